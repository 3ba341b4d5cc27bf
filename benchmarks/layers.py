"""Time of forward and backward of one SphereConv2d relative to a plain convolution of the same shape.

    python benchmarks/layers.py [--channels 64] [--filters 64] [--size 32] [--batch-size 128] [--rounds 15]

Layers alternate in one process. The script prints medians in milliseconds with quartiles, and the ratio to the
convolution in the same round. The ratio of a network is smaller, because BatchNorm, ReLU and optimizer add the same
time to both.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import spherenet as sn
from spherenet.bench.networks import Spread, paired_ratios, take_turns


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("channels", 64), ("filters", 64), ("size", 32), ("batch-size", 128), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    geometry = (arguments.channels, arguments.filters, 3)
    layers: dict[str, nn.Module] = {"convolution": nn.Conv2d(*geometry, padding=1, bias=False)}
    for operator in ("cosine", "linear", "sigmoid", "learnable"):
        layers[operator] = sn.SphereConv2d(*geometry, padding=1, operator=operator)
    shape = (arguments.batch_size, arguments.channels, arguments.size, arguments.size)
    images = torch.randn(shape).to(memory_format=torch.channels_last).requires_grad_()

    def step(layer: nn.Module) -> None:
        out: Tensor = layer(images)
        out.backward(torch.ones_like(out))

    runs = {}
    for name, layer in layers.items():
        layer.to(memory_format=torch.channels_last)
        runs[name] = lambda layer=layer: step(layer)
    rounds = list(take_turns(runs, arguments.rounds, warmup=2))
    print(f"{shape} -> {arguments.filters}, {arguments.threads} threads, torch {torch.__version__}, n = {len(rounds)}")
    for name in layers:
        ms, ratio = Spread.of([1e3 * seconds[name] for seconds in rounds]), paired_ratios(rounds, name, "convolution")
        print(
            f"{name:12} {ms.median:7.1f} ms ({ms.lower:.1f} to {ms.upper:.1f})   "
            f"ratio {ratio.median:.3f} ({ratio.lower:.3f} to {ratio.upper:.3f})"
        )


if __name__ == "__main__":
    main()
