"""Probes: tasks with known answers that show what a position scheme can do, at the trained size and beyond."""

from hf_relpos.data.probes.adjacency import ADJACENCY
from hf_relpos.data.probes.adjacency import ADJACENCY_MARKED
from hf_relpos.data.probes.algorithms import ADDITION
from hf_relpos.data.probes.algorithms import COPY
from hf_relpos.data.probes.algorithms import PARITY
from hf_relpos.data.probes.algorithms import REVERSE
from hf_relpos.data.probes.algorithms import SORT
from hf_relpos.data.probes.base import EVALUATION_SEED
from hf_relpos.data.probes.base import Probe
from hf_relpos.data.probes.indexing import INDIRECT_INDEXING
from hf_relpos.data.probes.recall import HAYSTACK
from hf_relpos.data.probes.recall import MQAR
from hf_relpos.data.probes.recall import PASSKEY

__all__ = ["EVALUATION_SEED", "PROBES", "Probe"]

_ALL = (
    *(ADJACENCY, ADJACENCY_MARKED),
    *(COPY, REVERSE, SORT, ADDITION, PARITY),
    *(MQAR, PASSKEY, INDIRECT_INDEXING, HAYSTACK),
)
PROBES: dict[str, Probe] = {probe.name: probe for probe in _ALL}
"""All probes by name."""
