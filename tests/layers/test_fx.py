"""`torch.fx` traces networks with sphere layers: each layer is one node, as torch's own layers are."""

import copy

import pytest
import torch
from torch import fx, nn

import spherenet as sn
from spherenet.models import create_model


def small_network():
    return nn.Sequential(
        sn.SphereConv2d(3, 4, 3, operator="learnable", rescale="learned"),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        sn.SphereConvTranspose2d(4, 5, 2, 2, center="weight"),
        nn.Flatten(),
        sn.SphereLinear(5 * 8 * 8, 6, magnitude="ball"),
    )


def module_targets(graph_module):
    return {node.target for node in graph_module.graph.nodes if node.op == "call_module"}


def test_sphere_layers_are_leaves_with_equal_outputs():
    model, images = small_network().eval(), torch.randn(2, 3, 6, 6)
    traced = fx.symbolic_trace(model)
    traced.graph.lint()
    assert module_targets(traced) == {"0", "1", "2", "3", "4", "5"}
    assert torch.equal(traced(images), model(images))


def test_traced_network_trains_like_the_network():
    model = small_network()
    traced = fx.symbolic_trace(copy.deepcopy(model))
    images = torch.randn(2, 3, 6, 6)
    for network in (model, traced):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            network(images).square().sum().backward()
            optimizer.step()
    state, other = model.state_dict(), traced.state_dict()
    assert list(state) == list(other)
    for name in state:
        assert torch.equal(state[name], other[name])
    assert not torch.equal(state["0.angle.raw_k"], small_network().state_dict()["0.angle.raw_k"])


@pytest.mark.parametrize("loss", ["softmax", "ga-linear", "s-cosine", "sphereface2"])
@pytest.mark.parametrize("name", ["cnn-3", "resnet-32"])
def test_classifiers_have_equal_scores_and_losses(name, loss):
    model = create_model(name, widths=(4, 4, 4), operator="sigmoid", loss=loss).eval()
    traced = fx.symbolic_trace(model)
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([1, 7])
    assert torch.equal(traced(images), model(images))
    value, scores = traced(images, labels)
    expected_value, expected_scores = model(images, labels)
    assert torch.equal(value, expected_value)
    assert torch.equal(scores, expected_scores)
    assert torch.equal(traced(images, labels, return_scores=False), value)
    value.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.features.parameters())


def test_classifier_traced_for_inference_and_again():
    model, images = create_model("cnn-3", widths=(4, 4, 4)).eval(), torch.randn(2, 3, 32, 32)
    traced = fx.symbolic_trace(model, concrete_args={"labels": None, "return_scores": True})
    assert torch.equal(traced(images), model(images))
    again = fx.symbolic_trace(fx.symbolic_trace(model))
    assert torch.equal(again(images), model(images))


class Recurrent(nn.Module):
    def __init__(self, layer, **arguments):
        super().__init__()
        self.layer, self.arguments = layer, arguments

    def forward(self, x):
        out = self.layer(x, **self.arguments)
        return out[0] if isinstance(self.layer, (sn.SphereLSTM, sn.SphereGRU, sn.SphereLSTMCell)) else out


@pytest.mark.parametrize("cls", [sn.SphereLSTM, sn.SphereGRU, sn.SphereLSTMCell, sn.SphereGRUCell])
def test_recurrent_layers_are_leaves(cls):
    model = Recurrent(cls(3, 4))
    x = torch.randn(5, 2, 3) if cls in (sn.SphereLSTM, sn.SphereGRU) else torch.randn(2, 3)
    traced = fx.symbolic_trace(model)
    assert module_targets(traced) == {"layer"}
    assert torch.equal(traced(x), model(x))


def test_output_size_is_recorded():
    class Upsampling(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = sn.SphereConvTranspose2d(3, 4, 3, 2, 1)

        def forward(self, x):
            return self.layer(x, output_size=[6, 6])

    model, x = Upsampling(), torch.randn(1, 3, 3, 3)
    traced = fx.symbolic_trace(model)
    assert traced(x).shape == (1, 4, 6, 6)
    assert torch.equal(traced(x), model(x))


def test_head_is_a_leaf_whose_output_has_attributes():
    class Cosines(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = sn.AngularHead(4, 3)

        def forward(self, x):
            return self.head(x).cosine

    model, x = Cosines(), torch.randn(2, 4)
    assert torch.equal(fx.symbolic_trace(model)(x), model(x))


def test_interpreter_reads_shapes_of_sphere_layers():
    from torch.fx.passes.shape_prop import ShapeProp

    traced = fx.symbolic_trace(small_network().eval())
    ShapeProp(traced).propagate(torch.randn(2, 3, 6, 6))
    shapes = {node.target: node.meta["tensor_meta"].shape for node in traced.graph.nodes if node.op == "call_module"}
    assert shapes["0"] == (2, 4, 4, 4)
    assert shapes["3"] == (2, 5, 8, 8)


def test_fx_fusion_leaves_sphere_layers_unchanged():
    from torch.fx.experimental.optimization import fuse

    model, images = nn.Sequential(sn.SphereConv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), torch.randn(8, 3, 6, 6)
    model(images)  # running statistics that change the output
    model.eval()
    torch.testing.assert_close(fuse(model)(images), model(images))
