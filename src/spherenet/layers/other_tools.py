"""Refusal of tools that would treat a sphere layer as the plain layer it derives from.

A sphere layer is an instance of torch's class, so that code for `nn.Linear` and `nn.Conv2d` finds it. Adapters and
quantizers that look for `nn.Linear` would compute another function without a word: they add a linear branch that their
merge then moves into the weight, or build a plain layer from the weight. Both register a module, which torch reports.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from spherenet.errors import InvalidArgumentType
from spherenet.layers.base import SphereLayer

__all__ = ["watch_modules"]

EXACT_WRAPPERS = ("LNTuningLayer", "ParamWrapper")
"""Classes of peft that change the weight itself, so that a merged layer computes the same."""

REPLACING_PACKAGES = {
    "aqlm", "auto_gptq", "awq", "bitsandbytes", "compressed_tensors", "eetq", "fbgemm_gpu", "gptqmodel", "hqq",
    "intel_extension_for_pytorch", "modelopt", "neural_compressor", "optimum", "quark", "spqr_quant", "torchao",
    "transformer_engine", "vptq",
}  # fmt: skip
"""Packages whose linear layers replace torch's, by the weight of the layer that they replace."""


def watch_modules() -> None:
    """Let torch report each module that becomes part of another one, from now on."""
    register_module_module_registration_hook(_refuse_plain_use)


def _refuse_plain_use(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise TypeError if a tool wraps or replaces a sphere layer as if it were plain."""
    if isinstance(module, SphereLayer):
        is_wrapped = name == "base_layer" and _package(parent) == "peft"
        if is_wrapped and type(parent).__name__ not in EXACT_WRAPPERS:
            raise InvalidArgumentType(
                "target_modules",
                f"of peft must be plain layers, got a {type(module).__name__}: merging the adapter "
                'would change its output. Use LoraConfig(target_modules=[], target_parameters=["….weight"]).',
            )
    elif module is not None:
        replaced = parent._modules.get(name)
        if isinstance(replaced, SphereLayer) and _replaces(module) and replaced not in module.modules():
            raise InvalidArgumentType(
                "layer",
                f"{name!r} must be a plain layer to become a {type(module).__module__}.{type(module).__name__}, "
                f"got a {type(replaced).__name__}: exclude sphere layers, or use weight-only quantization of torchao.",
            )


def _package(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def _replaces(module: nn.Module) -> bool:
    return _package(module) in REPLACING_PACKAGES or type(module).__module__.startswith(
        ("torch.ao.", "transformers.integrations.")
    )
