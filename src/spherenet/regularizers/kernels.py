"""Layers of a model that a regularizer applies to, their kernels as matrices, Gram matrices, and orthogonality (Eq. 4).

Layers whose kernels have the same shape are processed together, so that everything after the matrix products runs once
per shape instead of once per layer. Products of small kernels run as one batch. On a CPU, large kernels are multiplied
one by one, because copying them into a batch costs more than the calls that it saves.

The layers are collected on every call: for the 69 layers of cnn-69 this takes a hundredth of the time of their Gram
matrices (benchmarks/orthogonality.py), and a stored list would be wrong after a layer is replaced or a weight is tied.

Orthogonality has a lower bound. n kernels of fan-in d cannot be orthogonal if n > d, because WᵀW has a rank of at most
d. The smallest values then are

    raw           n − d          d eigenvalues of WᵀW are 1, the others 0
    normalized    n·(n − d)/d    the trace n is spread evenly over d eigenvalues: a tight frame of unit vectors

`orthogonality_minimum` returns their sum over a model. The bound is a constant: it does not change the gradient, which
pulls such a layer toward the tight frame.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter

from spherenet._util.validation import require_memory, require_one_of
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.kernels.dispatch import readable
from spherenet.layers import AngularHead, SphereLayer
from spherenet.ops.norms import DEFAULT_EPS, without_autocast, working_dtype

__all__ = [
    "FORMS",
    "INCLUDE",
    "KernelStack",
    "Modules",
    "cosines",
    "gram",
    "kernel_matrix",
    "kernel_stacks",
    "layers_with_kernels",
    "orthogonality",
    "orthogonality_minimum",
    "sphere_layers",
    "zero_of",
]

Modules: TypeAlias = nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module]
"""Argument of a regularizer: a model, a layer, several of them, or several with names."""

INCLUDE = ("sphere", "head", "plain")
"""Layers that a regularizer can include: sphere layers, `AngularHead`s, and convolutions and linear layers of torch."""

FORMS = ("raw", "normalized")

SMALL_MATRIX = 16384
"""Number of entries up to which copying a matrix into a batch takes a CPU less time than another matrix product."""

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def sphere_layers(modules: Modules) -> dict[str, SphereLayer]:
    """Return the sphere layers of a model by name, each weight once.

    A layer that occurs twice, or that shares its weight with another layer, is listed under its first name. A layer
    that is passed on its own gets the name of its class.

    Args:
        modules: A model, a layer, several of them, or several with names. Names of several unnamed modules start with
            the index of the module.

    Raises:
        TypeError: If an argument is not a module.
        ValueError: If a lazy layer has no weight yet.
    """
    return cast(dict[str, SphereLayer], layers_with_kernels(modules))


def layers_with_kernels(modules: Modules, include: Collection[str] = ("sphere",)) -> dict[str, nn.Module]:
    """Return the layers of a model whose kernels a regularizer includes; names and errors as in `sphere_layers`.

    Args:
        modules: As in `sphere_layers`.
        include: Names from `INCLUDE`.
    """
    if isinstance(include, str):
        include = (include,)
    types: tuple[Any, ...] = ()
    for choice in include:
        if choice not in INCLUDE:
            require_one_of("include", choice, INCLUDE)
        types += {"sphere": (SphereLayer,), "head": (AngularHead,), "plain": (_ConvNd, nn.Linear)}[choice]
    plain_only = "plain" in include and "sphere" not in include
    if isinstance(modules, nn.Module):
        roots = [("", modules)]
    elif isinstance(modules, Mapping):
        roots = list(modules.items())
    elif isinstance(modules, Iterable):
        roots = [(str(index), module) for index, module in enumerate(modules)]
    else:
        raise InvalidArgumentType("model", f"must be a module or several modules, got {modules!r}.")
    layers: dict[str, nn.Module] = {}
    owners: set[int] = set()
    for prefix, root in roots:
        if not isinstance(root, nn.Module):
            raise InvalidArgumentType("model", f"must hold modules only, got an object of type {type(root).__name__}.")
        for name, module in root.named_modules(prefix=prefix):
            # Sphere layers are convolutions and linear layers too.
            if not isinstance(module, types) or (plain_only and isinstance(module, SphereLayer)):
                continue
            # A parametrized weight is computed on each access, so that only the layer itself can be shared.
            weight = module._parameters.get("weight")
            if isinstance(weight, UninitializedParameter):
                raise InvalidArgument(
                    "model",
                    f"must be initialized, but {name or type(module).__name__} is lazy and has no weight yet: "
                    f"run one batch through it first.",
                )
            owner = id(module) if weight is None else id(weight)
            if owner not in owners:
                owners.add(owner)
                layers[name or type(module).__name__] = module
    return layers


def zero_of(modules: Modules, what: str, include: Collection[str]) -> Tensor:
    """Return the scalar 0 on the device of the modules and warn: the penalty of a model without what it is about."""
    if include and not torch.compiler.is_compiling():
        names = include if isinstance(include, str) else ", ".join(include)
        warnings.warn(f"the penalty is 0, because model has no {what} ({names}).", stacklevel=3)
    roots = [modules] if isinstance(modules, nn.Module) else modules
    roots = roots.values() if isinstance(roots, Mapping) else roots
    first = next((parameter for root in roots for parameter in root.parameters()), None)
    if first is None:
        return torch.zeros(())
    return torch.zeros((), dtype=working_dtype(first.dtype), device=first.device)


@dataclass
class KernelStack:
    """Kernel matrices [groups, kernels, fan_in] of the layers with the same shape, dtype, device and eps."""

    kernels: int
    fan_in: int
    eps: float
    is_output: bool = False
    """Whether the matrices are class weights of heads."""

    matrices: list[Tensor] = field(default_factory=list)


def kernel_stacks(modules: Modules, include: Collection[str] = ("sphere",)) -> list[KernelStack]:
    """Return the kernels of layers as matrices in float32 or float64, layers of the same shape together.

    Kernels of different groups see different channels, so that angles between them have no meaning: each group is a
    separate matrix. The entries of a kernel are in the order of memory, on which no inner product depends; a
    channels-last weight is therefore not copied. A sharded weight (DTensor, e.g. of FSDP2) is gathered: each process
    computes the whole penalty and receives the gradient of its shard.
    """
    stacks: dict[tuple[object, ...], KernelStack] = {}
    for layer in layers_with_kernels(modules, include).values():
        weight: Any = layer.weight
        require_memory(weight)
        if hasattr(weight, "full_tensor"):
            weight = weight.full_tensor()
        groups = cast(int, getattr(layer, "groups", 1))
        layout = _CHANNELS_LAST.get(weight.dim())
        if getattr(layer, "transposed", False):
            # [in, out/groups, ...] → [out, in/groups, ...]
            weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        elif layout is not None and weight.is_contiguous(memory_format=layout):
            weight = weight.movedim(1, -1)
        kernels, fan_in = weight.shape[0] // groups, weight.shape[1:].numel()
        matrix = weight.reshape(groups, kernels, fan_in).to(working_dtype(weight.dtype))
        eps, is_output = getattr(layer, "eps", DEFAULT_EPS), isinstance(layer, AngularHead)
        key = (kernels, fan_in, matrix.dtype, matrix.device, eps, is_output)
        stacks.setdefault(key, KernelStack(kernels, fan_in, eps, is_output)).matrices.append(matrix)
    return list(stacks.values())


def kernel_matrix(layer: nn.Module) -> Tensor:
    """Return the flattened kernels of a layer, [groups, kernels per group, fan-in], in float32 or float64."""
    return kernel_stacks(layer, INCLUDE)[0].matrices[0]


def gram(matrices: Sequence[Tensor]) -> Tensor:
    """Return M Mᵀ of each of several matrices [groups, rows, columns] with equal rows and columns.

    A batch of one matrix is multiplied without its batch dimension, which is up to twice as fast for small matrices.

    Shape:
        n × [groups_i, rows, columns] → [Σ groups_i, rows, rows].
    """
    first = matrices[0]
    if len(matrices) > 1 and (first.device.type != "cpu" or first[0].numel() <= SMALL_MATRIX):
        matrices = [torch.cat(list(matrices))]
    with without_autocast(first):  # which would multiply in half precision
        if readable(*matrices):
            result: Tensor = _Gram.apply(*matrices)  # type: ignore[no-untyped-call]
            return result
        products = [(m[0] @ m[0].mT).unsqueeze(0) if len(m) == 1 else m @ m.mT for m in matrices]
        return products[0] if len(products) == 1 else torch.cat(products)


class _Gram(torch.autograd.Function):
    """M Mᵀ of each matrix, concatenated along dimension 0; see `gram`.

    The gradient of a symmetric product takes one product, (G + Gᵀ)·M, while autograd's rule for `@` takes two. It can
    be differentiated any number of times.
    """

    @staticmethod
    def forward(ctx: Any, *matrices: Tensor) -> Tensor:
        ctx.save_for_backward(*matrices)
        ctx.save_for_forward(*matrices)
        products = [(m[0] @ m[0].mT).unsqueeze(0) if len(m) == 1 else m @ m.mT for m in matrices]
        return products[0] if len(products) == 1 else torch.cat(products)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        matrices = ctx.saved_tensors
        with without_autocast(grad_output):
            factors = torch.split(grad_output + grad_output.mT, [len(m) for m in matrices])
            pairs = zip(factors, matrices, strict=True)
            return tuple((f[0] @ m[0]).unsqueeze(0) if len(f) == 1 else f @ m for f, m in pairs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        halves = torch.cat([t @ m.mT for t, m in zip(tangents, ctx.saved_tensors, strict=True)])
        return halves + halves.mT


def cosines(stack: KernelStack) -> Tensor:
    """Return the cosines wᵢᵀwⱼ/(‖wᵢ‖‖wⱼ‖) between the kernels of each group, with ‖w‖ = sqrt(max(Σw², eps)).

    The cosine of a kernel with itself is 1 unless the kernel is shorter than √eps of its layer. The layer itself adds
    eps instead, but then two copies could reduce their cosine by becoming shorter. With a lower bound, the length of
    every longer kernel has no influence, and the gradient of shorter ones is bounded as well. The cosine of a zero
    kernel with any other is 0, and so is that of a kernel whose squares overflow (‖w‖ > 1e19 in float32).

    Shape:
        [Σ groups, kernels, kernels].
    """
    products = gram(stack.matrices)
    norms = products.diagonal(dim1=-2, dim2=-1).clamp_min(stack.eps).sqrt()
    # Both operands are replaced, not the quotient: inf/inf and 0·inf must not occur in backward either.
    overflow = norms.isinf()
    norms = norms.masked_fill(overflow, 1)
    products = products.masked_fill(overflow.unsqueeze(-1) | overflow.unsqueeze(-2), 0)
    return products / (norms.unsqueeze(-1) * norms.unsqueeze(-2))


def orthogonality(model: Modules, form: str = "raw", *, include: Collection[str] = ("sphere",)) -> Tensor:
    """Return the orthogonality penalty of the sphere layers, and of other layers on request (Eq. 4).

    The penalty is Σ over layers of ‖WᵀW − I‖_F², where the columns of W are the flattened kernels. Kernels of different
    groups of a convolution are not compared, because they see different channels. Half-precision weights are computed
    in float32, also under autocast. Weights of centered layers enter with their mean, as those of other layers do. If
    layers are on several devices, the result is on the device of the first one. In float32 the raw penalty is infinite
    if a kernel is longer than about 1e9.

    Args:
        model: A model, a layer, or several of them. A weight that several layers share counts once.
        form: "raw" for the weights themselves, as in the code released with the paper, which also pulls their norms
            to 1; "normalized" for unit kernels w/‖w‖, whose norms have no influence. Kernels shorter than the square
            root of the layer's eps (0.01 by default) are divided by that root.
        include: Layers to include: "sphere" for sphere layers, "head" for class weights of an `AngularHead`, "plain"
            for convolutions and linear layers of torch.

    Returns:
        A scalar; the constant 0, with a warning, for a model without such layers.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If the form or a name in `include` is unknown, or a lazy layer has no weight yet.
    """
    if form not in FORMS:
        require_one_of("form", form, FORMS)
    total: Tensor | None = None
    for stack in kernel_stacks(model, include):
        excess = stack.kernels - stack.fan_in
        if excess > 0:
            # ‖WᵀW − I_n‖² = ‖WWᵀ − I_d‖² + n − d: the smaller Gram matrix, and a sum without cancellation.
            matrices = stack.matrices
            if form == "normalized":
                matrices = [m / m.square().sum(-1, keepdim=True).clamp_min(stack.eps).sqrt() for m in matrices]
            products = gram([matrix.mT for matrix in matrices])
        else:
            products = gram(stack.matrices) if form == "raw" else cosines(stack)
        identity = torch.eye(products.shape[-1], dtype=products.dtype, device=products.device)
        value = (products - identity).square().sum()
        if excess > 0:
            value = value + excess * sum(len(matrix) for matrix in stack.matrices)
        total = value if total is None else total + value.to(total.device)
    return zero_of(model, "layer to include", include) if total is None else total


def orthogonality_minimum(model: Modules, form: str = "raw", *, include: Collection[str] = ("sphere",)) -> float:
    """Return the smallest value of `orthogonality`: 0 unless a layer has more kernels than fan-in.

    The value is Σ over layers and groups with n > d of n − d (raw) or n·(n − d)/d (normalized).

    Args:
        model: As in `orthogonality`.
        form: As in `orthogonality`.
        include: As in `orthogonality`.
    """
    require_one_of("form", form, FORMS)
    total = 0.0
    for layer in layers_with_kernels(model, include).values():
        groups, kernels, fan_in = kernel_matrix(layer).shape
        excess = max(kernels - fan_in, 0)
        total += groups * excess * (1 if form == "raw" or fan_in == 0 else kernels / fan_in)
    return total
