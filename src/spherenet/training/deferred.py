"""Sums of training steps that stay on the device until they are logged, so that no step waits for the device.

A step whose loss or gradient is not finite is skipped on the device: torch's fused optimizers take a flag for that.
With `on_nan="stop"` the flag stays set, so that the weights remain those before the first fault until the host fetches
the sums and stops the run. The host keeps the image indices of all steps since the last fetch, to report those of the
fault.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["DeferredSums", "Fault", "FetchedSums", "StepSums", "sum_dtype"]


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on a device: float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class StepSums(NamedTuple):
    """Sums of one step over all its images, in one process or over all: scalars on the device, or numbers.

    Attributes:
        loss: Sum of the losses.
        correct: Correct predictions.
        faults: Processes whose loss or gradient is not finite.
        stop_requests: Processes that were asked to stop.
        overflows: Processes whose gradient is not finite; a gradient scaler skips the step by itself.
    """

    loss: Any
    correct: Any
    faults: Any
    stop_requests: Any
    overflows: Any


class Fault(NamedTuple):
    """First step that was not finite: its number, sum of losses, gradient norm and image indices."""

    step: int
    loss_sum: float
    norm: float
    indices: Tensor


class FetchedSums(NamedTuple):
    """Sums over the steps since the last fetch."""

    loss_sum: float
    correct: float
    images: float
    skipped: int
    skipped_in_a_row: int
    stop_requested: bool
    fault: Fault | None


class _Totals(NamedTuple):
    """Scalars on the device since the last fetch; those of the fault are 0 unless `is_faulty`."""

    loss: Tensor
    correct: Tensor
    steps: Tensor
    skipped: Tensor
    longest_skip: Tensor
    stop_requests: Tensor
    is_faulty: Tensor
    steps_before_fault: Tensor
    fault_loss: Tensor
    fault_norm: Tensor


class DeferredSums:
    """Accumulate loss, correct predictions and faults on a device.

    Args:
        device: Device of the sums.
        batch_size: Images per step over all processes.
        sticky: Whether every step after a fault is skipped too, until `fetch`.
    """

    def __init__(self, device: torch.device, batch_size: int, *, sticky: bool) -> None:
        self._batch_size, self._sticky = batch_size, sticky
        self._zero = torch.zeros((), dtype=sum_dtype(device), device=device)
        self._in_a_row = self._zero
        self._clear()

    def _clear(self) -> None:
        self._totals = _Totals(*[self._zero] * len(_Totals._fields))._replace(longest_skip=self._in_a_row)
        self._indices: list[Tensor] = []
        self._first_step: int | None = None

    def add(self, step: int, sums: StepSums, norm: Tensor, indices: Tensor) -> Tensor:
        """Add the sums of a step and return, as a tensor on the device, whether to skip the step.

        Args:
            step: Number of the step.
            sums: Sums over all processes, on the device.
            norm: Norm of the gradient in this process.
            indices: Indices of the step's images, on the CPU.
        """
        if self._first_step is None:
            self._first_step = step
        self._indices.append(indices)
        totals, zero = self._totals, self._zero
        fault: Tensor = sums.faults > 0
        was_faulty = totals.is_faulty > 0
        is_first = fault & ~was_faulty
        skip = (fault | was_faulty) if self._sticky else fault
        skipped = skip | (sums.overflows > 0)
        self._in_a_row = torch.where(skipped, self._in_a_row + 1, zero)
        self._totals = _Totals(
            loss=totals.loss + torch.where(skip, zero, sums.loss),
            correct=totals.correct + torch.where(skip, zero, sums.correct),
            steps=totals.steps + ~skip,
            skipped=totals.skipped + skipped,
            longest_skip=torch.maximum(totals.longest_skip, self._in_a_row),
            stop_requests=totals.stop_requests + sums.stop_requests,
            is_faulty=torch.maximum(totals.is_faulty, fault.to(zero.dtype)),
            steps_before_fault=torch.where(is_first, zero + (step - self._first_step), totals.steps_before_fault),
            fault_loss=torch.where(is_first, sums.loss, totals.fault_loss),
            fault_norm=torch.where(is_first, norm.to(zero.dtype), totals.fault_norm),
        )
        return skip

    def fetch(self) -> FetchedSums:
        """Return the sums since the last call and reset them. This waits for the device."""
        totals = _Totals(*torch.stack(self._totals).tolist())
        fault = None
        if totals.is_faulty and self._first_step is not None:
            at = int(totals.steps_before_fault)
            fault = Fault(self._first_step + at, float(totals.fault_loss), float(totals.fault_norm), self._indices[at])
        self._clear()
        return FetchedSums(
            loss_sum=float(totals.loss),
            correct=float(totals.correct),
            images=float(totals.steps) * self._batch_size,
            skipped=int(totals.skipped),
            skipped_in_a_row=int(totals.longest_skip),
            stop_requested=bool(totals.stop_requests),
            fault=fault,
        )
