"""Command line on a few digits as a worker of torchrun. The worker DIE_RANK is killed once, at step DIE_AT_STEP."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import fork_server, injections
from spherenet.cli import main
from spherenet.training import run as training

training.build_data = fork_server.build_data

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ.get("DIE_RANK") == os.environ["RANK"]:
    injections.kill_at_step(int(os.environ["DIE_AT_STEP"]))
sys.exit(main())
