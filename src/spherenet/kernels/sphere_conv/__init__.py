"""Fused kernels of SphereConv and SphereLinear: native on CPUs, Triton on GPUs."""
