"""Every Triton kernel compiles for GPUs, without one: PTX and cubin, registers and spills within bounds."""

import re
import subprocess

import pytest
import torch

from spherenet.angles import make_angle
from spherenet.ops.geometry import Geometry
from spherenet.ops.operation import Operation, Parameters

triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton==3.7.1 (Linux, x86-64)")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from spherenet.kernels.backends import Pass, Saved  # noqa: E402
from spherenet.kernels.sphere_conv.triton import gradients, patches, weights  # noqa: E402
from spherenet.kernels.sphere_conv.triton.launch import OPTIONS  # noqa: E402

MOST_REGISTERS = 128  # four warps per block: at least 16 of 64 warps stay resident per multiprocessor
MOST_SPILLED = 16  # bytes per thread: ptxas spills a value or two outside of loops to fit one more block
POINTERS = {torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
ARCHITECTURES = (80, 90)


def type_of(value):
    """The type of a kernel's argument as Triton names it, with 1 and None as constants, as at a launch."""
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, tuple):
        return tuple(type_of(element) for element in value)
    if value is None or value == 1:
        return "constexpr"
    return "i32" if abs(value) < 2**31 else "i64"


def constants_of(value, path):
    """Paths of the arguments that are constants, elements of tuples included."""
    if isinstance(value, tuple):
        return {k: v for i, element in enumerate(value) for k, v in constants_of(element, (*path, i)).items()}
    return {path: value} if not isinstance(value, torch.Tensor) and (value is None or value == 1) else {}


def divisible(value, path):
    """Paths of the pointers and integers that are multiples of 16, which a launch tells the compiler."""
    if isinstance(value, tuple):
        return {k: v for i, element in enumerate(value) for k, v in divisible(element, (*path, i)).items()}
    if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
        return {path: [["tt.divisibility", 16]]}
    return {}


def captured_launches(monkeypatch, dtype, name, k, affine, memory_format, needs, size=(3, 3), groups=1):
    """The launches of one layer, forward and backward, recorded instead of run."""
    launches = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, grid, warmup, **c: launches.append((self, a, c)))
    geometry = Geometry(size, (1, 1), tuple(n // 2 for n in size), (1, 1), groups)
    x = torch.empty(16, 64, 32, 32, dtype=dtype).to(memory_format=memory_format)
    weight = torch.empty(64, 64 // groups, *size).to(memory_format=memory_format)
    unit, scale = weights.unit_weight(weight, 1e-4, dtype)
    product = torch.empty(16, 64, 32, 32, dtype=dtype).to(memory_format=memory_format)
    angle = make_angle(name)
    save_cosine = dtype != torch.float32 or any(v is not None for v in affine) or not angle.is_recoverable
    operation, parameters = Operation(angle, geometry, 1e-4), Parameters(k, *affine)
    out, inverse_norm, saved_map = patches.forward(product, x, operation, parameters, save_cosine)
    saved = Saved(unit, scale, inverse_norm, saved_map, None, not save_cosine)
    needs_k, needs_affine = needs
    needed = (True, True, needs_k, *[needs_affine] * 3, False)
    grad_product, spread, _ = gradients.backward(torch.empty_like(out), Pass(operation, parameters, saved, needed))
    gradients.correct(torch.empty_like(x), x, spread, groups)
    weights.unit_weight_backward(torch.empty_like(unit), unit, scale, weight.dtype)
    assert grad_product.dtype == dtype
    return launches


def compile_offline(launch, architecture, target=None):
    kernel, arguments, keywords = launch
    options = {"num_warps": 4} | {name: keywords[name] for name in OPTIONS}
    constants = {name: value for name, value in keywords.items() if name not in OPTIONS}
    names = kernel.arg_names[: len(arguments)]
    signature = {n: type_of(v) for n, v in zip(names, arguments, strict=True)} | dict.fromkeys(constants, "constexpr")
    constexprs = {(kernel.arg_names.index(n),): v for n, v in constants.items()}
    attributes = {}
    for index, value in enumerate(arguments):
        constexprs |= constants_of(value, (index,))
        attributes |= divisible(value, (index,))
    source = ASTSource(kernel, signature, constexprs, attributes)
    target = target or GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options=options)


def resources(compiled, folder):
    """Registers per thread and bytes of stack per thread, which hold spilled registers, from the cubin."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    text = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return int(registers), int(stack)


NONE = (None, None, None)
ALL = (torch.empty(64), torch.empty(64), torch.empty(64))
CASES = {
    "cosine": (torch.float32, "cosine", None, NONE, torch.channels_last, (False, False)),
    "linear": (torch.float32, "linear", None, NONE, torch.channels_last, (False, False)),
    "sigmoid": (torch.float32, "sigmoid", 0.3, NONE, torch.channels_last, (False, False)),
    "learnable": (torch.float32, "sigmoid", torch.empty(64), NONE, torch.channels_last, (True, False)),
    "learnable planes": (torch.float32, "sigmoid", torch.empty(64), NONE, torch.contiguous_format, (True, False)),
    "rescaled bfloat16": (torch.bfloat16, "sigmoid", torch.empty(64), ALL, torch.channels_last, (True, True)),
    "square cosine": (torch.float32, "square-cosine", None, NONE, torch.channels_last, (False, False)),
    "sharpened cosine": (torch.float32, "sharpened-cosine", torch.empty(64), ALL, torch.channels_last, (True, True)),
    "linear float16": (torch.float16, "linear", None, NONE, torch.contiguous_format, (False, False)),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_within_register_bounds(case, monkeypatch, tmp_path):
    launches = captured_launches(monkeypatch, *CASES[case])
    assert len(launches) == 5
    for launch in launches:
        for architecture in ARCHITECTURES:
            compiled = compile_offline(launch, architecture)
            assert f".target sm_{architecture}" in compiled.asm["ptx"]
            registers, stack = resources(compiled, tmp_path)
            what = f"{launch[0].__name__} for sm_{architecture}"
            assert 0 < registers <= MOST_REGISTERS, f"{what} takes {registers} registers"
            assert stack <= MOST_SPILLED, f"{what} spills {stack} bytes"
            print(f"{case}: {what}: {registers} registers, {stack} bytes of stack")


def test_kernels_compile_for_rocm(monkeypatch):
    for launch in captured_launches(monkeypatch, *CASES["rescaled bfloat16"]):
        compiled = compile_offline(launch, None, GPUTarget("hip", "gfx942", 64))
        assert compiled.asm["hsaco"]


def test_large_windows_use_separate_launch_for_squares(monkeypatch, tmp_path):
    launches = captured_launches(
        monkeypatch, torch.float32, "cosine", None, NONE, torch.channels_last, (False, False), size=(7, 7), groups=2
    )
    assert len(launches) == 6
    (squares,) = [launch for launch in launches if launch[0].__name__ == "squares_kernel"]
    for architecture in ARCHITECTURES:
        registers, stack = resources(compile_offline(squares, architecture), tmp_path)
        assert 0 < registers <= MOST_REGISTERS
        assert stack <= MOST_SPILLED


def test_offline_compilation_reports_an_error(monkeypatch):
    """A kernel that cannot be compiled fails, so that the tests above can fail."""
    (kernel, arguments, constants), *_ = captured_launches(monkeypatch, *CASES["cosine"])
    with pytest.raises(Exception, match=r"BLOCK|power of 2"):
        compile_offline((kernel, arguments, constants | {"BLOCK": 3}), ARCHITECTURES[0])


class NoGPU:
    """The methods of a driver that Triton's runtime calls before a launch; there is no GPU."""

    def __init__(self, architecture):
        self.architecture = architecture

    def get_current_target(self):
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", ["learnable", "rescaled bfloat16"])
def test_runtime_specializes_and_compiles_calls(case, architecture, monkeypatch):
    """Run a call up to the launch itself: binding, specialization of arguments, cache key, compilation."""
    with monkeypatch.context() as patch:
        launches = captured_launches(patch, *CASES[case])
    # The runtime caches compiled kernels by device, which is always 0 here.
    monkeypatch.setattr(triton.runtime.driver, "_active", NoGPU(architecture))
    for kernel, arguments, constants in launches:
        kernel.device_caches.clear()
        compiled = kernel.warmup(*arguments, grid=(1,), **constants)
        kernel.device_caches.clear()
        assert compiled.metadata.target.arch == architecture
        assert compiled.metadata.enable_fp_fusion
        assert compiled.asm["cubin"]
