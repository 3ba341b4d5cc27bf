"""Copies from the CPU to a device that do not wait for what the device is doing."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["without_waiting"]


def without_waiting(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a CPU tensor on a device.

    A plain `to` waits until the device has finished its work so far, which costs a step its overlap. Copies from
    ordinary memory are taken over before the call returns, so that the source may be freed. MPS is not known to do so.
    """
    return tensor.to(device, non_blocking=torch.device(device).type != "mps")
