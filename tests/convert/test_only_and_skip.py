"""Arguments `only` and `skip`: patterns, types, predicates, lists of these, and errors of rules without a match."""

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
    "none": (None, []),
    "name": ("stem", ["stem"]),
    "container": ("layer1", [name for name in ALL if name.startswith("layer1")]),
    "children of a container": ("layer1.*", [name for name in ALL if name.startswith("layer1")]),
    "leading star": ("*.conv1", [name for name in ALL if name.endswith("conv1")]),
    "question mark": ("layer?.0.conv2", ["layer1.0.conv2", "layer2.0.conv2"]),
    "character set": ("layer[2-9].*", ["layer2.0.conv1", "layer2.0.conv2"]),
    "type": (nn.Linear, ["embed"]),
    "type of an ancestor": (Block, [name for name in ALL if name.startswith("layer")]),
    "predicate": (in_first_blocks, [name for name in ALL if ".0." in name]),
    "negated predicate": (lambda name, module: not isinstance(module, nn.Linear), ALL[:-1]),
    "list": (["stem", nn.Linear, in_first_blocks], ["stem", *(n for n in ALL if ".0." in n), "embed"]),
    "tuple": (("stem", "embed"), ["stem", "embed"]),
}


@pytest.mark.parametrize("case", SKIPS)
def test_skip_excludes_matching_layers(case):
    rule, skipped = SKIPS[case]
    assert converted(to_sphere(network(), skip=rule)) == [name for name in ALL if name not in skipped]


@pytest.mark.parametrize("case", [case for case in SKIPS if case != "none"])
def test_only_selects_matching_layers(case):
    rule, selected = SKIPS[case]
    assert converted(to_sphere(network(), only=rule)) == selected


def test_skip_takes_precedence_and_the_summary_names_the_rule():
    sphere = to_sphere(network(), only=["layer1", "embed"], skip=["*.conv1", nn.Linear, in_first_blocks])
    assert converted(sphere) == ["layer1.1.conv2"]
    summary = sphere_summary(sphere)
    assert summary["layer1.0.conv1"].reason == "skipped by rule '*.conv1'"
    assert summary["embed"].reason == "skipped by rule Linear"
    assert summary["layer1.0.conv2"].reason == "skipped by rule in_first_blocks"
    assert summary["stem"].reason == "not selected by only"


def test_predicate_receives_the_original_modules():
    model = network()
    sphere = to_sphere(model, only=lambda name, module: module is model.stem)
    assert converted(sphere) == ["stem"]


def test_rules_match_every_name_of_a_shared_layer():
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(3, 3), "fc": nn.Linear(3, 2)})
    assert converted(to_sphere(model, skip="b")) == ["c"]
    assert converted(to_sphere(model, only="b")) == ["a"]


INVALID = {
    "misspelled pattern": ({"skip": "layr1.*"}, ValueError, r"skip must match.*got 'layr1\.\*'.*similar.*'layer1"),
    "unknown pattern": (
        {"only": "zzz"},
        ValueError,
        "only must match.*'zzz', which.*; similar names: 'stem'",
    ),
    "pattern in a list": (
        {"skip": ["stem", "steam"]},
        ValueError,
        "got 'steam', which.*; similar names: 'stem'",
    ),
    "pattern without layers": ({"skip": "*.bn1"}, ValueError, "matches none"),
    "type": ({"skip": nn.Conv3d}, ValueError, "Conv3d, which matches none; its layers are of type Conv2d, Linear"),
    "number": ({"skip": 3}, TypeError, "skip must be a name pattern, a module type, a predicate.*got 3"),
    "class that is not a module": ({"only": [int]}, TypeError, "only must be.*got <class 'int'>"),
    "module": ({"skip": nn.ReLU()}, TypeError, "skip must be.*got ReLU"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_rules_raise(case):
    arguments, error, message = INVALID[case]
    with pytest.raises(error, match=message) as caught:
        to_sphere(network(), **arguments)
    assert "\n" not in str(caught.value)


def test_error_for_models_without_layers_or_names():
    with pytest.raises(ValueError, match="it has no layers"):
        to_sphere(nn.ReLU(), skip=nn.Conv2d)
    with pytest.raises(ValueError, match="its layers have no names"):
        to_sphere(nn.Conv2d(3, 4, 3), skip="conv")
