"""Recurrent sphere layers replace torch's, and their gates equal the reference."""

import copy
import inspect
import io
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

import spherenet as sn
from cases import OPERATORS, oracle_linear
from spherenet.layers.recurrent import SphereGRU, SphereGRUCell, SphereLSTM, SphereLSTMCell

CELLS = {nn.LSTMCell: SphereLSTMCell, nn.GRUCell: SphereGRUCell}
SEQUENCES = {nn.LSTM: SphereLSTM, nn.GRU: SphereGRU}
both_cells = pytest.mark.parametrize(("plain", "counterpart"), CELLS.items(), ids=["LSTMCell", "GRUCell"])
both_sequences = pytest.mark.parametrize(("plain", "counterpart"), SEQUENCES.items(), ids=["LSTM", "GRU"])
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)
OPTIONS = [
    dict(zip(("num_layers", "batch_first", "bidirectional"), values, strict=True))
    for values in itertools.product((1, 3), (False, True), (False, True))
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))


def flat(result):
    """Return the tensors of a result: output, h_n, c_n."""
    return [result] if isinstance(result, torch.Tensor) else [tensor for part in result for tensor in flat(part)]


def state_for(layer, shape, **options):
    """Return a random state: h, or (h, c)."""
    is_lstm = "LSTM" in type(layer).__name__
    return (torch.randn(shape, **options), torch.randn(shape, **options)) if is_lstm else torch.randn(shape, **options)


def input_for(options, batched, steps=5, size=6):
    return (
        torch.randn((4, steps, size) if options["batch_first"] else (steps, 4, size))
        if batched
        else torch.randn(steps, size)
    )


def assert_all_close(got, expected, **tolerances):
    for a, b in zip(flat(got), flat(expected), strict=True):
        torch.testing.assert_close(a, b, **tolerances)


@both_cells
@pytest.mark.parametrize("batch", [(), (4,), (0,)], ids=str)
@pytest.mark.parametrize("given_state", [False, True])
def test_cells_have_shapes_of_torch(plain, counterpart, batch, given_state):
    ordinary, cell = plain(6, 8), counterpart(6, 8)
    assert cell.weight_ih.shape == ordinary.weight_ih.shape
    assert cell.weight_hh.shape == ordinary.weight_hh.shape
    x, state = torch.randn(*batch, 6), state_for(cell, (*batch, 8)) if given_state else None
    for got, expected in zip(flat(cell(x, state)), flat(ordinary(x, state)), strict=True):
        assert got.shape == expected.shape


@both_sequences
@every_option
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("given_state", [False, True])
def test_with_plain_layers_as_gates_equals_torch(plain, counterpart, options, batched, given_state):
    """Compare the order of gates, layers and directions, shapes and states with torch, without angles."""
    ordinary, layer = plain(6, 8, **options), counterpart(6, 8, **options)
    for index, cell in enumerate(layer.cells):
        directions = 2 if options["bidirectional"] else 1
        suffix = f"l{index // directions}" + ("_reverse" if index % directions else "")
        for name in ("ih", "hh"):
            linear = nn.Linear(*reversed(getattr(cell, name).weight.shape))
            linear.weight, linear.bias = (getattr(ordinary, f"{kind}_{name}_{suffix}") for kind in ("weight", "bias"))
            setattr(cell, name, linear)
    x = input_for(options, batched)
    shape = (len(layer.cells), 4, 8) if batched else (len(layer.cells), 8)
    state = state_for(layer, shape) if given_state else None
    assert_all_close(layer(x, state), ordinary(x, state))


@both_sequences
@every_option
@pytest.mark.parametrize("bias", [False, True])
def test_sequences_have_shapes_of_torch_and_finite_gradients(plain, counterpart, options, bias):
    layer, x = counterpart(6, 8, bias=bias, operator="learnable", **options), input_for(options, True)
    got = layer(x)
    for a, b in zip(flat(got), flat(plain(6, 8, **options)(x)), strict=True):
        assert a.shape == b.shape
    got[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@both_sequences
def test_order_of_arguments_equals_torch(plain, counterpart):
    torchs = [
        name
        for name in inspect.signature(nn.RNNBase).parameters
        if name not in ("mode", "proj_size", "device", "dtype")
    ]
    assert list(inspect.signature(counterpart).parameters)[: len(torchs)] == torchs


def slow_lstm(of_x, of_h, state):
    """Return h′ and c′ of one hidden unit from the contributions to its four gates."""
    i, f, n, o = (x + h for x, h in zip(of_x, of_h, strict=True))
    c = state[1] / (1 + math.exp(-f)) + math.tanh(n) / (1 + math.exp(-i))
    return math.tanh(c) / (1 + math.exp(-o)), c


def slow_gru(of_x, of_h, state):
    """Return h′ of one hidden unit from the contributions to its three gates."""
    r, z = (1 / (1 + math.exp(-x - h)) for x, h in zip(of_x[:2], of_h[:2], strict=True))
    return ((1 - z) * math.tanh(of_x[2] + r * of_h[2]) + z * state[0],)


@every_operator
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("counterpart", "slow"), [(SphereLSTMCell, slow_lstm), (SphereGRUCell, slow_gru)])
def test_cells_equal_reference(counterpart, slow, operator, bias):
    cell = counterpart(3, 5, bias, **operator.arguments, dtype=torch.float64)
    for parameter in cell.parameters():
        nn.init.normal_(parameter)
    x, hx = torch.randn(2, 3, dtype=torch.float64), state_for(cell, (2, 5), dtype=torch.float64)
    got, state = flat(cell(x, hx)), flat(hx)
    of_x, of_h = oracle_linear(cell.ih, x, operator), oracle_linear(cell.hh, state[0], operator)
    for row, unit in itertools.product(range(2), range(5)):
        parts = [of[row, unit::5].tolist() for of in (of_x, of_h)]
        expected = slow(*parts, [tensor[row, unit].item() for tensor in state])
        assert [tensor[row, unit].item() for tensor in got] == pytest.approx(list(expected), rel=1e-10)


@both_sequences
def test_sequences_equal_cells_step_by_step(plain, counterpart):
    layer, x = counterpart(6, 8, num_layers=2, bidirectional=True), torch.randn(5, 4, 6)
    seen, last = x, []
    for index in (0, 2):
        outputs = []
        for cell, steps in ((layer.cells[index], range(5)), (layer.cells[index + 1], range(4, -1, -1))):
            state, of_steps = None, [None] * 5
            for t in steps:
                state = cell(seen[t], state)
                of_steps[t] = flat(state)[0]
            outputs.append(torch.stack(of_steps))
            last.append(flat(state))
        seen = torch.cat(outputs, -1)
    assert_all_close(layer(x), [seen, *(torch.stack(parts) for parts in zip(*last, strict=True))])


@both_cells
@pytest.mark.parametrize("operator", ["cosine", "linear", "learnable"])
def test_gradients_of_a_cell_against_finite_differences(plain, counterpart, operator):
    cell = counterpart(2, 3, operator=operator, dtype=torch.float64)
    state = flat(state_for(cell, (2, 3), dtype=torch.float64))
    names, values = zip(*cell.named_parameters(), strict=True)

    def call(x, *others):
        hx, parameters = others[: len(state)], dict(zip(names, others[len(state) :], strict=True))
        return torch.func.functional_call(cell, parameters, (x, hx if len(hx) == 2 else hx[0]))

    inputs = [torch.randn(2, 2, dtype=torch.float64), *state, *values]
    assert torch.autograd.gradcheck(call, [tensor.detach().requires_grad_() for tensor in inputs])


@both_sequences
def test_gradients_of_a_sequence_against_finite_differences(plain, counterpart):
    layer = counterpart(2, 2, num_layers=2, bidirectional=True, operator="sigmoid", dtype=torch.float64)
    x = torch.randn(3, 1, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: tuple(flat(layer(x))), [x])


@both_cells
@every_operator
def test_zero_state_and_zero_input_have_finite_gradients(plain, counterpart, operator):
    cell = counterpart(3, 4, **operator.arguments)
    x = torch.zeros(2, 3, requires_grad=True)
    state = [torch.zeros(2, 4, requires_grad=True) for _ in range(cell.num_states)]
    out = flat(cell(x, tuple(state) if len(state) == 2 else state[0]))
    assert_all_close(out, flat(cell(x)), rtol=0, atol=0)
    sum(tensor.sum() for tensor in out).backward()
    for tensor in (x, *state, *cell.parameters()):
        assert tensor.grad.isfinite().all()


@both_sequences
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(plain, counterpart, dtype):
    layer, x = counterpart(6, 8, num_layers=2, operator="learnable"), torch.randn(5, 4, 6)
    expected = layer(x)
    half = copy.deepcopy(layer).to(dtype)
    got = half(x.to(dtype))
    assert {tensor.dtype for tensor in flat(got)} == {dtype}
    assert_all_close([tensor.float() for tensor in flat(got)], flat(expected), rtol=0, atol=0.03)
    got[0].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in half.parameters())


@both_sequences
def test_autocast(plain, counterpart):
    layer, x = counterpart(6, 8, num_layers=2), torch.randn(5, 4, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(x)
    assert_all_close([tensor.float() for tensor in flat(got)], flat(layer(x)), rtol=0, atol=0.03)
    got[0].float().sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


@both_sequences
@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "torch.save"])
def test_copies_give_same_outputs(plain, counterpart, copier):
    arguments = {"num_layers": 2, "bidirectional": True, "operator": "learnable"}
    layer, x = counterpart(6, 8, **arguments), torch.randn(5, 4, 6)
    if copier == "torch.save":
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        other = counterpart(6, 8, **arguments)
        other.load_state_dict(torch.load(file, weights_only=True))
    else:
        other = copy.deepcopy(layer) if copier == "deepcopy" else pickle.loads(pickle.dumps(layer))
    assert_all_close(other(x), layer(x), rtol=0, atol=0)
    assert not {p.data_ptr() for p in layer.parameters()} & {p.data_ptr() for p in other.parameters()}


def test_state_dict_keys_are_fixed():
    """Saved files depend on these names."""
    layer = SphereLSTM(3, 2, operator="learnable", bias=True)
    expected = {}
    for part, size in (("ih", 3), ("hh", 2)):
        expected[f"cells.0.{part}.weight"] = (8, size)
        expected |= {f"cells.0.{part}.{name}": (8,) for name in ("bias", "beta", "gamma", "angle.raw_k")}
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == expected


@both_sequences
def test_weights_are_treated_as_sphere_weights(plain, counterpart):
    model = nn.Sequential(counterpart(6, 8, num_layers=2, operator="learnable"), nn.Linear(8, 2))
    decayed, spared = (group["params"] for group in sn.param_groups(model, 0.1))
    assert [id(parameter) for parameter in decayed] == [id(model[1].weight)]
    assert len(spared) == len(list(model[0].parameters())) + 1
    layers = sn.regularizers.sphere_layers(model)
    assert list(layers) == [f"0.cells.{cell}.{part}" for cell in range(2) for part in ("ih", "hh")]
    expected = sum((w @ w.mT - torch.eye(len(w))).square().sum() for w in (layer.weight for layer in layers.values()))
    torch.testing.assert_close(sn.orthogonality(model), expected)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kept, norms = sn.keep_norms(optimizer, model), [layer.weight.norm(dim=1) for layer in layers.values()]
    model[0](torch.randn(5, 4, 6))[0].sum().backward()
    optimizer.step()
    for layer, norm in zip(layers.values(), norms, strict=True):
        torch.testing.assert_close(layer.weight.norm(dim=1), norm)
    kept.remove()


@both_cells
def test_gates_do_not_depend_on_norms(plain, counterpart):
    cell, x = counterpart(3, 4, eps=1e-12), torch.randn(2, 3)
    before = cell(x)
    with torch.no_grad():
        cell.weight_ih.mul_(7)
        cell.weight_hh.mul_(0.1)
    assert_all_close(cell(5 * x), before)


def test_gates_saturate_only_with_rescaling():
    x, h, c = torch.randn(200, 3), torch.randn(200, 4), torch.ones(200, 4)
    bounded = SphereLSTMCell(3, 4, rescale=None)
    with torch.no_grad():
        bounded.weight_ih[8:12], bounded.weight_hh[8:12] = 0, 0  # n = 0: what is left of c is what f keeps
        assert bounded(x, (h, c))[1].max() <= 1 / (1 + math.exp(-2))
        free = SphereLSTMCell(3, 4)
        free.ih.gamma[4:8] = 20
        free.weight_ih[8:12], free.weight_hh[8:12] = 0, 0
    torch.testing.assert_close(free(x, (h, c))[1], c)


def test_reset_parameters_restores_all_parameters():
    cell = SphereGRUCell(3, 4, operator="learnable", k=0.4)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.fill_(7.0)
    cell.reset_parameters()
    for layer in (cell.ih, cell.hh):
        assert layer.weight.abs().max() < 1
        assert (layer.beta == 1).all()
        assert (layer.gamma == 0).all()
        torch.testing.assert_close(layer.k, torch.full((12,), 0.4))


def test_dropout_applies_between_layers_in_training():
    layer, x = SphereGRU(6, 8, num_layers=2, dropout=0.5), torch.randn(5, 4, 6)
    first, second = layer(x), layer(x)
    assert not torch.equal(first[0], second[0])
    torch.testing.assert_close(first[1][0], second[1][0])  # the first layer has no dropout before it
    layer.eval()
    assert_all_close(layer(x), layer(x), rtol=0, atol=0)
    with pytest.warns(UserWarning, match="only one layer"):
        SphereLSTM(6, 8, dropout=0.5)


def test_one_angle_object_is_shared_by_all_gates():
    angle = sn.LearnableSigmoidAngle()
    layer = SphereLSTM(6, 8, num_layers=2, operator=angle)
    assert sum(parameter.dim() == 0 for parameter in layer.parameters()) == 1
    layer(torch.randn(5, 4, 6))[0].sum().backward()
    assert angle.raw_k.grad != 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SphereLSTMCell(0, 4), ValueError, "input_size must be an integer of at least 1, got 0"),
        (lambda: SphereGRU(3, 2.5), ValueError, "hidden_size must be an integer of at least 1, got 2.5"),
        (lambda: SphereGRU(3, 4, num_layers=0), ValueError, "num_layers must be an integer"),
        (lambda: SphereGRU(3, 4, dropout=2), ValueError, "dropout must be from 0 to 1, got 2"),
        (lambda: SphereLSTM(3, 4, operator="cosin"), ValueError, "Did you mean 'cosine'"),
        (lambda: SphereLSTM(3, 4, proj_size=2), TypeError, "proj_size"),
        (lambda: SphereLSTMCell(3, 4)(torch.randn(2, 2, 3)), ValueError, "1 or 2 dimensions"),
        (lambda: SphereLSTMCell(3, 4)(torch.randn(2, 5)), ValueError, "input must have 3 features"),
        (lambda: SphereLSTMCell(3, 4)(torch.ones(2, 3).long()), TypeError, "floating point"),
        (lambda: SphereLSTMCell(3, 4)(torch.randn(2, 3), torch.randn(3, 4)), TypeError, "2 tensors in a tuple"),
        (lambda: SphereGRUCell(3, 4)(torch.randn(2, 3), torch.randn(3, 4)), ValueError, r"\[2, 4\] .* got \[3, 4\]"),
        (lambda: SphereLSTM(3, 4)(torch.randn(0, 2, 3)), ValueError, "at least 1 step"),
        (lambda: SphereLSTM(3, 4)(torch.randn(3)), ValueError, "2 or 3 dimensions"),
        (lambda: SphereGRU(3, 4)(torch.randn(5, 2, 3), torch.randn(1, 1, 4)), ValueError, r"shape \[1, 2, 4\]"),
        (
            lambda: SphereGRU(3, 4)(nn.utils.rnn.pack_sequence([torch.randn(5, 3), torch.randn(2, 3)])),
            TypeError,
            "a PackedSequence is not supported",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()
