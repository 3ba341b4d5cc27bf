"""Fused twins of the operators: what a convolution costs, plus one pass over its output each way."""
