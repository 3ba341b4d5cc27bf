"""What tests share, with those of the library."""

from fixtures import browser, seed

__all__ = ["browser", "seed"]
