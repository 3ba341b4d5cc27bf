"""The adding problem: LSTM, SphereLSTM, GRU and SphereGRU learn to add two marked numbers of a sequence.

Each step has a number in [0, 1], a mark and a constant 1. The target after the last step is the sum of the two marked
numbers; the constant prediction 1 has a squared error of 1/6. All networks get the constant, because angles alone do
not depend on the size of a number. Data, optimizer, learning rate and clipping are the same for all networks.

    python examples/sequences.py            about two minutes on one core
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

import spherenet as sn

NETWORKS = {"LSTM": nn.LSTM, "SphereLSTM": sn.SphereLSTM, "GRU": nn.GRU, "SphereGRU": sn.SphereGRU}
HIDDEN, BATCH, SOLVED = 32, 64, 0.01


def draw(length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences [length, BATCH, 3] with one mark in each half, and the sums [BATCH]."""
    numbers, marks = torch.rand(length, BATCH, generator=generator), torch.zeros(length, BATCH)
    for start in (0, length // 2):
        marks[torch.randint(start, start + length // 2, (BATCH,), generator=generator), torch.arange(BATCH)] = 1
    return torch.stack([numbers, marks, torch.ones(length, BATCH)], -1), (numbers * marks).sum(0)


def train(recurrent: nn.Module, length: int, iterations: int, seed: int) -> list[float]:
    """Return the squared error at each iteration, on new data and averaged over the last ten batches."""
    model, generator = nn.ModuleList([recurrent, nn.Linear(HIDDEN, 1)]), torch.Generator().manual_seed(seed)
    optimizer, errors = torch.optim.Adam(model.parameters(), lr=0.02), []
    for _ in range(iterations):
        sequences, sums = draw(length, generator)
        error = (model[1](model[0](sequences)[0][-1]).squeeze(1) - sums).square().mean()
        optimizer.zero_grad()
        error.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        errors.append(error.item())
    return [statistics.mean(errors[max(0, i - 9) : i + 1]) for i in range(iterations)]


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
for option, default in {"--length": 16, "--iterations": 300, "--seeds": 5}.items():
    parser.add_argument(option, type=int, default=default)
length, iterations, seeds = vars(parser.parse_args()).values()
print(f"squared error; {length} steps, {iterations} iterations, n = {seeds} seeds; first iteration below {SOLVED}")
for name, network in NETWORKS.items():
    runs, start = [], time.process_time()
    for seed in range(seeds):
        torch.manual_seed(seed)
        runs.append(train(network(3, HIDDEN), length, iterations, seed))
    at = [[run[iterations * quarter // 4 - 1] for run in runs] for quarter in (1, 2, 3, 4)]
    solved = (next((str(i + 1) for i, error in enumerate(run) if error < SOLVED), "never") for run in runs)
    cells = "  ".join(f"{statistics.mean(errors):.4f} ± {statistics.stdev(errors):.4f}" for errors in at)
    seconds = (time.process_time() - start) / seeds
    print(f"{name:<11}{cells}   {', '.join(solved)}   {seconds:.1f} s per run", flush=True)
