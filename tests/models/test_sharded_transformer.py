"""A normalized transformer with FSDP2: weights stay normalized and equal those of a training on whole weights."""

import copy

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import spherenet as sn
from process_group import run_checks
from spherenet.models.transformer import EmbeddingMatrix

TOKENS, STEPS, WIDTH = 7, 5, 6  # 7 and 5 rows cannot be divided equally by two processes


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        # The same batch in all processes: their mean gradient is that of a single process.
        tokens = torch.randint(TOKENS, (4, STEPS + 1), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


def optimizers(model):
    yield torch.optim.SGD(model.parameters(), lr=0.5)
    yield torch.optim.AdamW(sn.param_groups(model, 0.1), lr=0.03)


def check(mesh, number, by_block):
    torch.manual_seed(0)
    whole = sn.SphereGPT(TOKENS, context=STEPS, dim=WIDTH, depth=2, num_heads=2, mlp_dim=5).double()
    sharded = copy.deepcopy(whole)
    with torch.no_grad():
        sharded.blocks[0].mlp_out.weight *= 3  # `keep_normalized` starts with a normalization
    for block in sharded.blocks if by_block else ():
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    start = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    for model in (whole, sharded):
        optimizer = list(optimizers(model))[number]
        sn.keep_normalized(optimizer, model)
        train(model, optimizer, 4)
    for (name, parameter), expected in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(parameter, DTensor), name
        torch.testing.assert_close(
            parameter.full_tensor(), expected, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert not torch.allclose(expected, start[name]), name
    for name, module in sharded.named_modules():
        if isinstance(module, EmbeddingMatrix):
            norms = module.weight.full_tensor().detach().norm(dim=module.axis)
            torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=1e-10, msg=f"{name}: {norms}")


def checks(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for number in range(2):
        for by_block in (False, True):
            check(mesh, number, by_block)


def test_sharded_weights_stay_normalized_and_equal_whole_ones(tmp_path):
    run_checks(__file__, 2, tmp_path)
