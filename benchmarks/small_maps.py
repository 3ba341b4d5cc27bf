"""Measure training steps on small maps, where Python and the start of parallel loops count.

The workload is that of `spherenet bench --suite`: cnn-9 with 16/24/32 filters, batch 64, 16×16 pixels, forward,
backward and Adam, with each operator and as a CNN. The networks alternate in one process. With the algorithm "direct"
sphere layers use torch's convolutions, as the CNN does, so that the ratio is the cost of the operator alone. Run it on
a machine that does nothing else.

    python benchmarks/small_maps.py --threads 2                 # about a minute and a half
"""

from __future__ import annotations

import argparse

import torch

import spherenet as sn
from spherenet.bench.networks import (
    TWIN,
    Spread,
    contestants,
    hardware,
    paired_ratios,
    take_turns,
    training_or_inference,
)
from spherenet.bench.suite import OPERATORS, WORKLOADS, Workload

SMALL = next(workload for workload in WORKLOADS if workload.size == 16)


def measure(workload: Workload, algorithm: str, rounds: int) -> dict[str, Spread]:
    """Return each network's time ratio to its CNN twin: median and quartiles."""
    options = {
        "mode": workload.mode,
        "batch_size": workload.batch_size,
        "widths": workload.widths,
        "input_size": (workload.size, workload.size),
        "device": "cpu",
    }
    networks = [contestant for contestant in contestants(OPERATORS) if contestant.name in (TWIN, *OPERATORS)]
    with sn.convolution(algorithm):
        runs = {network.name: training_or_inference(workload.network, network, **options) for network in networks}
        measured = list(take_turns(runs, rounds, warmup=5))
    return {name: paired_ratios(measured, name, TWIN) for name in OPERATORS}


def main() -> None:
    """Print a table of ratios per algorithm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="threads of torch")
    parser.add_argument("--rounds", type=int, default=300, metavar="N", help="measured rounds per algorithm")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{SMALL.name}; {hardware()}; n = {arguments.rounds} rounds; median ratio to the CNN (quartiles)", flush=True)
    print("algorithm  " + "".join(f"{name:<22}" for name in OPERATORS))
    for algorithm in ("auto", "direct"):
        ratios = measure(SMALL, algorithm, arguments.rounds)
        spreads = [ratios[name] for name in OPERATORS]
        cells = (f"{ratio.median:.2f} ({ratio.lower:.2f} to {ratio.upper:.2f})" for ratio in spreads)
        print(f"{algorithm:<11}" + "".join(f"{cell:<22}" for cell in cells).rstrip(), flush=True)


if __name__ == "__main__":
    main()
