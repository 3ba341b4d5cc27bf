"""Networks that look trained: every parameter and every running statistic away from where it starts."""

import pytest
import torch
from torch import nn

import spherenet as sn

WIDTHS = {"resnet-18": (4, 6, 8, 10)}


def _lived_in(model, images):
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(std=0.3)
            if isinstance(module, sn.SphereLayer) and isinstance(module.beta, nn.Parameter):
                module.beta.uniform_(0.5, 1.5)
                module.gamma.normal_(std=0.3)
            if isinstance(module, sn.LearnableSigmoidAngle):
                module.raw_k.add_(torch.randn_like(module.raw_k) * 0.3)
        model.train()
        for _ in range(2):
            model(images)
    return model


@pytest.fixture
def network():
    """Make a small network of a name and options of `create_model`, in training mode, as if trained for a while."""

    def make(name="cnn-3", **options):
        options.setdefault("widths", WIDTHS.get(name, (4, 6, 8)))
        model = sn.create_model(name, **{"operator": None, **options})
        return _lived_in(model, torch.randn(8, model.config["in_channels"], *model.config["input_size"]))

    return make


@pytest.fixture
def lived_in():
    """Move a module of one's own away from where it starts, by images."""
    return _lived_in
