"""The uniform distribution on a hypersphere."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from torch.distributions import Distribution
from torch.distributions.constraints import Constraint

from spherenet._util.validation import require_integer
from spherenet.distributions.base import (
    broadcast,
    checks_values,
    log_surface,
    require_sample,
    uniform_directions,
    unit_vectors,
)

__all__ = ["HypersphericalUniform"]


class HypersphericalUniform(Distribution):
    """The uniform distribution of unit vectors in d dimensions.

    Args:
        dimension: d, at least 2.
        batch_shape: Shape of independent copies.
        dtype: Floating point type of the samples; torch's default type if None.
        device: Device of the samples.
        validate_args: Whether values are checked: by default, but not in compiled code. The default of
            `torch.distributions` is not asked, because torch.compile changes it for the whole process.

    Raises:
        TypeError: The dimension is not an integer.
        ValueError: The dimension is less than 2.
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {}
    support = unit_vectors
    has_rsample = True

    def __init__(
        self,
        dimension: int,
        batch_shape: Any = (),
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        validate_args: bool | None = None,
    ) -> None:
        require_integer("dimension", dimension, minimum=2)
        self._like = torch.empty((), dtype=dtype or torch.get_default_dtype(), device=device)
        super().__init__(Size(batch_shape), Size((dimension,)), validate_args=False)
        self._validate_args = checks_values(validate_args)

    @property
    def dimension(self) -> int:
        """Number of entries of a sample: d on the sphere of d − 1 dimensions."""
        return self._event_shape[0]

    @property
    def mean(self) -> Tensor:
        """Mean of the samples: zeros."""
        return self._like.new_zeros(self._batch_shape + self._event_shape)

    @property
    def variance(self) -> Tensor:
        """Variance of each entry of the samples: 1 / d."""
        return torch.full_like(self.mean, 1 / self.dimension)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Return samples [*sample_shape, *batch_shape, d]; there are no parameters that could have gradients."""
        return uniform_directions(self._extended_shape(sample_shape), self._like).to(self._like.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of unit vectors: minus the log of the sphere's surface."""
        self._validate_sample(value)
        shape = broadcast(value.shape[:-1], self._batch_shape)
        return torch.full(shape, -log_surface(self.dimension), dtype=value.dtype, device=value.device)

    def entropy(self) -> Tensor:
        """Return the differential entropy: the log of the sphere's surface."""
        return self._like.new_full(self._batch_shape, log_surface(self.dimension))

    def _validate_sample(self, value: Tensor) -> None:
        require_sample(value, self._batch_shape + self._event_shape, self._validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> HypersphericalUniform:
        """Return the distribution with another batch shape."""
        new: Any = self._get_checked_instance(HypersphericalUniform, _instance)  # type: ignore[no-untyped-call]
        new._like = self._like
        Distribution.__init__(new, Size(batch_shape), self._event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new  # type: ignore[no-any-return]
