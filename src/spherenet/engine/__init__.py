"""The training loop on torch's own DDP and AMP; it receives built objects and writes a run directory."""

from spherenet.engine.evaluation import Evaluation, evaluate
from spherenet.engine.processes import Processes
from spherenet.engine.reporter import Reporter
from spherenet.engine.settings import Settings
from spherenet.engine.signals import StopRequested, StopSignals
from spherenet.engine.trainer import Outcome, Trainer

__all__ = [
    "Evaluation",
    "Outcome",
    "Processes",
    "Reporter",
    "Settings",
    "StopRequested",
    "StopSignals",
    "Trainer",
    "evaluate",
]
