"""When a layer attends by the kernels of `hf_relpos.kernels`, and what refuses a model that asks for them in vain.

The kernels do not ship: they are asked of the installed package, by name, and only by `attn_implementation="triton"`.
"""

import os
from importlib import import_module
from typing import Any

import torch

from .positions import Positions
from .scheme_registry import SCHEMES
from .scheme_registry import layer_schemes
from .scheme_registry import scheme_class
from .scheme_terms import ScoreTerms

KERNELS = "triton"
"""The `attn_implementation` that asks for the kernels."""

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Return whether Triton interprets kernels on a processor, for tests: slow, and without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def import_kernels() -> Any:
    """Return the module of the kernels; an ImportError where the package or Triton is missing."""
    import_module("triton")
    return import_module("hf_relpos.kernels")


def check_kernels(config: Any) -> None:
    """Refuse `attn_implementation="triton"` where no layer has a kernel, or where none can run.

    Raises:
        ValueError: names what is missing, and the attention implementations that work.
    """
    schemes = {name: scheme_class(name) for stack in config.stacks() for name in layer_schemes(stack)}
    asked, instead = f"attn_implementation={KERNELS!r}", "use 'sdpa', 'eager' or 'flex_attention'"
    if not any(kind.has_kernel for kind in schemes.values()):
        served = ", ".join(name for name, kind in SCHEMES.items() if kind.has_kernel)
        raise ValueError(
            f"{asked} has no kernel for position_scheme {', '.join(map(repr, schemes))}; it has one for {served}: {instead}"
        )
    try:
        import_kernels()
    except ImportError as error:
        needs = 'the package hf_relpos and Triton (`pip install "hf_relpos[gpu]"`)'
        raise ValueError(f"{asked} needs {needs}, and they cannot be imported: {error}; {instead}") from error
    if not (torch.cuda.is_available() or interpreted()):
        raise ValueError(f"{asked} needs a GPU, and torch {torch.__version__} finds none; {instead}")


def kernels_serve(terms: ScoreTerms, positions: Positions) -> bool:
    """Return whether the kernels can attend in a pass; where they cannot, a layer attends as under `sdpa`.

    They read numbers and vectors per distance, where every distance counts tokens; not `dense` terms, and no running sums, which
    FlexAttention looks up. For one query, as in decoding, one dense bias costs less.
    """
    read = terms.dense is None and terms.factors is None and terms.sums is None and not torch.compiler.is_compiling()
    runs = positions.query.device.type == "cuda" or interpreted()
    exact = positions.dtype == torch.float64  # in single precision sums would be too short for it
    return read and runs and not exact and positions.is_toeplitz and positions.query.shape[1] > 1
