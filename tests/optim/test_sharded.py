"""Regularizers and `keep_norms` on FSDP2 weights and under DDP equal the same computation on whole weights."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from process_group import run_checks
from spherenet.layers import AngularHead, SphereConv2d, SphereLinear
from spherenet.losses import WSoftmaxLoss
from spherenet.optim import Hyperball, MixedOptimizer, keep_norms, param_groups
from spherenet.regularizers import hyperspherical_energy, layer_diagnostics, orthogonality

INCLUDE = ("sphere", "head", "plain")


class Network(nn.Module):
    """Layers whose numbers of kernels are not multiples of the number of processes."""

    def __init__(self):
        super().__init__()
        self.conv, self.plain = SphereConv2d(3, 5, 3), nn.Conv2d(5, 7, 1)
        self.linear, self.head, self.criterion = SphereLinear(7, 3), AngularHead(3, 5), WSoftmaxLoss()

    def forward(self, images, labels):
        features = self.linear(self.plain(self.conv(images)).mean((2, 3)))
        return self.criterion(self.head(features), labels)


def penalty(model):
    return (
        1e-2 * orthogonality(model, include=INCLUDE)
        + 1e-3 * orthogonality(model, "normalized", include=INCLUDE)
        + 1e-2 * hyperspherical_energy(model, include=INCLUDE)
    )


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        # The same batch in all processes: their mean gradient is that of a single process.
        images, labels = torch.randn(4, 3, 5, 5, generator=generator), torch.randint(5, (4,), generator=generator)
        optimizer.zero_grad()
        (model(images, labels) + penalty(model)).backward()
        optimizer.step()


def assert_same_weights(sharded, reference):
    for (name, parameter), expected in zip(sharded.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            whole(parameter), expected, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def check_sharded(mesh, mode):
    torch.manual_seed(0)
    reference = Network()
    sharded = copy.deepcopy(reference)
    fully_shard(sharded, mesh=mesh)
    torch.testing.assert_close(whole(penalty(sharded)), penalty(reference))
    assert layer_diagnostics(sharded).keys() == layer_diagnostics(reference).keys()
    networks = (sharded, reference)
    optimizers = [torch.optim.Adam(param_groups(network, 0.01), lr=0.02) for network in networks]
    kept = [keep_norms(o, network, mode) for o, network in zip(optimizers, networks, strict=True)]
    for network, optimizer in zip(networks, optimizers, strict=True):
        train(network, optimizer, 4, seed=1)
    assert_same_weights(sharded, reference)
    states = [handle.state_dict() for handle in kept]
    assert states[0].keys() == states[1].keys() == {"conv.weight", "linear.weight", "head.weight"}
    for name, norms in states[0].items():
        torch.testing.assert_close(norms, states[1][name])
        weight = whole(sharded.get_parameter(name)).detach()
        torch.testing.assert_close(weight.flatten(1).norm(dim=1), norms)
    kept[0].load_state_dict({name: 2 * norms for name, norms in states[0].items()})
    kept[0].rescale()
    for name, norms in states[0].items():
        torch.testing.assert_close(whole(sharded.get_parameter(name)).detach().flatten(1).norm(dim=1), 2 * norms)


def check_other_dimension(mesh):
    layer = SphereLinear(4, 4)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"sharded by kernels, but weight has the placements \(Shard\(dim=1\),\)"):
        keep_norms(optimizer, layer)


def check_replicas(rank, world, mode):
    torch.manual_seed(0)
    network = Network()
    optimizer = torch.optim.Adam(param_groups(network, 0.01), lr=0.02)
    keep_norms(optimizer, network, mode)
    replica = nn.parallel.DistributedDataParallel(network)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        images, labels = torch.randn(4, 3, 5, 5, generator=generator), torch.randint(5, (4,), generator=generator)
        optimizer.zero_grad()
        (replica(images, labels) + penalty(network)).backward()
        optimizer.step()
    for parameter in network.parameters():
        copies = [torch.empty_like(parameter) for _ in range(world)]
        dist.all_gather(copies, parameter.detach())
        assert all(torch.equal(copies[0], other) for other in copies)


def sphere_optimizers(network):
    """Optimizers that need whole weights or their norms, and the rest of the network in SGD."""
    groups = param_groups(network, 0.01, filters="muon", rest="sgd")
    others = [parameter for group in groups[1:] for parameter in group["params"]]
    for options in ({"norm": "frobenius"}, {"norm": "filter"}, {}):
        yield [MixedOptimizer(groups, muon={"lr": 0.1, **options}, sgd={"lr": 0.05})]
    for scope in ("weight", "filter"):
        for inner in ("adam", "muon"):
            hyperball = Hyperball(groups[0]["params"], inner, lr=0.05, scope=scope)
            yield [hyperball, torch.optim.SGD(others, lr=0.05)]


def check_sphere_optimizers(mesh):
    torch.manual_seed(0)
    start = Network()
    for number in range(7):
        reference = copy.deepcopy(start)
        sharded = copy.deepcopy(start)
        fully_shard(sharded, mesh=mesh)
        for network in (sharded, reference):
            optimizers = list(sphere_optimizers(network))[number]
            for seed in range(3):
                generator = torch.Generator().manual_seed(seed)
                images = torch.randn(4, 3, 5, 5, generator=generator)
                network.zero_grad()
                network(images, torch.randint(5, (4,), generator=generator)).backward()
                for optimizer in optimizers:
                    optimizer.step()
        assert_same_weights(sharded, reference)


def checks(rank, world):
    # Gradients of 1×1 kernels have other strides of dimensions of size 1: the same layout.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
    mesh = init_device_mesh("cpu", (world,))
    for mode in ("renormalize", "project"):
        check_sharded(mesh, mode)
        check_replicas(rank, world, mode)
    check_other_dimension(mesh)
    check_sphere_optimizers(mesh)


@pytest.mark.parametrize("world", [1, 2])
def test_sharded_weights_train_as_whole_ones(world, tmp_path):
    run_checks(__file__, world, tmp_path)
