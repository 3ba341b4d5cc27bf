"""What all sphere layers share: angle and magnitude function, centering, rescaling and eps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy

from spherenet._util.validation import OptionCheck, require_one_of
from spherenet.angles import AngleFunction, make_angle
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.kernels.dispatch import can_read_values
from spherenet.layers.options import SphereOptions
from spherenet.magnitudes import Magnitude, make_magnitude
from spherenet.ops.operation import require_center

__all__ = [
    "METADATA_KEY",
    "Proxy",
    "SphereLayer",
    "different_options",
    "getting_weight",
    "make_lazy",
    "record_as_leaf",
]

Proxy: Any = fx.Proxy
"""Input of a layer while `torch.fx` traces it; `Any`, because annotations state a tensor."""

METADATA_KEY = "spherenet"
"""Entry of the metadata of a state dict with the options of a sphere layer."""


class SphereLayer(OptionCheck, nn.Module):
    """Mixin of the layers whose output is β·(h(‖x‖)·g(θ) + b) + γ (docs/concepts.md, Eq. 1 to 3, 14 and 15).

    It precedes the torch.nn class among the bases of a layer. `angle` is g and `k` its parameter, None if g has none.
    `beta` and `gamma` are parameters [filters] if they are learned, numbers if they are fixed, and None without
    rescaling.
    """

    angle: AngleFunction
    beta: nn.Parameter | float | None
    gamma: nn.Parameter | float | None
    eps: float
    center: str | None = None
    magnitude: Magnitude | None  # no default, which would hide the submodule

    def _set_up_sphere(self, num_filters: int, options: SphereOptions, device: Any, dtype: Any) -> None:
        """Add the attributes of a sphere layer; the last step of a constructor."""
        self.k_sharing = require_one_of("k_sharing", options.k_sharing, ("filter", "layer"))
        self.eps = options.eps
        num_k = None if self.k_sharing == "layer" else num_filters
        self.angle = make_angle(options.operator, options.k, num_filters=num_k, device=device, dtype=dtype)
        values, parameter = self.angle.k, self.angle.parameter
        if isinstance(values, Tensor) and values.dim() == 1 and len(values) != num_filters:
            name = "k" if parameter is None else parameter.name
            raise InvalidArgument(
                "operator", f"must have {num_filters} {name}, one per filter, got an object with {len(values)}."
            )
        # Lazy layers do not know their kernels yet; a constructor may have given them one input for now.
        kernel = None if isinstance(self, LazyModuleMixin) else getattr(self, "weight", None)
        size = kernel.numel() // max(1, num_filters) if isinstance(kernel, Tensor) and not is_lazy(kernel) else None
        self.center = require_center(options.center, size)
        self.magnitude = make_magnitude(
            options.magnitude, options.radius, num_filters=num_filters, device=device, dtype=dtype
        )
        radii = None if self.magnitude is None else self.magnitude.raw_radius
        if radii is not None and len(radii) != num_filters:
            raise InvalidArgument("magnitude", f"must have {num_filters} radii, one per filter, got {len(radii)}.")
        self.rescale = options.rescale
        if self.rescale == "learned":
            self.beta = nn.Parameter(torch.ones(num_filters, device=device, dtype=dtype))
            self.gamma = nn.Parameter(torch.zeros(num_filters, device=device, dtype=dtype))
        elif isinstance(self.rescale, tuple):
            self.beta, self.gamma = self.rescale
        else:
            self.beta = self.gamma = None

    @property
    def operator(self) -> str:
        """The name of the angle function."""
        return self.angle.name

    @property
    def k(self) -> Tensor | float | None:
        """The parameter of g, whatever its name: a number, a tensor [filters] or [], or None if g has none."""
        return self.angle.k

    def reset_parameters(self) -> None:
        """Initialize weight and bias as torch.nn does, and set k, β and γ to their initial values."""
        super().reset_parameters()  # type: ignore[misc]
        # torch's constructors call this before the attributes of a sphere layer exist, and lazy layers when they get
        # their weight from the first input: k, β and γ may have other values then, and k may belong to other layers.
        if isinstance(getattr(self, "angle", None), nn.Module) and not getattr(self, "_is_getting_weight", False):
            reset_angle = getattr(self.angle, "reset_parameters", None)
            if reset_angle is not None:
                reset_angle()
            if self.magnitude is not None:
                self.magnitude.reset_parameters()
            if isinstance(self.beta, nn.Parameter) and isinstance(self.gamma, nn.Parameter):
                nn.init.ones_(self.beta)
                nn.init.zeros_(self.gamma)

    def saved_options(self) -> dict[str, Any]:
        """Return the options that change the output and that the tensors of a state dict do not contain."""
        magnitude = self.magnitude
        return {
            "operator": self.operator,
            "k": self.k if isinstance(self.k, float) else None,
            "eps": self.eps,
            "center": self.center,
            "magnitude": "sphere" if magnitude is None else magnitude.name,
            "radius": None if magnitude is None else magnitude.fixed_radius,
            "slopes": None if magnitude is None else [magnitude.alpha, magnitude.beta],
            "rescale": list(self.rescale) if isinstance(self.rescale, tuple) else self.rescale,
        }

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Add the options to the metadata of the state dict, which strict loading and safetensors ignore."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            metadata.setdefault(prefix[:-1], {})[METADATA_KEY] = self.saved_options()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *arguments: Any
    ) -> None:
        """Load the tensors, with a warning if they were saved by a sphere layer with other options."""
        saved = local_metadata.get(METADATA_KEY)  # None for a plain layer
        different = different_options(saved, self)
        if different:
            warnings.warn(
                f"{prefix[:-1] or type(self).__name__} was saved by a layer with {different}: its outputs will differ.",
                stacklevel=2,
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Warn of a weight that only rescales the kernels, as `torch.nn.utils.fusion` computes it."""
        if name == "weight" and _is_rescaled(self._parameters.get("weight"), value, getattr(self, "transposed", False)):
            warnings.warn(
                f"the new weight of {type(self).__name__} only rescales its kernels, which does not change its output. "
                "To fold a BatchNorm, use spherenet.freeze.",
                stacklevel=2,
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Return torch's own description followed by the options of a sphere layer."""
        options = [super().extra_repr(), f"operator={self.operator!r}"]
        if self.center is not None:
            options.append(f"center={self.center!r}")
        if self.rescale is not None:
            options.append(f"rescale={self.rescale!r}")
        options.append(f"eps={self.eps:g}")
        return ", ".join(options)


@torch.no_grad()
def _is_rescaled(old: Any, new: Any, transposed: bool) -> bool:
    """Return whether a new weight has the directions of the old one, or their opposites, and other norms."""
    if not isinstance(old, nn.Parameter) or not isinstance(new, nn.Parameter) or is_lazy(old) or is_lazy(new):
        return False
    if old is new or old.shape != new.shape or old.numel() == 0 or not (can_read_values(old) and can_read_values(new)):
        return False
    dim = int(transposed)
    rows = [weight.detach().double().transpose(0, dim).flatten(1) for weight in (old, new)]
    before, after = (row.norm(dim=1) for row in rows)
    aligned = (rows[0] * rows[1]).sum(1).abs() >= before * after * (1 - 1e-5)
    same_norm = ((before - after).abs() <= 1e-4 * before).all()
    return bool(aligned.all()) and not bool(same_norm)


def different_options(saved: object, module: nn.Module | None) -> str:
    """Return how the options of a saved sphere layer differ from those of a module, "" if they do not.

    Args:
        saved: Value of `SphereLayer.saved_options`, or anything else if the layer was not a sphere layer.
        module: The module that loads its tensors.
    """
    if not isinstance(saved, dict):
        return ""
    if not isinstance(module, SphereLayer):
        return f"operator={saved.get('operator')!r} instead of a plain layer"
    own = module.saved_options()
    names = [name for name, value in own.items() if name in saved and saved[name] != value]
    return ", ".join(f"{name}={saved[name]!r} instead of {own[name]!r}" for name in names)


def record_as_leaf(module: nn.Module, input: Tensor, *arguments: Any) -> Tensor:
    """Record the call of a module with a `Proxy` as one node of the graph, as `torch.fx` does for torch's own layers.

    Otherwise `torch.fx` would trace into the layer, whose checks and kernels require tensors.
    """
    tracer = cast(Any, input).tracer
    arguments = tuple(argument for argument in arguments if argument is not None)
    node: Tensor = tracer.create_proxy("call_module", tracer.path_of_module(module), (input, *arguments), {})
    return node


@contextmanager
def getting_weight(layer: nn.Module) -> Iterator[None]:
    """Let `reset_parameters` initialize only weight and bias, while a lazy layer creates them."""
    layer.__dict__["_is_getting_weight"] = True
    try:
        yield
    finally:
        del layer.__dict__["_is_getting_weight"]


def make_lazy(layer: Any, device: Any, dtype: Any) -> None:
    """Leave the weight and bias of a lazy layer uninitialized until its first input."""
    layer.weight = nn.UninitializedParameter(device=device, dtype=dtype)  # type: ignore[call-arg]
    if layer.bias is not None:
        layer.bias = nn.UninitializedParameter(device=device, dtype=dtype)  # type: ignore[call-arg]


# --- refusal of tools that would treat a sphere layer as the plain layer it derives from ------------------------------
#
# A sphere layer is an instance of torch's class, so that code for `nn.Linear` and `nn.Conv2d` finds it. Adapters and
# quantizers that look for `nn.Linear` would compute another function without a word: they add a linear branch that
# their merge then moves into the weight, or build a plain layer from the weight. Both register a module, which torch
# reports.

EXACT_WRAPPERS = ("LNTuningLayer", "ParamWrapper")
"""Classes of peft that change the weight itself, so that a merged layer computes the same."""

REPLACING_PACKAGES = {
    "aqlm", "auto_gptq", "awq", "bitsandbytes", "compressed_tensors", "eetq", "fbgemm_gpu", "gptqmodel", "hqq",
    "intel_extension_for_pytorch", "modelopt", "neural_compressor", "optimum", "quark", "spqr_quant", "torchao",
    "transformer_engine", "vptq",
}  # fmt: skip
"""Packages whose linear layers replace torch's, by the weight of the layer that they replace."""


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


register_module_module_registration_hook(_refuse_plain_use)
