"""Change layers in place: plain to sphere and back, BatchNorms that follow them, and which module follows which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from spherenet.convert.layers import (
    CONVERTIBLE,
    TRANSPOSED,
    ancestor_names,
    called_children,
    consecutive_modules,
    is_sequential,
    num_filters,
    sealed_reason,
)
from spherenet.convert.summary import override_attribute, record_drop, record_reason
from spherenet.errors import ModelError
from spherenet.layers import (
    LazySphereConv1d,
    LazySphereConv2d,
    LazySphereConv3d,
    LazySphereLinear,
    SphereConv1d,
    SphereConv2d,
    SphereConv3d,
    SphereConvTranspose1d,
    SphereConvTranspose2d,
    SphereConvTranspose3d,
    SphereLayer,
    SphereLinear,
    SphereMultiheadAttention,
    SphereOptions,
)

__all__ = [
    "can_be_centered",
    "check_options",
    "computed_weight",
    "disable_fast_paths",
    "disable_inplace",
    "drop_batch_norms",
    "find_batch_norms",
    "is_convertible_back",
    "make_plain",
    "make_spherical",
    "overridden_methods",
    "require_convertible",
    "require_revertible",
    "set_up",
    "weight_problem",
]

_SPHERE_CLASSES: dict[type[nn.Module], type[SphereLayer]] = {
    nn.Conv1d: SphereConv1d,
    nn.Conv2d: SphereConv2d,
    nn.Conv3d: SphereConv3d,
    nn.Linear: SphereLinear,
    nn.ConvTranspose1d: SphereConvTranspose1d,
    nn.ConvTranspose2d: SphereConvTranspose2d,
    nn.ConvTranspose3d: SphereConvTranspose3d,
    nn.LazyConv1d: LazySphereConv1d,
    nn.LazyConv2d: LazySphereConv2d,
    nn.LazyConv3d: LazySphereConv3d,
    nn.LazyLinear: LazySphereLinear,
}
_PLAIN_CLASSES: dict[type[nn.Module], type[nn.Module]] = {sphere: plain for plain, sphere in _SPHERE_CLASSES.items()}

_HARMLESS_METHODS = {"reset_parameters", "extra_repr", "_abc_impl"}
_HARMFUL_SPECIAL_METHODS = {"__call__", "__getattr__", "__getattribute__"}


def set_up(target: Any, options: SphereOptions, layer: Any) -> None:
    """Add to `target` the attributes of a sphere layer with the filters, device and dtype of `layer`."""
    options = options if can_be_centered(layer) else replace(options, center=None)
    target._set_up_sphere(num_filters(layer), options, layer.weight.device, layer.weight.dtype)


def check_options(options: SphereOptions, layer: nn.Module) -> None:
    """Raise the errors of `make_spherical` without changing the layer."""
    set_up(SphereLayer(), options, layer)


def make_spherical(layer: Any, options: SphereOptions) -> None:
    """Change a convolution or linear layer into a sphere layer. `check_options` must have passed.

    Learned k, β, γ and radii are new parameters with the device and dtype of the weight, frozen if the weight is.
    """
    layer.__class__ = _SPHERE_CLASSES[_torch_class(layer)]
    set_up(layer, options, layer)
    if isinstance(options.operator, str):  # an angle function object keeps its mode, as it keeps its parameters
        layer.angle.train(layer.training)
    if isinstance(options.magnitude, str) and layer.magnitude is not None:
        layer.magnitude.train(layer.training)
    if not layer.weight.requires_grad:
        if isinstance(options.operator, str):  # an angle function object may be shared with trainable layers
            layer.angle.requires_grad_(False)
        if isinstance(options.magnitude, str) and layer.magnitude is not None:
            layer.magnitude.requires_grad_(False)
        if layer.rescale == "learned":
            layer.beta.requires_grad_(False)
            layer.gamma.requires_grad_(False)


def is_convertible_back(layer: SphereLayer) -> bool:
    """Return whether a sphere layer has a plain counterpart, as each converted layer has."""
    return type(layer) in _PLAIN_CLASSES


def make_plain(layer: Any) -> list[str]:
    """Change a sphere layer into the torch layer; return which of its options were dropped."""
    angle = layer.angle
    own = ["parameters of g"] if next(angle.parameters(), None) is not None else []
    dropped = own if angle.parameter is None else [angle.parameter.name]
    dropped += ["β and γ"] if layer.rescale is not None else []
    dropped += ["centering"] if layer.center is not None else []
    dropped += ["magnitude function"] if layer.magnitude is not None else []
    layer.__class__ = _PLAIN_CLASSES[type(layer)]
    for name in ("angle", "beta", "gamma", "eps", "k_sharing", "rescale", "center", "magnitude"):
        delattr(layer, name)
    return dropped


def can_be_centered(layer: Any) -> bool:
    """Return whether the kernels of a layer have several entries; a single one is its own mean."""
    weight = layer.weight
    return is_lazy(weight) or weight.numel() == 0 or weight.numel() > num_filters(layer)


def overridden_methods(layer: nn.Module) -> list[str]:
    """Return the methods that a subclass adds to torch's class and that a sphere layer would lose."""
    if "forward" in vars(layer):  # set on the object, e.g. by a tool that offloads weights
        return ["forward"]
    torch_class = _torch_class(layer)
    subclasses = [cls for cls in type(layer).__mro__ if cls not in torch_class.__mro__]
    names = [name for cls in subclasses for name in vars(cls)]
    return [
        name
        for name in names
        if (name in _HARMFUL_SPECIAL_METHODS if name.startswith("__") else name not in _HARMLESS_METHODS)
    ]


def _torch_class(layer: nn.Module) -> type[nn.Module]:
    return next(cls for cls in type(layer).__mro__ if cls in _SPHERE_CLASSES)


def require_convertible(name: str, module: nn.Module) -> None:
    """Raise ModelError for a scripted, compiled or wrapped module and for a quantized or computed weight."""
    hint = ", or skip it" if name else ""
    sealed = sealed_reason(module)
    if sealed is not None:
        raise ModelError(f"{_quoted(name)} is {sealed}{hint}.")
    problem = weight_problem(module)
    if problem is not None:
        raise ModelError(f"{_quoted(name)} of type {type(module).__name__} {problem}{hint}.")


def require_revertible(model: nn.Module) -> None:
    """Raise ModelError for a scripted, compiled or wrapped module and for a subclass of the sphere layers."""
    for name, module in model.named_modules():
        sealed = sealed_reason(module)
        if sealed is not None:
            raise ModelError(f"{_quoted(name)} is {sealed}.")
        is_subclass = isinstance(module, SphereMultiheadAttention) and type(module) is not SphereMultiheadAttention
        if is_subclass:
            raise ModelError(
                f"{_quoted(name)} of type {type(module).__name__} is a subclass of a sphere layer or parametrized, "
                "which has no plain counterpart."
            )
        if isinstance(module, SphereLayer) and type(module) not in _PLAIN_CLASSES:
            problem = weight_problem(module) or "is a subclass of a sphere layer, which has no plain counterpart"
            raise ModelError(f"{_quoted(name)} of type {type(module).__name__} {problem}.")


def weight_problem(module: nn.Module) -> str | None:
    """Return why the weight of a layer cannot be converted and what to do about it, or None if it can."""
    if _is_quantized(module):
        return "is quantized: convert the model before quantizing it"
    weight = module._parameters.get("weight")
    if isinstance(weight, Tensor) and not weight.is_floating_point():
        return f"is quantized or complex, its weight is {weight.dtype}: convert the floating point model"
    # Quantization and sharding libraries use tensor subclasses that report a floating point dtype.
    if isinstance(weight, Tensor) and type(weight).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"has a weight of type {type(weight).__name__}: convert the model before quantizing or sharding it"
    return computed_weight(module)


def _is_quantized(module: nn.Module) -> bool:
    return not isinstance(module, (*CONVERTIBLE, *TRANSPOSED)) or type(module).__module__.startswith("torch.ao.")


def computed_weight(module: nn.Module) -> str | None:
    """Return that a layer computes its weight or bias from other tensors and what to do about it, or None."""
    if _is_quantized(module):
        return None
    if is_parametrized(module):
        return "is parametrized: call torch.nn.utils.parametrize.remove_parametrizations first"
    computed = [name for name in ("weight", "bias") if name not in module._parameters]
    if computed and (type(module) in _PLAIN_CLASSES or not overridden_methods(module)):
        return f"computes its {computed[0]} in a hook (weight_norm, spectral_norm, pruning): remove the hook first"
    return None


def _quoted(name: str) -> str:
    return f"layer {name!r}" if name else "the model"


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def find_batch_norms(model: nn.Module, converted: Collection[nn.Module]) -> tuple[dict[str, str], dict[str, str]]:
    """Return which BatchNorm modules follow sphere layers, and why the others are kept.

    The order of calls is traced. In a block whose `forward` cannot be traced, a BatchNorm follows a layer if they are
    the only children with parameters, and the layer is the first of them.

    Args:
        model: The model before its conversion.
        converted: The layers that will be converted.

    Returns:
        {name of the BatchNorm: name of the layer before it} and {name of the BatchNorm: reason to keep it}.
    """
    drop: dict[str, str] = {}
    keep: dict[str, str] = {}
    names = {module: name for name, module in model.named_modules()}
    spherical = {*converted, *(module for module in names if isinstance(module, SphereLayer))}
    uses = Counter(child for module in names for child in module._modules.values())
    inputs = _Inputs(model, names)
    for module, name in names.items():
        if not isinstance(module, _BatchNorm):
            continue
        sources = inputs.sources_of(module)
        if type(module) not in _BATCH_NORMS:
            keep[name] = f"{type(module).__name__} is a subclass"
        elif uses[module] > 1:
            keep[name] = "it is used in several places"
        elif any(getattr(module, hooks) for hooks in _HOOKS):
            keep[name] = "it has hooks"
        elif sources is None:
            keep[name] = "the order of calls around it cannot be traced"
        elif not sources or any(source not in spherical for source in sources):
            keep[name] = "it does not directly follow a converted layer"
        elif any(num_filters(source) != module.num_features for source in sources):
            keep[name] = "it does not normalize the filters of the layer before it"
        else:
            drop[name] = names[sources[0]]
    return drop, keep


class _Inputs:
    """Lookup of the modules whose output a module takes. Each `forward` is traced at most once."""

    def __init__(self, model: nn.Module, names: dict[nn.Module, str]) -> None:
        self._modules = {name: module for module, name in names.items()}
        self._names = names
        self._in_sequences: dict[nn.Module, list[nn.Module]] = {}
        self._traced: dict[str, dict[nn.Module, list[nn.Module]] | None] = {}
        for first, then in consecutive_modules(model):
            if not isinstance(first, nn.Identity):
                self._in_sequences.setdefault(then, []).append(first)

    def sources_of(self, module: nn.Module) -> list[nn.Module] | None:
        """Return the modules whose output `module` takes, [] if it takes something else, None if that is unknown."""
        containers = (nn.ModuleList, nn.ModuleDict)
        ancestors = ancestor_names(self._names[module])
        owners = [name for name in ancestors if not isinstance(self._modules[name], containers)]
        if not owners:
            return None
        name = owners[-1]
        owner = self._modules[name]
        if is_sequential(owner):
            return self._in_sequences.get(module, [])
        if name not in self._traced:
            self._traced[name] = called_children(owner)
        traced = self._traced[name]
        return _only_layer(owner) if traced is None else traced.get(module, [])


def _only_layer(owner: nn.Module) -> list[nn.Module] | None:
    """Return the layer of a block whose only children with parameters are one layer and then one BatchNorm."""
    children = [child for child in owner.children() if next(child.parameters(), None) is not None]
    is_pair = len(children) == 2 and isinstance(children[0], CONVERTIBLE) and isinstance(children[1], _BatchNorm)
    return children[:1] if is_pair else None


def drop_batch_norms(model: nn.Module, drop: dict[str, str]) -> None:
    """Replace each BatchNorm in {name: name of the layer before it} by an `nn.Identity`."""
    for name, layer in drop.items():
        batch_norm = model.get_submodule(name)
        identity = nn.Identity().train(batch_norm.training)
        record_drop(identity, type(batch_norm).__name__, layer)
        model.set_submodule(name, identity)


def disable_inplace(model: nn.Module) -> None:
    """Set `inplace=False` on each module of an `nn.Sequential` that overwrites the saved output of a sphere layer.

    Gradients would be correct without this, but the layer would have to convolve again, which costs more than the
    saved memory. With a bias or rescaling the layer does not save its output, so later in-place activations stay.
    """
    for first, then in consecutive_modules(model):
        saves_output = (
            isinstance(first, SphereLayer) and first.rescale is None and first._parameters.get("bias") is None
        )
        then = getattr(then, "_orig_mod", then)  # a compiled module calls this one
        is_changeable = not isinstance(then, torch.jit.ScriptModule)
        if saves_output and is_changeable and getattr(then, "inplace", False) is True:
            override_attribute(then, "inplace", False)
            record_reason(then, "inplace disabled: the sphere layer before it saves its output")


def disable_fast_paths(model: nn.Module) -> None:
    """Disable the inference fast path of torch's transformer encoders that contain sphere layers.

    In eval mode without gradients, `nn.TransformerEncoderLayer` passes the weights of its linear layers to one fused
    function and never calls the layers. The attribute `activation_relu_or_gelu` only serves to select this path.
    """
    changed = set()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            layers = (module.linear1, module.linear2, module.self_attn)
            spherical = (SphereLayer, SphereMultiheadAttention)
            if any(isinstance(layer, spherical) for layer in layers) and module.activation_relu_or_gelu:
                override_attribute(module, "activation_relu_or_gelu", 0)
                record_reason(module, "inference fast path disabled: it would bypass the sphere layers")
                changed.add(module)
    for module in model.modules():
        is_encoder = isinstance(module, nn.TransformerEncoder) and changed.intersection(module.layers)
        if is_encoder and module.use_nested_tensor:
            override_attribute(module, "use_nested_tensor", False)
            record_reason(module, "nested tensors disabled: they need the inference fast path")
