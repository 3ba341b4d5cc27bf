"""Script of test_sharding_costs.py: bytes that training steps allocate and exchange, in each of four processes.

    python measured_costs.py RANK STORE OUTPUT

Process 0 writes [{case, peak bytes, {collective: bytes}}, …] as JSON: for four processes, then for two of them.
"""

import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import spherenet as sn
from spherenet.bench.networks import peak_bytes
from spherenet.losses import make_loss
from spherenet.training import Processes, TrainConfig
from spherenet.training.optimizers import build_optimizer
from spherenet.training.sharding import shard_model

IMAGE, HIDDEN = 64, 2048
CLASSES, FEATURES = 40_000, 32
PARAMETERS = HIDDEN * (IMAGE + FEATURES)


@dataclass(frozen=True)
class Case:
    """Options of a measurement. With 64 images maps of all classes dominate, with 8 images the class weights."""

    processes: int
    batch_size: int
    optimizer: str = "adam"
    precision: str = "float32"
    sharding: str = "ddp"
    shard_head: bool = False
    sample_rate: float = 1.0


CASES = [
    Case(4, 64),
    Case(4, 8, optimizer="sgd"),
    Case(4, 64, precision="bfloat16"),
    Case(4, 64, sharding="fsdp"),
    Case(4, 8, sharding="fsdp"),
    Case(4, 64, shard_head=True),
    Case(4, 8, shard_head=True, sample_rate=0.25),
    Case(4, 8, shard_head=True, sharding="fsdp"),
    Case(2, 8),
    Case(2, 8, sharding="fsdp"),
    Case(2, 8, shard_head=True),
    Case(2, 64, shard_head=True, sample_rate=0.25),
]


class Exchanged(TorchDispatchMode):
    """Count the bytes of collectives: of the whole that is gathered, scattered or summed."""

    def __init__(self):
        super().__init__()
        self.sizes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if "c10d" in name and "wait" not in name:
            self.sizes[name.split(".")[1]] += max(map(_bytes, args))
        return function(*args, **(kwargs or {}))


def _bytes(argument):
    if isinstance(argument, torch.Tensor):
        return argument.nbytes
    return sum(map(_bytes, argument)) if isinstance(argument, (list, tuple)) else 0


class Model(nn.Module):
    """A backbone of two layers and a head with many classes."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(IMAGE, HIDDEN, bias=False), nn.Linear(HIDDEN, FEATURES, bias=False)
        self.features = nn.Sequential(nn.Sequential(*layers))
        self.head, self.criterion = sn.AngularHead(FEATURES, CLASSES), make_loss("cosface")

    def forward(self, images, labels):
        return self.criterion(self.head(self.features(images)), labels, return_scores=True)


def run(case, processes):
    """Train for two steps as the trainer does; return what the second one exchanged."""
    torch.manual_seed(0)
    model = Model()
    options = {name: value for name, value in asdict(case).items() if name != "processes"}
    config = TrainConfig(**options)
    shard_model(model, config, processes)
    optimizer = build_optimizer(config, model)
    forward = processes.wrap(model, sync_batch_norm=False) if case.sharding == "ddp" else model
    own = case.batch_size // case.processes
    images, labels = torch.randn(own, IMAGE), torch.randint(CLASSES, (own,))
    for _ in range(2):
        with Exchanged() as exchanged:
            with torch.autocast("cpu", torch.bfloat16, enabled=case.precision != "float32"):
                loss, scores = forward(images, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss, scores
        time.sleep(0.1)  # gloo's threads release the buckets of DDP, which orders them anew in the second step
    return exchanged.sizes


def measure(rank, world, store):
    """Return the measurements of the cases with a number of processes."""
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    processes, measured = Processes(rank, world, torch.device("cpu")), []
    for case in CASES:
        if case.processes == world:
            sizes, peaks = {}, []
            for _ in range(3 if case.sharding == "fsdp" else 2):
                peaks.append(peak_bytes(lambda case=case, sizes=sizes: sizes.update(run(case, processes))))
            # The smallest one: what gloo's threads release late only adds to a peak.
            measured.append((asdict(case), min(peaks), sizes))
    dist.destroy_process_group()
    return measured


def main(rank, store, output):
    torch.set_num_threads(1)
    measured = measure(rank, 4, f"{store}-4")
    if rank < 2:
        measured += measure(rank, 2, f"{store}-2")
    if rank == 0:
        Path(output).write_text(json.dumps(measured))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
