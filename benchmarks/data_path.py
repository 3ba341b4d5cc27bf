"""What the data path costs of a training step: making a batch against a whole step, taking turns in one process.

python benchmarks/data_path.py --data cifar10 --augmentation flips-crop
"""

import argparse
import statistics
import time

import torch

import spherenet as sn
from spherenet.data import AUGMENTATIONS, list_datasets, load_dataset
from spherenet.training.evaluation import training_order


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10", choices=list_datasets())
    parser.add_argument("--data-dir")
    parser.add_argument("--augmentation", default="flips-crop", choices=list(AUGMENTATIONS))
    parser.add_argument("--model", default="cnn-9")
    parser.add_argument("--operator", default="sigmoid")
    parser.add_argument("--widths", nargs="+", type=int)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int)
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    dataset = load_dataset(chosen.data, chosen.data_dir)
    model = sn.create_model(
        chosen.model,
        len(dataset.classes),
        operator=chosen.operator,
        widths=chosen.widths,
        in_channels=dataset.preprocessing.channels,
        input_size=dataset.preprocessing.size,
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(sn.param_groups(model, 5e-4), lr=1e-3, fused=True)
    order = training_order(len(dataset.train), chosen.batch_size, 0, 0, lambda indices: indices, 1)
    batches = dataset.train.batches(
        order, device=torch.device("cpu"), augmentation=AUGMENTATIONS[chosen.augmentation], seed=0
    )
    shares, data_times, step_times = [], [], []
    for step in range(chosen.steps + 3):
        began = time.perf_counter()
        batch = next(batches)
        ready = time.perf_counter()
        loss, _ = model(batch.images, batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended = time.perf_counter()
        if step >= 3:  # the first steps compile
            data_times.append(1e3 * (ready - began))
            step_times.append(1e3 * (ended - began))
            shares.append((ready - began) / (ended - began))
    low, median, high = statistics.quantiles(shares, n=4)
    print(
        f"{chosen.model} {chosen.operator}, batch {chosen.batch_size}, {chosen.augmentation}: "
        f"data {statistics.median(data_times):.2f} ms of a step of {statistics.median(step_times):.1f} ms, "
        f"share {median:.2%} (quartiles {low:.2%} … {high:.2%}), n = {chosen.steps}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
