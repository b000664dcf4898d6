"""Attention with position terms, block of queries by block of queries: no query x key tensor for all heads is ever built.

Memory grows with the length, not with its square. The forward pass hands each block's bias to the fused kernel as a mask; the
backward pass recomputes the block's probabilities from the saved log-sum-exp, as FlashAttention does (arXiv 2205.14135), and lets
autograd carry the score gradient from the block's bias to the scheme's tables, so every score term has one formula, forward and
backward.
"""

from typing import Any
from typing import NamedTuple

import torch

from .positions import Positions
from .scheme_base import ScoreTerms
from .scheme_base import dense_bias

BLOCK = 128
"""Queries a block: large enough for fast products, small enough for the cache of a processor."""


class Block(NamedTuple):
    """One block: its rows among the queries, its columns among the keys, and its positions."""

    rows: slice
    columns: slice
    positions: Positions


class Attended(NamedTuple):
    """What the autograd function works on; the fields of `ScoreTerms` that it serves, the offsets already added to the queries."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    distance_query: torch.Tensor | None
    bias: torch.Tensor | None
    query_vectors: torch.Tensor | None
    key_vectors: torch.Tensor | None


def blocks(positions: Positions, size: int = BLOCK) -> list[Block]:
    """Cut the queries into blocks, each with just the keys that it can see."""
    queries, keys = positions.query.shape[1], positions.key.shape[1]
    start = int(positions.start)
    found = []
    for first in range(0, queries, size):
        rows = slice(first, min(first + size, queries))
        low, high = 0, keys
        if positions.given_mask is None and positions.causal:
            high = min(keys, start + rows.stop)
            low = 0 if positions.window is None else max(0, start + first + 1 - positions.window)
        columns = slice(low, high)
        found.append(Block(rows, columns, positions.block(rows, columns)))
    return found


def block_bias(parts: Attended, block: Block, low: int, scale: float) -> torch.Tensor | None:
    """The bias of one block, `(batch|1, heads, rows, columns)`, from the parts cut to the block.

    Args:
        parts: queries and keys already cut to the block; tables whole.
        block: the block.
        low: the distance of the first entry of the tables.
        scale: factor on products.
    """
    first, last = block.positions.bounds
    cut = slice(first - low, last - low + 1)
    terms = ScoreTerms(
        bias=None if parts.bias is None else parts.bias[:, cut],
        query_vectors=None if parts.query_vectors is None else parts.query_vectors[:, cut],
        key_vectors=None if parts.key_vectors is None else parts.key_vectors[:, cut],
    )
    query = parts.query if parts.distance_query is None else parts.distance_query
    return dense_bias(terms, block.positions, query, parts.key, scale)


def cut(parts: Attended, block: Block) -> Attended:
    """The queries, keys and values of one block."""
    rows, columns = block.rows, block.columns
    return parts._replace(
        query=parts.query[:, :, rows],
        key=parts.key[:, :, columns],
        value=parts.value[:, :, columns],
        distance_query=None if parts.distance_query is None else parts.distance_query[:, :, rows],
    )


def masked(bias: torch.Tensor | None, block: Block, like: torch.Tensor) -> torch.Tensor | None:
    """The block's bias with minus infinity where the mask hides; None when nothing is added and nothing is hidden."""
    positions = block.positions
    if not positions.needs_mask and (not positions.causal or positions.query.shape[1] == 1):
        return bias
    hidden = ~positions.visible
    if bias is None:
        return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
    return bias.masked_fill(hidden, float("-inf"))


def attend_block(part: Attended, mask: torch.Tensor | None, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `(batch, heads, rows, head_dim)` and log-sum-exp `(batch, heads, rows)` of one block."""
    if part.query.device.type == "cpu":
        expanded = None if mask is None else mask.expand(part.query.shape[0], part.query.shape[1], -1, -1)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            part.query, part.key, part.value, 0.0, False, attn_mask=expanded, scale=scale
        )
    scores = (part.query * scale) @ part.key.transpose(-1, -2)
    scores = (scores if mask is None else scores + mask).float()
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(part.value.dtype) @ part.value, lse


class _Blockwise(torch.autograd.Function):
    """Blockwise attention with gradients for queries, keys, values and every table."""

    @staticmethod
    def forward(ctx: Any, positions: Positions, scale: float, *tensors: torch.Tensor | None) -> torch.Tensor:
        parts = Attended(*tensors)
        output = torch.empty(
            *parts.query.shape[:-1], parts.value.shape[-1], dtype=parts.value.dtype, device=parts.value.device
        )
        lse = torch.empty(parts.query.shape[:-1], dtype=torch.promote_types(output.dtype, torch.float32), device=output.device)
        low = positions.bounds[0]
        for block in blocks(positions):
            part = cut(parts, block)
            mask = masked(block_bias(part, block, low, scale), block, part.query)
            output[:, :, block.rows], lse[:, :, block.rows] = attend_block(part, mask, scale)
        ctx.positions, ctx.scale = positions, scale
        ctx.save_for_backward(*tensors, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        *tensors, output, lse = ctx.saved_tensors
        parts, scale = Attended(*tensors), ctx.scale
        low = ctx.positions.bounds[0]
        sums = Attended(*(None if tensor is None else torch.zeros_like(tensor, dtype=_wide(tensor)) for tensor in tensors))
        delta = (grad * output).sum(-1, dtype=lse.dtype)
        for block in blocks(ctx.positions):
            rows, columns = block.rows, block.columns
            part = cut(parts, block)
            with torch.enable_grad():
                leaves = Attended(*(None if tensor is None else tensor.detach().requires_grad_() for tensor in part))
                bias = block_bias(leaves, block, low, scale)
            mask = masked(None if bias is None else bias.detach(), block, part.query)
            scores = ((part.query * scale) @ part.key.transpose(-1, -2)).to(lse.dtype)
            scores = scores if mask is None else scores.add_(mask)
            weights = scores.sub_(lse[:, :, rows, None]).exp_()
            outward = grad[:, :, rows]
            narrow = weights.to(outward.dtype)
            slope = (outward @ part.value.transpose(-1, -2)).to(lse.dtype).sub_(delta[:, :, rows, None]).mul_(weights)
            slope = slope.to(outward.dtype)
            sums.value[:, :, columns] += narrow.transpose(-1, -2) @ outward
            sums.query[:, :, rows] += (slope @ part.key) * scale
            sums.key[:, :, columns] += (slope.transpose(-1, -2) @ part.query) * scale
            if bias is not None:
                _add_bias_gradients(sums, leaves, bias, slope, block)
        grads = (None if total is None else total.to(tensor.dtype) for total, tensor in zip(sums, tensors, strict=True))
        return None, None, *grads


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """Sums over blocks are kept in at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _add_bias_gradients(sums: Attended, leaves: Attended, bias: torch.Tensor, slope: torch.Tensor, block: Block) -> None:
    """Carry the score gradient of one block, `(batch, heads, rows, columns)`, to all that its bias was made from."""
    where = Attended(block.rows, block.columns, block.columns, block.rows, None, None, None)
    if bias.shape[0] == 1:
        slope = slope.sum(0, keepdim=True)
    names = [name for name, leaf in zip(Attended._fields, leaves, strict=True) if leaf is not None]
    found = torch.autograd.grad(bias, [getattr(leaves, name) for name in names], slope.to(bias.dtype), allow_unused=True)
    for name, gradient in zip(names, found, strict=True):
        if gradient is not None:
            rows = getattr(where, name)
            total = getattr(sums, name)
            (total if rows is None else total[:, :, rows]).add_(gradient)


def blockwise_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: ScoreTerms, positions: Positions, scale: float
) -> torch.Tensor:
    """Attend with score terms in memory linear in the length.

    Args:
        query: `(batch, heads, query, head_dim)`, without offsets.
        key, value: `(batch, heads, key, head_dim)`, heads already repeated for grouped queries.
        terms: what the scheme adds; `dense` terms are refused.
        positions: who sees whom, at which distance.
        scale: factor on products of queries and keys.

    Returns:
        `(batch, query, heads, head_dim)`.
    """
    if terms.dense is not None:
        raise ValueError("blockwise attention takes score terms per distance, not a dense tensor")

    def offset(by: torch.Tensor | None) -> torch.Tensor:
        return query if by is None else query + by[:, None].to(query.dtype)

    distance_query = None if terms.query_vectors is None else offset(terms.distance_offset)
    per_row = [offset(terms.key_offset), key, value, distance_query]
    tables = [terms.bias, terms.query_vectors, terms.key_vectors]
    groups = positions.row_groups
    if groups[0][0] is None:
        return _Blockwise.apply(groups[0][1], scale, *per_row, *tables).transpose(1, 2)
    outputs = []
    for rows, group in groups:
        chosen = [None if part is None else part.index_select(0, rows) for part in per_row]
        outputs.append(_Blockwise.apply(group, scale, *chosen, *tables))
    order = torch.cat([rows for rows, _ in groups]).argsort()
    return torch.cat(outputs).index_select(0, order).transpose(1, 2)
