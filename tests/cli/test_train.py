"""`spherenet train` on the embedded digits: files of a run, resuming, wrong input."""

import json
import signal
import subprocess

import pytest
import torch
import yaml

import spherenet as sn
from command_line import TINY, command, in_other_processes, one_sentence, spherenet
from spherenet.runs import RunDirectory
from spherenet.runs.checkpoints import load_checkpoint
from spherenet.training.saved_runs import load_run


def weights(run, role="step"):
    checkpoints = RunDirectory.open(run).checkpoints
    return load_checkpoint(checkpoints.paths(role)[-1]).tensors["model"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a finished run."""
    path = tmp_path_factory.mktemp("runs") / "finished"
    assert spherenet("train", *TINY, "--output", path) == 0
    return path


def test_run_folder_has_config_metrics_and_summary(finished):
    config = json.loads((finished / "config.json").read_text())
    assert config["train"]["iterations"] == 6
    assert config["train"]["operator"] == "cosine"
    assert {"spherenet", "torch", "python"} == set(config["versions"])
    assert config["hardware"]["processor"]
    rows = RunDirectory.open(finished).metrics.read()
    assert [row["step"] for row in rows if row["split"] == "train"] == [2, 4, 6]
    assert [row["step"] for row in rows if row["split"] == "test"] == [3, 6]
    assert all({"loss", "accuracy", "seconds"} <= set(row) for row in rows if row["split"] != "probes")
    probes = [row for row in rows if row["split"] == "probes"][-1]
    assert {"output_variance", "weight_norm", "feature_norm"} <= set(probes)
    assert 0 < probes["within_class_angle"] < 3.15
    assert 0 < probes["between_class_angle"] < 3.15
    assert 0 < probes["simplex_distance"] < 2
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["iterations"] == 6
    assert summary["accuracy"] == [row["accuracy"] for row in rows if row["split"] == "test"][-1]


def test_first_losses_match_the_recorded_trace(tmp_path):
    """Change the trace only together with an intended change of the numbers."""
    options = ["--operator", "sigmoid", "--log-every", 1, "--threads", 1]
    assert spherenet("train", *TINY, *options, "--output", tmp_path / "run") == 0
    losses = [row["loss"] for row in RunDirectory.open(tmp_path / "run").metrics.read() if row["split"] == "train"]
    assert losses == pytest.approx(GOLDEN, abs=1e-4)


GOLDEN = [2.5047, 2.3933, 2.3910, 2.3793, 2.3062, 2.3157]


def test_same_seed_gives_the_same_run(tmp_path, finished):
    assert spherenet("train", *TINY, "--output", tmp_path / "again") == 0
    assert spherenet("train", *TINY, "--seed", 1, "--output", tmp_path / "other") == 0
    first, again, other = weights(finished), weights(tmp_path / "again"), weights(tmp_path / "other")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_yaml_options_are_read_and_overridden(tmp_path, capsys):
    assert spherenet("train", *TINY, "--operator", "none", "--print-config") == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["widths"] == [4, 4, 4]
    (tmp_path / "my.yaml").write_text(printed)
    arguments = ["--config", tmp_path / "my.yaml", "--iterations", 2, "--output", tmp_path / "run"]
    assert spherenet("train", *arguments) == 0
    config = RunDirectory.open(tmp_path / "run").config["train"]
    assert (config["iterations"], config["operator"], config["batch_size"]) == (2, None, 32)


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [("--model", "cnn-4", "cnn-45"), ("--augmentation", "flips", "flip"), ("--operator", "cosin", "cosine"),
     ("--loss", "softmax:margin=1", "softmax has no option 'margin'")],
)  # fmt: skip
def test_wrong_names_are_refused_before_they_are_printed(option, value, hint, capsys):
    assert spherenet("train", option, value, "--print-config") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"spherenet train: {option} ")
    assert hint in printed.err


def test_images_that_cannot_be_translated_are_refused_before_training(tmp_path, capsys):
    options = ["--image-size", 1, "--model", "resnet-32", "--set", "tta=mirror-shift"]
    assert spherenet("train", *TINY, *options, "--output", tmp_path / "run") == 2
    assert not (tmp_path / "run").exists()
    assert "tta must be none or mirror for images of 1×1 pixels, got 'mirror-shift'." in capsys.readouterr().err


def test_json_has_the_final_numbers(tmp_path, capsys):
    assert spherenet("train", *TINY, "--output", tmp_path / "run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["iterations"] == 6


def test_tensorboard_files_are_written(tmp_path):
    assert spherenet("train", *TINY, "--output", tmp_path / "run", "--tensorboard") == 0
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


LOSSES = ["w-cosine", "ga-linear", "a", "s-cosine", "arcface"]


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_train(tmp_path, loss):
    assert spherenet("train", *TINY, "--loss", loss, "--output", tmp_path / "run") == 0


@pytest.mark.parametrize(
    ("options", "center"),
    [
        (["--no-batch-norm"], "patch"),
        (["--no-batch-norm", "--center", "none"], None),
        (["--center", "weight", "--magnitude", "ball:radius=learned"], "weight"),
    ],
    ids=str,
)
def test_centers_and_magnitudes_train_and_resume(tmp_path, options, center):
    assert spherenet("train", *TINY, *options, "--output", tmp_path / "run") == 0
    run = RunDirectory.open(tmp_path / "run")
    assert run.config["model"]["center"] == center
    (tmp_path / "run" / "summary.json").unlink()
    assert spherenet("train", "--resume", tmp_path / "run") == 0
    layers = sn.regularizers.sphere_layers(load_run(tmp_path / "run", "last").model).values()
    assert {layer.center for layer in layers} == {center}
    magnitudes = {None if layer.magnitude is None else layer.magnitude.name for layer in layers}
    assert magnitudes == {"ball" if "ball:radius=learned" in options else None}


def test_annealing_follows_the_length_of_the_run(tmp_path, monkeypatch):
    values = []
    forward = sn.GASoftmaxLoss.forward

    def recorded(loss, *arguments, **options):
        if torch.is_grad_enabled():
            values.append(loss.lambda_)
        return forward(loss, *arguments, **options)

    monkeypatch.setattr(sn.GASoftmaxLoss, "forward", recorded)
    options = ["--loss", "ga-linear", "--set", "annealing=true", "--accumulate", 2]
    assert spherenet("train", *TINY, *options, "--output", tmp_path / "run") == 0
    schedule = sn.Annealing.for_run(6)
    assert values == [schedule.at(step) for step in range(6) for _ in range(2)]  # both batches of a step use its λ


def test_init_from_loads_weights_of_another_run(tmp_path, finished, capfd):
    arguments = [*TINY, "--iterations", 1, "--learning-rate", 0, "--init-from", finished, "--loss", "w-cosine"]
    assert spherenet("train", *arguments, "--output", tmp_path / "run") == 0
    before, after = weights(finished), weights(tmp_path / "run")
    assert torch.equal(before["head.weight"], after["head.weight"])
    capfd.readouterr()
    assert spherenet("train", *TINY, "--init-from", finished, "--widths", 5, 5, 5, "--output", tmp_path / "wide") == 0
    assert "tensors (first: features.stages.0.0.0.weight) have no match in" in capfd.readouterr().err


def test_resume_after_sigterm_gives_the_same_weights(tmp_path, finished):
    path = tmp_path / "run"
    running = subprocess.Popen(
        command("train", *TINY, "--output", path, "--checkpoint-every", 100, "--log-every", 1),
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in running.stderr:
        if "step 1/" in line:
            running.send_signal(signal.SIGTERM)
            break
    said = running.stderr.read()
    assert running.wait(240) == 143
    running.stderr.close()
    assert "saved at step" in said
    assert f"--resume {path}" in said
    assert not RunDirectory.open(path).finished
    assert spherenet("train", "--resume", path) == 0
    first, second = weights(finished), weights(path)
    assert all(torch.equal(second[name], first[name]) for name in first)


def test_resume_rejects_changed_options(tmp_path, finished, capsys):
    assert spherenet("train", "--resume", finished) == 0
    assert "already finished" in capsys.readouterr().out
    summary = RunDirectory.open(finished).path / "summary.json"
    content = summary.read_text()
    summary.unlink()
    assert spherenet("train", "--resume", finished, "--batch-size", 64) == 2
    said = capsys.readouterr().err
    assert "was started with --batch-size 32, got 64" in said
    assert one_sentence(said.splitlines()[-1])
    summary.write_text(content)
    assert spherenet("train", "--resume", finished, "--output", tmp_path) == 2
    assert "--output must be left out" in capsys.readouterr().err


def test_resume_with_more_iterations_requires_allow_changes(tmp_path):
    path = tmp_path / "run"
    assert spherenet("train", *TINY, "--output", path) == 0
    assert spherenet("train", "--resume", path, "--iterations", 8, "--allow-changes") == 0
    assert RunDirectory.open(path).summary["iterations"] == 8


WRONG = {
    "data": (["--data", "mnist"], "--data must be mnist5k, cifar10, cifar100 or an existing folder, got 'mnist'"),
    "model": (["--model", "cnn-10"], "--model must be one of"),
    "operator": (["--operator", "cos"], "--operator must be one of"),
    "loss": (["--loss", "soft"], "--loss must be one of"),
    "loss option": (["--loss", "softmax:m=4"], "--loss softmax has no option 'm', it has label_smoothing."),
    "augmentation": (["--augmentation", "flop"], "--augmentation must be one of"),
    "number": (["--iterations", "many"], "--iterations must be a whole number, got 'many'"),
    "zero": (["--iterations", "0"], "--iterations must be at least 1, got 0"),
    "option": (["--iteration", "3"], "unknown option --iteration, did you mean --iterations?"),
    "device": (["--device", "cuda:7"], "device 'cuda:7' is not available here"),
    "unknown device": (["--device", "gpu"], "device 'gpu' is not available here"),
    "too large a batch": (["--batch-size", "5000"], "--batch-size must be at most"),
    "config": (["--config", "nowhere.yaml"], "--config nowhere.yaml cannot be read: No such file or directory"),
    "resume": (["--resume", "nowhere"], "nowhere is not a folder"),
    "empty output": (["--output", ""], "--output must not be empty"),
    "init-from": (["--init-from", "nowhere"], "nowhere is not a folder"),
    "data folder": (["--data", "folder", "--data-dir", "nowhere"], "nowhere"),
    "no data folder": (["--data", "folder"], "--data-dir"),
    "threads": (["--threads", "0"], "--threads must be at least 1"),
    "k of a plain network": (
        ["--operator", "none:k=0.3"],
        "--operator none has no option 'k', it has none.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_sentence_with_exit_code_2_and_writes_nothing(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = WRONG[case]
    assert spherenet("train", *arguments) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert one_sentence(said.err), said.err
    assert said.out == ""
    assert [entry for entry in tmp_path.rglob("*") if entry.name not in ("runs",)] == []


def test_wrong_keys_and_values_in_a_file_are_named(tmp_path, capsys):
    path = tmp_path / "my.yaml"
    for content, message in (
        ("iterationes: 3", "unknown key 'iterationes', did you mean 'iterations'?"),
        ("iterations: many", "--iterations must be a whole number, got 'many'"),
        ("iterations: [", "is not valid YAML"),
        ("- 1", "must contain lines of the form 'option: value', got [1]"),
        ("!!python/object/apply:os.system ['touch ran']", ""),
    ):
        path.write_text(content)
        assert spherenet("train", "--config", path, "--output", tmp_path / "run") == 2
        said = capsys.readouterr().err
        assert message in said
        assert one_sentence(said), said
    assert [entry.name for entry in tmp_path.iterdir()] == ["my.yaml"]


def test_unusable_output_folders_are_rejected(tmp_path, finished, capsys):
    before = sorted((path.name, path.stat().st_mtime_ns) for path in finished.rglob("*"))
    assert spherenet("train", *TINY, "--output", finished) == 2
    assert "contains a run" in capsys.readouterr().err
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in finished.rglob("*"))
    (tmp_path / "file").write_text("")
    assert spherenet("train", *TINY, "--output", tmp_path / "file" / "run") == 2
    assert "cannot be created" in capsys.readouterr().err
    run = RunDirectory.open(finished)
    with run.locked():
        (finished / "summary.json").rename(finished / "aside")
        assert spherenet("train", "--resume", finished) == 2
        (finished / "aside").rename(finished / "summary.json")
    assert "is in use by another process" in capsys.readouterr().err


def test_two_processes_give_the_weights_of_one(tmp_path):
    """Without BatchNorm, at the same global batch size; the order of sums differs."""
    options = [*TINY, "--no-batch-norm", "--batch-size", 33]
    done = in_other_processes("train", *options, "--output", tmp_path / "two", processes=2)
    assert done.returncode == 0, done.stderr
    assert spherenet("train", *options, "--output", tmp_path / "one") == 0
    assert "Warning" not in done.stderr
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=2e-5, atol=2e-5)
    rows = [RunDirectory.open(tmp_path / name).metrics.read() for name in ("one", "two")]
    for first, second in zip(*rows, strict=True):
        assert (first["step"], first["split"]) == (second["step"], second["split"])
        if first["split"] != "probes":
            assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
    (tmp_path / "two" / "summary.json").unlink()
    assert spherenet("train", "--resume", tmp_path / "two") == 2


def test_sigterm_to_two_processes_saves_at_the_same_step(tmp_path):
    path = tmp_path / "run"
    running = subprocess.Popen(
        command("train", *TINY, "--iterations", 100000, "--checkpoint-every", 100000, "--eval-every", 100000,
                "--log-every", 1, "--threads", 1, "--output", path, processes=2),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in running.stderr:
        if "step 3/" in line:
            break
    running.send_signal(signal.SIGTERM)
    running.stderr.read()
    assert running.wait(240) != 0
    running.stderr.close()
    newest, complaints = RunDirectory.open(path).checkpoints.newest()
    assert complaints == []
    assert newest.step >= 3
