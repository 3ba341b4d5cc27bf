"""Run the function `checks(rank, world)` of a test file in each process of a group.

A test calls `run_checks`, which starts this file as a script. Its processes are forked after the imports, which they
share.
"""

import gc
import importlib.util
import os
import subprocess
import sys
import traceback
from datetime import timedelta

TIMEOUT = timedelta(seconds=60)
"""How long a process waits for the others, which a failed one ends."""


def run_checks(file, world, folder):
    """Run the checks of a file in `world` processes, with warnings as errors, and assert that all of them succeed."""
    command = [sys.executable, "-W", "error", __file__, file, str(world), str(folder / "store")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    assert done.returncode == 0, done.stdout


def imported(file):
    """Return a file as a module."""
    spec = importlib.util.spec_from_file_location("checked", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def join(checks, rank, world, store):
    """Call the function in one process of the group."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=TIMEOUT)
    checks(rank, world)
    gc.collect()  # what refers to the group goes before it, see docs/scaling.md
    dist.destroy_process_group()


def fork(checks, world, store):
    """Call the function in all processes of the group and return whether all succeed."""
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                join(checks, rank, world, store)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    return all([os.waitpid(child, 0)[1] == 0 for child in children])  # noqa: C419 - waits for all of them


if __name__ == "__main__":
    file, world, store = sys.argv[1:]
    sys.exit(not fork(imported(file).checks, int(world), store))
