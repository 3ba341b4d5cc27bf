"""SphereLSTM, SphereGRU and their cells: recurrent layers whose gates depend on angles.

A gate of torch's cells is σ(W_i x + b_i + W_h h + b_h). Here both products are sphere layers (docs/concepts.md, Eq. 3):

    gate = σ(a_i + a_h),    a_i = β_i·g(θ(w_i, x)) + γ_i,    a_h = β_h·g(θ(w_h, h)) + γ_h

β and γ are learned by default. g is in [−1, 1], so without them every gate stays in σ(±2) = [0.12, 0.88]: a forget gate
of 0.88 loses half of its memory after five steps, whatever the weights. β allows a gate to saturate, and γ is its bias;
`bias` is off by default because it would be a second one.

Gates do not depend on lengths: x and 2x give the same gates, and of a single feature only the sign matters. If the
length matters, add a constant feature to the input, (x, 1). A zero state, as before the first step, is a zero patch:
g = 0, the gates depend on x alone, and gradients are finite.
"""

from __future__ import annotations

import warnings
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from spherenet._util.validation import OptionCheck, require_floating, require_number
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.kernels.recurrent import fused_recurrence, next_state
from spherenet.layers.base import Proxy, record_as_leaf
from spherenet.layers.conv import SphereLinear
from spherenet.layers.options import SphereKeywords

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SphereGRU", "SphereGRUCell", "SphereLSTM", "SphereLSTMCell"]

State: TypeAlias = tuple[Tensor, ...]  # state of a cell between steps: (h, c) or (h,)


class _SphereCell(OptionCheck, nn.Module):
    """Constructor and forward of both cells; a subclass defines its numbers of gates and states.

    The weights belong to two sphere layers, `ih` and `hh`, which regularizers, parameter groups and `keep_norms` treat
    like any other. All gates form one layer; if it has more kernels than inputs, `orthogonality_minimum` is not 0.
    """

    option_defaults = {"rescale": "learned"}  # noqa: RUF012
    num_gates: int
    num_states: int

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = False,
        *,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[SphereKeywords],
    ) -> None:
        super().__init__()
        self.input_size = _require_size("input_size", input_size)
        self.hidden_size = _require_size("hidden_size", hidden_size)
        kernels = self.num_gates * hidden_size
        sphere: dict[str, Any] = {**self.option_defaults, **options, "device": device, "dtype": dtype}
        self.ih = SphereLinear(input_size, kernels, bias, **sphere)
        self.hh = SphereLinear(hidden_size, kernels, bias, **sphere)

    @property
    def weight_ih(self) -> Tensor:
        """Weights of the input, [gates·hidden_size, input_size], gates in torch's order."""
        return self.ih.weight

    @property
    def weight_hh(self) -> Tensor:
        """Weights of the state, [gates·hidden_size, hidden_size], gates in torch's order."""
        return self.hh.weight

    def reset_parameters(self) -> None:
        """Initialize the weights as in `SphereLinear`, and set k, β and γ to their initial values."""
        self.ih.reset_parameters()
        self.hh.reset_parameters()

    def _next(self, input: Tensor, state: State | None) -> State:
        require_floating("input", input)
        if input.dim() not in (1, 2):
            raise InvalidArgument("input", f"must have 1 or 2 dimensions, got shape {list(input.shape)}.")
        state = _state_or_zeros(state, self.num_states, input, [*input.shape[:-1], self.hidden_size])
        return next_state(self.ih(input), self.hh(state[0]), state)


class SphereLSTMCell(_SphereCell):
    """One step of an LSTM on angles, called like `torch.nn.LSTMCell`: cell(input, (h, c)) → (h′, c′).

        i, f, n, o = σ, σ, tanh, σ of a_i + a_h;    c′ = f·c + i·n;    h′ = o·tanh(c′)

    The default state is zero. Gates without rescaling cannot saturate, so rescale is "learned" by default.

    Args:
        input_size: Number of input features.
        hidden_size: Number of hidden units.
        bias: Whether the two sphere layers have a bias.
        operator: As in `SphereConv2d`.
        k: As in `SphereConv2d`.
        k_sharing: As in `SphereConv2d`.
        rescale: As in `SphereConv2d`.
        eps: As in `SphereConv2d`.
        center: As in `SphereConv2d`.
        magnitude: As in `SphereConv2d`.
        radius: As in `SphereConv2d`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        TypeError: If an argument has the wrong type; in forward for a wrong dtype.
        ValueError: If an argument is not allowed; in forward for a wrong shape.

    Shape:
        input [N, input_size] or [input_size]; h, c [N, hidden_size] or [hidden_size]; `weight_ih`
        [4·hidden_size, input_size], `weight_hh` [4·hidden_size, hidden_size], gates in the order i, f, n, o.
    """

    num_gates, num_states = 4, 2

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return the next (h, c)."""
        if isinstance(input, Proxy):
            return record_as_leaf(self, input, hx)  # type: ignore[return-value]
        return cast(tuple[Tensor, Tensor], self._next(input, hx))


class SphereGRUCell(_SphereCell):
    """One step of a GRU on angles, called like `torch.nn.GRUCell`: cell(input, h) → h′.

        r, z = σ of a_i + a_h;    n = tanh(a_i + r·a_h);    h′ = (1 − z)·n + z·h

    Arguments, errors and shapes are those of `SphereLSTMCell`, with 3·hidden_size kernels, gates in the order r, z, n.
    """

    num_gates, num_states = 3, 1

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the next h."""
        if isinstance(input, Proxy):
            return record_as_leaf(self, input, hx)
        return self._next(input, None if hx is None else (hx,))[0]


class _SphereRecurrence(OptionCheck, nn.Module):
    """Layers and directions of cells over a sequence; `cells` contains them in the order of torch's states."""

    option_defaults = _SphereCell.option_defaults
    cell_class: type[_SphereCell]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = False,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[SphereKeywords],
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.num_layers = _require_size("num_layers", num_layers)
        self.batch_first, self.bidirectional = batch_first, bidirectional
        self.dropout = require_number("dropout", dropout)
        if not 0 <= self.dropout <= 1:
            raise InvalidArgument("dropout", f"must be from 0 to 1, got {dropout!r}.")
        if self.dropout and num_layers == 1:
            warnings.warn(f"dropout={dropout} applies between layers, but there is only one layer.", stacklevel=2)
        self.num_directions = 2 if bidirectional else 1
        hidden_sizes = [hidden_size * self.num_directions] * (num_layers - 1) * self.num_directions
        sizes = [input_size] * self.num_directions + hidden_sizes
        self.cells = nn.ModuleList(
            self.cell_class(size, hidden_size, bias, device=device, dtype=dtype, **options) for size in sizes
        )

    def extra_repr(self) -> str:
        """Return the options that the cells do not print."""
        return f"batch_first={self.batch_first}, dropout={self.dropout:g}, bidirectional={self.bidirectional}"

    def _run(self, input: Tensor, states: State | None) -> tuple[Tensor, State]:
        """Return the outputs and the last states of a sequence, with torch's shapes."""
        if isinstance(input, PackedSequence):
            raise InvalidArgumentType(
                "input", "must be a tensor: a PackedSequence is not supported, pad it and mask the outputs."
            )
        require_floating("input", input)
        is_transposed = self.batch_first and input.dim() == 3
        x = input.transpose(0, 1) if is_transposed else input  # [L, N, features] or [L, features]
        if x.dim() not in (2, 3) or len(x) == 0:
            raise InvalidArgument(
                "input", f"must have 2 or 3 dimensions and at least 1 step, got shape {list(input.shape)}."
            )
        shape = [len(self.cells), *x.shape[1:-1], self.hidden_size]
        states = _state_or_zeros(states, self.cell_class.num_states, input, shape)
        last: list[State] = []
        for layer in range(self.num_layers):
            if layer > 0:
                x = nn.functional.dropout(x, self.dropout, self.training)
            outputs = []
            for backwards in range(self.num_directions):
                cell = cast(_SphereCell, self.cells[len(last)])
                output, state = _over_steps(cell, x, tuple(s[len(last)] for s in states), backwards == 1)
                outputs.append(output)
                last.append(state)
            x = torch.cat(outputs, -1)
        return x.transpose(0, 1) if is_transposed else x, tuple(
            torch.stack(tensors) for tensors in zip(*last, strict=True)
        )


class SphereLSTM(_SphereRecurrence):
    """Layers of `SphereLSTMCell` over a sequence, called like `torch.nn.LSTM`: output, (h_n, c_n) = lstm(input, hx).

    proj_size and PackedSequence are not supported.

    Args:
        input_size: As in `torch.nn.LSTM`.
        hidden_size: As in `torch.nn.LSTM`.
        num_layers: As in `torch.nn.LSTM`.
        bias: As in `SphereLSTMCell`.
        batch_first: As in `torch.nn.LSTM`.
        dropout: As in `torch.nn.LSTM`.
        bidirectional: As in `torch.nn.LSTM`.
        operator: As in `SphereLSTMCell`, like all other keyword arguments.

    Shape:
        input [L, N, input_size], [N, L, input_size] if batch_first, or [L, input_size]; output the same with
        hidden_size·directions; h_n, c_n and hx [num_layers·directions, N, hidden_size].
    """

    cell_class = SphereLSTMCell

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the outputs of all steps and the last (h, c) of each layer and direction."""
        if isinstance(input, Proxy):
            return record_as_leaf(self, input, hx)  # type: ignore[return-value]
        return cast(tuple[Tensor, tuple[Tensor, Tensor]], self._run(input, hx))


class SphereGRU(_SphereRecurrence):
    """Layers of `SphereGRUCell` over a sequence, called like `torch.nn.GRU`; arguments are those of `SphereLSTM`."""

    cell_class = SphereGRUCell

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs of all steps and the last h of each layer and direction."""
        if isinstance(input, Proxy):
            return record_as_leaf(self, input, hx)  # type: ignore[return-value]
        output, (h,) = self._run(input, None if hx is None else (hx,))
        return output, h


def _over_steps(cell: _SphereCell, x: Tensor, state: State, backwards: bool) -> tuple[Tensor, State]:
    """Run one cell over all steps of x [L, *, features], from the last to the first if `backwards`."""
    from_input = cell.ih(x)  # the contribution of the input does not depend on the state: all steps at once
    fused = None
    if type(cell.hh).forward is SphereLinear.forward and "forward" not in vars(cell.hh):  # not one of the user's
        fused = fused_recurrence(from_input.flip(0) if backwards else from_input, state, cell.hh)
    if fused is not None:
        output, state = fused
        return output.flip(0) if backwards else output, state
    steps = from_input.unbind(0)
    outputs = []
    for from_input in reversed(steps) if backwards else steps:
        state = next_state(from_input, cell.hh(state[0]), state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _state_or_zeros(state: State | None, num_states: int, input: Tensor, shape: list[int]) -> State:
    if state is None:
        return (input.new_zeros(shape),) * num_states
    if not isinstance(state, (tuple, list)) or len(state) != num_states:
        raise InvalidArgumentType(
            "hx", f"must be {num_states} tensors in a tuple, got {len(state)} in a {type(state).__name__}."
        )
    for tensor in state:
        require_floating("hx", tensor)
        if list(tensor.shape) != shape:
            raise InvalidArgument("hx", f"must have shape {shape} for this input, got {list(tensor.shape)}.")
    return state


def _require_size(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise InvalidArgument(name, f"must be an integer of at least 1, got {value!r}.")
    return int(value)
