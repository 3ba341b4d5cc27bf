"""A recurrent sphere layer over a whole sequence on CPUs: one autograd node instead of a dozen per step.

Each step consists of a matrix product, the kernel that converts it to β·g(θ) + γ, and one call for the gates. Backward
runs through the steps from the last to the first; the gradients of the weight and of k, β and γ are computed once, over
all steps.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from spherenet.angles import AngleFunction
from spherenet.angles.elementary import gradients_of
from spherenet.kernels.backends import Pass, Saved
from spherenet.kernels.dispatch import has_global_hooks, per_filter, readable, serves_recurrence
from spherenet.kernels.library import CellStruct, load
from spherenet.kernels.sphere_conv import native
from spherenet.ops import sphere_conv as plain
from spherenet.ops.norms import autocast_is_on
from spherenet.ops.operation import Operation, Parameters

__all__ = ["fused_recurrence", "next_state"]


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
    if not isinstance(angle, AngleFunction) or _has_hooks(layer) or torch.compiler.is_compiling():
        return None
    if layer.center is not None or layer.magnitude is not None:
        return None
    weight, k = layer.weight, angle.k
    one_dtype = all(value.dtype == from_input.dtype for value in (*state, weight)) and from_input.element_size() >= 4
    if from_input.dim() != 3 or not one_dtype or autocast_is_on(from_input):
        return None
    operation = Operation(angle, eps=layer.eps)
    if not serves_recurrence(state[0], weight, operation):
        return None
    affine = (per_filter(value, weight) for value in (layer.bias, layer.beta, layer.gamma))
    parameters = Parameters(k, *affine)
    if not readable(from_input, *state, weight, *parameters):
        return None
    c = state[1] if len(state) == 2 else None
    outputs, *last = _Recurrence.apply(from_input, state[0], c, weight, *parameters[:4], operation)  # type: ignore[no-untyped-call]
    return outputs, tuple(last[: len(state)])


def _has_hooks(layer: Any) -> bool:
    """Return whether calls of this layer have hooks, which the fused recurrence would skip."""
    own = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(own) or has_global_hooks()


class _Recurrence(torch.autograd.Function):
    """The steps of one cell over a sequence."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the outputs, the last h and the last c; inputs are those of `_plain`."""
        from_input, h, c, weight, k, *affine, operation = inputs
        parameters = Parameters(k, *affine)
        save_cosine = parameters.has_affine or not operation.angle.is_recoverable
        unit, scale = native.unit_weight(weight, operation, weight.dtype)
        from_input, transposed = from_input.contiguous(), unit.t()
        length, rows, _ = from_input.shape
        states = h.new_empty(length + 1, rows, h.shape[1])  # h before and after every step
        states[0] = h
        memory = None
        if c is not None:
            memory = torch.empty_like(states)
            memory[0] = c
        gates, from_state = torch.empty_like(from_input), torch.empty_like(from_input)
        cosines, norms = [], []
        for step in range(length):
            product = torch.mm(states[step], transposed, out=from_state[step])
            _, inverse_norm, cosine, _ = native.apply(product, states[step], operation, parameters, save_cosine)
            norms.append(inverse_norm)
            cosines.append(cosine)
            before, after = (states[step], None) if memory is None else (memory[step], memory[step + 1])
            cell_forward(from_input[step], product, before, gates[step], after, states[step + 1])
        saved_map = torch.stack(cosines) if save_cosine else from_state
        is_tensor = isinstance(k, Tensor)
        tensors = (from_input, h, c, weight, k if is_tensor else None, *affine)
        ctx.save_for_backward(*tensors, unit, scale, states, memory, gates, from_state, saved_map, torch.stack(norms))
        ctx.operation, ctx.constant_k, ctx.save_cosine = operation, None if is_tensor else k, save_cosine
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
        if torch.is_grad_enabled() or not readable(*given):  # create_graph=True, or a batch of gradients
            inputs = (from_input, h, c, weight, k, bias, beta, gamma, operation)
            return gradients_of(_plain, inputs, (grad_outputs, grad_h, grad_c))
        parameters, is_output = Parameters(k, bias, beta, gamma), not ctx.save_cosine
        grad_gates, products = torch.empty_like(gates), torch.empty_like(gates)
        is_gru = memory is None
        grad_from_state = torch.empty_like(gates) if is_gru else grad_gates
        carried = torch.zeros_like(states[0]) if grad_h is None else grad_h.contiguous().clone()
        memory_grad = torch.zeros_like(states[0]) if grad_c is None else grad_c.contiguous().clone()
        for step in reversed(range(gates.shape[0])):
            if grad_outputs is not None:
                carried = carried + grad_outputs[step]
            before = torch.empty_like(carried)
            cell_backward(CellGradients(
                gates[step], from_state[step], states[step] if is_gru else memory[step],
                None if is_gru else memory[step + 1], carried, memory_grad, grad_gates[step],
                grad_from_state[step] if is_gru else None, before,
            ))  # fmt: skip
            saved = Saved(unit, scale, norms[step], saved_map[step], None, is_output)
            asked = Pass(operation, parameters, saved, (True,))
            of_product, spread, _ = native.differentiate(grad_from_state[step], states[step], asked)
            products[step] = of_product
            carried = native.correct(products[step] @ unit, states[step], spread, 1)
            if is_gru:
                carried += before
            else:
                memory_grad = before
        flat = products.flatten(0, 1)
        grad_unit = flat.t() @ states[:-1].flatten(0, 1)
        saved = Saved(unit, scale, norms.flatten(0, 1), saved_map.flatten(0, 1), None, is_output)
        grad_weight = native.unit_weight_backward(grad_unit, saved, operation, weight.dtype)
        needs = (False, False, *ctx.needs_input_grad[4:8], False)
        of_parameters: list[Tensor | None] = [None] * 5
        if any(needs):
            x = states[:-1].flatten(0, 1)
            asked = Pass(operation, parameters, saved, needs)
            sums = native.differentiate(grad_from_state.flatten(0, 1), x, asked)[2]
            of_parameters = asked.parameter_gradients(cast(Tensor, sums))
        return (grad_gates, carried, None if is_gru else memory_grad, grad_weight, *of_parameters[:4], None)


def next_state(from_input: Tensor, from_state: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the next (h, c) of an LSTM or (h,) of a GRU from what input and state contribute to its gates.

    A GRU multiplies the contribution of h to n by r, as torch.nn.GRUCell does.
    """
    if len(state) == 2:
        i, f, n, o = (from_input + from_state).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * n.tanh()
        return o.sigmoid() * c.tanh(), c
    (r_x, z_x, n_x), (r_h, z_h, n_h) = from_input.chunk(3, -1), from_state.chunk(3, -1)
    z = (z_x + z_h).sigmoid()
    n = (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
    return ((1 - z) * n + z * state[0],)


def _plain(from_input: Tensor, h: Tensor, c: Tensor | None, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return the same by differentiable torch operations; the rest are k, bias, β, γ and the operation."""
    *values, operation = rest
    state: tuple[Tensor, ...] = (h,) if c is None else (h, c)
    outputs = []
    for step in from_input:
        state = next_state(step, plain.sphere_conv(state[0], weight, operation, Parameters(*values)), state)
        outputs.append(state[0])
    return torch.stack(outputs), state[0], state[-1]


# --- calls of the library ------------------------------------------------------------------------------------------


class CellGradients(NamedTuple):
    """Tensors of the backward pass of one step; the last three are written. See csrc/cells.h."""

    gates: Tensor
    from_state: Tensor | None
    before: Tensor
    after: Tensor | None
    grad_output: Tensor
    grad_after: Tensor | None
    grad_gates: Tensor
    grad_from_state: Tensor | None
    grad_before: Tensor


def cell_forward(from_input: Tensor, from_state: Tensor, before: Tensor, gates: Tensor, after: Tensor | None,
                 output: Tensor) -> None:  # fmt: skip
    """Compute one step of an LSTM (four gates) or a GRU (three) into gates, after and output; see csrc/cells.h."""
    rows, hidden = before.shape
    cell = CellStruct(rows, hidden, from_state.shape[1] // hidden)
    load().cell_forward(
        ctypes.byref(cell),
        *native.addresses(from_input, from_state, before, gates, after, output),
        native.TYPES[before.dtype],
        torch.get_num_threads(),
    )


def cell_backward(tensors: CellGradients) -> None:
    """Compute the gradients of one step."""
    before = tensors.before
    cell = CellStruct(*before.shape, tensors.gates.shape[1] // before.shape[1])
    load().cell_backward(
        ctypes.byref(cell), *native.addresses(*tensors), native.TYPES[before.dtype], torch.get_num_threads()
    )
