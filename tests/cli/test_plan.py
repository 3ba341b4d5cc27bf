"""`spherenet plan`: the table, JSON, exit codes, and one sentence for each wrong input."""

import json

import pytest

from command_line import one_sentence, spherenet

SIZES = ["--classes", "10_000_000", "--features", "512", "--gpus", "8x8"]


def test_table_and_recommendation(capsys):
    assert spherenet("plan", *SIZES, "--memory", "80GB") == 0
    printed = capsys.readouterr().out
    assert "10,000,000 classes, 512 features, 0 other parameters" in printed
    assert "64 processes, 4,096 images per step" in printed
    assert "Recommended: sharded head (--shard-head), because data parallel does not fit" in printed
    rows = {line.split("│")[1].strip(): line for line in printed.splitlines() if "│" in line}
    assert list(rows) == ["data parallel", "FSDP", "sharded head"]
    assert [row.split("│")[-2].strip() for row in rows.values()] == ["no", "yes", "yes"]


def test_json_has_bytes_of_each_use(capsys):
    assert spherenet("plan", *SIZES, "--sample-rate", 0.1, "--memory", "1GiB", "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert result["recommended"] is None
    assert result["reason"].startswith("No strategy fits: sampled sharded head takes least")
    sampled = result["strategies"][-1]
    assert sampled["options"] == "--shard-head --sample-rate 0.1"
    assert sampled["memory"]["total"] == sum(sampled["memory"].values()) // 2
    assert sampled["fits"] is False


def test_network_is_counted(capsys):
    assert spherenet("plan", "--classes", 1000, "--model", "cnn-3", "--gpus", 2, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    from spherenet import create_model

    network = create_model("cnn-3")
    assert result["features"] == network.head.in_features
    assert result["parameters"] == sum(parameter.numel() for parameter in network.features.parameters())
    assert result["batch_size"] == 128
    assert len(result["strategies"]) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--classes must be given."),
        (["--classes", 10], "--features or --model must be given."),
        (["--classes", 1, "--features", 4], "--classes must be at least 2, got 1"),
        (["--classes", 10**13, "--features", 4], "--classes must be at most 1000000000000, got 10000000000000"),
        (["--classes", "many", "--features", 4], "--classes must be a whole number, got 'many'"),
        ([*SIZES, "--gpus", "8x"], "--gpus must be a number of GPUs or NODESxGPUS, such as 8x8, got '8x'"),
        ([*SIZES, "--gpus", "0x8"], "--gpus must be a number of GPUs or NODESxGPUS, such as 8x8, got '0x8'"),
        ([*SIZES, "--gpus", "99999x99"], "--gpus must be at most 1,000,000 in total, got '99999x99'"),
        ([*SIZES, "--memory", "80"], "--memory must be a size such as 80GB, with one of MB, GB, TB, MiB, GiB, TiB"),
        ([*SIZES, "--memory", "0GB"], "--memory must be a size such as 80GB"),
        ([*SIZES, "--batch-size", 8], "--batch-size must be at least the number of processes, 64, got 8."),
        ([*SIZES, "--sample-rate", 0], "--sample-rate must be greater than 0 and at most 1, got 0."),
        ([*SIZES, "--optimizer", "lion"], "--optimizer must be adam or adamw or sgd, got 'lion'"),
        ([*SIZES, "--model", "cnn-3"], "--features must be 256, those of cnn-3, got 512."),
        (["--classes", 9, "--model", "cnn-2"], "--model must be one of 'cnn-3'"),
    ],
)
def test_wrong_input_gives_one_sentence(options, message, capsys):
    assert spherenet("plan", *options) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert one_sentence(printed.err)
    assert message in printed.err


def test_torch_is_not_imported():
    code = "import sys; from spherenet.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    import subprocess
    import sys

    result = subprocess.run([sys.executable, "-c", code, "plan", *SIZES], capture_output=True, text=True, timeout=240)
    assert result.stdout.splitlines()[-1] == "False", result.stderr
