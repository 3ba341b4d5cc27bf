"""A recurrent sphere layer over a whole sequence on CPUs: one autograd node instead of a dozen per step.

Each step consists of a matrix product, the kernel that converts it to β·g(θ) + γ, and one call for the gates. Backward
runs through the steps from the last to the first; the gradients of the weight and of k, β and γ are computed once, over
all steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spherenet.angles import AngleFunction
from spherenet.angles.elementary import gradients_of
from spherenet.kernels.dispatch import has_global_hooks, implementation, is_traced, needs_operators
from spherenet.kernels.sphere_conv import native
from spherenet.kernels.sphere_conv.autograd import K, parameter_gradients, per_filter
from spherenet.ops import sphere_conv as plain
from spherenet.ops.geometry import Geometry
from spherenet.ops.norms import autocast_is_on
from spherenet.ops.sphere_conv import Affine, Operation

__all__ = ["fused_recurrence"]


def fused_recurrence(
    from_input: Tensor, state: tuple[Tensor, ...], layer: Any
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Run a recurrent cell over a sequence by the native kernels.

    Args:
        from_input: Contribution of the input to the gates, [L, N, gates·H].
        state: (h, c) of an LSTM or (h,) of a GRU, each [N, H].
        layer: The layer on h, with gates·H filters, whose forward is that of `SphereLinear`.

    Returns:
        The outputs of all steps [L, N, H] and the last state, or None if the kernels do not support this call.
    """
    angle = getattr(layer, "angle", None)
    if not isinstance(angle, AngleFunction) or angle.kernel_id is None or _has_hooks(layer):
        return None
    if layer.center is not None or layer.magnitude is not None:
        return None
    tensors = (from_input, *state, layer.weight)
    one_dtype = all(value.dtype == from_input.dtype for value in tensors) and from_input.element_size() >= 4
    if from_input.dim() != 3 or not one_dtype or autocast_is_on(from_input) or needs_operators(*tensors):
        return None
    parameters = (*tensors[1:], layer.bias, layer.beta, layer.gamma, angle.k)
    if implementation(from_input, *parameters) != "native":
        return None
    bias, beta, gamma = (per_filter(value, layer.weight) for value in (layer.bias, layer.beta, layer.gamma))
    save_cosine = not (bias is None and beta is None and gamma is None) or not angle.is_recoverable
    operation = Operation(angle, Geometry(), layer.eps, "native", save_cosine)
    c = state[1] if len(state) == 2 else None
    outputs, *last = _Recurrence.apply(  # type: ignore[no-untyped-call]
        from_input, state[0], c, layer.weight, angle.k, bias, beta, gamma, operation
    )
    return outputs, tuple(last[: len(state)])


def _has_hooks(layer: Any) -> bool:
    """Return whether calls of this layer have hooks, which the fused recurrence would skip."""
    own = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(own) or has_global_hooks()


class _Recurrence(torch.autograd.Function):
    """The steps of one cell over a sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        from_input: Tensor,
        h: Tensor,
        c: Tensor | None,
        weight: Tensor,
        k: K,
        bias: Tensor | None,
        beta: Tensor | None,
        gamma: Tensor | None,
        operation: Operation,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the outputs, the last h and the last c."""
        unit, scale = native.unit_weight(weight, operation.eps, weight.dtype)
        affine = Affine(bias, beta, gamma) if operation.save_cosine else None
        from_input, transposed = from_input.contiguous(), unit.t()
        length, rows, _ = from_input.shape
        states = h.new_empty(length + 1, rows, h.shape[1])  # h before and after every step
        states[0] = h
        memory = None
        if c is not None:
            memory = torch.empty_like(states)
            memory[0] = c
        gates, from_state = torch.empty_like(from_input), torch.empty_like(from_input)
        cosines: list[Any] = []  # all tensors, or all None
        norms = []
        for step in range(length):
            product = torch.mm(states[step], transposed, out=from_state[step])
            _, inverse_norm, cosine, _ = native.forward(product, states[step], operation, k, affine)
            norms.append(inverse_norm)
            cosines.append(cosine)
            before, after = (states[step], None) if memory is None else (memory[step], memory[step + 1])
            native.cell_forward(from_input[step], product, before, gates[step], after, states[step + 1])
        saved_map = torch.stack(cosines) if operation.save_cosine else from_state
        is_tensor = isinstance(k, Tensor)
        inputs = (from_input, h, c, weight, k if is_tensor else None, bias, beta, gamma)
        ctx.save_for_backward(*inputs, unit, scale, states, memory, gates, from_state, saved_map, torch.stack(norms))
        ctx.operation, ctx.constant_k = operation, None if is_tensor else k
        ctx.set_materialize_grads(False)
        last_c = None if memory is None else memory[-1].clone()
        return states[1:].clone(), states[-1].clone(), last_c

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None) -> Any:
        """Return the gradients of the tensors of forward."""
        (from_input, h, c, weight, k, bias, beta, gamma, unit, scale, states, memory, gates, from_state, saved_map,
         norms) = ctx.saved_tensors  # fmt: skip
        operation: Operation = ctx.operation
        k = ctx.constant_k if k is None else k
        given = [grad for grad in (grad_outputs, grad_h, grad_c) if grad is not None]
        if torch.is_grad_enabled() or is_traced(*given):  # create_graph=True, or a batch of gradients
            inputs = (from_input, h, c, weight, k, bias, beta, gamma, operation)
            return gradients_of(_plain, inputs, (grad_outputs, grad_h, grad_c))
        affine = Affine(bias, beta, gamma) if operation.save_cosine else None
        grad_gates, products = torch.empty_like(gates), torch.empty_like(gates)
        is_gru = memory is None
        grad_from_state = torch.empty_like(gates) if is_gru else grad_gates
        carried = torch.zeros_like(states[0]) if grad_h is None else grad_h.contiguous().clone()
        memory_grad = torch.zeros_like(states[0]) if grad_c is None else grad_c.contiguous().clone()
        for step in reversed(range(gates.shape[0])):
            if grad_outputs is not None:
                carried = carried + grad_outputs[step]
            before = torch.empty_like(carried)
            native.cell_backward(
                gates[step], from_state[step], states[step] if is_gru else memory[step],
                None if is_gru else memory[step + 1], carried, memory_grad, grad_gates[step],
                grad_from_state[step] if is_gru else None, before,
            )  # fmt: skip
            of_product, spread, _ = native.backward(
                grad_from_state[step], saved_map[step], norms[step], states[step], operation, k, affine,
                True, False, False,
            )  # fmt: skip
            assert spread is not None
            products[step] = of_product
            carried = native.correct(products[step] @ unit, states[step], spread, 1)
            if is_gru:
                carried += before
            else:
                memory_grad = before
        flat = products.flatten(0, 1)
        grad_unit = flat.t() @ states[:-1].flatten(0, 1)
        grad_weight = native.unit_weight_backward(grad_unit, unit, scale, weight.dtype)
        needs = (False, False, *ctx.needs_input_grad[4:8])
        of_parameters: tuple[Tensor | None, ...] = (None,) * 4
        if any(needs):
            *_, sums = native.backward(
                grad_from_state.flatten(0, 1), saved_map.flatten(0, 1), norms.flatten(0, 1),
                states[:-1].flatten(0, 1), operation, k, affine, False, True, True,
            )  # fmt: skip
            assert sums is not None
            of_parameters = parameter_gradients(sums, needs, k, affine or Affine())[:4]
        return (grad_gates, carried, None if is_gru else memory_grad, grad_weight, *of_parameters, None)


def _plain(
    from_input: Tensor,
    h: Tensor,
    c: Tensor | None,
    weight: Tensor,
    k: K,
    bias: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    operation: Operation,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same by differentiable torch operations, for second derivatives."""
    outputs = []
    for step in from_input:
        from_state = plain.sphere_conv(h, weight, k, Affine(bias, beta, gamma), operation)
        if c is None:
            (r_x, z_x, n_x), (r_h, z_h, n_h) = step.chunk(3, -1), from_state.chunk(3, -1)
            z = (z_x + z_h).sigmoid()
            h = (1 - z) * (n_x + (r_x + r_h).sigmoid() * n_h).tanh() + z * h
        else:
            i, f, n, o = (step + from_state).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * n.tanh()
            h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs), h, h if c is None else c
