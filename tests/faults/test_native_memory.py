"""The C++ kernels under the address and undefined-behavior sanitizers, over every geometry of the tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from faults.scale import SOAK

POINT = 12
ROOT = Path(__file__).parents[2]
SCRIPT = """
import pathlib, sys, torch
sys.path.insert(0, "tests")
from spherenet.kernels import library
library.PATH = pathlib.Path(sys.argv[1])
import spherenet as sn
from cases import GEOMETRIES, OPERATORS
calls = 0
for geometry in GEOMETRIES:
    for operator in OPERATORS:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            for sphere in ({}, {"rescale": "learned", "bias": True}):
                layer = geometry.layer(**operator.arguments, **sphere, dtype=dtype)
                x = geometry.images(3, dtype)
                for images in (x, x.transpose(1, -1).contiguous().transpose(1, -1)):
                    images = images.detach().requires_grad_()
                    with sn.backend("native"):
                        layer(images).sum().backward()
                    calls += 1
for threads in (1, 2, 5):
    torch.set_num_threads(threads)
    for batch in (1, 3, 70):
        layer = sn.SphereConv2d(6, 33, 3, groups=3, padding=1, operator="learnable", rescale="learned")
        layer(torch.randn(batch, 6, 31, 17, requires_grad=True)).sum().backward()
        calls += 1
with sn.convolution("winograd"):
    shapes = [(0, 3, 1, 5), (1, 1, 17, 2), (1, 9, 33, 18), (2, 14, 8, 40), (1, 35, 16, 16)]
    for padding, size, channels, filters in shapes:
        for operator in [*OPERATORS, None]:
            options = {} if operator is None else operator.arguments
            convolution = sn.FastConv2d if operator is None else sn.SphereConv2d
            for center in (None, "patch") if operator else (None,):
                options |= {"center": center} if center else {}
                layer = convolution(channels, filters, 3, padding=padding, **options)
                for bad in (1.0, 0.0, 1e-6, float("nan")):
                    x = torch.randn(3, channels, size, size + 2)
                    x[0, :, :1] *= bad
                    layer(x.requires_grad_()).sum().backward()
                    calls += 1
for cell in (sn.SphereLSTM, sn.SphereGRU):
    for dtype in (torch.float32, torch.float64):
        layer = cell(5, 19, dtype=dtype)
        layer(torch.randn(4, 3, 5, dtype=dtype))[0].sum().backward()
        calls += 1
with torch.no_grad():
    sn.SphereLinear(7, 3)(torch.randn(5, 7))
print(library.instruction_set(), calls)
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """Build the library with both sanitizers; return it and the runtime libraries to preload."""
    if not SOAK:
        pytest.skip("builds the kernels and runs them slowly: only in make soak and make sanitizers")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("sanitized")
    # Without optimization the compiler takes a quarter of the time, and no access disappears before it is checked.
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O0 -g1"
    build = [sys.executable, "setup.py", "build_ext", "--build-lib", folder / "lib", "--build-temp", folder / "temp"]
    done = subprocess.run(
        build, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "SPHERENET_NATIVE_FLAGS": flags}
    )
    library = folder / "lib/spherenet/kernels/_native.so"
    assert library.exists(), done.stderr
    names = ["libasan.so", "libubsan.so"]
    paths = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names]
    return library, ":".join(paths)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_no_access_out_of_bounds_and_no_undefined_behavior(sanitized, isa, tried):
    library, preload = sanitized
    environment = {
        **os.environ,
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",  # Python itself leaks memory at exit
        "SPHERENET_ISA": isa,
        "PYTHONPATH": str(ROOT / "src"),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, library], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    calls = int(done.stdout.split()[1])
    assert calls > 2000
    for _ in range(calls):
        tried("the C++ kernels under the address and undefined-behavior sanitizers, forward and backward: no report")
