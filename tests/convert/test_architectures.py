"""Conversion of VGG and GoogLeNet, which the paper mentions, with training and conversion back."""

import pytest
import torch
from torch import Tensor, nn

import spherenet as sn
from spherenet.convert import sphere_summary, to_plain, to_sphere
from spherenet.layers import SphereLayer


class VGG(nn.Module):
    """Stages of 3×3 convolutions with in-place ReLU and max pooling, then three linear layers."""

    def __init__(self, batch_norm: bool, widths=((8,), (12, 12)), classes: int = 5) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in widths:
            for width in stage:
                norm = [nn.BatchNorm2d(width)] if batch_norm else []
                layers += [nn.Conv2d(channels, width, 3, padding=1, bias=not batch_norm), *norm, nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            *(nn.Linear(channels * 16, 16), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(16, classes)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class ConvNormReLU(nn.Module):
    def __init__(self, channels: int, width: int, kernel: int, **options: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, kernel, bias=False, **options)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.bn(self.conv(x)))


class Inception(nn.Module):
    """Concatenation of four branches."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.branch1 = ConvNormReLU(channels, width, 1)
        self.branch2 = nn.Sequential(ConvNormReLU(channels, width, 1), ConvNormReLU(width, width, 3, padding=1))
        self.branch3 = nn.Sequential(ConvNormReLU(channels, width, 1), ConvNormReLU(width, width, 5, padding=2))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvNormReLU(channels, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class Auxiliary(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv = ConvNormReLU(channels, 8, 1)
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(self.conv(x).mean((2, 3)))))


class GoogLeNet(nn.Module):
    """Inception modules with an auxiliary classifier that is used in training only."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = ConvNormReLU(3, 8, 7, stride=2, padding=3)
        self.inception3a = Inception(8, 4)
        self.inception3b = Inception(16, 4)
        self.aux1 = Auxiliary(16, classes)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.inception3a(self.conv1(x))
        auxiliary = self.aux1(x) if self.training else None
        scores = self.fc(self.dropout(self.inception3b(x).mean((2, 3))))
        return scores if auxiliary is None else (scores, auxiliary)


NETWORKS = {
    "vgg": (lambda: VGG(batch_norm=False), ["classifier.6"]),
    "vgg-bn": (lambda: VGG(batch_norm=True), ["classifier.6"]),
    "googlenet": (GoogLeNet, ["aux1.fc2", "fc"]),
}


@pytest.mark.parametrize("drop_batch_norm", [False, True])
@pytest.mark.parametrize("operator", ["cosine", "learnable"])
@pytest.mark.parametrize("name", NETWORKS)
def test_converted_network_trains_and_evaluates(name, operator, drop_batch_norm):
    make, plain = NETWORKS[name]
    model = make()
    sphere = to_sphere(model, operator, drop_batch_norm=drop_batch_norm)
    left_plain = [
        n for n, m in sphere.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and not isinstance(m, SphereLayer)
    ]
    assert left_plain == plain
    weights = dict(model.named_parameters())
    for key, value in sphere.named_parameters():
        if key in weights:
            torch.testing.assert_close(value, weights[key], rtol=0, atol=0)
    assert any(isinstance(m, nn.BatchNorm2d) for m in sphere.modules()) == (not drop_batch_norm and name != "vgg")

    x, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])
    optimizer = torch.optim.Adam(sn.param_groups(sphere, 1e-4), lr=1e-2)
    losses = []
    for _ in range(8):
        scores = sphere(x)
        scores = scores if isinstance(scores, tuple) else (scores,)
        loss = sum(nn.functional.cross_entropy(s, labels) for s in scores)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in sphere.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    sphere.eval()
    assert sphere(x).shape == (4, 5)
    torch.testing.assert_close(sphere(x[:2]), sphere(x)[:2])


@pytest.mark.parametrize("name", NETWORKS)
def test_to_plain_restores_outputs_exactly(name):
    model = NETWORKS[name][0]().eval()
    back = to_plain(to_sphere(model))
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(back(x), model(x), rtol=0, atol=0)
    assert repr(back) == repr(model)
    assert list(back.state_dict()) == list(model.state_dict())


def test_converted_vgg_without_bias_ignores_image_scale():
    """Scaling an image leaves all angles and so the scores unchanged, up to eps."""
    model = VGG(batch_norm=True).eval()
    sphere = to_sphere(model, "cosine", eps=1e-9)
    x = torch.rand(2, 3, 16, 16) + 0.5
    torch.testing.assert_close(sphere(3 * x), sphere(x), rtol=1e-4, atol=1e-5)
    assert (model(3 * x) - model(x)).abs().max() > 1e-3


def test_summary_of_googlenet():
    summary = sphere_summary(to_sphere(GoogLeNet(), drop_batch_norm=True))
    assert summary.count("sphere") == 1 + 2 * 6 + 1 + 1
    assert summary.count("dropped") == 1 + 2 * 6 + 1
    assert summary["fc"].reason == "classifier (named 'fc')"
    assert summary["aux1.fc2"].reason == "classifier (named 'aux1')"
    assert summary["inception3a.branch2.0.bn"].reason == "BatchNorm2d dropped after inception3a.branch2.0.conv"
