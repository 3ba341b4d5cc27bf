"""Train on 100,000 synthetic identities whose class weights are divided among processes, then verify new identities.

An image of 64 numbers mixes 16 of its identity with 16 of a pose. Each process owns half of the class weights and uses
a tenth of them per step. Then images of 2,000 new identities are compared by the angle between their 32 features.

    torchrun --nproc-per-node 2 examples/sharded_retrieval.py     two processes, about two minutes on two cores
    python examples/sharded_retrieval.py                          one process with all class weights, alone
"""

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import spherenet as sn
from spherenet.training import Processes

NEW, BATCH = 2000, 1024  # identities for verification; images per step of all processes


def draw(identities: Tensor) -> Tensor:
    """Return an image [64] of each identity [16] with a new pose."""
    return torch.tanh(torch.cat([identities, 1.5 * torch.randn(len(identities), 16)], 1) @ mixing)


def verify(name: str, first: Tensor, second: Tensor) -> None:
    """Compare each of the first images with one of the same identity and with one of another."""
    scores = torch.cat([sn.pair_similarities(first, other) for other in (second, second.roll(1, 0))])
    same = torch.arange(len(scores)) < len(first)
    rate, error = sn.true_positive_rate_at(scores, same, 0.01), sn.equal_error_rate(scores, same)
    print(f"{name:<9}TPR@FPR 1 % {100 * rate:5.1f} %, EER {100 * error:4.1f} %")


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--identities", type=int, default=100_000)
parser.add_argument("--iterations", type=int, default=1000, help="steps of 1024 images")
parser.add_argument("--sample-rate", type=float, default=0.1, help="fraction of the identities used per step")
args = parser.parse_args()
torch.manual_seed(0)  # the same identities and network in all processes
identities, mixing = torch.randn(args.identities + NEW, 16), torch.randn(32, 64) / 4
network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))
model, loss = nn.Sequential(network, sn.AngularHead(32, args.identities)), sn.CosFaceLoss(s=16, m=0.2)
with Processes.joined("cpu") as processes:
    if processes.world > 1:
        sn.shard_head(model, init_device_mesh("cpu", (processes.world,)), sample_rate=args.sample_rate)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)  # plain and divided weights
    trained = processes.wrap(model, sync_batch_norm=False)  # DDP, which leaves out the divided weights
    torch.manual_seed(1 + processes.rank)
    for _ in range(args.iterations):
        labels = torch.randint(args.identities, (BATCH // processes.world,))
        loss(trained(draw(identities[labels])), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    if processes.is_main:
        print(f"{args.identities} identities, {processes.world} processes with equal parts of the class weights")
        first, second = draw(identities[-NEW:]), draw(identities[-NEW:])
        verify("numbers", first, second)
        verify("network", network(first).detach(), network(second).detach())
