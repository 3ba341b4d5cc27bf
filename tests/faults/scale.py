"""Number of trials of the fault tests: few by default, many with SPHERENET_SOAK=1."""

import os

SOAK = os.environ.get("SPHERENET_SOAK") == "1"


def count(short, soak):
    """Return the number of trials for this run."""
    return soak if SOAK else short


RANDOM_KILLS = count(4, 55)  # runs that are killed once or twice at random moments
CRASH_POINTS = count(8, 50)  # changes of a run directory before which a run is killed
CORRUPTIONS = count(5, 10_000)  # corrupt files of a checkpoint; all combinations in a soak
BIT_FLIPS = count(4, 40)  # flipped bits in files of a checkpoint
DISK_LIMITS = count(2, 6)  # file sizes at which the disk is full
FAULTY_STEPS = count(3, 20)  # steps with a loss or gradient that is not finite
FUZZ_INPUTS = count(40, 760)  # mutated inputs per reader
COMMAND_LINES = count(300, 20_000)  # command lines with mutated runs, models and option files
POWER_FAILURES = count(1, 25)  # simulated power failures
SOAK_STEPS = count(120, 4_000)  # training steps with growing and shrinking batches
SOAK_RUNS = count(2, 30)  # complete runs in one process
SOAK_READERS = count(4, 60)  # image loaders with workers
STRESS_DRAWS = count(1, 2)  # random inputs per operator, scale and dtype
STRESS_SCALES = count(4, 100)  # scales between 1e-45 and 3e38; all in a soak
PAIRS = count(3, 40)  # runs of two processes that finish
RACERS = count(3, 8)  # processes that start one run at the same moment
RACES = count(1, 6)  # repetitions
ARCHIVE_FLIPS = count(4, 100)  # archives with a flipped bit or a missing end
STRESS_WEIGHTS = count(2, 5)  # sets of weights per input

PATIENCE = 240
"""Seconds after which a child process counts as hanging, also on a busy machine."""
