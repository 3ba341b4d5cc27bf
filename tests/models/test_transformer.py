"""Normalized transformers keep hidden states and weights on the sphere; plain counterparts have the same shapes."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spherenet as sn
from spherenet.models.transformer import EmbeddingMatrix, LearnedScale

TOKENS, STEPS = 7, 6


def gpt(**options):
    return sn.SphereGPT(TOKENS, **{"context": STEPS, "dim": 8, "depth": 2, "num_heads": 2, **options})


def vit(**options):
    return sn.SphereViT(3, **{"image_size": 8, "in_channels": 2, "dim": 8, "depth": 2, "num_heads": 2, **options})


def inputs_of(model, batch=4):
    is_gpt = isinstance(model, sn.SphereGPT)
    return torch.randint(TOKENS, (batch, STEPS)) if is_gpt else torch.randn(batch, 2, 8, 8)


both = pytest.mark.parametrize("make", [gpt, vit])
with_and_without_sphere = pytest.mark.parametrize("sphere", [True, False])


def matrices(model):
    return [module for module in model.modules() if isinstance(module, EmbeddingMatrix)]


def largest_error(model):
    """Return the largest distance from 1 of the norms of all weights along their embedding dimension."""
    return max((m.weight.detach().norm(dim=m.axis) - 1).abs().max().item() for m in matrices(model))


def take_step(model, optimizer):
    optimizer.zero_grad()
    model(inputs_of(model)).square().sum().backward()
    optimizer.step()


@both
def test_hidden_states_have_norm_1(make):
    model = make()
    states = model.hidden_states(inputs_of(model))
    assert len(states) == 3
    for state in states:
        torch.testing.assert_close(state.norm(dim=-1), torch.ones(state.shape[:-1]), rtol=0, atol=1e-6)


@both
def test_embedding_dimension_of_every_matrix_has_size_dim(make):
    model = make(dim=10)
    assert len(matrices(model)) == 11  # four per block, positions, inputs and outputs
    assert all(matrix.weight.shape[matrix.axis] == 10 for matrix in matrices(model))


@both
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_weights_have_norm_1_after_each_step(make, optimizer_class):
    model = make()
    assert largest_error(model) < 1e-6
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    handle = sn.keep_normalized(optimizer, model)
    before = model.blocks[0].mlp_out.weight.detach().clone()
    for _ in range(3):
        take_step(model, optimizer)
        assert largest_error(model) < 1e-6
    assert not torch.allclose(before, model.blocks[0].mlp_out.weight)
    handle.remove()
    take_step(model, optimizer)
    assert largest_error(model) > 1e-4
    sn.normalize_weights(model)
    assert largest_error(model) < 1e-6


@both
def test_normalization_leaves_plain_counterpart_alone(make):
    model = make(sphere=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sn.normalize_weights(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@both
def test_counterparts_have_equal_shapes(make):
    model, plain = make(), make(sphere=False)
    x = inputs_of(model)
    assert model(x).shape == plain(x).shape == ((4, STEPS, TOKENS) if make is gpt else (4, 3))
    shapes, others = ({f"{m}.{n}": p.shape for m, o in net.named_modules() if isinstance(o, EmbeddingMatrix)
                       for n, p in o.named_parameters()} for net in (model, plain))  # fmt: skip
    assert shapes == others


@with_and_without_sphere
def test_later_tokens_do_not_change_earlier_logits(sphere):
    model, tokens = gpt(sphere=sphere), torch.randint(TOKENS, (1, STEPS))
    logits = model(tokens)
    for step in range(STEPS):
        changed = tokens.clone()
        changed[:, step] = (changed[:, step] + 1) % TOKENS
        is_equal = [torch.allclose(a, b, atol=1e-6) for a, b in zip(logits[0], model(changed)[0], strict=True)]
        assert is_equal[:step] == [True] * step
        assert not is_equal[step]


@with_and_without_sphere
def test_shorter_sequences_have_equal_logits(sphere):
    model, tokens = gpt(sphere=sphere), torch.randint(TOKENS, (2, STEPS))
    torch.testing.assert_close(model(tokens[:, :3]), model(tokens)[:, :3])


@with_and_without_sphere
def test_every_patch_changes_the_logits(sphere):
    model, image = vit(sphere=sphere), torch.randn(1, 2, 8, 8)
    logits = model(image)
    for row, column in ((0, 0), (0, 7), (7, 0), (7, 7)):
        changed = image.clone()
        changed[0, 0, row, column] += 1
        assert not torch.allclose(logits, model(changed))


def test_block_equals_definition():
    """Compare a block with the formulas of the paper, one head and one step at a time."""
    model = gpt().double()
    block = model.blocks[0]
    for parameter in (block.s_qk.stored, block.s_uv.stored, block.alpha_attention.stored, block.alpha_mlp.stored):
        nn.init.uniform_(parameter, 0.1, 0.5)
    h = F.normalize(torch.randn(STEPS, 8, dtype=torch.float64), dim=-1)
    q, k, v = (h @ weight.T for weight in block.qkv.weight.split(8))
    attended = torch.zeros(STEPS, 8, dtype=torch.float64)
    for channels in (slice(0, 4), slice(4, 8)):
        s = block.s_qk()[channels]
        for i in range(STEPS):
            query = s * F.normalize(q[i, channels], dim=0)
            scores = torch.stack([2 * query @ (s * F.normalize(k[j, channels], dim=0)) for j in range(i + 1)])
            attended[i, channels] = scores.softmax(0) @ v[: i + 1, channels]
    step = F.normalize(attended @ block.attention_out.weight.T, dim=-1)
    middle = F.normalize(h + block.alpha_attention() * (step - h), dim=-1)
    u, gate = (middle @ block.uv.weight.T * block.s_uv()).chunk(2, -1)
    step = F.normalize((u * F.silu(gate * math.sqrt(8))) @ block.mlp_out.weight.T, dim=-1)
    expected = F.normalize(middle + block.alpha_mlp() * (step - middle), dim=-1)
    torch.testing.assert_close(block(h[None])[0], expected)


def test_learned_scale_starts_at_init_and_learns_at_its_scale():
    scale = LearnedScale(3, init=2, scale=0.1)
    torch.testing.assert_close(scale(), torch.full((3,), 2.0))
    torch.testing.assert_close(scale.stored.detach(), torch.full((3,), 0.1))
    optimizer = torch.optim.Adam(scale.parameters(), lr=0.01)
    scale().sum().backward()
    optimizer.step()  # Adam's first step changes what is stored by lr
    torch.testing.assert_close(scale(), torch.full((3,), 2.0 - 0.01 * 20))


def test_initial_learning_rate_is_1_over_depth():
    block = gpt(depth=4).blocks[0]
    torch.testing.assert_close(block.alpha_mlp(), torch.full((8,), 0.25))
    torch.testing.assert_close(gpt(alpha=0.05).blocks[0].alpha_attention(), torch.full((8,), 0.05))


@both
@with_and_without_sphere
def test_gradients(make, sphere):
    model = make(dim=4, depth=1, mlp_dim=3, sphere=sphere).double()
    x = inputs_of(model, batch=1)
    x = x.double() if make is vit else x
    names, parameters = zip(*model.named_parameters(), strict=True)

    def function(*values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, [p.detach().clone().requires_grad_() for p in parameters])


@both
@with_and_without_sphere
def test_every_parameter_gets_a_gradient(make, sphere):
    model = make(sphere=sphere)
    model(inputs_of(model)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@both
@with_and_without_sphere
def test_training_lowers_the_loss(make, sphere):
    """GPT: continue a counting sequence. ViT: say which channel is brighter."""
    torch.manual_seed(0)
    model = make(sphere=sphere, dim=16)
    if make is gpt:
        x = (torch.arange(TOKENS)[:, None] + torch.arange(STEPS)) % TOKENS
        labels = (x + 1) % TOKENS
    else:
        x = torch.randn(32, 2, 8, 8)
        labels = x.mean((2, 3)).argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    sn.keep_normalized(optimizer, model)
    losses = []
    for _ in range(40):
        loss = F.cross_entropy(model(x).flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3


@both
@with_and_without_sphere
def test_bfloat16_autocast(make, sphere):
    model = make(sphere=sphere)
    x = inputs_of(model)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    # Logits of about 1 after two blocks of bfloat16.
    torch.testing.assert_close(logits.float(), expected, rtol=0.1, atol=0.1)
    logits.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@both
def test_compiles_without_graph_breaks(make):
    model = make()
    x = inputs_of(model)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


def test_black_images_have_finite_logits_and_gradients():
    model, images = vit(), torch.zeros(2, 2, 8, 8, requires_grad=True)
    model(images).sum().backward()
    assert images.grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gpt(num_heads=3), ValueError, "num_heads must be a divisor of dim=8, got 3"),
        (lambda: gpt(depth=0), ValueError, "depth must be at least 1, got 0"),
        (lambda: gpt(alpha=-1), ValueError, "alpha must be greater than 0, got -1"),
        (lambda: vit(patch_size=3), ValueError, "patch_size must be a divisor of image_size=8, got 3"),
        (lambda: gpt()(torch.ones(1, 2)), TypeError, "tokens must be a tensor of integers, got torch.float32"),
        (lambda: gpt()(torch.ones(1, 7).long()), ValueError, r"tokens must have shape \[N, at most 6\], got \[1, 7\]"),
        (
            lambda: vit()(torch.ones(1, 3, 8, 8)),
            ValueError,
            r"images must have shape \[N, 2, 8, 8\], got \[1, 3, 8, 8\]",
        ),
        (lambda: sn.normalize_weights(3), TypeError, "model must be a module, got 3"),
        (lambda: sn.keep_normalized(3, gpt()), TypeError, "optimizer must be a torch optimizer, got int"),
    ],
    ids=range(9),
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def classifier(operator="cosine", **options):
    return sn.create_model("sphere-vit-tiny", 3, operator, **{"widths": (8,), "input_size": 8, **options})


@with_and_without_sphere
def test_network_of_the_registry_is_the_vision_transformer(sphere):
    """With the head as output matrix, the scores are those of `SphereViT`, up to the constant √dim."""
    model = classifier("cosine" if sphere else None, input_size=(8, 8))
    vit = sn.SphereViT(3, image_size=8, in_channels=3, dim=8, depth=6, num_heads=1, sphere=sphere)
    state = model.features.state_dict() | {"out.weight": model.head.weight.detach()}
    vit.load_state_dict(state | ({"s_z.stored": vit.s_z.stored.detach()} if sphere else {}))
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(model(images), vit(images) * (math.sqrt(8) if sphere else 1))


def test_tiny_vision_transformer_has_the_sizes_of_its_name():
    with torch.device("meta"):
        model, plain = (sn.create_model("sphere-vit-tiny", operator=operator) for operator in ("cosine", None))
    assert len(model.features.blocks) == 6
    assert model.features.blocks[0].num_heads == 3
    assert {m.weight.shape for m in matrices(model)} == {m.weight.shape for m in matrices(plain)}
    assert model.features.positions.weight.shape == (64, 192)
    # Four matrices of 192·192, two of 192·512 to read and one to write per block; positions, patches and head.
    blocks = 6 * (4 * 192 * 192 + 3 * 192 * 512)
    assert sum(m.weight.numel() for m in matrices(plain)) == blocks + 64 * 192 + 48 * 192
    assert model.head.weight.shape == (10, 192)


def test_patches_have_the_order_of_unfold():
    model, images = vit(patch_size=2), torch.randn(2, 2, 8, 8)
    patches = F.unfold(images, 2, stride=2).transpose(1, 2)
    expected = F.normalize(patches @ model.patches.weight.T, dim=-1) + model.positions.weight
    torch.testing.assert_close(model.hidden_states(images)[0], F.normalize(expected, dim=-1))


@with_and_without_sphere
def test_network_of_the_registry_takes_rectangular_images_and_any_loss(sphere):
    operator = "cosine" if sphere else None
    model = classifier(operator, input_size=(4, 12), in_channels=1, loss="arcface", batch_norm=False)
    loss, scores = model(torch.randn(2, 1, 4, 12), torch.tensor([0, 2]))
    loss.backward()
    assert scores.shape == (2, 3)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_features_have_the_same_size_as_those_of_the_counterpart():
    images = torch.randn(4, 3, 8, 8)
    for operator in ("cosine", None):
        norms = classifier(operator).features(images).norm(dim=1)
        torch.testing.assert_close(norms, torch.full((4,), math.sqrt(8)), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0.3}, r"k must be none for a transformer, which has no sphere layers, got 0\.3"),
        ({"operator": "sigmoid"}, "operator must be cosine or none for a transformer, got sigmoid"),
        ({"center": "patch"}, "center must be none for a transformer"),
        ({"magnitude": "ball"}, "magnitude must be none for a transformer"),
        ({"input_size": 10}, "input_size must be multiples of 4, the size of a patch, got 10×10"),
        ({"widths": (8, 8)}, "widths must be 1 positive integers for sphere-vit-tiny"),
    ],
    ids=str,
)
def test_network_of_the_registry_refuses_options_it_does_not_have(options, message):
    with pytest.raises(ValueError, match=message):
        classifier(**options)


@with_and_without_sphere
def test_network_of_the_registry_is_saved_and_exported(sphere, tmp_path):
    model = classifier("cosine" if sphere else None).eval()
    images = torch.randn(5, 3, 8, 8)
    with torch.no_grad():
        expected = model(images)
        sn.save_model(model, tmp_path / "folder")
        assert torch.equal(sn.load_model(tmp_path / "folder")(images), expected)
        program = torch.export.load(sn.export.export_model(model, tmp_path / "x.pt2")).module()
        torch.testing.assert_close(program(images), expected)
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(sn.export.export_model(model, tmp_path / "x.onnx"))
        (scores,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        torch.testing.assert_close(torch.from_numpy(scores), expected, rtol=1e-4, atol=1e-4)


def test_tiny_gpt_has_the_default_sizes():
    torch.manual_seed(0)
    model = sn.models.sphere_gpt_tiny(TOKENS)
    torch.manual_seed(0)
    default = sn.SphereGPT(TOKENS)
    x = torch.randint(TOKENS, (2, 128))
    assert torch.equal(model(x), default(x))
    assert not sn.models.sphere_gpt_tiny(TOKENS, sphere=False).sphere


def test_weights_of_normalized_transformers_are_not_decayed():
    decay, _ = sn.param_groups(gpt(), 0.1)
    assert decay["params"] == []
    decay, _ = sn.param_groups(gpt(sphere=False), 0.1)
    assert len(decay["params"]) == 11


@pytest.mark.parametrize(("tokens", "got"), [([[0, TOKENS]], TOKENS), ([[-1, 0]], -1), ([[-3, TOKENS]], -3)])
def test_tokens_beyond_the_vocabulary_are_named(tokens, got):
    model = sn.SphereGPT(TOKENS, context=4, dim=8, depth=1, num_heads=2)
    with pytest.raises(ValueError, match=rf"^tokens must be from 0 to {TOKENS - 1}, got {got}\.$"):
        model(torch.tensor(tokens))
    assert model(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, TOKENS)


@pytest.mark.parametrize("make", [sn.SphereViT, lambda **options: sn.SphereGPT(5, **options)])
def test_unknown_options_are_refused_with_a_suggestion(make):
    with pytest.raises(TypeError, match="has no option 'dims'; did you mean 'dim'"):
        make(dims=8)
