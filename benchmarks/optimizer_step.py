"""Share of a step of the optimizer in a training step of the speed recipe.

Forward and backward of some images and a step of the optimizer are timed in turns. A batch of the recipe has 2,000
images, so that its forward and backward take 2,000/images times as long. Run it on a machine that does nothing else.

    python benchmarks/optimizer_step.py --threads 2                 # about a minute
"""

from __future__ import annotations

import argparse
import time
from statistics import median, quantiles

import torch

import spherenet as sn
from spherenet.bench.networks import hardware

OPERATORS = (None, "cosine")


def measure(
    operator: str | None, images: int, rounds: int, widths: tuple[int, ...] | None
) -> tuple[list[float], list[float]]:
    """Return the seconds of forward and backward, and of steps of the recipe's optimizer, after a warm-up."""
    torch.manual_seed(0)
    model = sn.create_model("air", operator=operator, widths=widths).to(memory_format=torch.channels_last)
    groups = sn.param_groups(model, 2e-6, filters="muon", rest="sgd")
    muon = {"lr": 0.24, "momentum": 0.6, "norm": "frobenius", "steps": 3}
    optimizer = sn.MixedOptimizer(groups, muon=muon, sgd={"lr": 0.1, "momentum": 0.85, "nesterov": True})
    batch, labels = torch.randn(images, 3, 32, 32).to(memory_format=torch.channels_last), torch.arange(images) % 10
    passes, steps = [], []
    for _ in range(rounds + 1):
        optimizer.zero_grad()
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = model(batch, labels)
        loss.backward()
        middle = time.perf_counter()
        optimizer.step()
        passes.append(middle - start)
        steps.append(time.perf_counter() - middle)
    return passes[1:], steps[1:]


def main() -> None:
    """Print one row per network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="threads of torch")
    parser.add_argument("--images", type=int, default=500, help="images of a forward and backward pass")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="measured rounds")
    parser.add_argument("--widths", type=int, nargs=3, help="filters of the groups; default: those of the recipe")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"air, bfloat16, {arguments.images} images, n = {arguments.rounds} rounds; {hardware()}", flush=True)
    widths = None if arguments.widths is None else tuple(arguments.widths)
    for operator in OPERATORS:
        passes, steps = measure(operator, arguments.images, arguments.rounds, widths)
        shares = [step / (step + 2000 / arguments.images * pair) for pair, step in zip(passes, steps, strict=True)]
        lower, _, upper = quantiles(shares, n=4)
        times = f"forward and backward {1000 * median(passes):.0f} ms, step {1000 * median(steps):.0f} ms"
        print(
            f"{operator or 'CNN':7} {times}, {median(shares):.2%} of a training step ({lower:.2%} to {upper:.2%})",
            flush=True,
        )


if __name__ == "__main__":
    main()
