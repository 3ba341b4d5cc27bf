"""Full-batch minimisation of an objective over a module's parameters, by scipy's L-BFGS in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

__all__ = ["Minimum", "minimize_over_parameters"]

Vector = npt.NDArray[np.float64]

SMALLEST_DECREASE = 64 * np.finfo(np.float64).eps
"""A relative decrease below which a step is rounding: what stops a hinge, whose gradient never gets small."""

LINE_SEARCH_STEPS = 50
"""scipy's 20 are too few across the kinks of a hinge; smooth objectives take one or two."""


class Minimum(NamedTuple):
    """Where a minimisation ended: the objective there, the iterations it took, whether it converged, and why."""

    value: float
    iterations: int
    converged: bool
    reason: str


def minimize_over_parameters(
    module: nn.Module, objective: Callable[[], Tensor], *, max_iter: int, tol: float
) -> Minimum:
    """Move the float64 parameters of `module` to a minimum of `objective()`, a scalar that depends on them.

    It has converged when no entry of the gradient exceeds `tol`, or when an iteration lowers the objective by
    rounding only; it gives up after `max_iter` iterations. No random numbers are used.
    """
    parameters = list(module.parameters())

    def value_and_gradient(vector: Vector) -> tuple[float, Vector]:
        # A copy: scipy writes its next point into the same memory.
        vector_to_parameters(torch.tensor(vector), parameters)
        value = objective()
        gradient = parameters_to_vector(torch.autograd.grad(value, parameters))
        return value.item(), gradient.numpy()

    found = minimize(
        value_and_gradient,
        parameters_to_vector(parameters).detach().numpy(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": max_iter, "gtol": tol, "ftol": SMALLEST_DECREASE, "maxls": LINE_SEARCH_STEPS},
    )
    # The last point tried need not be the best one.
    vector_to_parameters(torch.tensor(found.x), parameters)
    return Minimum(float(found.fun), int(found.nit), bool(found.success), str(found.message))
