"""Numerical demonstrations ("labs") of the paper's theoretical arguments; `spherenet theory NAME` runs them.

Each lab consists of functions that return plain results and of a function that draws them. Training does not need this
package.

- conditioning: exact Hessians of matrix products (Eq. 12 of docs/concepts.md)
- spectra: Hessian spectra of small networks by the Lanczos method
- phase: images from Fourier phases and from magnitudes (Eq. 13)
- operators: g, ψ and their slopes (Eq. 1 and 6)
- features: 2-D features of digits
- color: outputs for changing brightness and color
- labs: the labs by name, with tables
- drawing: figures
"""
