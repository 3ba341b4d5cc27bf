"""Tools that rewrite the weights of linear layers, on sphere layers: each works exactly or refuses.

The table in docs/sharing.md states the results.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import spherenet as sn

INPUT = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def network(operator="sigmoid"):
    torch.manual_seed(0)
    return nn.Sequential(
        sn.SphereLinear(8, 16, operator=operator, bias=True), nn.ReLU(), nn.Linear(16, 16), sn.SphereLinear(16, 4)
    )


def output(model):
    with torch.no_grad():
        return model.eval()(INPUT)


def randomize(model, word):
    """Set the parameters of an adapter to values that change the output."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if word in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)


def test_lora_on_weights_is_merged_exactly():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["0.weight", "3.weight"])
    model = peft.get_peft_model(network(), config)
    model(INPUT).sum().backward()
    gradients = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert len(gradients) == 4
    assert all("lora_" in name for name in gradients)
    randomize(model, "lora_")
    adapted = output(model)
    merged = model.merge_and_unload()
    assert type(merged[0]) is sn.SphereLinear
    assert torch.equal(output(merged), adapted)
    assert not torch.allclose(adapted, output(network()), atol=0.05)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LoraConfig", {"r": 2}),
        ("LoraConfig", {"r": 2, "use_dora": True}),
        ("IA3Config", {"feedforward_modules": []}),
        ("LoHaConfig", {"r": 2}),
        ("LoKrConfig", {"r": 2}),
        ("VeraConfig", {"r": 2}),
        ("OFTConfig", {"oft_block_size": 4}),
        ("HRAConfig", {}),
        ("FourierFTConfig", {"n_frequency": 20}),
    ],
)
def test_adapters_of_modules_are_refused(name, options):
    peft = pytest.importorskip("peft")
    config = getattr(peft, name)(target_modules=["0"], **options)
    with pytest.raises(TypeError, match=r"target_modules of peft must be plain layers, got a SphereLinear.*parameters"):
        peft.get_peft_model(network(), config)


def test_adapters_of_convolutions_are_refused():
    peft = pytest.importorskip("peft")
    model = nn.Sequential(sn.SphereConv2d(3, 4, 3))
    with pytest.raises(TypeError, match="target_modules of peft must be plain layers, got a SphereConv2d"):
        peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"]))


def test_adapters_of_plain_layers_and_whole_layers_work():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["2"], modules_to_save=["3"])
    model = peft.get_peft_model(network(), config)
    randomize(model, "lora_")
    randomize(model, "modules_to_save")
    adapted = output(model)
    torch.testing.assert_close(output(model.merge_and_unload()), adapted)


REPLACING = ["bitsandbytes.nn.modules", "torchao.quantization.qat.linear", "transformers.integrations.bitnet"]


@pytest.mark.parametrize("package", REPLACING)
def test_layers_of_quantizers_do_not_replace_sphere_layers(package):
    model = network()
    quantized = type("Linear4bit", (nn.Linear,), {"__module__": package})
    with pytest.raises(TypeError, match=f"layer '0' must be a plain layer to become a {package}.Linear4bit"):
        model[0] = quantized(8, 16)
    assert isinstance(model[0], sn.SphereLinear)
    model[2] = quantized(16, 16)
    model[3] = nn.Linear(16, 2)  # a user's own layer
    model[3] = quantized(16, 2)
    assert output(model).shape == (5, 2)


WEIGHT_ONLY = ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Float8WeightOnlyConfig"]
ACTIVATIONS = ["Int8DynamicActivationInt8WeightConfig"]


@pytest.mark.parametrize("config", WEIGHT_ONLY + ACTIVATIONS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("options", [{}, {"center": "patch", "rescale": "learned"}, {"magnitude": "tanh"}])
def test_quantized_weights_are_used_at_their_rounded_values(config, backend, options):
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(sn.SphereLinear(64, 32, operator="sigmoid", bias=True, **options))
    rounded, features = copy.deepcopy(model), torch.randn(3, 2, 64, requires_grad=True)
    torchao.quantize_(model, getattr(torchao, config)())
    weight = model[0].weight
    assert type(weight) not in (torch.Tensor, nn.Parameter)
    with torch.no_grad():
        assert 0 < (weight.dequantize() - rounded[0].weight).abs().max() < 0.01
        rounded[0].weight.copy_(weight.dequantize())
    rounded[0].weight.requires_grad_(False)
    with sn.backend(backend):
        results = [network(features) for network in (model, rounded)]
        gradients = [torch.autograd.grad(result.square().sum(), features)[0] for result in results]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*gradients)
        with torch.no_grad():
            torch.testing.assert_close(model(features), results[1])
    assert "SphereLinear(" in repr(model)


def test_quantized_convolutions_are_used_at_their_rounded_values():
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(sn.SphereConv2d(3, 8, 3, padding=1))
    rounded, images = copy.deepcopy(model), torch.randn(2, 3, 8, 8)
    torchao.quantize_(
        model, torchao.Int8WeightOnlyConfig(), filter_fn=lambda module, _: type(module) is sn.SphereConv2d
    )
    assert type(model[0].weight) is not nn.Parameter
    with torch.no_grad():
        rounded[0].weight.copy_(model[0].weight.dequantize())
        torch.testing.assert_close(model(images), rounded(images))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_quantization_of_torch_leaves_sphere_layers():
    model = network()
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert type(quantized[0]) is sn.SphereLinear
    assert type(quantized[2]) is not nn.Linear
    assert (output(quantized) - output(model)).abs().max() < 0.02


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_exported_programs_are_quantized():
    pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    x86 = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    torch.manual_seed(0)
    model = nn.Sequential(sn.SphereConv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), sn.SphereLinear(144, 5)).eval()
    images = torch.randn(8, 3, 8, 8)
    program = torch.export.export(model, (images,)).module()
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = pt2e.prepare_pt2e(program, quantizer)
    prepared(images)
    quantized = pt2e.convert_pt2e(prepared)
    assert any("quantize" in str(node.target) for node in quantized.graph.nodes)
    with torch.no_grad():
        error = (quantized(images) - model(images)).abs().max()
    assert 0 < error < 0.02


def test_quantization_aware_training_is_refused():
    torchao = pytest.importorskip("torchao.quantization")
    qat = pytest.importorskip("torchao.quantization.qat")
    weights = torchao.granularity.PerGroup(8)
    config = qat.QATConfig(torchao.Int8DynamicActivationIntxWeightConfig(weight_granularity=weights), step="prepare")
    with pytest.raises(TypeError, match="must be a plain layer to become a torchao"):
        torchao.quantize_(network(), config)
    only_plain = network()
    torchao.quantize_(only_plain, config, filter_fn=lambda module, name: type(module) is nn.Linear)
    assert isinstance(only_plain[0], sn.SphereLinear)
    assert type(only_plain[2]).__name__ == "FakeQuantizedLinear"


def test_float8_training_is_refused():
    float8 = pytest.importorskip("torchao.float8")
    with pytest.raises(TypeError, match=r"must be a plain layer to become a torchao.*Float8Linear"):
        float8.convert_to_float8_training(network())


def masked(layer):
    prune.l1_unstructured(layer, "weight", amount=0.5)


@pytest.mark.parametrize(
    "rewrite", [masked, parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_tools_that_compute_the_weight_work(rewrite):
    model = network()
    rewrite(model[0])
    model.train()
    model(INPUT)
    result = output(model)
    expected = network()
    with torch.no_grad():
        expected[0].weight.copy_(model[0].weight)
    torch.testing.assert_close(result, output(expected))


def test_offloaded_layers_work():
    accelerate = pytest.importorskip("accelerate")
    model, expected = network(), output(network())
    accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(output(model), expected)


def test_copies_and_nested_networks_are_not_affected():
    model = network()
    assert torch.equal(output(copy.deepcopy(model)), output(model))
    outer = nn.Sequential(model)
    outer.add_module("head", nn.Linear(4, 2))
    outer[0][0] = sn.SphereLinear(8, 16)
    outer[0][0] = None
    assert output(nn.Sequential(sn.to_plain(network()))).shape == (5, 4)
