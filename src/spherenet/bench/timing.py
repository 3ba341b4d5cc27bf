"""Fair timing on a noisy machine: contestants take turns in one process, and only ratios of neighbours are compared."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

__all__ = ["Spread", "paired_ratios", "take_turns"]


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles over n measurements."""

    median: float
    lower: float
    upper: float
    n: int

    @staticmethod
    def of(values: list[float]) -> Spread:
        """Summarise measurements; needs two at least."""
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, lower, upper, len(values))


def take_turns(
    contestants: Mapping[str, Callable[[], object]], rounds: int, warmup: int, device: str = "cpu"
) -> Iterator[dict[str, float]]:
    """Yield one dictionary of seconds a round; the order turns from round to round, so nobody always goes first."""
    names = list(contestants)
    for _ in range(warmup):
        for run in contestants.values():
            run()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            start = index % len(names)
            seconds = {}
            for name in names[start:] + names[:start]:
                _wait_for(device)
                begin = time.perf_counter()
                contestants[name]()
                _wait_for(device)
                seconds[name] = time.perf_counter() - begin
            yield {name: seconds[name] for name in names}
    finally:
        if collecting:
            gc.enable()


def paired_ratios(rounds: list[dict[str, float]], name: str, base: str) -> Spread:
    """Summarise time(name)/time(base) round by round: what slows a whole round slows both."""
    return Spread.of([seconds[name] / seconds[base] for seconds in rounds])


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()
