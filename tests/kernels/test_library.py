"""Loading of the native library: missing and corrupt files, and the choice of the instruction set.

A process loads the library once, so each of these tests needs a new one. Children of a process that has imported torch
but not loaded the library start in milliseconds.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spherenet.kernels import library

SERVER = """
import json, os, signal, sys, traceback
import torch, spherenet.kernels.sphere_conv.native
from spherenet.kernels import dispatch, library
assert not any("_native" in line for line in open("/proc/self/maps")), "the library is loaded"
for line in sys.stdin:
    code, environment, folder = json.loads(line)
    child = os.fork()
    if child == 0:
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
        os.environ.update(environment)
        signal.alarm(120)
        failed = 0
        try:
            exec(code, {})
        except BaseException:
            traceback.print_exc()
            failed = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def server():
    """Return the process with torch, or None on systems without /proc, where each code starts Python."""
    if sys.platform != "linux":
        yield None
        return
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run_fresh(server, tmp_path_factory):
    """Return a function that runs code in a new process, without a loaded library, and returns its output."""

    def run(code, **environment):
        if server is None:
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, timeout=240
            )
            assert done.returncode == 0, done.stderr
            return done.stdout, done.stderr
        folder = tmp_path_factory.mktemp("output")
        print(json.dumps([code, environment, str(folder)]), file=server.stdin, flush=True)
        failed = server.stdout.readline().strip()
        stdout, stderr = ((folder / name).read_text() for name in ("stdout", "stderr"))
        assert failed == "0", stderr
        return stdout, stderr

    return run


LAYER = "import torch, spherenet as sn; layer = sn.SphereConv2d(3, 20, 3); print(layer(torch.ones(1, 3, 9, 9)).shape)"


@pytest.mark.parametrize("content", [None, b"", b"\x7fELF", b"no library at all" * 9, "truncated"], ids=str)
def test_missing_or_corrupt_library_logs_one_line(run_fresh, tmp_path, content):
    path = tmp_path / "_native.so"
    if content == "truncated":
        path.write_bytes(library.PATH.read_bytes()[:-4000])
    elif content is not None:
        path.write_bytes(content)
    code = (
        f"import pathlib\nfrom spherenet.kernels import library\nlibrary.PATH = pathlib.Path({str(path)!r})\n{LAYER}\n"
    )
    code += "from spherenet.kernels import dispatch; print(dispatch.implementation_name('cpu'))"
    stdout, stderr = run_fresh(code)
    assert stdout.split("\n")[:2] == ["torch.Size([1, 20, 7, 7])", "plain"]
    assert stderr.count("\n") == 1
    assert "runs without native kernels" in stderr


def test_library_of_another_version_is_rejected(monkeypatch):
    version = library.INTERFACE_VERSION
    monkeypatch.setattr(library, "INTERFACE_VERSION", 99)
    with pytest.raises(ValueError, match=f"interface version {version}, this package needs 99"):
        library.open_library(library.PATH)


def processor_flags():
    """Return what Linux says about the processor."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    return set(Path("/proc/cpuinfo").read_text().split())


def test_best_instruction_set_of_the_processor_is_used(run_fresh):
    flags = processor_flags()
    best = "baseline"
    if {"avx2", "fma", "f16c"} <= flags:
        best = "avx512" if {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags else "avx2"
    code = "from spherenet.kernels import library; print(library.instruction_set())"
    assert run_fresh(code, SPHERENET_ISA="")[0].strip() == best


@pytest.mark.parametrize("name", ["baseline", "avx2", "avx512"])
def test_instruction_sets_give_same_results(run_fresh, name):
    """Each runs in a new process, because the library chooses the instruction set when it is loaded."""
    flags = processor_flags()
    if name != "baseline" and {"avx2": "avx2", "avx512": "avx512f"}[name] not in flags:
        pytest.skip(f"this processor has no {name}")
    code = """
import copy, torch, spherenet as sn
from spherenet.kernels import library
worst = 0
names = ("cosine", "linear", "sigmoid", "learnable", "square-cosine")
extended = {"center": "patch", "magnitude": "tanh", "radius": 4.0}
for operator, form in [(name, {}) for name in names] + [("linear", extended), ("sigmoid", {"center": "weight"})]:
    for rescale in (None, "learned"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for memory_format in (torch.contiguous_format, torch.channels_last):
                torch.manual_seed(0)
                options = {"operator": operator, "rescale": rescale, "dtype": dtype, **form}
                layer = sn.SphereConv2d(6, 27, 3, groups=3, padding=1, **options)
                x = torch.randn(3, 6, 9, 7).to(dtype).contiguous(memory_format=memory_format)
                # In float64: torch's first asin of a process in float32 is now and then off by 2e-5 on a busy machine.
                wide = torch.float64 if dtype == torch.float32 else dtype
                found = []
                for backend, module in (("reference", copy.deepcopy(layer).to(wide)), ("native", layer)):
                    images = x.to(module.weight.dtype, copy=True).requires_grad_()
                    with sn.backend(backend):
                        out = module(images)
                    out.square().sum().backward()
                    found.append([out, images.grad, *(p.grad.clone() for p in module.parameters())])
                for a, b in zip(*found):
                    error = ((a.double() - b.double()).abs().max() / a.double().abs().max()).item()
                    worst = max(worst, error / torch.finfo(dtype).eps)
print(library.instruction_set(), worst < 80, worst)
"""
    chosen, close, worst = run_fresh(code, SPHERENET_ISA=name)[0].split()
    assert (chosen, close) == (name, "True"), worst
