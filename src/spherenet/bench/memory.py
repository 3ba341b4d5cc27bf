"""Peak memory of tensors during a call, counted allocation by allocation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["peak_bytes"]


def peak_bytes(run: Callable[[], object], device: str = "cpu") -> int:
    """Return the most bytes of tensors that `run` held at once, beyond what was allocated before.

    On the CPU every allocation and release that torch reports is added up, which is exact and does not depend on
    what the process held before; scratch space inside vendor libraries is not seen. Elsewhere the device's own
    counter is read.
    """
    if device != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        run()
        module.synchronize()
        return int(module.max_memory_allocated() - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    held = peak = 0
    assert profiler.profiler is not None
    kineto = profiler.profiler.kineto_results
    assert kineto is not None
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
