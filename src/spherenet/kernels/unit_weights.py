"""Unit weights that are kept from call to call in inference, as long as the weight has not changed.

A weight may change without a trace: `weight.data.copy_(…)` does not advance the version counter that autograd looks at.
So a kept unit weight is used only if a fingerprint of the weight's memory is still the same; computing it takes a
fraction of the time of normalizing the weight again.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from spherenet.kernels import native

__all__ = ["kept_unit_weight"]


class _Entry(NamedTuple):
    weight: weakref.ref[Tensor]
    key: tuple[object, ...]
    unit: Tensor


_kept: dict[int, _Entry] = {}


def kept_unit_weight(weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return weight/‖w‖ per filter in `dtype`, from the last call if the weight is the same. For inference only."""
    key = (native.checksum(weight), weight.data_ptr(), weight.shape, weight.stride(), eps, dtype)
    entry = _kept.get(id(weight))
    if entry is not None and entry.weight() is weight and entry.key == key:
        return entry.unit
    unit = native.unit_weight(weight, eps, dtype)[0]
    if not unit.is_inference():  # such a tensor could not be used again outside of inference mode
        name = id(weight)
        _kept[name] = _Entry(weakref.ref(weight, lambda _: _kept.pop(name, None)), key, unit)
    return unit
