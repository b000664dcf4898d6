"""Settings of all tests: offline, one seed, one thread."""

import gc
import os

# For this process and for all that tests start, whatever the shell says: runs that are compared bit by bit must add up in
# the same order, tiny tensors are slower on many threads, and the tests share the cores among their workers.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import pytest
import torch
from reload_folders import read_code_once
from transformers.utils.logging import get_logger
from transformers.utils.logging import set_verbosity_warning

from hf_relpos.data import file_streams
from hf_relpos.data import stream_lanes


@pytest.fixture(autouse=True)
def same_start() -> None:
    """Begin each test alike, whichever ran before it: a trainer lowers what transformers says, and some is said once a process."""
    torch.manual_seed(0)
    set_verbosity_warning()
    for warn_once in (get_logger(__name__).warning_once, file_streams.warn_once, stream_lanes.warn_once):
        warn_once.cache_clear()


def pytest_configure() -> None:
    """Collect no garbage while all is imported."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Look through the code that ships once, and leave all that is imported out of garbage collection.

    Every save and load reads all of that code, and trainers collect garbage at every turn, among all objects there are.
    """
    read_code_once()
    gc.freeze()
    gc.enable()
