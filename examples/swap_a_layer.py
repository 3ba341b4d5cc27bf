"""Replace one layer of a network: nn.Conv2d becomes sn.SphereConv2d, and nothing else changes.

Both networks learn 4,000 embedded digits (mnist5k). Then the test digits are dimmed. Pixels are in [0, 1], white on
black, so that dimming scales a patch and keeps its direction. The output of a SphereConv depends on the direction only.

    python examples/swap_a_layer.py         under a minute on one core
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spherenet as sn
from spherenet.data import Split, load_dataset

BRIGHTNESS = (1.0, 0.5, 0.25, 0.125)
LAYERS = {
    "Conv2d": lambda: nn.Conv2d(1, 16, 5, padding=2, bias=False),
    "SphereConv2d": lambda: sn.SphereConv2d(1, 16, 5, padding=2, operator="sigmoid", k=0.3),
}


def network(first: nn.Module) -> nn.Sequential:
    """Return a network from images [N, 1, 28, 28] to scores [N, 10]."""
    second = nn.Conv2d(16, 32, 3, padding=1, bias=False)
    units = [(layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU(), nn.MaxPool2d(2)) for layer in (first, second)]
    return nn.Sequential(*units[0], *units[1], nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


def images_of(split: Split) -> tuple[Tensor, Tensor]:
    """Return all images of a split, float [N, 1, 28, 28] in [0, 1], and their labels [N]."""
    batch = next(split.batches([(0, torch.arange(len(split)))], device=torch.device("cpu"), augmentation=None))
    return batch.images * (128 / 255) + 0.5, batch.labels  # load_dataset returns (pixel − 127.5)/128


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--iterations", type=int, default=240, help="steps of 50 digits; 80 are an epoch")
parser.add_argument("--seeds", type=int, default=3, help="at least 2")
arguments = parser.parse_args()
data = load_dataset("mnist5k")
(images, labels), (test_images, test_labels) = images_of(data.train), images_of(data.test)
print(f"test accuracy % at brightness {BRIGHTNESS}; {arguments.iterations} iterations, n = {arguments.seeds} seeds")
for name, layer in LAYERS.items():
    rows = []
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        model = network(layer())
        optimizer = torch.optim.Adam(sn.param_groups(model, weight_decay=5e-4), lr=1e-3)  # no decay on sphere weights
        for _ in range(arguments.iterations):
            chosen = torch.randint(len(labels), (50,))
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval().requires_grad_(False)
        predictions = [model(test_images * brightness).argmax(1) for brightness in BRIGHTNESS]
        rows.append([100 * (predicted == test_labels).double().mean().item() for predicted in predictions])
    cells = (f"{accuracy.mean():5.1f} ± {accuracy.std():4.1f}" for accuracy in torch.tensor(rows).T)
    print(f"{name:<14}" + "  ".join(cells), flush=True)
