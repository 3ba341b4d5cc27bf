"""Script of test_cost.py: bytes that training steps allocate and exchange, in each of four processes.

    python measured_costs.py RANK STORE OUTPUT

Process 0 writes {name: [peak bytes, {collective: [bytes, …]}]} as JSON. Two processes are measured in pairs.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import spherenet as sn
from spherenet.bench.networks import peak_bytes
from spherenet.losses import make_loss

WORLD = 4
IMAGE, HIDDEN = 64, 2048
CLASSES, FEATURES, BATCH = 60_000, 32, 64
CASES = {
    "data parallel": {},
    "data parallel, sgd": {"optimizer": "sgd"},
    "data parallel, bfloat16": {"precision": "bfloat16"},
    "fsdp": {"fsdp_backbone": True, "fsdp_head": True},
    "sharded head": {"sharded": True},
    "sharded head, sampled": {"sharded": True, "sample_rate": 0.25},
    "sharded head, fsdp": {"sharded": True, "fsdp_backbone": True},
}


class Exchanged(TorchDispatchMode):
    """Record the collectives and the bytes of their largest tensor list."""

    def __init__(self):
        super().__init__()
        self.sizes = defaultdict(list)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if "c10d" in name and "wait" not in name:
            size = max(_bytes(argument) for argument in args)
            self.sizes[name.split(".")[1]].append(size)
        return function(*args, **(kwargs or {}))


def _bytes(argument):
    if isinstance(argument, torch.Tensor):
        return argument.nbytes
    return sum(map(_bytes, argument)) if isinstance(argument, (list, tuple)) else 0


class Model(nn.Module):
    """A backbone of two layers and a head with many classes."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(IMAGE, HIDDEN, bias=False), nn.Linear(HIDDEN, FEATURES, bias=False))
        self.head, self.criterion = sn.AngularHead(FEATURES, CLASSES), make_loss("cosface")

    def forward(self, images, labels):
        return self.criterion(self.head(self.features(images)), labels, return_scores=True)


def run(mesh, optimizer="adam", precision="float32", fsdp_backbone=False, fsdp_head=False, sharded=False,
        sample_rate=1.0):  # fmt: skip
    """Train for three steps; return what the last one exchanged."""
    torch.manual_seed(0)
    model = Model()
    if sharded:
        model = sn.shard_head(model, mesh, sample_rate=sample_rate)
    if fsdp_head:
        fully_shard(model.head, mesh=mesh)
    if fsdp_backbone:
        fully_shard(model.features, mesh=mesh)
    make = {"adam": torch.optim.Adam, "sgd": lambda *a, **o: torch.optim.SGD(*a, momentum=0.9, **o)}[optimizer]
    # Fused optimizers do not mix sharded and plain parameters in one group.
    groups = [{"params": list(module.parameters())} for module in (model.features, model.head)]
    optimizer = make(groups, lr=0.1, fused=True)
    forward = model
    if not fsdp_backbone:
        if sharded:
            model._ddp_params_and_buffers_to_ignore = ["head.weight"]
        forward = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
    own = BATCH // mesh.size()
    images, labels = torch.randn(own, IMAGE), torch.randint(CLASSES, (own,))
    for _ in range(3):
        with Exchanged() as exchanged:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision != "float32"):
                loss, _ = forward(images, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return dict(exchanged.sizes)


def main(rank, store, output):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "pair"))["pair"]
    measured = {}
    for world, mesh in ((2, pairs), (WORLD, init_device_mesh("cpu", (WORLD,)))):
        for name, options in CASES.items():
            sizes = {}
            dist.barrier()
            peak = peak_bytes(lambda mesh=mesh, options=options, sizes=sizes: sizes.update(run(mesh, **options)))
            measured[f"{name}, {world}"] = (peak, sizes)
    if rank == 0:
        Path(output).write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
