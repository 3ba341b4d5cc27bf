"""`MixedOptimizer`: each group takes the steps of its algorithm, in one optimizer with one state dict."""

import copy

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.optim import MixedOptimizer, Muon


def network():
    torch.manual_seed(0)
    return sn.create_model("cnn-3", operator="cosine", widths=(4, 4, 4), input_size=8)


def train(model, optimizer, steps, first=0):
    for seed in range(first, first + steps):
        generator = torch.Generator().manual_seed(seed)
        images, labels = torch.rand(6, 3, 8, 8, generator=generator), torch.randint(10, (6,), generator=generator)
        optimizer.zero_grad()
        model(images, labels)[0].backward()
        optimizer.step()


OPTIONS = {"muon": {"lr": 0.1, "norm": "filter"}, "sgd": {"lr": 0.05, "momentum": 0.9}}


def mixed(model):
    return MixedOptimizer(sn.param_groups(model, 5e-4, filters="muon", rest="sgd"), **OPTIONS)


def test_groups_hold_every_parameter_once_and_filters_go_to_muon():
    model = network()
    groups = sn.param_groups(model, 5e-4, filters="muon", rest="sgd")
    assert [(group["name"], group["algorithm"]) for group in groups] == [
        ("filters", "muon"),
        ("decay", "sgd"),
        ("no_decay", "sgd"),
    ]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    filters = {id(parameter) for parameter in groups[0]["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in filters}
    assert "head.weight" not in names
    assert len(names) == 4
    assert all(name.startswith("features") and name.endswith("weight") for name in names)


def test_groups_without_filters_are_those_of_before():
    assert [group.keys() for group in sn.param_groups(network(), 5e-4)] == [{"name", "params", "weight_decay"}] * 2


def test_steps_are_those_of_separate_optimizers():
    models = [network(), network()]
    groups = sn.param_groups(models[1], 5e-4, filters="muon", rest="sgd")

    class Both:
        def __init__(self):
            options = [{key: value for key, value in group.items() if key != "algorithm"} for group in groups]
            self.parts = [Muon(options[:1], **OPTIONS["muon"]), torch.optim.SGD(options[1:], **OPTIONS["sgd"])]

        def zero_grad(self):
            models[1].zero_grad()

        def step(self):
            for part in self.parts:
                part.step()

    train(models[0], mixed(models[0]), 5)
    train(models[1], Both(), 5)
    for own, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(own, other)


def test_resumed_run_is_bit_identical_and_copies_are_independent():
    model = network()
    optimizer = mixed(model)
    train(model, optimizer, 3)
    other = copy.deepcopy(model)
    resumed = MixedOptimizer(sn.param_groups(other, 0, filters="muon", rest="sgd"))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 3, first=3)
    train(other, resumed, 3, first=3)
    for own, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(own, loaded)
    model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    train(model, optimizer, 1, first=6)
    train(model_copy, optimizer_copy, 1, first=6)
    for own, copied in zip(model.parameters(), model_copy.parameters(), strict=True):
        assert torch.equal(own, copied)


def test_scheduler_changes_every_group():
    optimizer = mixed(network())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, 4)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.075, 0.0375, 0.0375])


def test_gradient_scaler_skips_a_step_that_is_not_finite():
    model = network()
    optimizer, scaler = mixed(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for scale, is_changed in ((1.0, True), (float("inf"), False)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        loss = model(torch.rand(6, 3, 8, 8), torch.arange(6))[0] * scale
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True)]
        assert all(same) != is_changed


def test_added_group_is_trained():
    model, extra = network(), nn.Linear(3, 2)
    optimizer = mixed(model)
    optimizer.add_param_group({"params": extra.parameters(), "algorithm": "adamw", "lr": 0.1})
    before = extra.weight.detach().clone()
    extra(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(extra.weight, before)


def test_unknown_algorithms_are_refused():
    group = {"params": [nn.Parameter(torch.ones(2, 2))]}
    with pytest.raises(ValueError, match=r"^algorithm must be one of .*muon.*, got 'lion'"):
        MixedOptimizer([{**group, "algorithm": "lion"}])
    with pytest.raises(ValueError, match=r"^algorithm must be one of .*, got None"):
        MixedOptimizer([group])
    with pytest.raises(ValueError, match=r"^an option must be one of .*, got 'lion'"):
        MixedOptimizer([{**group, "algorithm": "sgd"}], lion={})


def test_options_that_an_algorithm_does_not_have_are_refused():
    """Torch ignores unknown options of a group, so that a wrong name would go unnoticed."""
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], "algorithm": "muon"}]
    with pytest.raises(ValueError, match=r"^an option of muon must be one of 'lr', .*, got 'momentun'\. Did you mean"):
        MixedOptimizer(groups, muon={"momentun": 0.9})
    with pytest.raises(ValueError, match=r"^an option of adamw must be one of 'lr', .*, got 'momentum'"):
        MixedOptimizer(groups, adamw={"momentum": 0.9})
    with pytest.raises(TypeError, match=r"^muon must be a dictionary of options, got float\.$"):
        MixedOptimizer(groups, muon=0.1)


@pytest.mark.parametrize("optimizer", [sn.Muon, sn.Hyperball, MixedOptimizer])
@pytest.mark.parametrize(
    "params",
    [nn.Linear(2, 2), torch.ones(2, 2), None, "decay", {"params": []}, torch.optim.Adam([torch.ones(2, 2)])],
    ids=lambda params: type(params).__name__,
)
def test_what_is_not_a_list_of_parameters_is_refused(optimizer, params):
    name = "groups" if optimizer is MixedOptimizer else "params"
    message = (
        rf"^{name} must be parameters or groups of them, such as model\.parameters\(\), got {type(params).__name__}\.$"
    )
    with pytest.raises(TypeError, match=message):
        optimizer(params)
