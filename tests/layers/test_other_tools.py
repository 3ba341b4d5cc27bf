"""Tools that rewrite the weights of linear layers, on sphere layers: each works exactly or refuses.

The table in docs/tools.md states the results.
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
