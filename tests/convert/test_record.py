"""Conversion records: a new model becomes spherical in the same way, and nothing in a record is trusted."""

import copy
import json

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import spherenet as sn
from spherenet.convert import apply_conversion, conversion_record, sphere_summary, to_sphere
from spherenet.errors import ModelError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, bias=False),
            nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6), nn.ReLU(),
        )  # fmt: skip
        self.classifier = nn.Linear(6, 4)

    def forward(self, images):
        return self.classifier(self.body(images))


CONVERSIONS = {
    "cosine": lambda model: to_sphere(model),
    "sigmoid": lambda model: to_sphere(model, "sigmoid", k=0.7, rescale=(2.0, 0.5), eps=1e-5),
    "learnable": lambda model: to_sphere(model, "learnable", k=0.4, rescale="learned"),
    "one k per layer": lambda model: to_sphere(model, "learnable", k_sharing="layer"),
    "one k per network": lambda model: to_sphere(model, "learnable", k_sharing="network"),
    "centered": lambda model: to_sphere(model, "linear", center="weight", skip="body.0"),
    "dropped BatchNorm": lambda model: to_sphere(model, drop_batch_norm=True),
    "ball": lambda model: to_sphere(model, magnitude="ball", radius=2.5),
    "learned radius": lambda model: to_sphere(model, magnitude="tanh", radius="learned:2.5", classifier=True),
    "sharpened": lambda model: to_sphere(model, "sharpened-cosine"),
    "one object": lambda model: to_sphere(model, sn.LearnableSigmoidAngle(8), only="body.[03]"),
    "two steps": lambda model: to_sphere(to_sphere(model, "sigmoid", only="body.0"), "linear", only="body.3"),
}


@pytest.mark.parametrize("case", CONVERSIONS)
def test_record_reproduces_the_conversion(case):
    torch.manual_seed(0)
    converted = CONVERSIONS[case](Block()).eval()
    with torch.no_grad():
        for parameter in converted.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    record = json.loads(json.dumps(conversion_record(converted)))
    fresh = Block().eval()
    apply_conversion(fresh, record)
    assert str(fresh) == str(converted)
    fresh.load_state_dict(converted.state_dict())
    rows = [[layer.cells()[:-1] for layer in sphere_summary(model)] for model in (fresh, converted)]
    assert rows[0] == rows[1]
    images = torch.randn(2, 3, 12, 12)
    assert torch.equal(fresh(images), converted(images))
    assert not torch.equal(Block().eval()(images), converted(images))
    shared = [len({id(p) for p in model.parameters()}) for model in (fresh, converted)]
    assert shared[0] == shared[1]
    assert conversion_record(fresh) == record


def test_layers_that_are_already_spherical_stay():
    model = to_sphere(Block(), "linear")
    again = copy.deepcopy(model)
    apply_conversion(again, conversion_record(model))
    assert str(again) == str(model)
    with pytest.raises(ModelError, match=r"'body.0' is already spherical, with other options"):
        apply_conversion(to_sphere(Block(), "cosine"), conversion_record(model))


def test_objects_are_not_recorded():
    def fails(message, **options):
        with pytest.raises(ModelError, match=message):
            conversion_record(to_sphere(Block(), **options))

    fails("must have one of the operators .* got an object of type CustomAngle", operator=sn.CustomAngle(torch.cos))
    fails("operator or magnitude object with others", magnitude=sn.LinearMagnitude(alpha=3.0))
    fails("must not share the learned radii of 'body.0'", magnitude=sn.BallMagnitude(num_filters=8), only="body.[03]")


GOOD = conversion_record(to_sphere(Block(), "sigmoid", drop_batch_norm=True))


def changed(**entries):
    record = copy.deepcopy(GOOD)
    record["layers"]["body.0"] |= entries
    return record


HOSTILE = {
    "no object": [],
    "nothing": None,
    "another format": GOOD | {"format": "x"},
    "newer": GOOD | {"format_version": 2},
    "boolean version": GOOD | {"format_version": True},
    "layers of a list": GOOD | {"layers": []},
    "options of a list": GOOD | {"layers": {"body.0": []}},
    "option missing": GOOD | {"layers": {"body.0": {"operator": "cosine"}}},
    "option unknown": changed(code="import os"),
    "layer missing": GOOD | {"layers": {"nowhere": GOOD["layers"]["body.0"]}},
    "layer of another type": GOOD | {"layers": {"body.2": GOOD["layers"]["body.0"]}},
    "operator unknown": changed(operator="__import__"),
    "operator a number": changed(operator=3),
    "k text": changed(k="0.3"),
    "k huge": changed(k=10**400),
    "k negative": changed(k=-1.0),
    "eps nan": changed(eps=float("nan")),
    "center": changed(center=["weight"]),
    "magnitude": changed(magnitude={"name": "ball"}),
    "radius": changed(magnitude="ball", radius="huge"),
    "rescale": changed(rescale=[1.0]),
    "shared with nothing": changed(angle_of="nowhere"),
    "shared with itself": changed(angle_of="body.0"),
    "shared with another size": GOOD
    | {
        "layers": {
            "body.0": GOOD["layers"]["body.0"] | {"operator": "learnable", "k": 0.5},
            "body.7": GOOD["layers"]["body.7"] | {"operator": "learnable", "k": 0.5, "angle_of": "body.0"},
        }
    },
    "dropped missing": GOOD | {"dropped_batch_norms": {"nowhere": "body.0"}},
    "dropped of another type": GOOD | {"dropped_batch_norms": {"body.0": "body.0"}},
    "dropped names": GOOD | {"dropped_batch_norms": {"body.1": 3}},
    "long name": GOOD | {"layers": {"x" * 100_000: GOOD["layers"]["body.0"]}},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_record_leaves_the_model_unchanged(case):
    model = Block()
    before = str(model)
    with pytest.raises(ModelError) as caught:
        apply_conversion(model, HOSTILE[case])
    assert str(model) == before
    assert len(str(caught.value)) < 600
    assert len(str(caught.value).splitlines()) == 1


def test_model_must_be_a_module():
    with pytest.raises(TypeError, match="model must be a module, got 'model' of type str"):
        apply_conversion("model", GOOD)


def test_computed_weights_are_named():
    def pruned(layer):
        return torch.nn.utils.prune.random_unstructured(layer, "weight", 0.5)

    for change, message in ((pruned, "in a hook"), (nn.utils.parametrizations.orthogonal, "is parametrized")):
        model = to_sphere(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
        change(model[0])
        with pytest.raises(ModelError, match=f"layer '0' .* {message}"):
            conversion_record(model)
