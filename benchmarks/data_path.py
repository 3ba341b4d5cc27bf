"""Fraction of a training step that is spent on data loading.

python benchmarks/data_path.py --data cifar10 --augmentation flips-crop
"""

import argparse
import statistics
import time

import torch

import spherenet as sn
from spherenet.data import AUGMENTATIONS, list_datasets, load_dataset
from spherenet.training import Processes, TrainConfig
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
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    dataset = load_dataset(arguments.data, arguments.data_dir)
    model = sn.create_model(
        arguments.model,
        len(dataset.classes),
        operator=arguments.operator,
        widths=arguments.widths,
        in_channels=dataset.preprocessing.channels,
        input_size=dataset.preprocessing.size,
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(sn.param_groups(model, 5e-4), lr=1e-3, fused=True)
    config = TrainConfig(batch_size=arguments.batch_size)
    order = training_order(len(dataset.train), config, Processes(0, 1, torch.device("cpu")))
    batches = dataset.train.batches(
        order, device=torch.device("cpu"), augmentation=AUGMENTATIONS[arguments.augmentation], seed=0
    )
    fractions, data_times, step_times = [], [], []
    for step in range(arguments.steps + 3):
        start = time.perf_counter()
        batch = next(batches)
        ready = time.perf_counter()
        loss, _ = model(batch.images, batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        if step >= 3:  # warm-up
            data_times.append(1e3 * (ready - start))
            step_times.append(1e3 * (end - start))
            fractions.append((ready - start) / (end - start))
    low, median, high = statistics.quantiles(fractions, n=4)
    print(
        f"{arguments.model} {arguments.operator}, batch {arguments.batch_size}, {arguments.augmentation}: "
        f"data loading {statistics.median(data_times):.2f} ms of a step of {statistics.median(step_times):.1f} ms, "
        f"fraction {median:.2%} (quartiles {low:.2%} … {high:.2%}), n = {arguments.steps}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
