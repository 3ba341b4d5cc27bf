"""When a tensor is so large that walking over it in blocks beats whole-tensor operations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["BLOCK_ELEMENTS", "LARGE_MAP", "block_length", "is_large", "is_traced"]

BLOCK_ELEMENTS = {"cpu": 1 << 19}
"""Elements of a block by device: 2 MB in float32 on a CPU, so that a block and its scratch stay in the cache."""

BLOCK_ELEMENTS_ELSEWHERE = 1 << 25
"""On other devices a block serves to save memory, not cache: few, large launches."""

LARGE_MAP = 1 << 19
"""Elements from which the blockwise kernels are used: 2 MB in float32, the size of one block.

Below there is nothing to divide, and the plain form serves every transform of torch. Above, each whole-tensor
operation leaves the cache, and from some 100 KB on the C library may give a buffer back to the system, so that
the next operation pays for its pages anew.
"""


def block_length(tensor: Tensor) -> int:
    """How many rows of a matrix make a block."""
    elements = BLOCK_ELEMENTS.get(tensor.device.type, BLOCK_ELEMENTS_ELSEWHERE)
    return max(1, elements // tensor.shape[1])


def is_traced(*tensors: Tensor) -> bool:
    """Whether values cannot be looked at now: inside torch.compile, torch.export or a torch.func transform."""
    return torch.compiler.is_compiling() or any(
        torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors
    )


def is_large(elements: int, *tensors: Tensor) -> bool:
    """Whether the blockwise kernels should serve a map of this many elements, made from these tensors.

    Never while tracing, where a compiler fuses the plain form by itself, nor under forward-mode derivatives,
    which only the plain form has.
    """
    if elements < LARGE_MAP or is_traced(*tensors):
        return False
    return all(forward_ad.unpack_dual(tensor).tangent is None for tensor in tensors)  # type: ignore[no-untyped-call]
