"""Time of a whole run of the speed recipe, and the share of its optimizer, from measured steps and evaluations.

The networks alternate in one process: a training step on one batch, a step of the optimizer alone, and the scores of a
batch of an evaluation. The time of a run is the sum over its 200 steps, the evaluations after each epoch and the six
views of the last one. Reading and augmenting images is left out. Run it on a machine that does nothing else.

    python benchmarks/recipe_time.py --threads 2                 # about five minutes
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

import spherenet as sn
from spherenet.bench.networks import Spread, hardware, take_turns
from spherenet.training.recipes import recipe

OPERATORS = (None, "cosine")
SPEED = recipe("speed")
TRAIN_IMAGES, TEST_IMAGES, VIEWS = 50_000, 10_000, 6


def parts_of_a_run(
    operator: str | None, images: int, widths: tuple[int, ...] | None
) -> dict[str, Callable[[], object]]:
    """Return functions of a network: a training step, a step of the optimizer, and the scores of a test batch."""
    torch.manual_seed(0)
    model = sn.create_model("air", operator=operator, widths=widths).to(memory_format=torch.channels_last)
    groups = sn.param_groups(model, 2e-6, filters="muon", rest="sgd")
    muon = {"lr": 0.24, "momentum": 0.6, "norm": "frobenius", "steps": 3}
    optimizer = sn.MixedOptimizer(groups, muon=muon, sgd={"lr": 0.1, "momentum": 0.85, "nesterov": True})
    batch, labels = torch.randn(images, 3, 32, 32).to(memory_format=torch.channels_last), torch.arange(images) % 10

    def train() -> None:
        model.train()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = model(batch, labels)
        loss.backward()
        optimizer.step()

    def score() -> None:
        model.eval()
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            model(batch[: images // 2])

    train()  # the optimizer needs gradients
    return {"step": train, "optimizer": optimizer.step, "scores": score}


def seconds_of_a_run(step: float, scores: float, images: int) -> float:
    """Return the seconds of a run from those of a step on these images and of the scores of half of them."""
    passes = SPEED["epochs"] * (TRAIN_IMAGES // SPEED["batch_size"]) * SPEED["batch_size"] / images
    evaluations = (SPEED["epochs"] + VIEWS) * TEST_IMAGES / (images // 2)
    return float(passes * step + evaluations * scores)


def spread(values: list[float], form: Callable[[float], str]) -> str:
    """Return the median with its quartiles."""
    measured = Spread.of(values)
    return f"{form(measured.median)} ({form(measured.lower)} to {form(measured.upper)})"


def main() -> None:
    """Print one row per network, and the ratio of the SphereNet's time to the CNN's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="threads of torch")
    parser.add_argument("--images", type=int, default=SPEED["batch_size"], help="images of a step; default: a batch")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="measured rounds")
    parser.add_argument("--widths", type=int, nargs=3, help="filters of the groups; default: those of the recipe")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"air, bfloat16, steps of {arguments.images} images, n = {arguments.rounds} rounds; {hardware()}", flush=True)
    print("medians (quartiles)")
    widths = None if arguments.widths is None else tuple(arguments.widths)
    contestants = {
        f"{operator or 'CNN'} {name}": run
        for operator in OPERATORS
        for name, run in parts_of_a_run(operator, arguments.images, widths).items()
    }
    rounds = list(take_turns(contestants, arguments.rounds, warmup=1))
    total = partial(seconds_of_a_run, images=arguments.images)
    runs = {name: [total(seconds[f"{name} step"], seconds[f"{name} scores"]) for seconds in rounds]
            for name in (operator or "CNN" for operator in OPERATORS)}  # fmt: skip
    for name, seconds in runs.items():
        step = spread([one[f"{name} step"] for one in rounds], "{:.2f} s".format)
        share = spread([one[f"{name} optimizer"] / one[f"{name} step"] for one in rounds], "{:.2%}".format)
        minutes = spread([value / 60 for value in seconds], "{:.1f} min".format)
        print(f"{name}: step {step}, of which the optimizer {share}; run {minutes}")
        if name != "CNN":
            ratio = spread([own / base for own, base in zip(seconds, runs["CNN"], strict=True)], "{:.2f}".format)
            print(f"{name}: run {ratio} of the CNN's")


if __name__ == "__main__":
    main()
