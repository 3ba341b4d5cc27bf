"""Script of test_face_losses.py: the state of adaptive losses in two processes, under DDP and with a sharded head.

python state_worker.py STORE
"""

import copy
import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import spherenet as sn
from spherenet.losses import AdaFaceLoss, CurricularFaceLoss

WORLD, SIZES = 2, (5, 3)


class Model(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(3)
        self.head, self.criterion = sn.AngularHead(4, 6), loss

    def forward(self, features, labels):
        return self.criterion(self.head(features), labels)


def main(rank, store):
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=timeout)
    mesh = init_device_mesh("cpu", (WORLD,))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(sum(SIZES), 4, generator=generator) * scale for scale in (1, 4)]
    labels = torch.randint(6, (sum(SIZES),), generator=generator)
    own = slice(0, SIZES[0]) if rank == 0 else slice(SIZES[0], sum(SIZES))
    for make in (AdaFaceLoss, CurricularFaceLoss):
        expected = expected_state(make, rows, labels)
        ddp = torch.nn.parallel.DistributedDataParallel(Model(make(momentum=0.5)))
        sharded = Model(make(momentum=0.5))
        sharded.head = sn.shard_head(copy.deepcopy(sharded.head), mesh)
        for batch in rows:
            ddp(batch[own], labels[own]).backward()
            sharded(batch[own], labels[own]).backward()
        for state in (ddp.module.criterion.state_dict(), sharded.criterion.state_dict()):
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(state[name], torch.tensor(value), rtol=1e-5, atol=1e-6)
    dist.destroy_process_group()


def expected_state(make, rows, labels):
    """Return the state after the batches of all processes, by the definition."""
    head, mean, std, progress = Model(make()).head, 20.0, 100.0, 0.0
    for batch in rows:
        output = head(batch)
        mean += 0.5 * (output.feature_norm.mean().item() - mean)
        std += 0.5 * (output.feature_norm.std().item() - std)
        progress += 0.5 * (output.cosine.gather(1, labels[:, None]).mean().item() - progress)
    return {"norm_mean": mean, "norm_std": std} if make is AdaFaceLoss else {"progress": progress}


def fork(store):
    """Run both processes, which share the imported modules, and return whether they succeeded."""
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                main(rank, store)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    return not any(codes)


if __name__ == "__main__":
    sys.exit(not fork(sys.argv[1]))
