"""How often each thing is tried: a short form in every run of the tests, the full counts with SPHERENET_SOAK=1."""

import os

SOAK = os.environ.get("SPHERENET_SOAK") == "1"


def count(short, soak):
    """The number for this run."""
    return soak if SOAK else short


RANDOM_KILLS = count(4, 55)  # runs, each killed once or twice at moments drawn at random
CRASH_POINTS = count(8, 50)  # of all changes that a run makes to its folder, evenly spread
DAMAGES = count(5, 10_000)  # of all kinds of damage to all files of a checkpoint
BIT_FLIPS = count(4, 40)  # single bits, over all files of a checkpoint
DISK_LIMITS = count(2, 6)  # sizes of files at which the disk is full
FAULTY_STEPS = count(3, 20)  # steps with a loss or gradient that is not finite
FUZZ_INPUTS = count(40, 760)  # for each reader
COMMAND_LINES = count(300, 20_000)  # command lines over mutated files of runs, models and options
POWER_FAILURES = count(1, 25)  # runs whose disk is copied as it is at a random moment
SOAK_STEPS = count(120, 4_000)  # of training with growing and shrinking batches
SOAK_RUNS = count(2, 30)  # whole runs in one process
SOAK_READERS = count(4, 60)  # loaders of pictures with workers, opened and closed
STRESS_DRAWS = count(1, 2)  # random inputs for each operator, scale and dtype
STRESS_SCALES = count(4, 100)  # of all scales from 1e-45 to 3e38, evenly spread, the ends included; all in a soak
PAIRS = count(3, 40)  # runs of two processes that come to their end
RACERS = count(3, 8)  # processes that begin one run at the same moment
RACES = count(1, 6)  # of them
ARCHIVE_FLIPS = count(4, 100)  # archives with a bit flipped or an end missing
STRESS_WEIGHTS = count(2, 5)  # kinds of weights for each input

PATIENCE = 240
"""Seconds until a child that should have ended counts as hanging: generous, for loaded machines."""
