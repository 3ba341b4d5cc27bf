"""The adding problem: LSTM, SphereLSTM, GRU and SphereGRU learn to add two marked numbers of a sequence.

Each step shows a number in [0, 1], a mark and a constant 1; the answer after the last step is the sum of the two
marked numbers. Guessing 1 every time has a squared error of 1/6. The constant is there for all networks, for angles
alone would not see how large a number is. Same data, optimiser, learning rate and clipping for all.

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
    """A batch: sequences [length, BATCH, 3] and the sums [BATCH]; one mark in each half."""
    numbers, marks = torch.rand(length, BATCH, generator=generator), torch.zeros(length, BATCH)
    for start in (0, length // 2):
        marks[torch.randint(start, start + length // 2, (BATCH,), generator=generator), torch.arange(BATCH)] = 1
    return torch.stack([numbers, marks, torch.ones(length, BATCH)], -1), (numbers * marks).sum(0)


def train(recurrent: nn.Module, length: int, iterations: int, seed: int) -> list[float]:
    """The squared error on each iteration's fresh batch, as a mean over the last ten batches."""
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
print(f"squared error; {length} steps, {iterations} iterations, n = {seeds} seeds; below {SOLVED} at which iteration")
for name, network in NETWORKS.items():
    runs, start = [], time.process_time()
    for seed in range(seeds):
        torch.manual_seed(seed)
        runs.append(train(network(3, HIDDEN), length, iterations, seed))
    at = [[run[iterations * quarter // 4 - 1] for run in runs] for quarter in (1, 2, 3, 4)]
    solved = (next((str(i + 1) for i, error in enumerate(run) if error < SOLVED), "never") for run in runs)
    cells = "  ".join(f"{statistics.mean(errors):.4f} ± {statistics.stdev(errors):.4f}" for errors in at)
    seconds = (time.process_time() - start) / seeds
    print(f"{name:<11}{cells}   {', '.join(solved)}   {seconds:.1f} s a run", flush=True)
