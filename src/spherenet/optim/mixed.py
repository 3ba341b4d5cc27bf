"""One optimizer whose groups use different algorithms, so that schedulers, scalers and checkpoints see one object."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from spherenet._util.validation import require_one_of
from spherenet.errors import InvalidArgumentType
from spherenet.optim.muon import Muon
from spherenet.optim.step import SteppingOptimizer, as_list

__all__ = ["ALGORITHMS", "MixedOptimizer"]

ALGORITHMS: dict[str, type[Optimizer]] = {
    "muon": Muon,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


class MixedOptimizer(SteppingOptimizer):
    """Update each group of parameters with the algorithm that it names.

    A group is a dictionary with `params`, `algorithm` ("muon", "sgd", "adam", "adamw" or an optimizer class) and the
    options of that algorithm. Groups with the same algorithm are updated together. The state dict has the ordinary form
    of an optimizer.

    Args:
        groups: The groups, for instance `sn.param_groups(model, 0.01, filters="muon", rest="adamw")`.
        **options: Options for each algorithm by its name, which groups may override: `muon={"lr": 0.24}`.

    Raises:
        ValueError: If an algorithm is unknown, or an option is out of its range.

    Example:
        >>> groups = sn.param_groups(model, 5e-4, filters="muon", rest="sgd")
        >>> optimizer = sn.optim.MixedOptimizer(groups, muon={"lr": 0.24}, sgd={"lr": 0.1, "momentum": 0.9})
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]], **options: Mapping[str, Any]) -> None:
        for name, values in options.items():
            _require_options(name, values)
        own: list[dict[str, Any]] = []
        for group in as_list("groups", groups):
            if not isinstance(group, Mapping):
                raise InvalidArgumentType(
                    "groups",
                    f"must be dictionaries with params and algorithm, got {type(group).__name__}; see sn.param_groups.",
                )
            own.append(dict(group))
        for group in own:
            algorithm = group.get("algorithm")
            if not (isinstance(algorithm, type) and issubclass(algorithm, Optimizer)):
                require_one_of("algorithm", algorithm, ALGORITHMS)
                for name, value in options.get(str(algorithm), {}).items():
                    group.setdefault(name, value)
        self._parts: list[Optimizer] = []
        super().__init__(own, {})
        self._connect()

    def _connect(self) -> None:
        """Create an optimizer per algorithm on the same groups and the same state."""
        by_algorithm: dict[Any, list[dict[str, Any]]] = {}
        for group in self.param_groups:
            by_algorithm.setdefault(group["algorithm"], []).append(group)
        self._parts = []
        for algorithm, groups in by_algorithm.items():
            part = ALGORITHMS.get(algorithm, algorithm)(groups)
            part.state = self.state
            self._parts.append(part)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which must name its algorithm."""
        super().add_param_group(param_group)
        if self._parts:  # otherwise the constructor connects all groups
            self._connect()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or loaded optimizer."""
        super().__setstate__(state)
        self._connect()

    def _step(self) -> None:
        """Make one step with every algorithm."""
        for part in self._parts:
            part.step()


def _require_options(algorithm: str, options: Any) -> None:
    """Raise an error unless the options are those of an algorithm; torch ignores unknown ones of a group."""
    require_one_of("an option", algorithm, ALGORITHMS)
    if not isinstance(options, Mapping):
        raise InvalidArgumentType(algorithm, f"must be a dictionary of options, got {type(options).__name__}.")
    allowed = list(inspect.signature(ALGORITHMS[algorithm]).parameters)[1:]  # after the parameters
    for name in options:
        require_one_of(f"an option of {algorithm}", name, allowed)
