"""FlexAttention with numbers per distance: its kernel looks them up, so that no query x key tensor of all heads is built.

For accelerators: compiled for a processor, such a table does not survive a second length (torch 2.13). There, and wherever a scheme
reads queries or keys, FlexAttention is given one dense bias (`attention.py`).
"""

from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers.integrations.flex_attention import compile_friendly_flex_attention

from .positions import Positions


def flex_by_distance(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    positions: Positions,
    scale: float,
    training: bool,
) -> torch.Tensor:
    """Attend with a number per head and distance; its gradient is summed inside the kernel (torch's FlexAttention, on a GPU).

    Args:
        query: `(batch, heads, query, head_dim)`.
        key, value: `(batch, heads, key, head_dim)`, heads already repeated for grouped queries.
        bias: `(heads, distances)` added to the scaled scores, of all distances between the bounds; None for nothing.
        positions: who sees whom, at which distance; `is_toeplitz` must hold if there is a bias.
        scale: factor on products of queries and keys.
        training: whether the model is being trained, for the choice of kernels.

    Returns:
        `(batch, query, heads, head_dim)`.
    """

    def looked_up(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        entry = (column - row - first).clamp(0, table.shape[1] - 1)  # unseen distances are clamped to the ends
        return score + table[head, entry]

    table: Any = None if bias is None else bias.to(query.dtype)
    first = 0 if bias is None else positions.start + positions.bounds[0]
    output: Any = compile_friendly_flex_attention(
        query,
        key,
        value,
        training,
        score_mod=None if bias is None else looked_up,
        block_mask=positions.once(_block_mask),
        scale=scale,
    )
    return output.transpose(1, 2)


def _block_mask(positions: Positions) -> Any:
    """Return who sees whom, in blocks; the kernel skips a block that nobody sees."""
    visible = positions.visible
    batch, _, queries, keys = visible.shape

    def seen(row: Any, head: Any, query: Any, key: Any) -> Any:
        return visible[row if batch > 1 else 0, 0, query, key]

    return create_block_mask(seen, batch if batch > 1 else None, None, queries, keys, device=visible.device)
