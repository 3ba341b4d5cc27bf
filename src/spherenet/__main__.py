"""`python -m spherenet` is the command line."""

import sys

from spherenet.cli import main

sys.exit(main())
