"""The state of adaptive losses is the same in two processes, under DDP and with a sharded head."""

import copy

import torch
from torch.distributed.device_mesh import init_device_mesh

import spherenet as sn
from process_group import run_checks
from spherenet.losses import AdaFaceLoss, CurricularFaceLoss

SIZES = (5, 3)


class Model(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(3)
        self.head, self.criterion = sn.AngularHead(4, 6), loss

    def forward(self, features, labels):
        return self.criterion(self.head(features), labels)


def checks(rank, world):
    mesh = init_device_mesh("cpu", (world,))
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


def expected_state(make, rows, labels):
    """Return the state after the batches of all processes, by the definition."""
    head, mean, std, progress = Model(make()).head, 20.0, 100.0, 0.0
    for batch in rows:
        output = head(batch)
        mean += 0.5 * (output.feature_norm.mean().item() - mean)
        std += 0.5 * (output.feature_norm.std().item() - std)
        progress += 0.5 * (output.cosine.gather(1, labels[:, None]).mean().item() - progress)
    return {"norm_mean": mean, "norm_std": std} if make is AdaFaceLoss else {"progress": progress}


def test_state_is_the_same_in_all_processes(tmp_path):
    run_checks(__file__, len(SIZES), tmp_path)
