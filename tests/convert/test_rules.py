"""Rules for what to convert: patterns, types, predicates, lists of them, and what they say when they miss."""

from collections import OrderedDict

import pytest
from torch import nn

from spherenet.convert import sphere_summary, to_sphere
from spherenet.layers import SphereLayer


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3)
        self.conv2 = nn.Conv2d(4, 4, 1)


def network():
    stages = {"layer1": nn.Sequential(Block(), Block()), "layer2": nn.Sequential(Block())}
    return nn.Sequential(OrderedDict(stem=nn.Conv2d(3, 4, 3), **stages, embed=nn.Linear(4, 4), fc=nn.Linear(4, 2)))


ALL = [
    *("stem", "layer1.0.conv1", "layer1.0.conv2", "layer1.1.conv1", "layer1.1.conv2", "layer2.0.conv1"),
    *("layer2.0.conv2", "embed"),
]


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, SphereLayer)]


def in_first_blocks(name, module):
    return ".0." in name


SKIPS = {
    "nothing": (None, []),
    "a name": ("stem", ["stem"]),
    "a container": ("layer1", [name for name in ALL if name.startswith("layer1")]),
    "below a container": ("layer1.*", [name for name in ALL if name.startswith("layer1")]),
    "a star in front": ("*.conv1", [name for name in ALL if name.endswith("conv1")]),
    "a question mark": ("layer?.0.conv2", ["layer1.0.conv2", "layer2.0.conv2"]),
    "a set": ("layer[2-9].*", ["layer2.0.conv1", "layer2.0.conv2"]),
    "a type": (nn.Linear, ["embed"]),
    "a type around": (Block, [name for name in ALL if name.startswith("layer")]),
    "a predicate": (in_first_blocks, [name for name in ALL if ".0." in name]),
    "a predicate of containers' opposite": (lambda name, module: not isinstance(module, nn.Linear), ALL[:-1]),
    "a list": (["stem", nn.Linear, in_first_blocks], ["stem", *(n for n in ALL if ".0." in n), "embed"]),
    "a tuple": (("stem", "embed"), ["stem", "embed"]),
}


@pytest.mark.parametrize("case", SKIPS)
def test_skip(case):
    rule, skipped = SKIPS[case]
    assert converted(to_sphere(network(), skip=rule)) == [name for name in ALL if name not in skipped]


@pytest.mark.parametrize("case", [case for case in SKIPS if case != "nothing"])
def test_only_is_the_opposite(case):
    rule, chosen = SKIPS[case]
    assert converted(to_sphere(network(), only=rule)) == chosen


def test_skip_wins_over_only_and_the_summary_names_the_rule():
    sphere = to_sphere(network(), only=["layer1", "embed"], skip=["*.conv1", nn.Linear, in_first_blocks])
    assert converted(sphere) == ["layer1.1.conv2"]
    summary = sphere_summary(sphere)
    assert summary["layer1.0.conv1"].reason == "skipped by rule '*.conv1'"
    assert summary["embed"].reason == "skipped by rule Linear"
    assert summary["layer1.0.conv2"].reason == "skipped by rule in_first_blocks"
    assert summary["stem"].reason == "left out by only"


def test_a_predicate_sees_the_users_own_modules():
    model = network()
    sphere = to_sphere(model, only=lambda name, module: module is model.stem)
    assert converted(sphere) == ["stem"]


def test_every_name_of_a_shared_layer_counts():
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(3, 3), "fc": nn.Linear(3, 2)})
    assert converted(to_sphere(model, skip="b")) == ["c"]
    assert converted(to_sphere(model, only="b")) == ["a"]


WRONG = {
    "a misspelt pattern": ({"skip": "layr1.*"}, ValueError, r"skip must name.*'layr1\.\*' names none; near.*'layer1"),
    "a pattern near nothing": ({"only": "zzz"}, ValueError, "only must name.*'zzz' names none; near names: 'stem'"),
    "one of a list": ({"skip": ["stem", "steam"]}, ValueError, "'steam' names none; near names: 'stem'"),
    "a pattern of no layer": ({"skip": "*.bn1"}, ValueError, "names none"),
    "a type": ({"skip": nn.Conv3d}, ValueError, "Conv3d names none; its layers are of type Conv2d, Linear"),
    "a number": ({"skip": 3}, TypeError, "skip must be a name pattern, a module type, a predicate.*got 3"),
    "a class that is no module": ({"only": [int]}, TypeError, "only must be.*got <class 'int'>"),
    "a module": ({"skip": nn.ReLU()}, TypeError, "skip must be.*got ReLU"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rules(case):
    arguments, error, message = WRONG[case]
    with pytest.raises(error, match=message) as caught:
        to_sphere(network(), **arguments)
    assert "\n" not in str(caught.value)


def test_no_layers_no_names():
    with pytest.raises(ValueError, match="it has no layers"):
        to_sphere(nn.ReLU(), skip=nn.Conv2d)
    with pytest.raises(ValueError, match="its layers have no names"):
        to_sphere(nn.Conv2d(3, 4, 3), skip="conv")
