"""The study of the paper with spherenet: experiments, claims, theory, results and figures.

It uses spherenet through its public API and adds the verbs `reproduce`, `theory` and `tune` to its command line.
"""

__version__ = "0.1.0.dev0"
