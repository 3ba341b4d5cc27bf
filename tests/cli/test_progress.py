"""Lines of a log: a sign of life every 30 seconds, and an estimate of a slow run after its first steps."""

import pytest

from command_line import spherenet
from spherenet.cli import progress
from spherenet.cli.output import ProgressBar, progress_bar
from spherenet.cli.progress import LogLines, duration


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock by one that the test sets."""

    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    return clock


def test_step_that_is_reported_twice_keeps_its_speed(clock, capsys):
    lines = LogLines("title")
    lines.started(0, 100)
    for step in (1, 2):
        clock.now += 40.0
        lines.stepped(step, 1.0, 0.5)
    lines.logged({"split": "train", "step": 2, "loss": 1.0, "accuracy": 0.5})
    assert capsys.readouterr().err.strip().splitlines()[-1].endswith("0.03 it/s, 65 min left")


def test_steps_without_rows_print_a_line_every_30_seconds(clock, capsys):
    lines = LogLines("title")
    lines.started(0, 1000)
    for step in range(1, 61):
        clock.now += 4.0
        lines.stepped(step, 1.0, 0.5)
    printed = capsys.readouterr().err.strip().splitlines()
    assert printed[0] == "title  training from step 0 to 1000"
    assert printed[1] == "title  about 66 min left at 4 s per step, without evaluations"
    assert printed[2].startswith("title  step 11/1000, 0.25 it/s, ")
    assert len(printed) == 2 + (240 - 12) // 32  # after 8 steps of 4 seconds
    clock.now += 20.0
    lines.evaluating(10, 5000)
    assert not capsys.readouterr().err
    clock.now += 31.0
    lines.evaluating(1024, 5000)
    assert capsys.readouterr().err == "title  evaluating: 1,024 of 5,000 images\n"


def test_rows_take_the_place_of_these_lines(clock, capsys):
    lines = LogLines("title")
    lines.started(0, 9)
    clock.now = 29.0
    lines.logged({"split": "train", "step": 1, "loss": 1.0, "accuracy": 0.5})
    clock.now = 31.0
    lines.stepped(2, 1.0, 0.5)
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["training", "step"]


def test_short_runs_are_not_estimated(clock, capsys):
    lines = LogLines("title")
    lines.started(5, 100)
    for step in range(6, 12):
        clock.now += 0.5
        lines.stepped(step, 1.0, 0.5)
    assert "about" not in capsys.readouterr().err


def test_first_step_is_not_part_of_the_estimate(clock, capsys):
    lines = LogLines("title")
    lines.started(5, 105)
    for step, seconds in ((6, 100.0), (7, 30.0), (8, 30.0)):
        clock.now += seconds
        lines.stepped(step, 1.0, 0.5)
    assert "about 48 min left at 30 s per step" in capsys.readouterr().err


def test_bars_print_the_estimate_too(clock, capsys):
    bar = ProgressBar("title")
    bar.started(0, 100)
    for step in (1, 2, 3):
        clock.now += 30.0
        bar.stepped(step, 1.0, 0.5)
    bar.finished()
    assert "about 48 min left at 30 s per step" in capsys.readouterr().err


def test_decoding_without_a_terminal_prints_lines(clock, capsys):
    with progress_bar("decoding images") as report:
        report(1, 2000)
        clock.now = 31.0
        report(900, 2000)
        report(901, 2000)
    assert capsys.readouterr().err == "decoding images: 900 of 2,000\n"
    with progress_bar("downloading", in_bytes=True) as report:
        clock.now = 70.0
        report(5_000_000, 170_000_000)
    assert capsys.readouterr().err == "downloading: 5 of 170 MB\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (89.4, "89 s"), (100, "2 min"), (5000, "83 min"), (12000, "3 h 20 min"),
                          (187200, "2 d 4 h")]
)  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_broken_image_does_not_lose_the_steps_before_it(tmp_path, capsys):
    from PIL import Image

    from spherenet.runs import RunDirectory

    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for index in range(20):
            Image.new("RGB", (8, 8), (index, 9, 9)).save(tmp_path / "images" / name / f"{index}.png")
    options = ["--data", tmp_path / "images", "--image-size", 8, "--widths", 2, 2, 2, "--batch-size", 4, "--workers", 0,
               "--iterations", 40, "--eval-every", 100, "--checkpoint-every", 100, "--threads", 1]  # fmt: skip
    assert spherenet("train", *options, "--output", tmp_path / "complete") == 0
    pixels = {path: path.read_bytes() for path in (tmp_path / "images" / "a").iterdir()}
    broken = tmp_path / "images" / "a" / "3.png"
    broken.write_bytes(b"broken")
    run = tmp_path / "run"
    capsys.readouterr()
    assert spherenet("train", *options, "--output", run) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert "3.png' cannot be read" in message
    assert "--on-broken skip leaves such images out" in message
    step = RunDirectory.open(run).checkpoints.steps(up_to=100)
    assert message.endswith(f"the run is saved at step {step[-1]}.")
    broken.write_bytes(pixels[broken])
    assert spherenet("train", "--resume", run) == 0
    assert _weights(run) == _weights(tmp_path / "complete")


def _weights(run):
    return sorted(
        (path.name, path.read_bytes()) for path in (run / "checkpoints" / "step-00000040").glob("model.safetensors")
    )
