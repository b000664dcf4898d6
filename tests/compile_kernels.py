"""Compile the Triton kernels for GPUs that are not at hand: `make kernels`.

A driver that only says which GPU there is takes the place of the real one, and launches end when the kernel is compiled. So this shows
that Triton takes the kernels as the package calls them, and how much shared memory they need; not that they are right, nor fast.
"""

import argparse
import sys
from typing import Any

import torch
import triton
from plain_attention import SCALE
from plain_attention import positions_of
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hf_relpos.kernels import kernel_attention
from hf_relpos.model.scheme_terms import ScoreTerms

SHARED = 99 * 1024
"""Bytes of shared memory of a block on the GPUs with the least, from 2020 on (compute capability 8.6 and 8.9)."""
HEADS, LENGTH = 2, 128
CASES = {
    "transformer_xl": ("query_vectors", "key_offset", "distance_offset"),
    "shaw": ("query_vectors", "value_vectors"),
    "deberta": ("query_vectors", "key_vectors"),
}


class Named:
    """A driver that knows the GPU's name, and nothing else.

    Args:
        capability: 80 for A100, 90 for H100.
    """

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_case(names: tuple[str, ...], dtype: torch.dtype, size: int, dropout: float, padded: bool) -> dict[str, int]:
    """Compile what one forward and backward pass launches; return the shared memory of each kernel in bytes."""
    found: dict[str, int] = {}
    run = JITFunction.run

    def compiled(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *given, grid=grid, warmup=True, **options)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        found[self.__name__] = kernel.metadata.shared
        return kernel

    options = {"attention_mask": torch.ones(1, LENGTH).index_fill(1, torch.tensor([0]), 0)} if padded else {}
    positions = positions_of(1, LENGTH, causal=False, **options)
    shapes = {"key_offset": (HEADS, size), "distance_offset": (HEADS, size)}
    parts: dict[str, Any] = {
        name: torch.zeros(shapes.get(name, (HEADS, 2 * LENGTH - 1, size)), dtype=dtype).requires_grad_() for name in names
    }
    states = [torch.zeros(1, HEADS, LENGTH, size, dtype=dtype, requires_grad=True) for _ in range(3)]
    JITFunction.run = compiled
    try:
        kernel_attention(*states, ScoreTerms(**parts), positions, SCALE, dropout).sum().backward()
    finally:
        JITFunction.run = run
    return found


def main(argv: list[str] | None = None) -> int:
    """Compile all cases; return 1 if a kernel needs more shared memory than the smallest GPUs have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90], help="of the GPUs, 80 for A100, 90 for H100")
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--size", type=int, nargs="+", default=[64], help="of heads")
    given, wrong = parser.parse_args(argv), 0
    for capability in given.capability:
        triton.runtime.driver.set_active(Named(capability))
        for case in given.case:
            for dtype in given.dtype:
                for size in given.size:
                    found = compile_case(CASES[case], getattr(torch, dtype), size, 0.1, padded=True)
                    wrong += max(found.values()) > SHARED
                    sizes = ", ".join(f"{name} {shared // 1024}" for name, shared in found.items())
                    print(
                        f"sm_{capability}, {case}, {dtype}, heads of {size}: compiled; KiB of shared memory: {sizes}",
                        flush=True,
                    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
