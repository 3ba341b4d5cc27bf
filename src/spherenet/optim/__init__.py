"""What an optimiser should know about scale-invariant weights: parameter groups and the norm-keeping hook."""

from spherenet.optim.keep_norms import KeptNorms, keep_norms
from spherenet.optim.param_groups import param_groups

__all__ = ["KeptNorms", "keep_norms", "param_groups"]
