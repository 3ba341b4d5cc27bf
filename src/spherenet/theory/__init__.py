"""Numerical labs: what the paper argues with, computed, drawn and corrected where it is wrong (SPEC 1 (8), (9) and 2).

Every lab is a module of pure functions that return plain results, and a `draw` that turns them into a figure; nothing
here is needed to train a network. `spherenet theory NAME` runs them from the command line.

conditioning, depth: exact Hessians of matrix products · spectra, twins: Hessians of networks by Lanczos's method ·
phase: the Fourier figure · operators: g, ψ and their slopes · features: 2-D features of digits · colour: brightness
and the ratio of R, G, B.
"""
