"""Gathered losses on pairs equal those of one process with all samples."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spherenet as sn
from process_group import run_checks

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


def checks(rank, world):
    for name in MAKERS:
        for block_size in (None, 2):
            for sizes in ([4] * world, [5, 3, 4][:world], [6, 0, 2][:world]):
                check(rank, sizes, name, block_size)


@pytest.mark.parametrize("world", [2, 3])
def test_gathered_losses_equal_those_of_one_process(world, tmp_path):
    run_checks(__file__, world, tmp_path)
