"""Attention with position terms, block of queries by block of queries: no query x key tensor for all heads is ever built.

Memory grows with the length, not with its square. The forward pass hands each block's terms to the fused kernel as a mask, which
is a view of the numbers per distance (`blockwise_forward.py`). The backward pass recomputes the block's probabilities from the
saved log-sum-exp, as FlashAttention does (arXiv 2205.14135), and sums score gradients along distances (`blockwise_backward.py`).
"""

from typing import Any

import torch

from .blockwise_backward import FIELDS
from .blockwise_backward import blockwise_gradients
from .blockwise_buffers import BufferPool
from .blockwise_forward import BLOCK
from .blockwise_forward import Block
from .blockwise_forward import BlockSettings
from .blockwise_forward import BlockTensors
from .blockwise_forward import block_scores
from .blockwise_forward import content_query
from .blockwise_forward import cut_blocks
from .blockwise_forward import cut_heads
from .blockwise_forward import dense_part
from .blockwise_forward import dropout_mask
from .blockwise_forward import fusible
from .blockwise_forward import low_rank_bias_of
from .blockwise_forward import room_for_sums
from .blockwise_forward import whole_scores
from .blockwise_kernel import fused_attention
from .blockwise_masking import groups_of_rows
from .positions import Positions
from .scheme_terms import ScoreTerms
from .toeplitz import padded_to_diagonals
from .toeplitz import weighted


def _attend(
    parts: BlockTensors, plan: BlockSettings, block: Block, scores: torch.Tensor, buffers: BufferPool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output `(heads, batch, rows, head_dim)` and log-sum-exp `(heads, batch, rows)` of one block."""
    if fusible(parts, plan):
        return fused_attention(content_query(parts, plan), parts.key, parts.value, scores)
    whole = whole_scores(parts, plan, scores, buffers)
    lse = whole.logsumexp(-1)
    lse = lse.masked_fill(lse == float("-inf"), 0.0)  # a caller's mask may show a query nothing: it finds 0, as in the kernel
    weights = whole.sub_(lse[..., None]).exp_()
    factor = dropout_mask(plan, block, weights)
    weights = weights if factor is None else weights.mul_(factor)
    output = weights.to(parts.value.dtype) @ parts.value
    if parts.value_vectors is not None:
        along = padded_to_diagonals(weights).to(output.dtype)
        output = output + weighted(along, parts.value_vectors, plan.first(block))
    return output, lse


class _Blockwise(torch.autograd.Function):
    """Blockwise attention with gradients for queries, keys, values and every table."""

    @staticmethod
    def forward(ctx: Any, plan: BlockSettings, *tensors: Any) -> torch.Tensor:
        parts, learned = BlockTensors(*tensors[:FIELDS]).with_channels(), tensors[FIELDS:]
        query, value = parts.query, parts.value
        output = torch.empty(*query.shape[:-1], value.shape[-1], dtype=value.dtype, device=value.device)
        lse = torch.empty(query.shape[:-1], dtype=torch.promote_types(value.dtype, torch.float32), device=value.device)
        buffers = BufferPool(query)
        fuses = fusible(parts, plan)
        for rows in cut_blocks(parts, plan, fuses):
            factors = low_rank_bias_of(learned, plan, rows)
            for block in cut_heads(rows, parts, plan, fuses):
                part = parts.grown(block)
                dense = dense_part(part, plan.learned(learned, block), plan, block)
                scores = block_scores(part, dense, factors, plan, block, buffers)
                found = _attend(part, plan, block, scores, buffers)
                output[block.heads, :, block.rows], lse[block.heads, :, block.rows] = found
        ctx.plan = plan
        ctx.save_for_backward(*tensors, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # Not by `once_differentiable`: torch.autograd.grad never meets the error that it leaves in the graph.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "attention in blocks has no second derivatives (create_graph=True): use attn_implementation='eager'"
            )
        *tensors, output, lse = ctx.saved_tensors
        return None, *blockwise_gradients(ctx.plan, tensors, ctx.needs_input_grad[1:], (output, lse, grad))


def _padded(table: torch.Tensor, entries: int) -> torch.Tensor:
    """Return a table `(heads, entries, ...)` with zeros for the distances after the last, which only hidden pairs have."""
    missing = entries - table.shape[1]
    return table if missing <= 0 else torch.cat([table, table.new_zeros(table.shape[0], missing, *table.shape[2:])], 1)


def _hidden(positions: Positions, distances: int, dtype: torch.dtype) -> torch.Tensor:
    """Return minus infinity at the distances that order and window hide, `(1, distances)`, 0 elsewhere."""
    distance = torch.arange(distances, device=positions.query.device) + positions.bounds[0]
    unseen = distance > 0 if positions.ordered else torch.zeros_like(distance, dtype=torch.bool)
    if positions.window is not None and positions.given_mask is None:
        unseen = unseen | (distance.abs() >= positions.window)
    return torch.zeros(1, distances, dtype=dtype, device=distance.device).masked_fill_(unseen, float("-inf"))


def blockwise_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: ScoreTerms,
    positions: Positions,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attend with score terms in memory linear in the length.

    Args:
        query: `(batch, heads, query, head_dim)`, without offsets.
        key, value: `(batch, heads, key, head_dim)`, heads already repeated for grouped queries.
        terms: what the scheme adds.
        positions: who sees whom, at which distance; `is_toeplitz` must hold.
        scale: factor on products of queries and keys.
        dropout: rate at which probabilities are dropped.

    Returns:
        `(batch, query, heads, head_dim)`.
    """
    groups = positions.once(groups_of_rows) or [(None, positions)]
    if groups[0][0] is None:
        return _attend_rows([query, key, value], terms, groups[0][1], scale, dropout)
    split = [(rows, group) for rows, group in groups if rows is not None]
    outputs = []
    for rows, group in split:
        states = [part.index_select(0, rows) for part in (query, key, value)]
        outputs.append(_attend_rows(states, terms.select(rows), group, scale, dropout))
    order = torch.cat([rows for rows, _ in split]).argsort()
    return torch.cat(outputs).index_select(0, order)


def _attend_rows(
    states: list[torch.Tensor], terms: ScoreTerms, positions: Positions, scale: float, dropout: float
) -> torch.Tensor:
    """Attend for rows of the batch that share what hides keys, by queries, keys and values; `(batch, query, heads, head_dim)`."""
    query, key, value = states  # (batch, heads, length, head_dim)
    wide = torch.promote_types(query.dtype, torch.float32)
    distances = query.shape[2] + key.shape[2] - 1
    hidden = _hidden(positions, distances, wide)
    bias = None if terms.bias is None else _padded(terms.bias.to(wide), distances) + hidden

    low, high = terms.span or positions.bounds
    near = low - positions.bounds[0]
    # Without far distances, hidden ones get vectors too: then the products of a block are whole, and need not be copied.
    room = min(distances, high - low + BLOCK) if near <= 0 <= high and positions.ordered else 0

    def table(vectors: torch.Tensor | None) -> torch.Tensor | None:
        return None if vectors is None else _padded(vectors.to(query.dtype), room)

    def offset(vector: torch.Tensor | None) -> torch.Tensor | None:
        return None if vector is None else vector.to(query.dtype)

    vectors = (table(terms.query_vectors), table(terms.key_vectors), table(terms.value_vectors))
    sums, size = None, value.shape[-1]
    if terms.sums is not None:
        value, sums = room_for_sums(value), terms.sums.transpose(0, 1)
    heads_first = (query.flip(-2).transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
    parts = BlockTensors(*heads_first, bias, *vectors, offset(terms.key_offset), offset(terms.distance_offset), sums)
    seed = int(torch.randint(2**62, ())) if dropout else 0
    made = (terms.dense, terms.mixes_heads, terms.factors, len(terms.learned))
    plan = BlockSettings(positions, scale, hidden, near, dropout, seed, *made)
    output = _Blockwise.apply(plan, *parts, *terms.learned, *terms.learned_by_head)
    return output[..., :size].flip(-2).permute(1, 2, 0, 3)
