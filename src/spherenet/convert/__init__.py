"""Any network made spherical, and back: `to_sphere`, `to_plain`, and what they did: `sphere_summary`."""

from spherenet.convert.conversion import to_plain, to_sphere
from spherenet.convert.summary import LayerSummary, SphereSummary, sphere_summary

__all__ = ["LayerSummary", "SphereSummary", "sphere_summary", "to_plain", "to_sphere"]
