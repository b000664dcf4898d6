"""Memory that one block of attention leaves to the next.

A block's tensors are as large as a processor's cache and live for a moment; fresh memory for each of them costs more than what
is computed in it.
"""

import math

import torch


class BufferPool:
    """Buffers by name, each as large as the largest tensor that was asked for under it.

    Args:
        like: gives the device and the usual dtype.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self.buffers: dict[str, torch.Tensor] = {}

    def empty(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor with nothing in it yet; one asked for earlier under the same name is lost."""
        size, dtype = math.prod(shape), dtype or self.like.dtype
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            buffer = self.buffers[name] = self.like.new_empty(size, dtype=dtype)
        return buffer[:size].view(shape)

    def matrix(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a matrix `(..., rows, columns)` likewise, with zeros behind each row, which `padded_to_diagonals` reads, where that is free.

        It is not where threads share the products of several matrices: they need these to be side by side.
        """
        *outer, rows, columns = shape
        if math.prod(outer) > 1 and torch.get_num_threads() > 1:
            return self.empty(name, *shape, dtype=dtype)
        padded = self.empty(name, *outer, rows, columns + rows, dtype=dtype)
        padded[..., columns:] = 0
        return padded[..., :columns]
