"""Command line on a few digits as a worker of torchrun.

The worker DIE_RANK is killed once, at step DIE_AT_STEP. All workers wait once before step HOLD_AT_STEP, until the file
HOLD_UNTIL exists.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import fork_server, injections
from spherenet.cli import main
from spherenet.training import run as training

training.build_data = fork_server.build_data

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ.get("DIE_RANK") == os.environ["RANK"]:
        injections.kill_at_step(int(os.environ["DIE_AT_STEP"]))
    if "HOLD_AT_STEP" in os.environ:
        injections.hold_at_step(int(os.environ["HOLD_AT_STEP"]), os.environ["HOLD_UNTIL"])
sys.exit(main())
