"""Convert a trained model of plain torch layers to a SphereNet with one call, then continue training.

A residual network learns the embedded digits (mnist5k). `to_sphere` returns a copy with the same weights whose layers
output functions of angles. `sphere_summary` lists what happened to each layer and why. Since the outputs of the copy
differ, it is trained again for as many iterations. For a fair comparison, so is the plain model.

    python examples/convert_a_model.py      under a minute on one core
"""

import argparse

import torch
from torch import Tensor, nn

import spherenet as sn
from spherenet.data import load_dataset


class Block(nn.Module):
    """Two convolutions and a shortcut: [N, channels_in, H, W] → [N, channels, H/2, W/2]."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels_in, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.downsample = nn.Conv2d(channels_in, channels, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + self.downsample(x)).relu()


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--iterations", type=int, default=160, help="steps of 50 digits, before and after conversion")
parser.add_argument("--seeds", type=int, default=3, help="at least 2")
args = parser.parse_args()
data, cpu, rows = load_dataset("mnist5k"), torch.device("cpu"), []
test = next(data.test.batches([(0, torch.arange(len(data.test)))], device=cpu, augmentation=None))


def trained(model: nn.Module, iterations: int = args.iterations) -> float:
    """Train the model and return its accuracy in % on the test digits."""
    optimizer = torch.optim.Adam(sn.param_groups(model.train(), weight_decay=5e-4), lr=1e-3)
    order = ((0, torch.randint(len(data.train), (50,))) for _ in range(iterations))
    for batch in data.train.batches(order, device=cpu, augmentation=None):
        nn.functional.cross_entropy(model(batch.images), batch.labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return 100 * (model.eval()(test.images).argmax(1) == test.labels).double().mean().item()


for seed in range(args.seeds):
    torch.manual_seed(seed)
    model = nn.Sequential(Block(1, 8), Block(8, 16), Block(16, 32), nn.Flatten(), nn.Linear(512, 10))
    before = trained(model)
    sphere = sn.to_sphere(model, "sigmoid", k=0.3, shortcuts=True, skip="0.downsample")  # sees one pixel at a time
    rows.append((before, trained(sphere, iterations=0), trained(sphere), trained(model)))
print(sn.sphere_summary(sphere), f"\n\ntest accuracy %, n = {args.seeds} seeds")
names = ("plain", "converted", "converted, trained", "plain, trained again")
for name, accuracies in zip(names, torch.tensor(rows).T, strict=True):
    print(f"{name:<24}{accuracies.mean():5.1f} ± {accuracies.std():.1f}")
