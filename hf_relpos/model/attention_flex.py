"""FlexAttention with numbers per distance or per key: its kernel looks them up, so that no query x key tensor of all heads is built.

For accelerators: compiled for a processor, such a table does not survive a second length (torch 2.13). There, and wherever a scheme
reads queries or keys, FlexAttention is given one dense bias (`attention.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers.integrations.flex_attention import compile_friendly_flex_attention

from .positions import Positions
from .running_sums import sums_of_queries
from .scheme_terms import ScoreTerms


def flex_by_distance(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: ScoreTerms | None,
    positions: Positions,
    scale: float,
    training: bool,
) -> torch.Tensor:
    """Attend with numbers that are looked up; their gradients are summed inside the kernel (torch's FlexAttention, on a GPU).

    Args:
        query: `(batch, heads, query, head_dim)`.
        key, value: `(batch, heads, key, head_dim)`, heads already repeated for grouped queries.
        terms: what the scheme adds: a bias of all distances between the bounds, or running sums; None for nothing.
        positions: who sees whom, at which distance; `is_toeplitz` must hold if there is a bias.
        scale: factor on products of queries and keys.
        training: whether the model is being trained, for the choice of kernels.

    Returns:
        `(batch, query, heads, head_dim)`.
    """
    output: Any = compile_friendly_flex_attention(
        query,
        key,
        value,
        training,
        score_mod=None if terms is None else _look_up(terms, positions, query.dtype),
        block_mask=positions.once(_block_mask),
        scale=scale,
    )
    return output.transpose(1, 2)


def _look_up(terms: ScoreTerms, positions: Positions, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the function that adds, in the kernel, what `terms` say of a query and a key."""
    if terms.sums is not None:
        keys = _in_two(terms.sums, torch.promote_types(dtype, torch.float32))
        queries = [sums_of_queries(part, positions) for part in keys]

        def grown(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
            coarse, fine = (
                mine[batch, head, row] - other[batch, head, column] for mine, other in zip(queries, keys, strict=True)
            )
            return score + (coarse + fine)

        return grown
    bias: Any = terms.bias
    table, first = bias.to(dtype), positions.start + positions.bounds[0]

    def of_distance(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        entry = (column - row - first).clamp(0, table.shape[1] - 1)  # unseen distances are clamped to the ends
        return score + table[head, entry]

    return of_distance


def _in_two(sums: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Write sums in double precision as two of a dtype, whose differences lose nothing: multiples of 64, and what is left."""
    coarse = (sums.detach() / 64).round() * 64
    return [coarse.to(dtype), (sums - coarse).to(dtype)]


def _block_mask(positions: Positions) -> Any:
    """Return who sees whom, in blocks; the kernel skips a block that nobody sees."""
    visible = positions.visible[:, 0]
    batch, queries, keys = visible.shape

    def seen(row: Any, head: Any, query: Any, key: Any) -> Any:
        return visible[row.clamp(max=batch - 1), query, key]  # torch 2.9 takes no plain number beside traced ones

    return create_block_mask(seen, batch if batch > 1 else None, None, queries, keys, device=visible.device)
