"""Start the command line: the script `spherenet` and `python -m spherenet`.

The imports of the command line take a tenth of a second. Ctrl-C ends them with one sentence instead of a traceback, so
this module imports only what Python has imported before it handles the signal.
"""

import os
import sys

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import NoReturn

INTERRUPTED = 130


def _leave(*_: object) -> "NoReturn":
    """End the process: during imports nothing has been opened or written."""
    os.write(2, b"spherenet: interrupted.\n")
    os._exit(INTERRUPTED)


def run() -> int:
    """Run the command line and return its exit code."""
    try:
        import signal

        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_default:
            signal.signal(signal.SIGINT, _leave)
        from spherenet.cli import main

        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return main()
    except KeyboardInterrupt:  # before or after what `main` handles
        _leave()


def _leave_group(code: int) -> "NoReturn":
    """End a process of torchrun.

    At interpreter shutdown, running threads of torch's process groups are destroyed, which sometimes aborts a process
    that has finished its work and closed its files.
    """
    import logging

    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    code = run()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _leave_group(code)
    sys.exit(code)
