"""Parameter groups: which parameters have weight decay."""

import math

import pytest
import torch
from torch import nn

from spherenet.angles import AngleFunction, LearnableSigmoidAngle
from spherenet.layers import AngularHead, LazySphereConv2d, SphereConv2d, SphereLinear
from spherenet.losses import CosFaceLoss, SoftmaxLoss, WSoftmaxLoss
from spherenet.optim import param_groups


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.sphere = SphereConv2d(3, 4, 3, bias=True, operator="learnable", rescale="learned")
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 5, 3)
        self.layer_norm = nn.LayerNorm([5, 2, 2])
        self.group_norm = nn.GroupNorm(1, 5)
        self.act = nn.PReLU(5)
        self.fc = nn.Linear(5, 6)
        self.sphere_fc = SphereLinear(6, 7)


def names_of(model, groups):
    """Return the names of the parameters of each group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["name"]: {names[id(p)] for p in group["params"]} for group in groups}


def test_learned_radii_are_not_decayed():
    layer = SphereLinear(6, 7, magnitude="ball", radius="learned")
    for model in (layer, layer.magnitude):
        names = names_of(model, param_groups(model, 5e-4))
        assert names["decay"] == set()
        assert any(name.endswith("raw_radius") for name in names["no_decay"])


def test_only_plain_weights_are_decayed():
    model = Net()
    groups = param_groups(model, 5e-4)
    assert [(group["name"], group["weight_decay"]) for group in groups] == [("decay", 5e-4), ("no_decay", 0.0)]
    names = names_of(model, groups)
    assert names["decay"] == {"conv.weight", "fc.weight"}
    assert names["no_decay"] == {name for name, _ in model.named_parameters()} - names["decay"]
    assert {"sphere.weight", "sphere.angle.raw_k", "sphere.beta", "sphere.gamma", "sphere.bias"} < names["no_decay"]
    assert {"norm.weight", "layer_norm.weight", "act.weight", "fc.bias"} < names["no_decay"]


@pytest.mark.parametrize(
    "make", [lambda m: m, lambda m: nn.Sequential(m, m), lambda m: nn.ModuleList([m, m.conv, m.fc])]
)
def test_every_trainable_parameter_exactly_once(make):
    model = make(Net())
    held = [p for group in param_groups(model, 0.1) for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))


class SingleParameter(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(shape))


class CurvedAngle(AngleFunction):
    def __init__(self):
        super().__init__()
        self.curvature = nn.Parameter(torch.zeros(3, 3))


@pytest.mark.parametrize(
    ("module", "decayed"),
    [
        (nn.Conv1d(2, 3, 3), {"weight"}),
        (nn.ConvTranspose2d(2, 3, 3), {"weight"}),
        (nn.Bilinear(2, 3, 4), {"weight"}),
        (nn.MultiheadAttention(4, 2), {"in_proj_weight", "out_proj.weight"}),
        (nn.LSTM(2, 3), {"weight_ih_l0", "weight_hh_l0"}),
        (SingleParameter((3, 4)), {"matrix"}),
        (SingleParameter((3,)), set()),
        (SingleParameter(()), set()),
        (nn.Embedding(5, 3), set()),
        (nn.EmbeddingBag(5, 3), set()),
        (nn.InstanceNorm2d(3, affine=True), set()),
        (nn.SyncBatchNorm(3), set()),
        (nn.RMSNorm([3, 4]), set()),
        (LearnableSigmoidAngle(4), set()),
        (CurvedAngle(), set()),
        (SphereLinear(3, 4, operator=CurvedAngle()), set()),
        (nn.utils.parametrizations.weight_norm(SphereLinear(3, 4)), set()),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), {"parametrizations.weight.original"}),
        (nn.ReLU(), set()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_decayed_parameters_by_module_type(module, decayed):
    groups = param_groups(module, 0.1)
    names = names_of(module, groups)
    assert names["decay"] == decayed
    assert names["no_decay"] == {name for name, _ in module.named_parameters()} - decayed


class Head(nn.Module):
    """Class weights whose norm matters to some losses only."""

    scale_invariant = False

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.zeros(3))


def test_module_can_declare_itself_scale_invariant():
    head = Head()
    assert names_of(head, param_groups(head, 0.1)) == {"decay": {"weight"}, "no_decay": {"bias"}}
    head.scale_invariant = True
    assert names_of(head, param_groups(head, 0.1)) == {"decay": set(), "no_decay": {"weight", "bias"}}


class Network(nn.Module):
    """Hand-built network with a head and a loss."""

    def __init__(self, criterion):
        super().__init__()
        self.body, self.head, self.criterion = nn.Linear(3, 4), AngularHead(4, 5, bias=True), criterion


@pytest.mark.parametrize(
    ("criterion", "decayed"),
    [
        (SoftmaxLoss(), True),
        (WSoftmaxLoss(), False),
        (CosFaceLoss(), False),
        (nn.CrossEntropyLoss(), True),
        (nn.ModuleList([WSoftmaxLoss(), SoftmaxLoss()]), True),
    ],
    ids=["softmax", "w-softmax", "cosface", "torch", "two losses"],
)
def test_class_weights_are_decayed_unless_the_loss_normalizes_them(criterion, decayed):
    model = Network(criterion)
    names = names_of(model, param_groups(model, 0.1))
    assert names["decay"] == {"body.weight"} | ({"head.weight"} if decayed else set())
    wrapped = nn.Sequential(nn.Sequential(model), nn.Linear(2, 2))
    assert ("0.0.head.weight" in names_of(wrapped, param_groups(wrapped, 0.1))["decay"]) == decayed


def test_class_weights_without_a_loss_are_decayed():
    head = AngularHead(4, 5)
    assert names_of(head, param_groups(head, 0.1))["decay"] == {"weight"}
    with_loss = nn.ModuleList([head, CosFaceLoss()])
    assert names_of(with_loss, param_groups(with_loss, 0.1))["decay"] == set()


def test_each_head_has_the_loss_of_the_nearest_module():
    model = nn.ModuleDict({"plain": Network(SoftmaxLoss()), "normalized": Network(WSoftmaxLoss())})
    names = names_of(model, param_groups(model, 0.1))
    assert names["decay"] == {"plain.body.weight", "plain.head.weight", "normalized.body.weight"}


def test_replaced_loss_is_used():
    model = Network(SoftmaxLoss())
    model.criterion = WSoftmaxLoss()
    assert "head.weight" in names_of(model, param_groups(model, 0.1))["no_decay"]


@pytest.mark.parametrize("declared", [True, False])
def test_declaration_takes_precedence_over_the_loss(declared):
    model = Network(SoftmaxLoss() if declared else WSoftmaxLoss())
    model.head.scale_invariant = declared
    assert ("head.weight" in names_of(model, param_groups(model, 0.1))["no_decay"]) == declared


def test_shared_parameter_is_decayed_only_if_all_its_modules_would():
    sphere, plain, embedding, other = (
        SphereLinear(4, 4),
        nn.Linear(4, 4),
        nn.Embedding(4, 4),
        nn.Linear(4, 4, bias=False),
    )
    plain.weight = sphere.weight
    for order in ([sphere, plain], [plain, sphere]):
        model = nn.Sequential(*order)
        assert param_groups(model, 0.1)[0]["params"] == []
    other.weight = embedding.weight
    for order in ([embedding, other], [other, embedding]):
        assert param_groups(nn.Sequential(*order), 0.1)[0]["params"] == []
    shared_k = LearnableSigmoidAngle()
    layers = nn.Sequential(SphereLinear(4, 4, operator=shared_k), SphereLinear(4, 4, operator=shared_k))
    assert len(param_groups(layers, 0.1)[1]["params"]) == 3


def test_frozen_parameters_are_left_out_and_both_groups_exist():
    model = Net()
    model.fc.requires_grad_(False)
    model.conv.requires_grad_(False)
    groups = param_groups(model, 0.1)
    names = names_of(model, groups)
    assert names["decay"] == set()
    assert not any(name.startswith(("fc", "conv")) for name in names["no_decay"])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("freeze", [False, True])
def test_optimizers_decay_the_first_group_only(optimizer, freeze):
    model = nn.Sequential(SphereLinear(4, 4), nn.Linear(4, 4))
    if freeze:
        model[1].requires_grad_(False)
    optim = optimizer(param_groups(model, 0.5), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optim.step()
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert moved == [False, not freeze, False]
    assert [group["name"] for group in optim.state_dict()["param_groups"]] == ["decay", "no_decay"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: param_groups(Net(), -1e-4), ValueError, "weight_decay must be at least 0, got -0.0001"),
        (lambda: param_groups(Net(), math.nan), ValueError, "weight_decay must be finite, got nan"),
        (lambda: param_groups(Net(), math.inf), ValueError, "weight_decay must be finite, got inf"),
        (lambda: param_groups(Net(), "5e-4"), TypeError, "weight_decay must be a number, got '5e-4'"),
        (lambda: param_groups(Net().parameters(), 0.1), TypeError, "model must be a module, got .* of type generator"),
        (
            lambda: param_groups(nn.Sequential(LazySphereConv2d(4, 3)), 0.1),
            ValueError,
            "0.weight is lazy and has no shape",
        ),
        (lambda: param_groups(nn.LazyLinear(3), 0.1), ValueError, "but weight is lazy .* run one batch"),
    ],
)
def test_invalid_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
