"""Benchmarks of SphereNets against their CNN twins and the formula of the authors' code."""
