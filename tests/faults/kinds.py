"""The kinds of faults, and the jobs that each is tried on.

Each lets a job meet something bad once, runs the job again, and asserts what `tries.py` says must hold.
"""

import signal
from collections.abc import Callable

import spoil
from damaged_files import changed_checkpoint
from damaged_files import changed_record
from damaged_files import changed_source
from damaged_files import changed_table
from damaged_files import changed_text
from disks import full_disk
from disks import read_only
from network_and_workers import dead_worker
from network_and_workers import lost_network
from signals import stopped
from signals import stopped_in_save
from spoiled_numbers import spoiled
from tries import Try
from two_runs import two_at_once

RUNS = ("training", "training with memory")
KINDS: dict[str, tuple[Callable[[Try], str], tuple[str, ...]]] = {
    "SIGKILL": (stopped(signal.SIGKILL), (*RUNS, "data preparation", "evaluate", "compare", "convert", "push")),
    "SIGKILL within a save": (stopped_in_save(signal.SIGKILL), RUNS),
    "SIGTERM": (stopped(signal.SIGTERM), (*RUNS, "data preparation", "evaluate", "compare", "convert", "push")),
    "SIGINT": (stopped(signal.SIGINT), (*RUNS, "data preparation", "evaluate", "compare", "convert", "push")),
    "SIGINT within a save": (stopped_in_save(signal.SIGINT), RUNS),
    "full disk": (full_disk, (*RUNS, "data preparation", "evaluate", "compare", "convert")),
    "read-only disk": (read_only, (*RUNS, "data preparation", "compare", "convert")),
    "lost network": (lost_network, ("push",)),
    "dead worker": (dead_worker, ("training with workers", "data preparation")),
    "two at once": (two_at_once, (*RUNS, "data preparation", "compare", "convert")),
    "damaged checkpoint": (changed_checkpoint, RUNS),
    "damaged record": (changed_record, RUNS[:1]),
    "damaged table": (changed_table, RUNS),
    "damaged source": (changed_source, ("convert",)),
    "changed text": (changed_text, RUNS),
    **{f"spoiled {what}": (spoiled(what), RUNS) for what in spoil.WHAT},
}
"""Each kind of fault, and the jobs that it is tried on."""
