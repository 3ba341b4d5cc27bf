"""Options: earlier names, switches, names in error messages, suggestions, `--debug` and shell completion."""

import os
import subprocess
from dataclasses import fields

import pytest
import yaml

from command_line import TINY, command, one_sentence, spherenet
from spherenet.cli import main
from spherenet.cli.main import verb_parser
from spherenet.cli.options import ConfigParser, config_from
from spherenet.cli.verbs import VERBS
from spherenet.errors import RunError
from spherenet.training.choices import Choice
from spherenet.training.config import TrainConfig

MOST_OPTIONS = 60


def config(*arguments):
    return config_from(verb_parser("train").parse_args([str(argument) for argument in arguments]), TrainConfig)


def help_text(capsys, *arguments):
    assert spherenet(*arguments, "--help") == 0
    return capsys.readouterr().out


def test_default_operator_is_cosine_and_none_is_a_plain_network():
    assert config().operator == "cosine"
    assert config("--operator", "none").operator is None


def test_augmentation_none_differs_from_the_default():
    assert config("--augmentation", "none").augmentation == "none"
    assert config().augmentation is None


@pytest.mark.parametrize("center", ["auto", "none", "weight", "patch"])
def test_center_is_a_choice_with_the_default_auto(center, tmp_path):
    assert config().center == "auto"
    assert config("--center", center).center == center
    (tmp_path / "my.yaml").write_text(f"center: {center}\n")
    assert config("--config", tmp_path / "my.yaml").center == center


def test_options_with_options_have_one_text_and_a_mapping_in_files(tmp_path):
    assert config("--loss", "cosface:s=30,m=0.20").loss == "cosface:m=0.2,s=30"
    assert config("--magnitude", "none").magnitude is None
    assert config("--magnitude", "tanh:radius=learned:10").choice("magnitude").options == {"radius": "learned:10"}
    assert config("--operator", "sigmoid:k=0.3").choice("operator") == Choice("sigmoid", {"k": 0.3})
    (tmp_path / "my.yaml").write_text("loss: {name: ga-linear, m: 4.0, scale: norm}\noptimizer: sgd:momentum=0.5\n")
    chosen = config("--config", tmp_path / "my.yaml")
    assert chosen.loss == "ga-linear:m=4,scale=norm"
    assert chosen.choice("optimizer").options == {"momentum": 0.5}
    assert config("--config", tmp_path / "my.yaml", "--loss", "a").loss == "a"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--loss cosface:margin", "--loss must be NAME or NAME:OPTION=VALUE,… with each option once"),
        ("--loss cosface:m=1,m=2", "with each option once"),
        ("--loss cosface:", "--loss must be NAME or NAME:OPTION=VALUE,…"),
        ("--loss cosface:m=9999999999999999999999", "--loss cosface: m must be below 2^63 in magnitude"),
        ("--optimizer lion:x=1", "--optimizer must be one of adam, adamw, sgd, muon, got 'lion'"),
        ("--optimizer sgd:momentun=1", "--optimizer sgd has no option 'momentun', did you mean 'momentum'?"),
        ("--optimizer sgd:momentum=1", "--optimizer sgd: momentum must be from 0 to less than 1, got 1."),
        ("--optimizer adam:eps=no", "--optimizer adam: eps must be a finite number of at least 0, got 'no'."),
        ("--magnitude cube", "--magnitude must be one of sphere, ball, "),
        ("--loss cosface:marginn=1", "--loss cosface has no option 'marginn', it has m, s, "),
        ("--loss sphereface2:label_smoothin=1", "--loss sphereface2 has no option 'label_smoothin', it has "),
        ("--loss a:margin_gradien=full", "--loss a has no option 'margin_gradien', did you mean 'margin_gradient'?"),
        ("--loss a:m=0.5", "--loss a: m must be at least 1, got 0.5."),
        ("--loss w-cosine:k=0.5", "--loss w-cosine: k must be None for the cosine operator, got 0.5."),
        ("--loss softmax:reduction=sum", "--loss softmax has no option 'reduction', it has label_smoothing."),
        ("--operator cosine:k=1", "--operator cosine has no option 'k', it has none."),
        ("--operator sigmoid:k=-1", "--operator sigmoid: k must be "),
        ("--magnitude ball:radios=1", "--magnitude ball has no option 'radios', did you mean 'radius'?"),
        ("--magnitude ball:radius=true", "--magnitude ball: radius must be "),
    ],
)
def test_wrong_options_of_options_name_their_group(option, message, tmp_path, capsys):
    assert spherenet("train", *option.split(), "--output", tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert f"spherenet train: {message}" in said or message in said
    assert one_sentence(said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "loss", ["{m: 4}", "{name: 3}", "{name: a, m: [4]}", "{name: a, form: 'psi,m=4'}", "[a]", "{}"]
)
def test_wrong_mappings_of_a_loss_are_refused(loss, tmp_path, capsys):
    (tmp_path / "my.yaml").write_text(f"loss: {loss}\n")
    assert spherenet("train", "--config", tmp_path / "my.yaml") == 2
    said = capsys.readouterr().err
    assert "--loss must " in said
    assert one_sentence(said)


def test_switches_have_a_negation(capsys):
    assert config("--compile").compile is True
    assert config("--no-compile").compile is False
    assert spherenet("train", "--compile", "false") == 2
    assert "unrecognized arguments: false" in capsys.readouterr().err


def test_every_field_is_an_option_or_a_key_with_its_default(capsys):
    assert config() == TrainConfig()
    assert spherenet("train", "--help-all") == 0
    options, _, keys = capsys.readouterr().out.partition("keys of --config and --set")
    for field in fields(TrainConfig):
        option = field.name.replace("_", "-")
        is_option = f"--{option}" in options or f"--[no-]{option}" in options
        assert is_option == (field.metadata["tier"] != "file"), field.name
        assert is_option != (f"\n  {field.name} " in keys), field.name
    assert "null" not in options + keys


def test_help_shows_the_common_options_only(capsys):
    lines = {}
    for name in ("--help", "--help-all"):
        assert spherenet("train", name) == 0
        printed = capsys.readouterr().out
        lines[name] = [line.split()[0] for line in printed.splitlines() if line.startswith(("  --", "  -h"))]
    assert len(lines["--help"]) <= 30
    assert len(lines["--help-all"]) <= MOST_OPTIONS
    assert set(lines["--help"]) < set(lines["--help-all"])
    assert {"--data", "--model", "--loss", "--recipe"} <= set(lines["--help"])


def test_other_verbs_have_two_texts_if_they_have_advanced_options(capsys):
    texts = [help_text(capsys, verb) for verb in ("evaluate", "doctor")]
    assert "usage: spherenet evaluate RUN [OPTIONS]" in texts[0]
    assert "--help-all" in texts[0]
    assert "--max-megapixels" not in texts[0]
    assert "--help-all" not in texts[1]
    assert spherenet("evaluate", "--help-all") == 0
    assert "--max-megapixels" in capsys.readouterr().out
    assert spherenet("doctor", "--help-all") == 0
    assert capsys.readouterr().out == texts[1]


def test_keys_are_set_and_replaced_by_options(tmp_path):
    (tmp_path / "my.yaml").write_text("relu: false\nlearning_rate: 1e-2\nepochs: 3\nseed: 1\n")
    chosen = config("--seed", 3, "--config", tmp_path / "my.yaml", "--set", "bn_eval=[batch, running]", "seed=2")
    assert (chosen.relu, chosen.learning_rate, chosen.epochs, chosen.seed) == (False, 0.01, 3.0, 3)
    assert chosen.bn_eval == ["batch", "running"]
    both = config("--recipe", "paper-cifar", "--config", tmp_path / "my.yaml")
    assert (both.iterations, both.epochs, both.model) == (1000, 3.0, "cnn-9")  # epochs replace iterations of a recipe
    assert config("--set", "folds=3", "--set", "fold=1").fold == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["relu"], "--set must be KEY=VALUE, got 'relu'"),
        (["rellu=1"], "--set has the unknown key 'rellu', did you mean 'relu'?"),
        (["relu=3"], "relu must be true or false, got 3"),
        (["batch_size=x"], "--batch-size must be a whole number, got 'x'"),
        (["bn_eval=batch"], "bn_eval must be a list, got 'batch'"),
        (["bn_eval=[&a [], *a]"], "--set bn_eval must not contain aliases"),
        (["bn_eval=" + "[" * 50], "--set bn_eval must be nested at most 10 levels deep"),
        (["relu={"], "--set relu is not valid YAML"),
        (["epochs=1", "iterations=2"], "--epochs must be left out with --iterations"),
    ],
)
def test_wrong_keys_are_refused_in_one_sentence(words, message, capsys):
    assert spherenet("train", "--set", *words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert one_sentence(said)


def test_printed_config_is_read_back(tmp_path, capsys):
    options = [
        "--widths",
        4,
        5,
        6,
        "--operator",
        "learnable:k=0.7,k_sharing=layer",
        "--set",
        "relu=false",
        "--learning-rate",
        "1e-2",
    ]
    assert spherenet("train", *options, "--print-config") == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["learning_rate"] == 0.01
    assert yaml.safe_load(printed)["operator"] == {"name": "learnable", "k": 0.7, "k_sharing": "layer"}
    (tmp_path / "my.yaml").write_text(printed)
    assert config("--config", tmp_path / "my.yaml") == config(*options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--batch-sise", "3"], "unknown option --batch-sise, did you mean --batch-size?"),
        (["train", "--no-compil"], "unknown option --no-compil, did you mean --no-compile?"),
        (["train", "--no-relu"], "unknown option --no-relu, did you mean --set relu=VALUE?"),
        (["predict", "x.png", "--topp", "3"], "unknown option --topp, did you mean --top?"),
        (["doctor", "run", "--nothing-like-it"], "unknown option --nothing-like-it; see spherenet doctor --help."),
        (["train", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["train", "--eval-batch-size", str(2**40)], "--eval-batch-size must be at most"),
        (["train", "--image-size", "5000"], "--image-size must be at most 4,096, got 5000"),
        (["train", "--iterations"], "--iterations: expected one argument"),
        (["completion", "tcsh"], "SHELL must be bash or zsh or fish, got 'tcsh'"),
    ],
)
def test_errors_name_the_option_as_typed(arguments, message, capsys):
    assert spherenet(*arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert one_sentence(shown.err), shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("widths: 3", "--widths must be a list, got 3"),
        ("compile: 3", "--compile must be true or false, got 3"),
        ("optimizer: lion", "--optimizer must be one of adam, adamw, sgd, muon, got 'lion'"),
        ("iterations: 2.5", "--iterations must be a whole number, got 2.5"),
        ("data: 3", "--data must be text, got 3"),
        (f"seed: {2**63}", "--seed must be below 2^63 in magnitude"),
        ("3: 4", "has the unknown key 3"),
    ],
)
def test_errors_in_files_name_the_option(content, message, tmp_path, capsys):
    (tmp_path / "my.yaml").write_text(content)
    assert spherenet("train", "--config", tmp_path / "my.yaml") == 2
    said = capsys.readouterr().err
    assert message in said
    assert one_sentence(said)


def test_parser_is_built_once_per_call(tmp_path, monkeypatch):
    built = []
    initialize = ConfigParser.__init__
    monkeypatch.setattr(ConfigParser, "__init__", lambda self, *a, **k: (built.append(1), initialize(self, *a, **k))[1])
    assert spherenet("train", *TINY, "--output", tmp_path / "run") == 0
    assert len(built) == 1


def test_debug_raises_the_error(capsys):
    assert spherenet("evaluate", "nowhere") == 2
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(RunError, match="nowhere"):
        main(["evaluate", "nowhere", "--debug"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tr"], ["train"]),
        (["train", "--batch-s"], ["--batch-size"]),
        (["train", "--no-comp"], ["--no-compile"]),
        (["train", "--optimizer", ""], ["adam", "adamw", "sgd", "muon"]),
        (["train", "--train-im"], ["--train-images"]),
    ],
)
def test_bash_completes_verbs_options_and_choices(words, expected, tmp_path, capsys):
    assert spherenet("completion", "bash") == 0
    script = capsys.readouterr().out
    quoted = " ".join(f"'{word}'" for word in ["spherenet", *words])
    script += f"\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _spherenet; printf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.split() == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_scripts_contain_all_verbs_and_options(shell, capsys):
    assert spherenet("completion", shell) == 0
    script = capsys.readouterr().out
    for verb in VERBS:
        assert f" {verb}" in script
    assert "batch-size" in script
    assert "adam adamw sgd" in script


@pytest.mark.parametrize(
    ("verb", "argument", "expected"),
    [
        ("train", "batch_size", "--batch-size"),
        ("train", "classes", "classes"),
        ("train", "--output", "--output"),
        ("verify", "PAIRS", "PAIRS"),
    ],
)
def test_option_of_an_argument(verb, argument, expected):
    assert verb_parser(verb).option_of(argument) == expected


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "1x1 shortcut"), ("latin-1", "1×1 shortcut")])
def test_help_is_readable_in_terminals_without_unicode(encoding, shown):
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C"}
    done = subprocess.run(command("train", "--help-all"), capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode(encoding)
    assert shown in text
    assert "final lambda of the annealing" in text
    assert "?" not in text


def test_tables_and_messages_are_printed_without_unicode(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    listed = subprocess.run(command("data"), capture_output=True, env=environment)
    assert (listed.returncode, listed.stderr) == (0, b"")
    wrong = subprocess.run(command("evaluate", tmp_path / "θ–é"), capture_output=True, env=environment)
    assert wrong.returncode == 2
    assert b"theta-?" in wrong.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["evaluate", "--help"]])
def test_closed_pipe_of_help_prints_no_error(arguments):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command(*arguments), stdout=write, stderr=subprocess.PIPE, env=environment)
    os.close(write)
    assert done.stderr == b""
    assert done.returncode in (0, 141)  # argparse ignores an error of a text that is longer than the buffer


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["train", "--data", ""], "--data"),
        (["train", "--data", " "], "--data"),
        (["train", "--data", "folder", "--data-dir", ""], "--data-dir"),
        (["data", "folder", "--data-dir", ""], "--data-dir"),
        (["data", ""], "NAME"),
        (["embed", "model", "", "-o", "x.npy"], "IMAGES"),
        (["demo", ""], "MODEL"),
    ],
)
def test_empty_value_is_not_the_current_folder(arguments, option, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert spherenet(*arguments) == 2
    said = capsys.readouterr().err
    assert f"{option} must not be empty, got '" in said, said
    assert one_sentence(said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\noperator: cosine\nseed: 2\n", "got 'seed' again in line 3"),
        ("widths: [4, 4, 4]\n# a comment\nwidths: [8, 8, 8]\n", "got 'widths' again in line 3"),
        ("seed: {a: 1, a: 2}\n", "got 'a' again in line 1"),
        ("widths: [{a: 1,\n  a: 2}]\n", "got 'a' again in line 2"),
    ],
)
def test_repeated_keys_are_refused_in_one_sentence(text, message, tmp_path, capsys):
    path = tmp_path / "my.yaml"
    path.write_text(text)
    assert spherenet("train", "--config", path, "--output", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert one_sentence(error)
    assert f"--config {path} must have each key once, {message}" in error
    assert not (tmp_path / "run").exists()
