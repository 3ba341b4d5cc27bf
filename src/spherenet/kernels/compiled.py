"""Compile a pass once with torch's own compiler, and do without it quietly where there is none.

A pass is written twice: as one expression for the compiler, which makes a single loop of it for CPU or GPU, and as a
few in-place operations for everywhere else. Both work on views of two to four dimensions whose sizes are symbols to the
compiler, so one compilation serves every layer of a network and every batch size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

__all__ = ["SMALLEST_COMPILED", "compilations", "fused"]

SMALLEST_COMPILED = 1 << 18
"""Maps below this many numbers (1 MB of float32) stay in cache, where separate operations are nearly as good, and a
first try on a few images does not wait for a compiler."""

_log = logging.getLogger(__name__)
_broken = False
_compilations = 0


def _bare(value: Any) -> Any:
    """A tensor as if it were no view and had no graph: the compiler would trace, and guard, those too."""
    if isinstance(value, Tensor):
        return value.data
    return type(value)(*map(_bare, value)) if isinstance(value, tuple) and hasattr(value, "_fields") else value


def _copy(function: Any) -> Callable[..., Any]:
    """The same function with a code object of its own: the compiler limits how many variants one may have."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)


def compilations() -> int:
    """How many kernels have been compiled in this process so far."""
    return _compilations


def _counting_inductor(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    global _compilations
    _compilations += 1
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, example_inputs)  # type: ignore[return-value]


def _worth_compiling(example: Tensor) -> bool:
    # The compiler makes a kernel of its own for every dimension of size 1, and float64 wants exact functions.
    return (
        not _broken
        and example.numel() >= SMALLEST_COMPILED
        and example.dtype != torch.float64
        and min(example.shape) > 1
        and not torch.compiler.is_compiling()
    )


def fused(one_expression: Callable[..., Any], in_steps: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `one_expression` compiled where that pays and works, else `in_steps`.

    Both take the same arguments, the largest tensor first.
    """
    variants: dict[object, Callable[..., Any]] = {}

    def run(example: Tensor, *arguments: Any) -> Any:
        global _broken
        if _worth_compiling(example):
            constants = tuple(None if isinstance(value, (Tensor, tuple)) else value for value in arguments)
            key = (example.device.type, example.dtype, example.dim(), constants)
            bare = [_bare(value) for value in (example, *arguments)]
            try:
                if key in variants:
                    return variants[key](*bare)
                variants[key] = torch.compile(
                    _copy(one_expression), dynamic=True, fullgraph=True, backend=_counting_inductor
                )
                # Sizes are symbols, but numbers such as π are constants: as symbols they would be loaded at every step.
                with torch._dynamo.config.patch(specialize_float=True):
                    return variants[key](*bare)
            except Exception as error:  # no compiler, no Triton, a read-only cache: many types, one answer
                _broken = True
                _log.info("spherenet runs without compiled kernels: %s", error)
        return in_steps(example, *arguments)

    return run
