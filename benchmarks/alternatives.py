"""Time of other ways to compute angles between patches and kernels, and of angular losses, relative to plain layers.

    python benchmarks/alternatives.py [--channels 64] [--size 32] [--batch-size 64] [--classes 10000] [--rounds 15]

The alternatives are the obvious implementations in plain torch, or pytorch-metric-learning for the losses. Candidates
alternate in one process. The script prints a Markdown table: the median of forward and backward in milliseconds, and
the ratio to the plain layer in the same round with quartiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from pytorch_metric_learning import losses as metric_learning
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import spherenet as sn
from spherenet.bench.networks import Spread, paired_ratios, take_turns

EPS = 1e-4


class UnfoldedCosine(nn.Conv2d):
    """Cosine of every patch, which is copied out of the image, and every kernel."""

    def forward(self, images: Tensor) -> Tensor:
        """Return the cosines."""
        patches = F.normalize(F.unfold(images, self.kernel_size, padding=self.padding), dim=1)
        kernels = F.normalize(self.weight.flatten(1), dim=1)
        return (kernels @ patches).unflatten(2, images.shape[2:])


class TwoConvolutions(nn.Conv2d):
    """Cosine by two convolutions: inner products, and sums of squares with a kernel of ones."""

    def forward(self, images: Tensor) -> Tensor:
        """Return the cosines."""
        kernels = F.normalize(self.weight.flatten(1), dim=1).view_as(self.weight)
        squares = F.conv2d(images.square().sum(1, keepdim=True), torch.ones_like(self.weight[:1, :1]), padding=1)
        return F.conv2d(images, kernels, padding=1) * (squares + EPS).rsqrt()


class SharpenedCosine(TwoConvolutions):
    """sign(c)·|c|^p with one p per filter, from plain operations."""

    def __init__(self, *arguments: int, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.power = nn.Parameter(torch.full((self.out_channels, 1, 1), 2.0))

    def forward(self, images: Tensor) -> Tensor:
        """Return the sharpened cosines."""
        cosine = super().forward(images)
        return cosine.sign() * (cosine.abs() + EPS) ** self.power


class DecoupledTanh(TwoConvolutions):
    """tanh(‖x‖)·cos θ of decoupled networks, from plain operations."""

    def forward(self, images: Tensor) -> Tensor:
        """Return the outputs."""
        squares = F.conv2d(images.square().sum(1, keepdim=True), torch.ones_like(self.weight[:1, :1]), padding=1)
        return super().forward(images) * (squares + EPS).sqrt().tanh()


def layers(channels: int) -> dict[str, nn.Module]:
    """Return the layers by name, the plain one first."""
    shape = (channels, channels, 3)
    sphere: dict[str, dict[str, str]] = {
        "spherenet, cosine": {"operator": "cosine"},
        "spherenet, sigmoid": {"operator": "sigmoid"},
        "spherenet, sharpened cosine": {"operator": "sharpened-cosine"},
        "spherenet, cosine with tanh magnitude": {"operator": "cosine", "magnitude": "tanh"},
    }
    return {
        "nn.Conv2d": nn.Conv2d(*shape, padding=1, bias=False),
        "weight_norm(nn.Conv2d)": weight_norm(nn.Conv2d(*shape, padding=1, bias=False)),
        "cosine by unfold, normalize, matmul": UnfoldedCosine(*shape, padding=1, bias=False),
        "cosine by two convolutions": TwoConvolutions(*shape, padding=1, bias=False),
        "sharpened cosine, plain operations": SharpenedCosine(*shape, padding=1, bias=False),
        "decoupled tanh, plain operations": DecoupledTanh(*shape, padding=1, bias=False),
        **{name: sn.SphereConv2d(*shape, padding=1, **options) for name, options in sphere.items()},
    }


def heads(classes: int, batch_size: int) -> dict[str, Callable[[], Tensor]]:
    """Return functions that compute a loss of random features, the plain one first."""
    features = torch.randn(batch_size, 512, requires_grad=True)
    labels = torch.randint(classes, (batch_size,))
    linear = nn.Linear(512, classes, bias=False)
    head, arcface = sn.AngularHead(512, classes), sn.ArcFaceLoss()
    other = metric_learning.ArcFaceLoss(classes, 512)
    return {
        "nn.Linear, cross entropy": lambda: F.cross_entropy(linear(features), labels),
        "pytorch-metric-learning, ArcFace": lambda: other(features, labels),
        "spherenet, ArcFace": lambda: arcface(head(features), labels),
    }


def print_times(runs: dict[str, Callable[[], object]], rounds: int) -> None:
    """Measure and print one table."""
    measured = list(take_turns(runs, rounds, warmup=2))
    plain = next(iter(runs))
    for name in runs:
        ms, ratio = Spread.of([1e3 * seconds[name] for seconds in measured]), paired_ratios(measured, name, plain)
        print(f"| {name} | {ms.median:.1f} | {ratio.median:.2f} ({ratio.lower:.2f} to {ratio.upper:.2f}) |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"channels": 64, "size": 32, "batch-size": 64, "classes": 10_000, "rounds": 15}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    shape = (arguments.batch_size, arguments.channels, arguments.size, arguments.size)
    images = torch.randn(shape).to(memory_format=torch.channels_last).requires_grad_()

    def of_layer(layer: nn.Module) -> Callable[[], None]:
        layer.to(memory_format=torch.channels_last)

        def step() -> None:
            out = layer(images)
            out.backward(torch.ones_like(out))

        return step

    print(f"{arguments.threads} threads, torch {torch.__version__}, n = {arguments.rounds}\n")
    print(f"| layer, images {' × '.join(map(str, shape))} | ms | ratio to nn.Conv2d |\n|---|---|---|")
    print_times({name: of_layer(layer) for name, layer in layers(arguments.channels).items()}, arguments.rounds)
    print(f"\n| loss, {arguments.classes:,} classes, 512 features | ms | ratio to softmax |\n|---|---|---|")
    steps = heads(arguments.classes, arguments.batch_size)
    print_times({name: lambda loss=loss: loss().backward() for name, loss in steps.items()}, arguments.rounds)


if __name__ == "__main__":
    main()
