"""Networks whose parameters and running statistics differ from their initial values, as after training."""

import pytest
import torch
from torch import nn

import spherenet as sn

WIDTHS = {"resnet-18": (4, 6, 8, 10)}


def _perturb(model, images):
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
    """Return a function that creates a small network in training mode with perturbed parameters."""

    def create(name="cnn-3", **options):
        options.setdefault("widths", WIDTHS.get(name, (4, 6, 8)))
        model = sn.create_model(name, **{"operator": None, **options})
        return _perturb(model, torch.randn(8, model.config["in_channels"], *model.config["input_size"]))

    return create


@pytest.fixture
def perturb():
    """Return a function that perturbs the parameters and statistics of a module, given a batch of images."""
    return _perturb
