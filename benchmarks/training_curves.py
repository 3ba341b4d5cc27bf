"""Training curves with both algorithms of 3×3 convolutions, to see whether networks train alike.

For each seed, a small network is trained from the same weights on the same batches with `sn.convolution("direct")` and
with "winograd". The script writes one row per algorithm, seed and block of iterations with the mean training loss, and
the test accuracy at the end, and prints how far the algorithms are apart compared with the seeds. Takes about five
minutes on one core.

    OMP_NUM_THREADS=1 python benchmarks/training_curves.py --output docs/training_curves.csv
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from statistics import mean, stdev

import torch

import spherenet as sn
from spherenet.data import Dataset, load_dataset

ALGORITHMS = ("direct", "winograd")
WIDTHS, SIZE, BATCH, BLOCK = (16, 24, 32), 16, 64, 20

Row = dict[str, str | int | float]


def train(dataset: Dataset, algorithm: str, seed: int, iterations: int) -> list[Row]:
    """Return the mean loss of each block of iterations; the last row has the test accuracy."""
    torch.manual_seed(seed)
    model = sn.create_model("cnn-9", operator="cosine", widths=WIDTHS, in_channels=1, input_size=SIZE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    device, rows, losses = torch.device("cpu"), [], []
    with sn.convolution(algorithm):
        for iteration in range(1, iterations + 1):
            chosen = torch.randint(len(dataset.train.labels), (BATCH,), generator=generator)
            (batch,) = dataset.train.batches([(iteration, chosen)], device=device, augmentation=None)
            loss, _ = model(batch.images, batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if iteration % BLOCK == 0:
                row: Row = {"algorithm": algorithm, "seed": seed, "iteration": iteration, "loss": mean(losses)}
                rows.append(row | {"test_accuracy": ""})
                losses = []
        rows[-1]["test_accuracy"] = accuracy(model, dataset)
    return rows


@torch.no_grad()
def accuracy(model: torch.nn.Module, dataset: Dataset) -> float:
    """Return the test accuracy in percent."""
    model.eval()
    order = [(0, indices) for indices in torch.arange(len(dataset.test.labels)).split(250)]
    batches = dataset.test.batches(order, device=torch.device("cpu"), augmentation=None)
    correct = sum(int((model(batch.images).argmax(1) == batch.labels).sum()) for batch in batches)
    return 100 * correct / len(dataset.test.labels)


def summarize(rows: list[Row]) -> str:
    """Return the differences between the algorithms, seed by seed, and the spread of the seeds."""
    lines = []
    last = max(int(row["iteration"]) for row in rows)
    for name, start in (("loss", last // 2), ("test_accuracy", last - 1)):
        of_seed = {
            (algorithm, seed): mean(
                float(row[name])
                for row in rows
                if (row["algorithm"], row["seed"]) == (algorithm, seed) and int(row["iteration"]) > start
            )
            for algorithm, seed in {(str(row["algorithm"]), int(row["seed"])) for row in rows}
        }
        seeds = sorted({seed for _, seed in of_seed})
        differences = [of_seed["winograd", seed] - of_seed["direct", seed] for seed in seeds]
        direct = [of_seed["direct", seed] for seed in seeds]
        lines.append(
            f"{name}: direct {mean(direct):.4f}, standard deviation over seeds {stdev(direct):.4f}; winograd − direct "
            f"{mean(differences):+.4f}, standard deviation {stdev(differences):.4f} (n = {len(seeds)})"
        )
    return "\n".join(lines)


def main() -> None:
    """Train all networks, write the curves and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=400, help=f"a multiple of {BLOCK}")
    parser.add_argument("--output", type=Path, help="file for the curves (csv)")
    arguments = parser.parse_args()
    dataset = load_dataset("mnist5k", image_size=SIZE)
    rows = []
    for seed in range(arguments.seeds):
        for algorithm in ALGORITHMS:
            rows += train(dataset, algorithm, seed, arguments.iterations)
            print(f"seed {seed}, {algorithm}: test accuracy {rows[-1]['test_accuracy']:.2f} %", flush=True)
    if arguments.output is not None:
        with arguments.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | {"loss": f"{row['loss']:.6f}"} for row in rows)
    print(summarize(rows))


if __name__ == "__main__":
    main()
