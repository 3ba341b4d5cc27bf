"""SphereMultiheadAttention replaces torch's layer, and its scores are scaled cosines."""

import copy
import inspect
import math
import warnings

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import spherenet as sn
from spherenet.layers.attention import SphereMultiheadAttention

N, L, S, E, H = 2, 4, 5, 6, 3
both_paths = pytest.mark.parametrize("need_weights", [True, False])


def layer_and_inputs(dtype=torch.float64, **options):
    """Return a layer with random parameters, batch first, and its query, key and value."""
    layer = SphereMultiheadAttention(E, H, batch_first=True, dtype=dtype, **options)
    for name, parameter in layer.named_parameters():
        nn.init.normal_(parameter, std=1 if "weight" in name else 0.3)
    with torch.no_grad():
        layer.temperature += 3  # scales of about 5: larger ones multiply the rounding errors of cosines
    sizes = ((N, L, E), (N, S, layer.kdim), (N, S, layer.vdim))
    return layer, *(torch.randn(size, dtype=dtype) for size in sizes)


def oracle(layer, query, key, value, added=None):
    """Return output and weights [N, H, L, S] of the definition, with one cosine at a time."""
    if layer.in_proj_weight is None:
        projections = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    else:
        projections = layer.in_proj_weight.split(E)
    biases = [0, 0, 0] if layer.in_proj_bias is None else layer.in_proj_bias.split(E)
    q, k, v = (x @ w.T + b for x, w, b in zip((query, key, value), projections, biases, strict=True))
    heads, weights = torch.zeros(N, L, E, dtype=q.dtype), torch.zeros(N, H, L, S, dtype=q.dtype)
    for n in range(N):
        for h in range(H):
            scale = layer.max_scale / (1 + math.exp(layer.temperature[h].item()))
            channels = slice(h * E // H, (h + 1) * E // H)
            for i in range(L):
                exponentials = []
                for j in range(S):
                    a, b = q[n, i, channels], k[n, j, channels]
                    norms = [math.sqrt(sum(c * c for c in x.tolist()) + layer.eps) for x in (a, b)]
                    score = scale * sum(c * d for c, d in zip(a.tolist(), b.tolist(), strict=True)) / math.prod(norms)
                    exponentials.append(math.exp(score + (0 if added is None else added[n, h, i, j].item())))
                for j in range(S):
                    weights[n, h, i, j] = exponentials[j] / sum(exponentials) if any(exponentials) else 0
                    heads[n, i, channels] += weights[n, h, i, j] * v[n, j, channels]
    return layer.out_proj(heads), weights


@both_paths
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 4, "vdim": 3}], ids=["same", "kdim-vdim"])
def test_equals_oracle(need_weights, bias, sizes):
    layer, *inputs = layer_and_inputs(bias=bias, **sizes)
    output, weights = layer(*inputs, need_weights=need_weights, average_attn_weights=False)
    expected, expected_weights = oracle(layer, *inputs)
    torch.testing.assert_close(output, expected)
    if need_weights:
        torch.testing.assert_close(weights, expected_weights)
        torch.testing.assert_close(layer(*inputs)[1], expected_weights.mean(1))
    else:
        assert weights is None


FIXED = torch.Generator().manual_seed(0)  # what other files draw at import does not change the masks
PADDING = torch.tensor([[False, False, True, False, True], [False] * 5])
CAUSAL = torch.ones(L, S, dtype=torch.bool).triu(1)
MASKS = {
    "padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": torch.randn(N, S, dtype=torch.float64, generator=FIXED)},
    "2-D": {"attn_mask": CAUSAL},
    "float 2-D": {"attn_mask": torch.randn(L, S, dtype=torch.float64, generator=FIXED)},
    "3-D": {"attn_mask": torch.rand(N * H, L, S, generator=FIXED) < 0.4},
    "float 3-D": {"attn_mask": torch.randn(N * H, L, S, dtype=torch.float64, generator=FIXED)},
    "both": {"key_padding_mask": PADDING, "attn_mask": CAUSAL},
    "mixed": {"key_padding_mask": PADDING, "attn_mask": torch.randn(L, S, dtype=torch.float64, generator=FIXED)},
    "causal": {"is_causal": True},
    "causal with mask": {"is_causal": True, "attn_mask": CAUSAL},
    "causal and padding": {"is_causal": True, "key_padding_mask": PADDING},
    "causal with mask and padding": {"is_causal": True, "attn_mask": CAUSAL, "key_padding_mask": PADDING},
    "nothing": {"key_padding_mask": torch.ones(N, S, dtype=torch.bool)},
    "float nothing": {"attn_mask": torch.full((L, S), -math.inf, dtype=torch.float64)},
    "some nothing": {"key_padding_mask": torch.tensor([[True] * 5, [False] * 5]), "attn_mask": CAUSAL},
}
every_mask = pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)


def added_by(key_padding_mask=None, attn_mask=None, is_causal=False):
    """Return what masks add to the scores [N, H, L, S]."""

    def numbers(mask):
        return torch.zeros(mask.shape).double().masked_fill(mask, -math.inf) if mask.dtype is torch.bool else mask

    total = torch.zeros(N, H, L, S, dtype=torch.float64)
    if key_padding_mask is not None:
        total = total + numbers(key_padding_mask)[:, None, None]
    if attn_mask is not None:
        total = total + numbers(attn_mask).expand(N * H, L, S).reshape(N, H, L, S)
    return total + numbers(CAUSAL) if is_causal else total


@both_paths
@every_mask
def test_masks_equal_oracle_and_gradients_are_finite(need_weights, masks):
    layer, *inputs = layer_and_inputs()
    for tensor in inputs:
        tensor.requires_grad_()
    output, weights = layer(*inputs, need_weights=need_weights, average_attn_weights=False, **masks)
    expected, expected_weights = oracle(layer, *inputs, added_by(**masks))
    torch.testing.assert_close(output, expected)
    if need_weights:
        torch.testing.assert_close(weights, expected_weights)
    output.square().sum().backward()
    for tensor in (*inputs, *layer.parameters()):
        assert tensor.grad is None or tensor.grad.isfinite().all()


@every_mask
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_paths_have_equal_outputs_and_gradients(masks, dtype):
    layer, *inputs = layer_and_inputs(dtype)
    results = []
    for need_weights in (True, False):
        layer.zero_grad()
        output, _ = layer(*inputs, need_weights=need_weights, **masks)
        output.square().sum().backward()
        results.append((output.detach(), layer.temperature.grad.clone(), layer.in_proj_weight.grad.clone()))
    is_half = dtype is torch.bfloat16  # its scores of up to 10 have errors of 0.02, its outputs are about 5
    for a, b in zip(*results, strict=True):
        assert a.isfinite().all()
        scale = b.abs().max().clamp(min=1)
        torch.testing.assert_close(a / scale, b / scale, rtol=0, atol=0.1 if is_half else 1e-5)


@both_paths
def test_fully_masked_row_gives_bias_and_no_gradient(need_weights):
    layer, query, key, value = layer_and_inputs()
    query.requires_grad_()
    mask = torch.zeros(L, S, dtype=torch.bool)
    mask[2] = True
    output, weights = layer(query, key, value, attn_mask=mask, need_weights=need_weights)
    assert torch.equal(output[:, 2], layer.out_proj.bias.expand(N, E))
    assert weights is None or not weights[:, 2].any()
    output.square().sum().backward()
    assert not query.grad[:, 2].any()
    assert query.grad[:, 1].any()


@both_paths
def test_float_mask_below_the_range_of_half_precision_masks(need_weights):
    layer, *inputs = layer_and_inputs(torch.float16)
    mask = torch.full((L, S), -1e9)  # −inf in float16
    output, _ = layer(*inputs, attn_mask=mask, need_weights=need_weights)
    assert torch.equal(output, layer.out_proj.bias.expand(N, L, E))


@both_paths
def test_learned_float_mask_gets_a_gradient(need_weights):
    layer, *inputs = layer_and_inputs()
    mask = torch.zeros(N * H, L, S, dtype=torch.float64, requires_grad=True)
    layer(*inputs, attn_mask=mask, need_weights=need_weights)[0].square().sum().backward()
    assert mask.grad.any()


@both_paths
@pytest.mark.parametrize("masks", [{}, MASKS["some nothing"], MASKS["mixed"]], ids=["none", "bool", "float"])
def test_gradients(need_weights, masks):
    layer, *inputs = layer_and_inputs()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def function(*tensors):
        state = dict(zip(names, tensors[3:], strict=True))
        options = {"need_weights": need_weights, **masks}
        return torch.func.functional_call(layer, state, tensors[:3], options)[0]

    leaves = [tensor.detach().clone().requires_grad_() for tensor in (*inputs, *parameters)]
    assert torch.autograd.gradcheck(function, leaves)


@both_paths
def test_zero_vectors_have_finite_gradients(need_weights):
    layer = SphereMultiheadAttention(E, H, batch_first=True)
    x = torch.zeros(N, L, E, requires_grad=True)
    output, weights = layer(x, x, x, need_weights=need_weights)
    output.sum().backward()
    assert x.grad.isfinite().all()
    if need_weights:
        torch.testing.assert_close(weights, torch.full((N, L, L), 1 / L))


def test_norms_of_queries_and_keys_do_not_matter():
    layer, *inputs = layer_and_inputs(bias=False, eps=1e-12)
    expected = layer(*inputs)[1]
    torch.testing.assert_close(layer(inputs[0] * 50, inputs[1] * 0.1, inputs[2])[1], expected)


def test_scales_start_at_scale_and_are_bounded():
    layer = SphereMultiheadAttention(E, H, scale=4, max_scale=20)
    torch.testing.assert_close(layer.scales(), torch.full((H,), 4.0))
    nn.init.constant_(layer.temperature, -100)
    assert layer.scales().max() <= 20
    nn.init.constant_(layer.temperature, 100)
    assert layer.scales().min() >= 0


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 4}, {"vdim": 3, "bias": False}], ids=str)
def test_parameters_have_names_and_shapes_of_torch(options):
    state = {name: value.shape for name, value in SphereMultiheadAttention(E, H, **options).state_dict().items()}
    assert state.pop("temperature") == (H,)
    torchs = nn.MultiheadAttention(E, H, **options).state_dict()
    assert state == {name: value.shape for name, value in torchs.items()}
    loaded = SphereMultiheadAttention(E, H, **options).load_state_dict(torchs, strict=False)
    assert loaded == (["temperature"], [])


def test_arguments_have_names_order_and_defaults_of_torch():
    for ours, torchs in (
        (SphereMultiheadAttention, nn.MultiheadAttention),
        (SphereMultiheadAttention.forward, nn.MultiheadAttention.forward),
    ):
        expected = [p for p in inspect.signature(torchs).parameters.values() if p.name not in ("device", "dtype")]
        actual = list(inspect.signature(ours).parameters.values())[: len(expected)]
        assert [(p.name, p.default) for p in actual] == [(p.name, p.default) for p in expected]


@both_paths
@pytest.mark.parametrize("shape", ["batch first", "steps first", "unbatched"])
@pytest.mark.parametrize("average", [False, True])
def test_shapes_equal_torch(need_weights, shape, average):
    options = {"batch_first": shape == "batch first"}
    ours, torchs = SphereMultiheadAttention(E, H, **options), nn.MultiheadAttention(E, H, **options)
    query, key = torch.randn(N, L, E), torch.randn(N, S, E)
    if shape != "batch first":
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    padding = PADDING
    if shape == "unbatched":
        query, key, padding = query[:, 0], key[:, 0], PADDING[0]
    options = {"need_weights": need_weights, "average_attn_weights": average, "key_padding_mask": padding}
    for a, b in zip(ours(query, key, key, **options), torchs(query, key, key, **options), strict=True):
        assert a is b is None or a.shape == b.shape


@both_paths
def test_layouts_have_equal_outputs(need_weights):
    layer, *inputs = layer_and_inputs()
    expected, _ = layer(*inputs, key_padding_mask=PADDING, need_weights=need_weights)
    alone, _ = layer(*(x[0] for x in inputs), key_padding_mask=PADDING[0], need_weights=need_weights)
    torch.testing.assert_close(alone, expected[0])
    layer.batch_first = False
    transposed = (x.transpose(0, 1) for x in inputs)
    output, _ = layer(*transposed, key_padding_mask=PADDING, need_weights=need_weights)
    torch.testing.assert_close(output.transpose(0, 1), expected)


def test_self_attention_equals_three_products():
    layer, query, _, _ = layer_and_inputs()
    torch.testing.assert_close(layer(query, query, query), layer(query, query.clone(), query.clone()))


@both_paths
def test_bfloat16_autocast(need_weights):
    layer, *inputs = layer_and_inputs(torch.float32)
    nn.init.constant_(layer.temperature, math.log(9))
    expected, _ = layer(*inputs, need_weights=need_weights)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = layer(*inputs, need_weights=need_weights, attn_mask=torch.zeros(L, S))
    assert output.dtype is torch.bfloat16
    # Scores of up to 10 in bfloat16 have errors of 0.04; outputs are about 5.
    torch.testing.assert_close(output.float(), expected, rtol=0.1, atol=0.5)
    output.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@both_paths
def test_dropout_is_active_in_training_only(need_weights):
    layer, *inputs = layer_and_inputs(dropout=0.5)
    options = {"need_weights": need_weights}
    assert not torch.equal(layer(*inputs, **options)[0], layer(*inputs, **options)[0])
    layer.eval()
    assert torch.equal(layer(*inputs, **options)[0], layer(*inputs, **options)[0])


@both_paths
@pytest.mark.parametrize(("batch", "steps"), [(0, L), (N, 0)])
def test_empty_inputs(need_weights, batch, steps):
    layer = SphereMultiheadAttention(E, H, batch_first=True)
    query, key = torch.randn(batch, steps, E), torch.randn(batch, S, E)
    assert layer(query, key, key, need_weights=need_weights)[0].shape == query.shape


@both_paths
def test_no_keys_give_the_bias(need_weights):
    layer, query, key, value = layer_and_inputs()
    output, _ = layer(query, key[:, :0], value[:, :0], need_weights=need_weights)
    torch.testing.assert_close(output, layer.out_proj.bias.expand(N, L, E))


@both_paths
def test_compiles_without_graph_breaks(need_weights):
    layer, *inputs = layer_and_inputs(torch.float32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    options = {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "need_weights": need_weights}
    output, expected = compiled(*inputs, **options)[0], layer(*inputs, **options)[0]
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert layer.temperature.grad.any()


@both_paths
def test_exports_with_any_batch_size(need_weights):
    layer, *inputs = layer_and_inputs(torch.float32)
    batch = torch.export.Dim("batch", min=2)
    shapes = {name: {0: batch} for name in ("query", "key", "value")}
    options = {"need_weights": need_weights}
    program = torch.export.export(layer.eval(), tuple(inputs), options, dynamic_shapes={**shapes, "need_weights": None})
    larger = tuple(torch.cat([x, x, x]) for x in inputs)
    torch.testing.assert_close(program.module()(*larger, **options)[0], layer(*larger, **options)[0])


def differentiable_oracle(layer, query, key, value, added):
    """Return the output of the definition with plain torch operations, one head at a time, for autograd."""
    weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    weights = layer.in_proj_weight.split(E) if layer.in_proj_weight is not None else weights
    q, k, v = (x @ w.T + b for x, w, b in zip((query, key, value), weights, layer.in_proj_bias.split(E), strict=True))
    heads = []
    for h, (q_h, k_h, v_h) in enumerate(zip(*(x.split(E // H, -1) for x in (q, k, v)), strict=True)):
        norms = [(x.square().sum(-1, keepdim=True) + layer.eps).sqrt() for x in (q_h, k_h)]
        cosines = torch.einsum("nld,nsd->nls", q_h / norms[0], k_h / norms[1])
        scores = layer.max_scale / (1 + layer.temperature[h].exp()) * cosines + added[:, h]
        exponentials = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e30)).exp()
        shares = exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300)
        heads.append(shares @ v_h)
    return layer.out_proj(torch.cat(heads, -1))


@both_paths
@every_mask
@pytest.mark.parametrize("sizes", [{}, {"kdim": 4, "vdim": 3}], ids=["same", "kdim-vdim"])
def test_gradients_equal_those_of_the_oracle(need_weights, masks, sizes):
    layer, *inputs = layer_and_inputs(**sizes)
    leaves = [tensor.requires_grad_() for tensor in (*inputs, *layer.parameters())]
    output, _ = layer(*inputs, need_weights=need_weights, **masks)
    expected = differentiable_oracle(layer, *inputs, added_by(**masks))
    torch.testing.assert_close(output, expected)
    direction = torch.randn_like(output)
    ours, theirs = (torch.autograd.grad(x, leaves, direction, allow_unused=True) for x in (output, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@both_paths
@pytest.mark.parametrize("scale", [99.0, 999.0])
def test_bfloat16_with_large_scales(need_weights, scale):
    """Scores of ±scale have errors of up to scale/128 in bfloat16, but weights are finite and sum to 1."""
    layer, *inputs = layer_and_inputs(torch.bfloat16, scale=scale, max_scale=scale + 1)
    nn.init.constant_(layer.temperature, -10)  # the bound
    mask = torch.zeros(L, S, dtype=torch.bool)
    mask[1] = True
    mask[2, 1:] = True
    for tensor in inputs:
        tensor.requires_grad_()
    output, weights = layer(*inputs, need_weights=need_weights, average_attn_weights=False, attn_mask=mask)
    output.float().square().sum().backward()
    assert output.isfinite().all()
    assert all(tensor.grad.isfinite().all() for tensor in (*inputs, *layer.parameters()))
    assert torch.equal(output[:, 1], layer.out_proj.bias.expand(N, E))
    exact, _ = copy.deepcopy(layer).double()(*(x.detach().double() for x in inputs), attn_mask=mask)
    torch.testing.assert_close(output[:, 2].double(), exact[:, 2], rtol=0.05, atol=0.1)  # one key: no softmax
    if need_weights:
        rows = weights.float().sum(-1)
        torch.testing.assert_close(rows[:, :, 0], torch.ones(N, H), rtol=0, atol=0.02)
        assert not rows[:, :, 1].any()


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(("batch", "steps", "keys"), [(0, L, S), (N, 0, S), (N, L, 0), (0, 0, 0)])
def test_weights_of_empty_inputs_have_shapes_and_gradients(average, batch, steps, keys):
    layer = SphereMultiheadAttention(E, H, batch_first=True)
    query, key = torch.randn(batch, steps, E, requires_grad=True), torch.randn(batch, keys, E, requires_grad=True)
    padding = torch.zeros(batch, keys, dtype=torch.bool)
    output, weights = layer(query, key, key, key_padding_mask=padding, average_attn_weights=average)
    assert weights.shape == ((batch, steps, keys) if average else (batch, H, steps, keys))
    output.sum().backward()
    assert query.grad.shape == query.shape
    assert layer.in_proj_weight.grad.isfinite().all()


class SelfAttention(nn.Module):
    """Attention of a sequence to itself, with a causal mask and padding where the input is 0."""

    def __init__(self, need_weights):
        super().__init__()
        self.attention, self.need_weights = SphereMultiheadAttention(E, H, batch_first=True), need_weights

    def forward(self, x):
        padding, causal = x.abs().sum(-1) == 0, torch.ones(L, L, dtype=torch.bool).triu(1)
        options = {"key_padding_mask": padding, "attn_mask": causal, "need_weights": self.need_weights}
        return self.attention(x, x, x, **options)[0]


@both_paths
@pytest.mark.parametrize("ending", ["pt2", "onnx"])
def test_exported_attention_masks_rows_fully(need_weights, ending, tmp_path):
    network, x = SelfAttention(need_weights).eval(), torch.randn(N, L, E)
    x[1, 0] = 0  # its first step may attend to nothing
    file = sn.export.export_model(network, tmp_path / f"x.{ending}", example=x)
    other = torch.randn(N, L, E)
    other[0, :2] = 0
    for inputs in (x, other):
        expected = network(inputs).detach()
        if ending == "pt2":
            actual = torch.export.load(file).module()(inputs)
        else:
            session = pytest.importorskip("onnxruntime").InferenceSession(file)
            actual = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0])
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("average", [True, False])
def test_compiled_weights_equal_eager_ones(average):
    layer, *inputs = layer_and_inputs(torch.float32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    options = {"attn_mask": MASKS["3-D"]["attn_mask"], "average_attn_weights": average}
    for a, b in zip(compiled(*inputs, **options), layer(*inputs, **options), strict=True):
        torch.testing.assert_close(a, b)


def test_fx_records_one_node():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = SphereMultiheadAttention(E, H)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    network, x = Network(), torch.randn(L, N, E)
    traced = fx.symbolic_trace(network)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["attention"]
    assert torch.equal(traced(x), network(x))


@pytest.mark.parametrize("training", [True, False])
def test_replaces_attention_of_torchs_transformer(training):
    """Torch's fast path for inference must not compute plain attention instead."""
    encoder_layer = nn.TransformerEncoderLayer(E, 2, 8, dropout=0, batch_first=True)
    encoder_layer.self_attn = SphereMultiheadAttention(E, 2, batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the encoder says why it does not use its fast path
        encoder = nn.TransformerEncoder(encoder_layer, 1).train(training)
    x, layer = torch.randn(N, L, E), encoder.layers[0]
    with torch.no_grad():
        output = encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(L), is_causal=True)
        attended = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False, is_causal=True)[0])
        expected = layer.norm2(attended + layer.linear2(layer.linear1(attended).relu()))
    torch.testing.assert_close(output, expected)


WRONG_OPTIONS = [
    ({"num_heads": 4}, ValueError, r"num_heads must be a divisor of embed_dim=6, got 4\."),
    ({"embed_dim": 0}, ValueError, "embed_dim must be at least 1, got 0"),
    ({"num_heads": 1.5}, TypeError, "num_heads must be an integer"),
    ({"dropout": 2}, ValueError, "dropout must be from 0 to 1, got 2"),
    ({"add_zero_attn": True}, ValueError, "add_zero_attn must be False"),
    ({"add_bias_kv": True}, ValueError, "add_bias_kv must be False"),
    ({"scale": 100}, ValueError, "scale must be less than max_scale=100.0, got 100"),
    ({"eps": 0}, ValueError, "eps must be greater than 0, got 0"),
    ({"heads": 3}, TypeError, "SphereMultiheadAttention has no option 'heads'; did you mean 'num_heads'"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG_OPTIONS, ids=lambda value: str(value)[:30])
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        SphereMultiheadAttention(**{"embed_dim": E, "num_heads": H, **options})


X = torch.randn(N, L, E)
WRONG_INPUTS = [
    ((X.long(), X, X), {}, TypeError, "query must be a floating point tensor, got torch.int64"),
    ((X, X[..., :4], X), {}, ValueError, r"key must have shape .*, got \[2, 4, 4\]"),
    ((X, X, X[:, :2]), {}, ValueError, "key and value must have the batch and the steps in common"),
    ((X, X[0], X[0]), {}, ValueError, "the dimensions of the query"),
    ((X, X[:1], X[:1]), {}, ValueError, "key must have the batch size of the query, 2, got 1"),
    ((X, X, X), {"attn_mask": torch.zeros(L, 7)}, ValueError, r"attn_mask must have shape .*, got \[4, 7\]"),
    ((X, X, X), {"attn_mask": torch.zeros(L, L).long()}, TypeError, "attn_mask must be a boolean or floating point"),
    ((X, X, X), {"key_padding_mask": torch.zeros(7, L)}, ValueError, "key_padding_mask must have shape"),
    ((X, X.double(), X), {}, TypeError, "^key must have the dtype of the weights, torch.float32, got"),
    ((X, X, X), {"key_padding_mask": [True]}, TypeError, "key_padding_mask must be .* tensor, got list"),
]


@pytest.mark.parametrize(("inputs", "options", "error", "message"), WRONG_INPUTS, ids=lambda value: str(value)[:30])
def test_wrong_inputs(inputs, options, error, message):
    with pytest.raises(error, match=message):
        SphereMultiheadAttention(E, H, batch_first=True)(*inputs, **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout):
    nested = torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)], layout=layout)
    with pytest.raises(ValueError, match=r"^query must not be nested: pad it and use key_padding_mask"):
        SphereMultiheadAttention(E, H, batch_first=True)(nested, nested, nested)


class Operations(TorchDispatchMode):
    """Record the names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.add(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masked", [{}, {"is_causal": True}, {"key_padding_mask": torch.arange(6).expand(2, 6) > 3}])
def test_fused_kernel_computes_the_output_without_weights(need_weights, masked):
    layer, x = sn.SphereMultiheadAttention(8, 2, batch_first=True), torch.randn(2, 6, 8)
    with Operations() as operations:
        output, _ = layer(x, x, x, need_weights=need_weights, **masked)
        output.sum().backward()
    fused = "_scaled_dot_product_flash_attention_for_cpu"
    assert (fused in operations.names) == (not need_weights)
    assert (f"{fused}_backward" in operations.names) == (not need_weights)


def test_is_a_public_name():
    assert sn.SphereMultiheadAttention is SphereMultiheadAttention
