"""Small models of transformers, monai and torch with random weights, created without downloads."""

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.convert import sphere_summary, to_plain, to_sphere
from spherenet.layers import SphereLayer

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def transformers_model(name, **config):
    transformers = pytest.importorskip("transformers")
    family = name.removesuffix("ForImageClassification").removesuffix("ForMaskedLM").removesuffix("Model")
    return getattr(transformers, name)(getattr(transformers, f"{family}Config")(**config))


def monai_model(name, *args, **options):
    nets = pytest.importorskip("monai.networks.nets")
    return getattr(nets, name)(*args, **options)


IMAGES = (2, 3, 32, 32)
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 5}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 5}
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32} | {
    "image_size": 32, "patch_size": 8, "num_labels": 5,
}  # fmt: skip
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 30}

MODELS = {
    "resnet": (lambda: transformers_model("ResNetForImageClassification", **RESNET), IMAGES, ["classifier.1"]),
    "basic resnet": (
        lambda: transformers_model("ResNetForImageClassification", **RESNET, layer_type="basic"), IMAGES,
        ["classifier.1"],
    ),
    "resnet without classifier": (lambda: transformers_model("ResNetModel", **RESNET), IMAGES, []),
    "convnext": (lambda: transformers_model("ConvNextForImageClassification", **CONVNEXT), IMAGES, ["classifier"]),
    "mobilenet v1": (
        lambda: transformers_model("MobileNetV1ForImageClassification", depth_multiplier=0.25, num_labels=5),
        (2, 3, 64, 64), ["classifier"],
    ),
    "mobilenet v2": (
        lambda: transformers_model("MobileNetV2ForImageClassification", depth_multiplier=0.25, num_labels=5),
        (2, 3, 64, 64), ["classifier"],
    ),
    "vit": (
        lambda: transformers_model("ViTForImageClassification", **VIT), IMAGES,
        [*(f"vit.layers.{i}.attention.{p}_proj" for i in range(2) for p in "qkvo"), "classifier"],
    ),
    "bert": (
        lambda: transformers_model("BertForMaskedLM", **BERT), (2, 7),
        [*(f"bert.encoder.layer.0.attention.{p}" for p in ("self.query", "self.key", "self.value", "output.dense")),
         "cls.predictions.decoder"],
    ),
    "3-d unet": (
        lambda: monai_model("UNet", 3, 1, 2, (4, 8, 16), (2, 2), num_res_units=2, norm="batch"), (2, 1, 8, 8, 8),
        ["model.2.1.conv.unit0.conv"],
    ),
    "3-d unet that ends in a transposed convolution": (
        lambda: monai_model("UNet", 3, 1, 2, (4, 8), (2,)), (2, 1, 8, 8, 8), [],
    ),
    "basic unet": (lambda: monai_model("BasicUNet", 2, 1, 2, (4, 4, 8, 8, 8, 4)), (2, 1, 32, 32), ["final_conv"]),
    "densenet": (
        lambda: monai_model("DenseNet", 2, 3, 5, init_features=8, growth_rate=4, block_config=(2, 2)), IMAGES,
        ["class_layers.out"],
    ),
    "1-d densenet": (
        lambda: monai_model("DenseNet", 1, 2, 5, init_features=8, growth_rate=4, block_config=(1,)), (2, 2, 64),
        ["class_layers.out"],
    ),
    "transformer encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), (2, 5, 8),
        ["layers.0.self_attn.out_proj", "layers.1.self_attn.out_proj"],
    ),
}  # fmt: skip


def scores(model, inputs):
    out = model(inputs)
    if not isinstance(out, torch.Tensor):  # an output object of the transformers library
        out = out.logits if "logits" in out else out.last_hidden_state
    return out


def example(shape):
    return torch.randint(0, 30, shape) if len(shape) == 2 else torch.randn(shape)


@pytest.mark.parametrize("name", MODELS)
def test_public_models_convert_train_and_revert(name):
    make, shape, plain = MODELS[name]
    model = make()
    inputs = example(shape)
    expected_shape = scores(model.eval(), inputs).shape
    before = {key: value.clone() for key, value in model.state_dict().items()}

    sphere = to_sphere(model, "learnable", k=0.5, shortcuts=True)
    layers = {n: m for n, m in sphere.named_modules() if isinstance(m, LAYERS)}
    assert [n for n, m in layers.items() if not isinstance(m, SphereLayer)] == plain
    assert len(layers) > len(plain)
    state = sphere.state_dict()
    assert set(before) == {key for key in state if not key.endswith("raw_k")}
    for key, value in before.items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=0)
    assert {n for n, m in layers.items() if isinstance(m, SphereLayer)} == {
        row.name for row in sphere_summary(sphere) if row.reason.startswith("converted from")
    }

    assert not sphere.training
    out = scores(sphere, inputs)
    assert out.shape == expected_shape
    assert out.isfinite().all()
    out = scores(sphere.train(), inputs)
    out.float().square().mean().backward()
    sphere_layers = [layer for layer in layers.values() if isinstance(layer, SphereLayer)]
    assert all(layer.weight.grad.isfinite().all() for layer in sphere_layers)
    assert any(layer.weight.grad.abs().max() > 0 for layer in sphere_layers)

    back = to_plain(to_sphere(model, shortcuts=True)).eval()
    assert list(back.state_dict()) == list(before)
    torch.testing.assert_close(scores(back, inputs), scores(model, inputs), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_summary_says_that_scores_of_other_attention_stay_products(name):
    make, _, plain = MODELS[name]
    model = make()
    sphere = to_sphere(model, attention=True)
    stated = {row.name for row in sphere_summary(sphere) if "the scores of the attention stay products" in row.reason}
    assert stated == {layer for layer in plain if "attention" in layer}
    assert not any("stay products" in row.reason for row in sphere_summary(to_sphere(model)))


def test_parametrized_layer_of_a_speech_model_stays_plain():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    model = transformers_model("Wav2Vec2Model", **sizes, **convolutions, **positions).eval()
    sphere = to_sphere(model)
    assert "is parametrized" in sphere_summary(sphere)["encoder.pos_conv_embed.conv"].reason
    assert isinstance(sphere.feature_extractor.conv_layers[0].conv, SphereLayer)
    assert sphere(torch.randn(2, 400)).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("name", ["resnet", "mobilenet v2", "3-d unet", "densenet"])
def test_drop_batch_norm_on_public_models(name):
    make, shape, _ = MODELS[name]
    sphere = to_sphere(make(), drop_batch_norm=True, rescale="learned", shortcuts=True)
    summary = sphere_summary(sphere)
    assert summary.count("dropped") >= 2
    assert all("dropped after" in row.reason for row in summary if row.kind == "dropped")
    assert all("kept" in row.reason for row in summary if row.kind == "norm")
    inputs = example(shape)
    scores(sphere, inputs).square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in sphere.parameters())
    assert scores(sphere.eval(), inputs).isfinite().all()


def test_attention_and_classifier_convert_on_request():
    sphere = to_sphere(MODELS["vit"][0](), attention=True, classifier=True)
    assert all(isinstance(m, SphereLayer) for m in sphere.modules() if isinstance(m, LAYERS))
    assert scores(sphere, torch.randn(IMAGES)).shape == (2, 5)


def test_tied_embedding_of_a_language_model():
    for classifier in (False, True):
        sphere = to_sphere(MODELS["bert"][0](), classifier=classifier)
        decoder = sphere.cls.predictions.decoder
        assert isinstance(decoder, SphereLayer) == classifier
        assert decoder.weight is sphere.bert.embeddings.word_embeddings.weight


def test_shortcuts_of_a_residual_network_stay_plain_by_default():
    sphere = to_sphere(MODELS["resnet"][0]())
    shortcuts = [row.name for row in sphere_summary(sphere) if row.reason == "shortcut"]
    assert shortcuts
    assert all("shortcut" in name for name in shortcuts)
    assert sn.orthogonality(sphere).isfinite()
