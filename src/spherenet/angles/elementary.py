"""Elementary functions of angles with derivatives written out by hand.

Autograd's own chain for these functions takes two or three times as many operations. Each backward uses only inputs,
outputs and differentiable operations, so that it can be differentiated any number of times, vectorized with vmap and,
through `jvp`, differentiated in forward mode.

All functions take c = cos θ, which is what a convolution yields. asin c has no cancellation at θ = π/2, where
1 − 2θ/π loses digits. The derivative dθ/dc grows like 1/sin θ near θ = 0 and π, while the gradient of a patch contains
the factor sin θ. Both are computed from the same rounded c. Therefore sin θ is kept above a floor (`sine`), which makes
the product bounded and its limit at θ = 0 and θ = π zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ElementaryFunction",
    "angle_from_cosine",
    "asin",
    "clamp_rounding",
    "elementary",
    "gradients_of",
    "is_exporting",
    "is_jit_tracing",
    "multiply_by_inverse_sine_",
    "save_tensors",
    "sine",
    "tanh",
    "tanh_of_norm",
    "tanh_ratio",
    "with_slope",
]


class ElementaryFunction(torch.autograd.Function):
    """Base class of functions that define `forward`, `setup_context`, `backward` and `jvp`.

    `compiled` is the same function for torch.compile, from operations that autograd differentiates: `forward`, unless
    its derivative is another one. Numbers may be symbols there, which an `autograd.Function` cannot take.
    """

    generate_vmap_rule = True
    compiled: Callable[..., Any] | None = None


def is_exporting() -> bool:
    """Return whether torch.export records the operations. Before torch 2.7 nothing tells, and the answer is no."""
    return bool(getattr(torch.compiler, "is_exporting", bool)())


def is_jit_tracing() -> bool:
    """Return whether torch.jit.trace, or an exporter that uses it, records the operations."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def elementary(function: type[ElementaryFunction]) -> Callable[..., Any]:
    """Return the callable of a function that also works while torch.compile or torch.jit.trace record it.

    A trace gets the operations of `forward`: it cannot be saved with a function of Python, and exporters misread it.
    """
    forward, compiled = function.forward, function.compiled or function.forward

    def evaluate(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*inputs) if is_exporting() else compiled(*inputs)
        if is_jit_tracing():
            return forward(*inputs)
        return function.apply(*inputs)  # type: ignore[no-untyped-call]

    return evaluate


def with_slope(value: Tensor, x: Tensor, slope: Tensor | float) -> Tensor:
    """Return the value with a derivative by x that autograd does not derive: value + slope·(x − x)."""
    return value.detach() + slope * (x - x.detach())


def save_tensors(ctx: Any, *tensors: Tensor | None) -> None:
    """Save inputs or outputs for backward and forward mode; gradients of unused outputs will be None."""
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    ctx.save_for_forward(*tensors)


def gradients_of(
    formula: Callable[..., Sequence[Tensor]], inputs: Sequence[Any], grad_outputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of formula(*inputs), which can be differentiated again if gradients are enabled.

    Backward functions of fused kernels call it when they run with create_graph=True, which enables gradients, and for
    tensors without memory, such as those of a batch of gradients.

    Args:
        formula: Differentiable function that returns a sequence of tensors.
        inputs: Arguments of the formula, tensors or not.
        grad_outputs: Gradients of its outputs; None for an output that was not used.

    Returns:
        One entry per input; None for inputs that are not tensors or do not require gradients.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # New aliases stop the gradient here; otherwise it would continue into the graph of the inputs.
        aliases = [value.view_as(value) if isinstance(value, Tensor) else value for value in inputs]
        outputs = [pair for pair in zip(formula(*aliases), grad_outputs, strict=True) if pair[1] is not None]
    indices = [index for index, value in enumerate(aliases) if isinstance(value, Tensor) and value.requires_grad]
    gradients = torch.autograd.grad(
        [output for output, _ in outputs],
        [aliases[index] for index in indices],
        [grad for _, grad in outputs],
        create_graph=create_graph,
        allow_unused=True,
    )
    by_index = dict(zip(indices, gradients, strict=True))
    return tuple(by_index.get(index) for index in range(len(aliases)))


# --- angles ------------------------------------------------------------------------------------------------------


def sine(cosine: Tensor) -> Tensor:
    """Return sin θ from c = cos θ, at least 4·sqrt(ε) of the dtype.

    A float cosine of a few hundred products has an error of about ε, so 1 − c² is noise below a few ε. The floor of
    16·ε is far enough above the noise for the gradient bound max|dg/dθ|/‖x‖ to hold near θ = 0.
    """
    floor = 16 * torch.finfo(cosine.dtype).eps
    return ((1 - cosine) * (1 + cosine)).clamp_min(floor).sqrt()


def multiply_by_inverse_sine_(grad: Tensor, cosine: Tensor, scratch: Tensor) -> None:
    """Multiply grad in place by 1/sin θ with the floor of `sine`; `scratch` is overwritten."""
    square = torch.addcmul(cosine.new_ones(()), cosine, cosine, value=-1, out=scratch)
    grad.mul_(square.clamp_min_(16 * torch.finfo(cosine.dtype).eps).rsqrt_())


class _BoundedAsin(ElementaryFunction):
    """asin of a clamped cosine with the derivative 1/sin θ, where sin θ is the floored cosine of the result."""

    @staticmethod
    def forward(cosine: Tensor) -> Tensor:
        return cosine.clamp(-1, 1).asin()

    @staticmethod
    def compiled(cosine: Tensor) -> Tensor:
        latitude = cosine.detach().clamp(-1, 1).asin()
        return with_slope(latitude, cosine, 1 / _floored_cosine(latitude))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        save_tensors(ctx, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad / _floored_cosine(ctx.saved_tensors[0])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent / _floored_cosine(ctx.saved_tensors[0])


def _floored_cosine(latitude: Tensor) -> Tensor:
    """Return sin θ from π/2 − θ with the floor of `sine`."""
    return latitude.cos().clamp_min(4 * torch.finfo(latitude.dtype).eps ** 0.5)


_bounded_asin = elementary(_BoundedAsin)


def asin(cosine: Tensor) -> Tensor:
    """Return π/2 − θ from c = cos θ. c is clamped to [−1, 1] and the derivative is bounded."""
    result: Tensor = _bounded_asin(cosine)
    return result


def angle_from_cosine(cosine: Tensor) -> Tensor:
    """Return θ ∈ [0, π] from c = cos θ, with the bounded derivative of `asin`."""
    return math.pi / 2 - asin(cosine)


# --- the sigmoid -------------------------------------------------------------------------------------------------


def tanh(value: Tensor | float) -> Any:
    """Return tanh of a tensor or a number."""
    return value.tanh() if isinstance(value, Tensor) else math.tanh(value)


class _FixedTanhRatio(ElementaryFunction):
    """y = q·tanh(a·h) of the latitude a, with h = 1/(2k) and q = 1/tanh(π/(4k)):  dy = h·(q − y²/q)·da."""

    @staticmethod
    def forward(latitude: Tensor, k: float) -> Tensor:
        return (latitude / (2 * k)).tanh() / math.tanh(math.pi / (4 * k))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.k = inputs[1]
        save_tensors(ctx, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else grad * _FixedTanhRatio.slope(ctx), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent * _FixedTanhRatio.slope(ctx)

    @staticmethod
    def slope(ctx: Any) -> Tensor:
        """Return dy/da = h·q − y²·h/q."""
        (value,) = ctx.saved_tensors
        h, tau = 0.5 / ctx.k, math.tanh(math.pi / (4 * ctx.k))
        return torch.rsub(value * value, h / tau, alpha=h * tau)


class _LearnedTanhRatio(ElementaryFunction):
    """y = tanh(v)/τ with v = a·h, h = 1/(2k), τ = tanh u and u = πh/2, for a tensor k that broadcasts; also returns h.

    dy = q·(1 − tanh² v)·da + 2q·(F·tanh v − v·(1 − tanh² v))·dk  with  q = h/τ,  F = u·(1 − τ²)/τ,  and dh = −2h²·dk.
    For large k the difference is smaller than its terms by a factor of k², so derivatives are computed in float64.
    """

    @staticmethod
    def forward(latitude: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 / k
        return (latitude * h).tanh() / (h * (math.pi / 2)).tanh(), h

    @staticmethod
    def compiled(latitude: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        result, h = _LearnedTanhRatio.forward(latitude.detach(), k.detach())
        v, value, scale, decline = _LearnedTanhRatio.factors(latitude.detach(), h)
        by_latitude = (scale * (1 - value * value)).to(result.dtype)
        by_k = (2 * scale * (value * decline - v * (1 - value * value))).to(result.dtype)
        return with_slope(result, latitude, by_latitude) + by_k * (k - k.detach()), h

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        save_tensors(ctx, inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_h: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        latitude, h = ctx.saved_tensors
        by_latitude = by_k = None
        if grad is not None:
            v, value, scale, decline = _LearnedTanhRatio.factors(latitude, h)
            grad = grad * scale
            if ctx.needs_input_grad[0]:
                by_latitude = _times_tanh_slope(grad, value).to(latitude.dtype)
            if ctx.needs_input_grad[1]:
                change = torch.addcmul(_times_tanh_slope(v, value), value, decline, value=-1)
                by_k = ((grad * change).sum_to_size(h.shape) * -2).to(h.dtype)
        if grad_h is not None and ctx.needs_input_grad[1]:
            by_k = grad_h * h * h * -2 + (0 if by_k is None else by_k)
        return by_latitude, by_k

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, k_tangent: Tensor | None) -> tuple[Tensor, Tensor]:
        latitude, h = ctx.saved_tensors
        v, value, scale, decline = _LearnedTanhRatio.factors(latitude, h)
        by_value, by_h = torch.zeros_like(value), torch.zeros_like(h)
        if tangent is not None:
            by_value = by_value + _times_tanh_slope(tangent * scale, value)
        if k_tangent is not None:
            by_value = by_value + (value * decline - _times_tanh_slope(v, value)) * (2 * scale * k_tangent)
            by_h = -2 * h * h * k_tangent
        return by_value.to(latitude.dtype), by_h

    @staticmethod
    def factors(latitude: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return v, tanh v, q and F, in float64 if the device has it."""
        wide = h if h.device.type == "mps" else h.double()
        wide = wide if h.dim() else wide.reshape(1)  # without a dimension it would not widen the latitudes
        u, v = wide * (math.pi / 2), latitude * wide
        tau = u.tanh()
        return v, v.tanh(), wide / tau, _times_tanh_slope(u, tau) / tau


def _times_tanh_slope(factor: Tensor, value: Tensor) -> Tensor:
    """Return factor·(1 − value²) in one operation."""
    product: Tensor = torch.ops.aten.tanh_backward(factor, value)
    return product


class _TanhOfNorm(ElementaryFunction):
    """y = tanh v of v ≥ 0 with dy = 4e/(1 + e)²·dv, e = exp(−2v): 1 − y² is rounding noise where y is close to 1."""

    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return value.tanh()

    @staticmethod
    def compiled(value: Tensor) -> Tensor:
        return with_slope(value.tanh(), value, _TanhOfNorm.slope(value.detach()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        save_tensors(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad * _TanhOfNorm.slope(*ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * _TanhOfNorm.slope(*ctx.saved_tensors)

    @staticmethod
    def slope(value: Tensor) -> Tensor:
        """Return 1/cosh² v."""
        decay: Tensor = (-2 * value).exp()
        return 4 * decay / (1 + decay).square()


class _ClampRounding(ElementaryFunction):
    """Clamp values that only rounding moves beyond ±1; the derivative is 1.

    No derivative needs the result, so the next layer may change it in place.
    """

    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return value.clamp(-1, 1)

    @staticmethod
    def compiled(value: Tensor) -> Tensor:
        return with_slope(value.clamp(-1, 1), value, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()


_fixed_tanh_ratio, _learned_tanh_ratio = elementary(_FixedTanhRatio), elementary(_LearnedTanhRatio)
_tanh_of_norm, _clamp_rounding = elementary(_TanhOfNorm), elementary(_ClampRounding)


def tanh_ratio(latitude: Tensor, k: Tensor | float) -> Tensor:
    """Return tanh(a/(2k)) / tanh(π/(4k)) of the latitude a; k is a number or a tensor that broadcasts."""
    value: Tensor = _learned_tanh_ratio(latitude, k)[0] if isinstance(k, Tensor) else _fixed_tanh_ratio(latitude, k)
    return value


def tanh_of_norm(value: Tensor) -> Tensor:
    """Return tanh of values ≥ 0, with a derivative that keeps its digits where tanh is close to 1."""
    result: Tensor = _tanh_of_norm(value)
    return result


def clamp_rounding(value: Tensor) -> Tensor:
    """Return values clamped to [−1, 1] with derivative 1, for functions that only rounding moves beyond ±1."""
    result: Tensor = _clamp_rounding(value)
    return result
