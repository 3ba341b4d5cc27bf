"""Train in several processes, on CPUs (gloo) or GPUs (NCCL), with the library's trainer and torch's DDP.

The batch size is that of all processes together and is divided among them, so that one process and two take the same
steps up to rounding. There is no BatchNorm, because on CPUs it would see the images of one process only. At the end the
processes compare their weights with the mean over all of them. The digits are embedded (mnist5k).

    torchrun --nproc-per-node 2 examples/multi_process.py       under a minute on two cores
    python examples/multi_process.py                            one process alone
"""

import argparse
import tempfile
from pathlib import Path

import torch

import spherenet as sn
from spherenet.data import load_dataset
from spherenet.runs import RunDirectory
from spherenet.training import Processes, Reporter, StopSignals, TrainConfig, Trainer


class Printer(Reporter):
    """Print each row of metrics; the trainer calls it in the main process only."""

    def logged(self, row: dict[str, float]) -> None:  # noqa: D102
        print(f"step {row['step']:4}  {row['split']:<6}loss {row['loss']:.4f}  accuracy {row['accuracy']:.3f}")


def train(processes: Processes, folder: str, iterations: int) -> None:
    """Train a small SphereNet; metrics and checkpoints are written to `folder`."""
    data = load_dataset("mnist5k")
    torch.manual_seed(0)  # the same weights in all processes
    shape = {"widths": (16, 24, 32), "in_channels": 1, "input_size": 28}
    model = sn.create_model("cnn-3", operator="sigmoid", loss="w-cosine", batch_norm=False, **shape)
    every = max(1, iterations // 4)
    config = TrainConfig(
        iterations=iterations,
        batch_size=64,
        probes=False,
        log_every=every,
        eval_every=iterations,
        checkpoint_every=iterations,
    )
    trainer = Trainer(model, data, config, processes, RunDirectory(Path(folder)), reporter=Printer())
    with StopSignals() as stop:  # Ctrl-C and SIGTERM save a checkpoint and stop
        outcome = trainer.train(stop)
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    difference = (weights - processes.total(weights.clone()) / processes.world).abs().max().item()
    if processes.is_main and outcome.signal is None:
        accuracy = 100 * outcome.accuracy
        print(f"processes: {processes.world}, test accuracy {accuracy:.1f} %, difference of weights {difference:g}")


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--iterations", type=int, default=200, help="steps of 64 digits")
iterations = parser.parse_args().iterations
with tempfile.TemporaryDirectory() as own, Processes.joined() as processes:
    train(processes, processes.from_main(lambda: own), iterations)
