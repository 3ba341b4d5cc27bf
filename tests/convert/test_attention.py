"""`to_sphere` converts nn.MultiheadAttention on request, also in torch's transformer layers, and `to_plain` back."""

import copy
import warnings

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.convert import apply_conversion, conversion_record
from spherenet.errors import ModelError

E, H, N, L = 8, 2, 3, 5


class Network(nn.Module):
    """Attention between two linear layers."""

    def __init__(self, **options):
        super().__init__()
        self.first = nn.Linear(E, E)
        self.attention = nn.MultiheadAttention(E, H, **options)
        self.head = nn.Linear(E, 3)

    def forward(self, x):
        x = self.first(x)
        return self.head(self.attention(x, x, x)[0])


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(E, H, 16, dropout=0, batch_first=True, **options)


def encoder(depth=2):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return nn.TransformerEncoder(encoder_layer(), depth)


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 4, "vdim": 6}, {"dropout": 0.2, "batch_first": True}]
)
def test_converted_layer_equals_a_new_one_with_the_same_weights(options):
    plain = nn.MultiheadAttention(E, H, **options)
    sphere = sn.to_sphere(plain, attention=True)
    new = sn.SphereMultiheadAttention(E, H, **options)
    new.load_state_dict(plain.state_dict() | {"temperature": new.temperature.detach()})
    assert type(sphere) is sn.SphereMultiheadAttention
    assert set(vars(new)) == {name for name in vars(sphere) if "spherenet" not in name}
    assert str(sphere).replace("NonDynamicallyQuantizableLinear", "Linear") == str(new)
    query, key, value = torch.randn(L, N, E), torch.randn(4, N, plain.kdim), torch.randn(4, N, plain.vdim)
    if plain.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    mask, padding = torch.rand(L, 4) < 0.3, torch.rand(N, 4) < 0.3
    arguments = {"attn_mask": mask, "key_padding_mask": padding, "average_attn_weights": False}
    for actual, expected in zip(
        sphere.eval()(query, key, value, **arguments), new.eval()(query, key, value, **arguments), strict=True
    ):
        assert torch.equal(actual, expected)
    assert type(plain) is nn.MultiheadAttention  # a copy was converted


def test_weights_stay_the_same_objects_and_temperature_follows_them():
    model = Network().double().requires_grad_(False)
    parameters = dict(model.named_parameters())
    sn.to_sphere(model, attention=True, inplace=True)
    after = dict(model.named_parameters())
    temperature = after.pop("attention.temperature")
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert temperature.dtype is torch.float64
    assert not temperature.requires_grad
    torch.testing.assert_close(model.attention.scales(), torch.full((H,), 10.0).double())


def test_conversion_draws_no_random_numbers():
    model = Network()
    torch.manual_seed(0)
    sn.to_sphere(model, attention=True)
    drawn = torch.rand(())
    torch.manual_seed(0)
    assert torch.rand(()) == drawn


def test_attention_stays_plain_by_default_and_the_summary_says_so():
    summary = sn.sphere_summary(sn.to_sphere(Network()))
    assert (summary["attention"].kind, summary["attention"].reason) == ("plain", "attention")
    assert "applies its weight itself" in summary["attention.out_proj"].reason
    assert summary["first"].kind == "sphere"


@pytest.mark.parametrize(
    "options",
    [
        {"attention": True},
        {"select": nn.MultiheadAttention},
        {"select": "attention"},
        {"only": "att*", "attention": True},
    ],
    ids=str,
)
def test_selected_attention_is_converted(options):
    model = sn.to_sphere(Network(), **options)
    summary = sn.sphere_summary(model)
    row = summary["attention"]
    assert (row.kind, row.operator, row.reason) == ("sphere", "cosine", "converted from MultiheadAttention")
    assert summary["attention.out_proj"].reason == "attention projection: output of SphereMultiheadAttention"
    own = 3 * E * E + 3 * E + H
    assert summary.sphere_parameters == own + (E * E + E if options == {"attention": True} else 0)


@pytest.mark.parametrize("options", [{"skip": "attention"}, {"skip": nn.MultiheadAttention}, {"only": "first"}])
def test_rules_exclude_attention(options):
    model = sn.to_sphere(Network(), attention=True, **options)
    assert type(model.attention) is nn.MultiheadAttention


class Louder(nn.MultiheadAttention):
    def forward(self, *arguments, **options):
        return super().forward(*arguments, **options)


def parametrized():
    return nn.utils.parametrizations.weight_norm(nn.MultiheadAttention(E, H), "in_proj_weight")


def with_own_forward():
    layer = nn.MultiheadAttention(E, H)
    layer.forward = lambda *arguments, **options: None
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.MultiheadAttention(E, H, add_bias_kv=True), "add_bias_kv is set"),
        (lambda: nn.MultiheadAttention(E, H, add_zero_attn=True), "add_zero_attn is set"),
        (lambda: Louder(E, H), "Louder is a subclass of MultiheadAttention"),
        (parametrized, "ParametrizedMultiheadAttention is parametrized"),
        (with_own_forward, "MultiheadAttention overrides forward"),
    ],
    ids=["bias_kv", "zero_attn", "subclass", "parametrized", "own forward"],
)
def test_unsupported_attention_stays_plain_and_is_listed(make, reason):
    model = Network()
    model.attention = make()
    converted = sn.to_sphere(model, attention=True, inplace=True)
    assert isinstance(converted.attention, nn.MultiheadAttention)
    row = sn.sphere_summary(converted)["attention"]
    assert row.kind != "sphere"
    assert row.reason.startswith(f"not converted: {reason}")


def test_model_whose_only_layer_cannot_be_converted_is_refused():
    with pytest.raises(ModelError, match="no layer of the model was converted: 1 not converted: add_zero_attn"):
        sn.to_sphere(nn.MultiheadAttention(E, H, add_zero_attn=True), attention=True)
    with pytest.raises(ModelError, match="no layer of the model was converted: 1 attention"):
        sn.to_sphere(nn.MultiheadAttention(E, H))


def test_second_conversion_changes_nothing():
    once = sn.to_sphere(Network(), attention=True, skip="first")
    twice = sn.to_sphere(once, attention=True)
    assert type(twice.first) is sn.SphereLinear
    for name in ("attention", "attention.out_proj"):
        assert sn.sphere_summary(twice)[name] == sn.sphere_summary(once)[name]
    assert torch.equal(twice.attention.in_proj_weight, once.attention.in_proj_weight)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 4, "vdim": 6}, {"batch_first": True}], ids=str)
def test_to_plain_is_the_inverse(options):
    plain = nn.MultiheadAttention(E, H, **options)
    back = sn.to_plain(sn.to_sphere(plain, attention=True))
    assert type(back) is nn.MultiheadAttention
    assert {n: v for n, v in vars(back).items() if not n.startswith("_")} == {
        n: v for n, v in vars(plain).items() if not n.startswith("_")
    }
    assert back._qkv_same_embed_dim is plain._qkv_same_embed_dim
    inputs = torch.randn(L, N, E), torch.randn(L, N, plain.kdim), torch.randn(L, N, plain.vdim)
    assert torch.equal(back(*inputs)[0], plain(*inputs)[0])
    assert sn.sphere_summary(back)[""].reason == "converted back from SphereMultiheadAttention; temperatures dropped"


def test_to_plain_of_a_layer_that_was_never_plain():
    layer = sn.SphereMultiheadAttention(E, H, batch_first=True)
    back, torchs = sn.to_plain(layer), nn.MultiheadAttention(E, H, batch_first=True)
    torchs.load_state_dict(back.state_dict())
    x = torch.randn(N, L, E)
    assert torch.equal(back(x, x, x)[0], torchs(x, x, x)[0])
    assert set(vars(torchs)) == {name for name in vars(back) if "spherenet" not in name}
    assert type(back.out_proj) is type(torchs.out_proj)


def test_to_plain_refuses_subclasses():
    class Own(sn.SphereMultiheadAttention):
        pass

    with pytest.raises(ModelError, match="'0' of type Own is a subclass of a sphere layer"):
        sn.to_plain(nn.Sequential(Own(E, H)))


@pytest.mark.parametrize("select", ["self_attn", "*"], ids=["attention only", "all layers"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer_computes_the_same_in_evaluation(select, norm_first, activation):
    """Torch's fast path of inference reads in_proj_weight and would compute plain attention."""
    plain = encoder_layer(norm_first=norm_first, activation=activation)
    layer = sn.to_sphere(plain, select=select)
    x, padding = torch.randn(N, L, E), torch.zeros(N, L, dtype=torch.bool)
    padding[0, 3:] = True
    expected = layer.train()(x, src_key_padding_mask=padding)
    assert not torch.allclose(expected, plain(x, src_key_padding_mask=padding), atol=1e-2)
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x, src_key_padding_mask=padding), expected)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x, src_key_padding_mask=padding), expected)


def test_encoder_with_one_converted_layer_computes_the_same_in_evaluation():
    """Nested tensors, which the encoder passes on in evaluation, are not inputs of the converted layer."""
    model = sn.to_sphere(encoder(), select="layers.1.self_attn")
    assert sn.sphere_summary(model)[""].reason == "nested tensors disabled: they need the inference fast path"
    x, padding = torch.randn(N, L, E), torch.zeros(N, L, dtype=torch.bool)
    padding[0, 3:] = True
    expected = model.train()(x, src_key_padding_mask=padding)
    with torch.no_grad():
        actual = model.eval()(x, src_key_padding_mask=padding)
    torch.testing.assert_close(actual[~padding], expected[~padding])
    back = sn.to_plain(model)
    assert back.use_nested_tensor
    assert back.layers[1].activation_relu_or_gelu == 1


def test_decoder_and_whole_transformer_run_and_train():
    torch.manual_seed(0)
    model = nn.Transformer(E, H, 1, 1, 16, dropout=0, batch_first=True)
    sphere = sn.to_sphere(model, attention=True)
    kinds = [type(module) for module in sphere.modules()]
    assert kinds.count(sn.SphereMultiheadAttention) == 3
    source, target = torch.randn(N, L, E), torch.randn(N, 4, E)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    output = sphere(source, target, tgt_mask=mask, tgt_is_causal=True)
    changed = torch.cat([target[:, :2], torch.randn(N, 2, E)], 1)
    later = sphere(source, changed, tgt_mask=mask, tgt_is_causal=True)
    torch.testing.assert_close(output[:, :2], later[:, :2])
    output.square().sum().backward()
    for module in sphere.modules():
        if isinstance(module, sn.SphereMultiheadAttention):
            assert module.temperature.grad.any()
    with torch.no_grad():
        torch.testing.assert_close(sphere.eval()(source, target, tgt_mask=mask, tgt_is_causal=True), output)


def test_record_reproduces_the_conversion():
    model = sn.to_sphere(Network(), "sigmoid", attention=True, eps=1e-3)
    record = conversion_record(model)
    assert record["attention"] == {"attention": {"scale": 10.0, "max_scale": 100.0, "eps": 1e-3}}
    other = Network()
    apply_conversion(other, record)
    apply_conversion(other, record)  # nothing is left to do
    other.load_state_dict(model.state_dict())
    x = torch.randn(L, N, E)
    assert torch.equal(other(x), model(x))
    assert "attention" not in conversion_record(sn.to_sphere(Network()))


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (
            {"first": {"scale": 1.0, "max_scale": 2.0, "eps": 1.0}},
            "must have a MultiheadAttention 'first', got a Linear",
        ),
        ({"no": {"scale": 1.0, "max_scale": 2.0, "eps": 1.0}}, "must have a MultiheadAttention 'no', got none"),
        ({"attention": {"scale": 3.0, "max_scale": 2.0, "eps": 1.0}}, "scale must be less than max_scale=2.0, got 3.0"),
        ({"attention": {"scale": 3.0, "eps": 1.0}}, "must have the numbers scale, max_scale, eps for 'attention'"),
        ({"attention": {"scale": "3", "max_scale": 9.0, "eps": 1.0}}, "must have the numbers scale"),
        ([], "must have an object of at most 100000 layers as attention"),
    ],
    ids=range(6),
)
def test_invalid_records_change_nothing(attention, message):
    record = conversion_record(sn.to_sphere(Network(), attention=True)) | {"attention": attention}
    model = Network()
    with pytest.raises(ModelError, match=message):
        apply_conversion(model, record)
    assert type(model.first) is nn.Linear
    assert type(model.attention) is nn.MultiheadAttention


def test_save_and_load(tmp_path):
    model = sn.to_sphere(encoder(), select="*.self_attn").eval()
    sn.save_model(model, tmp_path / "model")
    loaded = sn.load_model(tmp_path / "model", model=encoder())
    x = torch.randn(N, L, E)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(x), model(x))


def test_copies_of_converted_models_are_converted():
    model = sn.to_sphere(Network(), attention=True)
    x = torch.randn(L, N, E)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
