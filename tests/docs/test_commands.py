"""Commands of the README and of the tutorials run: as written, with options that make them small.

Commands in `bash` and `console` blocks and in inline code run in the order of the page, in one folder. A command that
cannot run like this names the test that runs it.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from PIL import Image

from command_line import command, spherenet
from docs.pages import DOCS, ROOT, all_commands, name_of
from spherenet_paper.experiments import find_experiment

PAGES = [
    ROOT / "README.md",
    *(DOCS / f"{name}.md" for name in ("index", "scaling", "training")),
    *sorted((DOCS / "tutorials").glob("*.md")),
]
ELSEWHERE = {
    "pip install spherenet-torch": "test_pip_installs_the_wheel_by_name",
    "pip install .": "test_pip_installs_the_wheel_by_name",
    "pip install spherenet-torch[cluster]": "test_extras_of_the_pages_exist",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 3:4 --max-restarts 3 --nproc-per-node 8 --rdzv-backend "
    "c10d --rdzv-endpoint HOST:29500 --rdzv-id job1 -m spherenet train --data /shared/faces --allow-changes --output "
    "/shared/runs/faces": "test_torchrun_resumes_on_three_hosts_if_one_is_cut_off",
    "spherenet reproduce table1 --preset paper --seeds 3 --jobs 16 --ray auto --gpus 1 --output /shared/results": (
        "test_grid_runs_on_a_local_cluster"
    ),
}
NETWORK = ["--widths", "16", "16", "16", "--threads", "1"]
STEPS = ["--iterations", "2", "--batch-size", "2", "--eval-batch-size", "500", "--eval-every", "2"]
SMALL = {
    "train": [*NETWORK, *STEPS],
    "tune": [*NETWORK, *STEPS, "--number-of-folds", "2", "--try-operators", "cosine"],
    "theory": ["--iterations", "2"],
    "reproduce": ["--preset", "smoke", "--seeds", "1"],
}
REPLACED = [
    (r"^resnet-32$", "cnn-3"),  # whose ONNX file takes a few seconds less
    (r"cifar10\b", "mnist5k"),
    (r"^/shared/", "shared/"),
]


def smaller(words):
    """Return a command of spherenet with embedded data, local folders and options that make it small."""
    for pattern, replacement in REPLACED:
        words = [re.sub(pattern, replacement, word) for word in words]
    if {"--list", "--resume"} & set(words):
        return words
    if words[0] == "reproduce":
        words = [*words, "--only", find_experiment(words[1]).cells("smoke")[0].name]
    return [*words, *SMALL.get(words[0], [])]


def run_torchrun(words):
    """Run torchrun on this machine: one process per machine of the command, or two."""
    start = words.index("-m")
    options, arguments = words[1:start], smaller(words[start + 2 :])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    machines = int(options[options.index("--nnodes") + 1]) if "--nnodes" in options else 1
    options = [re.sub(r"^[\w-]+:\d+$", f"127.0.0.1:{port}", word) for word in options]
    options[options.index("--nproc-per-node") + 1] = "2" if machines == 1 else "1"
    launched = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "spherenet", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen(launched, env=environment, stderr=subprocess.PIPE) for _ in range(machines)]
    try:
        errors = [process.communicate(timeout=240)[1].decode() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * machines, errors


def run_demo(words):
    """Start the page, load it, and end the command as Ctrl-C does."""
    process = subprocess.Popen(
        command(*words, "--no-browser"), stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        with urlopen(process.stdout.readline().split()[0], timeout=240) as page:
            assert b"<title>" in page.read()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0


def recipe(words):
    """Return the commands that make would run for a target in an environment that exists."""
    shown = subprocess.run(
        ["make", "--dry-run", "--assume-old", ".venv/.usable", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    return [shlex.split(line) for line in shown.stdout.replace("\\\n", " ").splitlines()]


def run(words):
    """Run one command of a page in the current folder."""
    program, *rest = words
    if words[:2] == ["spherenet", "demo"]:
        run_demo(rest)
    elif program == "spherenet":
        images = [str(path) for word in rest if "*" in word for path in sorted(ROOT.glob(word))]
        arguments = smaller([word for word in rest if "*" not in word] + images)
        assert spherenet(*arguments) == 0, " ".join(arguments)
    elif program == "torchrun":
        run_torchrun(words)
    elif program == "make":
        for line in recipe(rest):
            if line[0].endswith("/spherenet"):
                run(["spherenet", *line[1:]])
    else:
        assert program == "python", f"{words} cannot be run"
        if rest[0] == "benchmarks/sharding_costs.py":  # a formula
            subprocess.run([sys.executable, ROOT / rest[0], *rest[1:]], check=True, timeout=240)
            return
        sizes = ["--channels", "4", "--size", "8", "--batch-size", "2", "--classes", "10", "--rounds", "2"]
        subprocess.run([sys.executable, ROOT / rest[0], *sizes, "--threads", "1"], check=True, timeout=240)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to a folder with the files that the pages name: photos of two classes and some images."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPHERENET_DATA", raising=False)
    gradient = Image.linear_gradient("L").resize((28, 28))
    photos = [f"photos/{name}/{index}.png" for name in ("bright", "dark") for index in range(3)]
    for name in ("cat.jpg", "dog.jpg", "digit.png", *photos):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        gradient.save(name)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_run(page, folder):
    for words in all_commands(page):
        if shlex.join(words).replace("'", "") not in ELSEWHERE:
            run(words)


def test_all_commands_have_a_test():
    shown = {shlex.join(words).replace("'", "") for page in PAGES for words in all_commands(page)}
    assert len(shown) >= 25
    assert [command for command in ELSEWHERE if command not in shown] == []
    folders = (ROOT / "tests", ROOT / "paper" / "tests")
    files = [path for folder in folders for path in folder.rglob("test_*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert [name for name in ELSEWHERE.values() if f"def {name}(" not in text] == []
