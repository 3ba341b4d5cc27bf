"""`python -m spherenet` is the command line."""

import logging
import os
import sys

from spherenet.cli import main

code = main()
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    # Under torchrun. While the interpreter goes down, threads of torch's process groups are destroyed while they run,
    # which now and then aborts a process whose work is done and whose files are closed.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
