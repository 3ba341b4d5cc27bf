"""Watch magnitudes: a deep residual network of plain layers and one of magnitude-preserving layers (EDM2).

Both have 16 residual units without normalization and learn 4,000 embedded digits (mnist5k). The learning rates differ,
since entries of MP kernels are about 1, those of plain kernels about 1/√n. `keep_norms` forces weight normalization.

    python examples/magnitudes.py            half a minute on one core
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spherenet as sn
from spherenet.data import load_dataset


class Network(nn.Module):
    """Residual network of 16 units with 64 features, from digits [N, 1, 28, 28]."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.last, self.is_mp = layer(784, 64), layer(64, 10), layer is sn.MPLinear
        self.units, self.gain = nn.ModuleList(layer(64, 64) for _ in range(16)), nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> tuple[Tensor, list[float]]:
        """Return logits [N, 10] and the magnitudes √E[x²] after all units."""
        x, magnitudes = self.first(F.layer_norm(images.flatten(1), (784,))), []
        for unit in self.units:
            x = sn.mp_sum(x, unit(sn.mp_silu(x)), t=0.3) if self.is_mp else x + unit(F.silu(x))
            magnitudes.append(x.detach().square().mean().sqrt().item())
        return (self.last(x, gain=self.gain) if self.is_mp else self.last(x)), magnitudes


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
for option, default in {"--iterations": 300, "--seeds": 3}.items():
    parser.add_argument(option, type=int, default=default)
iterations, seeds = vars(parser.parse_args()).values()
data, options = load_dataset("mnist5k"), {"device": torch.device("cpu"), "augmentation": None}
images, tests = (next(s.batches([(0, torch.arange(len(s)))], **options)).images for s in (data.train, data.test))
print(f"magnitude in first and last unit, before and after training; accuracy %; n = {seeds} seeds")
for name, layer in {"plain": nn.Linear, "MP": sn.MPLinear}.items():
    rows = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = Network(layer)
        optimizer = torch.optim.Adam(sn.param_groups(model, 0.0), lr=1e-2 if model.is_mp else 1e-3)
        sn.keep_norms(optimizer, model)  # leaves plain layers alone
        before = model(tests)[1]
        for _ in range(iterations):
            chosen = torch.randint(len(images), (64,))
            F.cross_entropy(model(images[chosen])[0], data.train.labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
        scores, after = model(tests)
        accuracy = 100 * (scores.argmax(1) == data.test.labels).double().mean().item()
        rows.append([before[0], before[-1], after[0], after[-1], accuracy])
    print(f"{name:<7}" + "  ".join(f"{x.mean():.2f} ± {x.std():.2f}" for x in torch.tensor(rows).T), flush=True)
