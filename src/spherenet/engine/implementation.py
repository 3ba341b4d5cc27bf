"""Which implementation of the operators computes: another one gives results that differ by rounding."""

from __future__ import annotations

import importlib

__all__ = ["implementation_name"]


def implementation_name(device_type: str) -> str:
    """Return the name of the implementation that runs on a type of device, for example "native" or "reference".

    The dispatcher of the kernels knows it. This function is the only place that asks it.
    """
    try:
        dispatch = importlib.import_module("spherenet.kernels.dispatch")
        return str(dispatch.implementation_name(device_type))
    except (ImportError, AttributeError):  # a version whose kernels have no dispatcher: torch's compiler, if it works
        compiled = importlib.import_module("spherenet.kernels.compiled")
        return "in steps" if getattr(compiled, "_broken", False) else "compiled"
