"""Convert any model to a SphereNet (`to_sphere`) and back (`to_plain`), summarize the result, and record it as JSON."""

from spherenet.convert.conversion import to_plain, to_sphere
from spherenet.convert.record import apply_conversion, conversion_record
from spherenet.convert.summary import LayerSummary, SphereSummary, sphere_summary

__all__ = [
    "LayerSummary",
    "SphereSummary",
    "apply_conversion",
    "conversion_record",
    "sphere_summary",
    "to_plain",
    "to_sphere",
]
