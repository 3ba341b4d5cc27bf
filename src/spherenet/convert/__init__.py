"""Convert any model to a SphereNet (`to_sphere`) and back (`to_plain`), and summarize the result (`sphere_summary`)."""

from spherenet.convert.conversion import to_plain, to_sphere
from spherenet.convert.summary import LayerSummary, SphereSummary, sphere_summary

__all__ = ["LayerSummary", "SphereSummary", "sphere_summary", "to_plain", "to_sphere"]
