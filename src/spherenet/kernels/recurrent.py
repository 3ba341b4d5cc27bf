"""A recurrent sphere layer over a whole sequence, on CPUs: one autograd node instead of a dozen per step.

Each step is a matrix product, the pass that turns it into β·g(θ) + γ, and one call for the gates. Backward runs through
the steps from the last to the first; the gradients of the weight and of k, β and γ are formed once, over all steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spherenet.kernels import native
from spherenet.kernels.interface import Affine, Angle, gradients_of
from spherenet.kernels.sphere_conv import parameter_gradients
from spherenet.ops import sphere_conv as composite
from spherenet.ops.geometry import Geometry
from spherenet.ops.norms import direction

__all__ = ["recurrence"]

_ROWS = Geometry()
"""A fully connected layer."""


def recurrence(
    from_input: Tensor,
    state: tuple[Tensor, ...],
    weight: Tensor,
    k: Tensor | None,
    affine: Affine,
    eps: float,
    angle: Angle,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs of all steps and the last state.

    Shapes: from_input [L, N, gates·H], what the input contributes to the gates; state (h, c) of an LSTM or (h,) of a
    GRU, each [N, H]; weight [gates·H, H], for the state; outputs [L, N, H].
    """
    outputs, *last = _Recurrence.apply(  # type: ignore[no-untyped-call]
        from_input, state[0], state[1] if len(state) == 2 else None, weight, k, *affine, eps, angle
    )
    return outputs, tuple(last[: len(state)])


class _Recurrence(torch.autograd.Function):
    """The steps of one cell over a sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        from_input: Tensor,
        h: Tensor,
        c: Tensor | None,
        weight: Tensor,
        k: Tensor | None,
        bias: Tensor | None,
        beta: Tensor | None,
        gamma: Tensor | None,
        eps: float,
        angle: Angle,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the outputs, the last h and the last c."""
        unit, scale = native.unit_weight(weight, eps, weight.dtype)
        angle, affine = (angle if k is None else Angle(angle.name, k)), Affine(bias, beta, gamma)
        from_input, transposed = from_input.contiguous(), unit.t()
        length, rows, _ = from_input.shape
        keep_cosine = bool(affine)
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
            _, inverse_norm, cosine = native.forward(product, states[step], (), _ROWS, eps, angle, affine, keep_cosine)
            norms.append(inverse_norm)
            cosines.append(cosine)
            before, after = (states[step], None) if memory is None else (memory[step], memory[step + 1])
            native.cell_forward(from_input[step], product, before, gates[step], after, states[step + 1])
        known = torch.stack(cosines) if keep_cosine else from_state
        inputs = (from_input, h, c, weight, k, bias, beta, gamma)
        ctx.save_for_backward(*inputs, unit, scale, states, memory, gates, from_state, known, torch.stack(norms))
        ctx.angle, ctx.keep_cosine, ctx.eps = angle, keep_cosine, eps
        ctx.set_materialize_grads(False)
        last_c = None if memory is None else memory[-1].clone()
        return states[1:].clone(), states[-1].clone(), last_c

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None) -> Any:
        """Return the gradients of the tensors of forward."""
        (from_input, h, c, weight, k, bias, beta, gamma, unit, scale, states, memory, gates, from_state, known,
         norms) = ctx.saved_tensors  # fmt: skip
        if torch.is_grad_enabled():  # create_graph=True
            inputs = (from_input, h, c, weight, k, bias, beta, gamma, ctx.eps, ctx.angle)
            return gradients_of(_plain, inputs, (grad_outputs, grad_h, grad_c))
        affine, length = Affine(bias, beta, gamma), gates.shape[0]
        grad_gates, products = torch.empty_like(gates), torch.empty_like(gates)
        is_gru = memory is None
        grad_from_state = torch.empty_like(gates) if is_gru else grad_gates
        carried = torch.zeros_like(states[0]) if grad_h is None else grad_h.contiguous().clone()
        memory_grad = torch.zeros_like(states[0]) if grad_c is None else grad_c.contiguous().clone()
        for step in reversed(range(length)):
            if grad_outputs is not None:
                carried = carried + grad_outputs[step]
            before = torch.empty_like(carried)
            native.cell_backward(
                gates[step], from_state[step], states[step] if is_gru else memory[step],
                None if is_gru else memory[step + 1], carried, memory_grad, grad_gates[step],
                grad_from_state[step] if is_gru else None, before,
            )  # fmt: skip
            of_product, spread, _ = native.backward(
                grad_from_state[step], known[step], ctx.keep_cosine, norms[step], states[step], (), _ROWS, ctx.angle,
                affine, True, False, False,
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
                grad_from_state.flatten(0, 1), known.flatten(0, 1), ctx.keep_cosine, norms.flatten(0, 1),
                states[:-1].flatten(0, 1), (), _ROWS, ctx.angle, affine, False, True, True,
            )  # fmt: skip
            assert sums is not None
            of_parameters = parameter_gradients(sums, needs, k, affine)
        return (grad_gates, carried, None if is_gru else memory_grad, grad_weight, *of_parameters, None, None)


def _plain(
    from_input: Tensor,
    h: Tensor,
    c: Tensor | None,
    weight: Tensor,
    k: Tensor | None,
    bias: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    eps: float,
    angle: Angle,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch's own operations, for second derivatives."""
    unit = direction(weight, 1, eps)
    outputs = []
    for step in from_input:
        value = composite.apply_angle(composite.cosines(h, unit, *_ROWS, eps), angle.name, angle.k if k is None else k)
        from_state = composite.apply_affine(value, bias, beta, gamma)
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
