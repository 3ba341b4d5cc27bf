"""Predict the characters of Python's own help texts with a normalized transformer and with its plain counterpart.

Both see the same batches and train with Adam, whose learning rate rises during the first twentieth of the steps and
then decreases linearly to 0. To search for its maximum, pass other `--rates` and a `--first-seed` that is not compared.

    python examples/characters.py            under two minutes per seed on one core
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch.nn import functional as F

import spherenet as sn

TEXT = "".join(topics[name] for name in sorted(topics))
CODES = {character: code for code, character in enumerate(sorted(set(TEXT)))}
TRAIN, TEST = torch.tensor([CODES[character] for character in TEXT]).tensor_split([len(TEXT) * 9 // 10])
CONTEXT, BATCH, HELD_OUT = 128, 8, torch.arange(32) * ((len(TEST) - 129) // 32)


def loss_of(model: torch.nn.Module, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in nats of the characters after each of CONTEXT steps."""
    rows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(sphere: bool, rate: float, steps: int, seed: int) -> list[float]:
    """Return the loss on 32 rows of held-out text after each twentieth of the steps."""
    torch.manual_seed(seed)
    model, losses = sn.models.sphere_gpt_tiny(len(CODES), sphere=sphere), []
    optimizer, batches = torch.optim.Adam(model.parameters()), torch.Generator().manual_seed(seed)
    sn.keep_normalized(optimizer, model)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = rate * min(20 * step / steps, (1 - step / steps) / 0.95)
        optimizer.zero_grad()
        loss_of(model, TRAIN, torch.randint(len(TRAIN) - CONTEXT, (BATCH,), generator=batches)).backward()
        optimizer.step()
        if step % (steps // 20) == 0:
            losses.append(torch.no_grad()(loss_of)(model, TEST, HELD_OUT).item())
    return losses


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
for option, default in {"--steps": 500, "--seeds": 3, "--first-seed": 0}.items():
    parser.add_argument(option, type=int, default=default)
parser.add_argument("--rates", type=float, nargs=2, default=(1e-2, 3e-3))
steps, seeds, first, rates = vars(parser.parse_args()).values()
print(f"loss per held-out character; {steps} steps, rates {rates[0]:g} and {rates[1]:g}, n = {seeds} seeds", flush=True)
runs = {}
for name, rate in zip(("SphereGPT", "plain"), rates, strict=True):
    runs[name] = [train(name == "SphereGPT", rate, steps, seed) for seed in range(first, first + seeds)]
    quarters = [torch.tensor([run[i] for run in runs[name]]) for i in (4, 9, 14, 19)]
    cells = (f"{x.mean():.3f} ± {x.std(correction=min(1, seeds - 1)):.3f}" for x in quarters)
    print(f"{name:<11}{'  '.join(cells)}", flush=True)
for pair in zip(*runs.values(), strict=True):
    goal = max(losses[-1] for losses in pair)
    at = [steps // 20 * (1 + next(i for i, loss in enumerate(run) if loss <= goal)) for run in pair]
    print(f"loss {goal:.3f}: SphereGPT after {at[0]} steps, plain after {at[1]}")
