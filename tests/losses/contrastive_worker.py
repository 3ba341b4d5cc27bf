"""Script of test_contrastive.py: gathered losses against those of one process with all samples.

    python contrastive_worker.py WORLD STORE

A process prints one line if all checks succeed.
"""

import copy
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spherenet as sn

MAKERS = {
    "supcon": sn.SupConLoss,
    "prototypical": sn.PrototypicalLoss,
    "info-nce": lambda **options: sn.InfoNCELoss(0.2, learn_temperature=True, **options),
    "nt-xent": lambda **options: sn.InfoNCELoss(0.2, "all", **options),
    "siglip": sn.SigLIPLoss,
    "alignment-uniformity": sn.AlignmentUniformityLoss,
}


class Model(nn.Module):
    """A linear layer and a loss in one module, so that DDP averages the gradients of the loss too."""

    def __init__(self, loss):
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 3), loss

    def forward(self, x, second):
        return self.loss(self.layer(x), second if second.dtype == torch.int64 else self.layer(second))


def check(rank, sizes, name, block_size):
    torch.manual_seed(1)
    samples = sum(sizes)
    x = torch.randn(samples, 4, dtype=torch.float64)
    supervised = name in ("supcon", "prototypical")
    second = torch.randint(4, (samples,)) if supervised else torch.randn(samples, 4, dtype=torch.float64)
    model = Model(MAKERS[name](gather=True, block_size=block_size)).double()
    alone = copy.deepcopy(model)
    alone.loss.gather = False
    expected = alone(x, second)
    expected.backward()
    parallel = DistributedDataParallel(model)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    value = parallel(x[own], second[own])
    value.backward()
    torch.testing.assert_close(value, expected, msg=lambda message: f"{name}: {message}")
    wanted = dict(alone.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, wanted[key].grad, msg=lambda message, key=key: f"{name}, {key}: {message}"
        )


def main(rank, world, store):
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)  # a failed process ends the others
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    for name in MAKERS:
        for block_size in (None, 2):
            check(rank, [4] * world, name, block_size)
            check(rank, [5, 3, 4][:world], name, block_size)
            check(rank, [6, 0, 2][:world], name, block_size)
    dist.destroy_process_group()
    print(f"process {rank} of {world}: all checks succeeded", flush=True)


if __name__ == "__main__":
    mp.spawn(main, (int(sys.argv[1]), sys.argv[2]), nprocs=int(sys.argv[1]))
