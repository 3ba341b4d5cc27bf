"""`sphere_summary`: table and data for converted and other models."""

import copy
import pickle

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.convert import sphere_summary, to_plain, to_sphere

TABLE = """\
name  layer            kind     operator  k    center  reason
0     SphereConv2d     sphere   sigmoid   0.3  patch   converted from Conv2d
1     Identity         dropped  –         –    –       BatchNorm2d dropped after 0
2     ReLU             changed  –         –    –       inplace disabled: the sphere layer before it saves its output
3     Conv2d           plain    –         –    –       skipped by rule '3'
4     BatchNorm2d      norm     –         –    –       BatchNorm kept: it does not directly follow a converted layer
5     ConvTranspose2d  plain    –         –    –       transposed convolution
7     Linear           plain    –         –    –       classifier (last layer of the model)

1 sphere, 3 plain, 1 norm, 1 dropped, 1 changed; 208 parameters, 108 of them in sphere layers (51.9%)"""


def network():
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)),
        *(nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.Linear(18, 2)),
    )


@pytest.fixture
def sphere():
    return to_sphere(network(), "sigmoid", skip="3", drop_batch_norm=True)


def test_printed_table(sphere):
    assert str(sphere_summary(sphere)) == TABLE


def test_summary_as_data(sphere):
    summary = sphere_summary(sphere)
    assert len(summary) == 7
    assert [layer.name for layer in summary if layer.kind == "plain"] == ["3", "5", "7"]
    assert summary["0"].k == 0.3
    assert summary["3"].k is summary["3"].operator is None
    assert summary.count("sphere") == 1
    assert summary.parameters == sum(p.numel() for p in sphere.parameters())
    with pytest.raises(KeyError, match="unknown"):
        summary["unknown"]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_reasons_survive_copies_and_are_not_in_the_state_dict(sphere, duplicate):
    assert str(sphere_summary(duplicate(sphere))) == TABLE
    plain_keys = [key for key in network().state_dict() if not key.startswith("1.")]
    assert list(sphere.state_dict()) == plain_keys


def test_reasons_survive_in_submodules_and_in_larger_models(sphere):
    larger = nn.ModuleDict({"backbone": sphere, "extra": nn.Linear(2, 2)})
    summary = sphere_summary(larger)
    assert summary["backbone.3"].reason == "skipped by rule '3'"
    assert summary["extra"].reason == "as created"
    assert sphere_summary(sphere[:1])["0"].reason == "converted from Conv2d"


def test_summary_of_models_that_were_not_converted():
    model = sn.create_model("cnn-3", operator="learnable", widths=(4, 4, 4))
    with torch.no_grad():
        model.features.stages[0][0][0].angle.raw_k[0] += 1
    summary = sphere_summary(model)
    assert [layer.kind for layer in summary] == ["sphere"] * 4 + ["head"]
    assert {layer.reason for layer in summary} == {"as created"}
    first = summary["features.stages.0.0.0"]
    assert first.operator == "learnable"
    assert first.k == (pytest.approx(0.5), pytest.approx(1.01, abs=0.01))
    assert "0.5 to 1.01" in str(summary)
    plain = sphere_summary(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    assert [(layer.kind, layer.reason) for layer in plain] == [("plain", "as created")]


def test_power_of_sharpened_cosine_is_shown_and_reported_as_dropped():
    sphere = to_sphere(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), "sharpened-cosine")
    row = sphere_summary(sphere)["0"]
    assert (row.parameter, row.k) == ("p", pytest.approx(2.0))
    assert "p = 2" in str(sphere_summary(sphere))
    with torch.no_grad():
        sphere[0].angle.raw_p[0] += 1
    assert sphere_summary(sphere)["0"].k == (pytest.approx(2.0), pytest.approx(2.9, abs=0.01))
    assert sphere_summary(to_plain(sphere))["0"].reason == "converted back from SphereLinear; p dropped"


def test_parameters_of_own_function_are_reported_as_dropped():
    class Scaled(sn.AngleFunction):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, cosine):
            return self.factor * cosine

    plain = to_plain(sn.SphereLinear(3, 4, operator=Scaled()))
    assert sphere_summary(plain)[""].reason == "converted back from SphereLinear; parameters of g dropped"


def test_shared_layers_and_parameters_count_once():
    angle = sn.LearnableSigmoidAngle()
    layer = sn.SphereLinear(3, 3, operator=angle)
    model = nn.ModuleList([layer, layer, sn.SphereLinear(3, 3, operator=angle), nn.LayerNorm(3)])
    summary = sphere_summary(model)
    assert [row.name for row in summary] == ["0", "2"]
    assert summary.sphere_parameters == 9 + 9 + 1
    assert summary.parameters == 9 + 9 + 1 + 6


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_summary_of_lazy_and_meta_models():
    sphere = to_sphere(nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(2)), "learnable")
    summary = sphere_summary(sphere)
    assert (summary["0"].layer, summary["2"].layer) == ("LazySphereConv2d", "LazyLinear")
    assert summary.parameters == 4  # only k has a shape so far
    with torch.device("meta"):
        summary = sphere_summary(sn.SphereLinear(3, 4, operator="learnable"))
    assert summary[""].k is None
    assert "(model)" in str(summary)


def test_summary_of_models_without_layers_and_invalid_model():
    assert str(sphere_summary(nn.ReLU())).endswith("0 sphere, 0 plain; 0 parameters, 0 of them in sphere layers (0.0%)")
    with pytest.raises(TypeError, match="model must be a module, got 3"):
        sphere_summary(3)


def test_summary_after_to_plain(sphere):
    learned = to_sphere(to_plain(sphere), "learnable", rescale="learned", only="0")
    assert sphere_summary(learned)["0"].reason == "converted from Conv2d"
    summary = sphere_summary(to_plain(learned))
    assert summary["0"].reason == "converted back from SphereConv2d; k, β and γ dropped"
    assert summary["1"].reason == "BatchNorm2d dropped after 0; not restored"
    assert summary["7"].reason == "as created"
    assert not [row for row in summary if row.kind == "changed"]
