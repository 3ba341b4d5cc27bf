"""What tests share, with those of the library."""

from fixtures import browser, seed, visit

__all__ = ["browser", "seed", "visit"]
