"""Sums of training steps that stay on the device until they are logged, so that no step waits for the device.

A step whose loss or gradient is not finite is skipped on the device: torch's fused optimizers take a flag for that.
With `on_nan="stop"` the flag stays set, so that the weights remain those before the first fault until the host fetches
the sums and stops the run. The host keeps the image indices of all steps since the last fetch, to report those of the
fault.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["DeferredSums", "Fault", "FetchedSums", "sum_dtype"]


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on a device: float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


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


class DeferredSums:
    """Accumulate loss, correct predictions and faults on a device.

    Args:
        device: Device of the sums.
        batch_size: Images per step over all processes.
        sticky: Whether every step after a fault is skipped too, until `fetch`.
    """

    def __init__(self, device: torch.device, batch_size: int, *, sticky: bool) -> None:
        self._dtype = sum_dtype(device)
        self._device, self._batch_size, self._sticky = device, batch_size, sticky
        self._in_a_row = torch.zeros((), dtype=self._dtype, device=device)
        self._clear()

    def _clear(self) -> None:
        # Loss, correct, steps counted, steps skipped, processes with a stop request; then steps before the first fault,
        # its loss and its gradient norm.
        self._sums = torch.zeros(8, dtype=self._dtype, device=self._device)
        self._faulty = torch.zeros((), dtype=torch.bool, device=self._device)
        self._longest = self._in_a_row.clone()
        self._indices: list[Tensor] = []
        self._first_step: int | None = None

    def add(self, step: int, sums: Tensor, norm: Tensor, indices: Tensor) -> Tensor:
        """Add the sums of a step and return, as a tensor on the device, whether to skip the step.

        Args:
            step: Number of the step.
            sums: Sums over all processes, on the device: loss, correct predictions, faults, processes with a stop
                request, and gradients that are not finite, whose steps a gradient scaler skips by itself.
            norm: Norm of the gradient in this process.
            indices: Indices of the step's images, on the CPU.
        """
        if self._first_step is None:
            self._first_step = step
        self._indices.append(indices)
        fault = sums[2] > 0
        first = fault & ~self._faulty
        skip = (fault | self._faulty) if self._sticky else fault
        zero = torch.zeros((), dtype=self._dtype, device=self._device)
        counted = torch.stack([sums[0], sums[1], zero + 1, zero])
        counted = torch.where(skip, torch.stack([zero, zero, zero, zero + 1]), counted)
        of_fault = torch.stack([zero + (step - self._first_step), sums[0], norm.to(self._dtype)])
        overflowed = sums[4] > 0
        self._sums[:4] += counted
        self._sums[3] += overflowed & ~skip
        self._in_a_row = torch.where(skip | overflowed, self._in_a_row + 1, zero)
        self._longest = torch.maximum(self._longest, self._in_a_row)
        self._sums[4] += sums[3]
        self._sums[5:] = torch.where(first, of_fault, self._sums[5:])
        self._faulty = self._faulty | fault
        return skip

    def fetch(self) -> FetchedSums:
        """Return the sums since the last call and reset them. This waits for the device."""
        faulty = self._faulty.item()
        loss_sum, correct, steps, skipped, stop_requests, after, fault_loss, norm = self._sums.tolist()
        longest = int(self._longest.item())
        fault = None
        if faulty and self._first_step is not None:
            fault = Fault(self._first_step + int(after), fault_loss, norm, self._indices[int(after)])
        self._clear()
        images = steps * self._batch_size
        return FetchedSums(loss_sum, correct, images, int(skipped), longest, stop_requests > 0, fault)
