"""Run the command line with `python -m spherenet`."""

import logging
import os
import sys

from spherenet.cli import main

code = main()
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    # Under torchrun. At interpreter shutdown, running threads of torch's process groups are destroyed, which sometimes
    # aborts a process that has finished its work and closed its files.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
