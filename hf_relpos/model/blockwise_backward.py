"""The backward pass of blockwise attention: each block's probabilities once more, and where their gradients go."""

from collections.abc import Sequence
from typing import Any

import torch

from .blockwise_buffers import BufferPool
from .blockwise_forward import Block
from .blockwise_forward import BlockSettings
from .blockwise_forward import BlockTensors
from .blockwise_forward import block_scores
from .blockwise_forward import content_query
from .blockwise_forward import cut_blocks
from .blockwise_forward import cut_heads
from .blockwise_forward import dense_part
from .blockwise_forward import distance_query
from .blockwise_forward import dropout_mask
from .blockwise_forward import fusible
from .blockwise_forward import low_rank_bias_of
from .blockwise_forward import whole_scores
from .blockwise_kernel import fused_gradients
from .blockwise_key_terms import key_product_gradients
from .blockwise_sums import add_growth_gradient
from .blockwise_sums import from_channels
from .scheme_terms import LowRankBias
from .toeplitz import add_matmul
from .toeplitz import padded_to_diagonals
from .toeplitz import product_gradients
from .toeplitz import products
from .toeplitz import to_matrix

FIELDS = len(BlockTensors._fields)


def blockwise_gradients(
    plan: BlockSettings,
    tensors: Sequence[torch.Tensor | None],
    wanted: Sequence[bool],
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> list[torch.Tensor | None]:
    """Compute the gradients of all inputs of the forward pass.

    Args:
        plan: how the forward pass was computed.
        tensors: its inputs, `BlockTensors` and then what the dense terms read.
        wanted: which of them have a gradient.
        results: its output, its log-sum-exp, and the gradient of the output.
    """
    gradients = _Gradients(plan, tensors, wanted, results)
    for rows in cut_blocks(gradients.parts, plan, gradients.fuses):
        gradients.add_rows(rows)
    sums = [*gradients.sums, *gradients.learned_sums]
    return [None if s is None or t is None else s.to(t.dtype) for s, t in zip(sums, tensors, strict=True)]


class _Gradients:
    """Sums over blocks, kept in at least float32."""

    def __init__(
        self,
        plan: BlockSettings,
        tensors: Sequence[torch.Tensor | None],
        wanted: Sequence[bool],
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        self.plan = plan
        self.output, self.lse, self.grad = results
        given: Any = tensors
        self.parts, self.learned = BlockTensors(*given[:FIELDS]).with_channels(), given[FIELDS:]
        pairs = zip(tensors, wanted, strict=True)
        sums: Any = [self.lse.new_zeros(t.shape) if t is not None and w else None for t, w in pairs]
        self.sums, self.learned_sums = BlockTensors(*sums[:FIELDS]), sums[FIELDS:]
        self.buffers = BufferPool(self.parts.query)
        self.delta = (self.grad * self.output).sum(-1, dtype=self.lse.dtype)[..., None]

    @property
    def fuses(self) -> bool:
        """Return whether the kernel's own backward pass will do: nothing is learned from the scores but queries and keys."""
        asked = (self.sums.bias, self.parts.query_vectors, self.parts.key_vectors, self.plan.dense, self.plan.factors)
        exact = self.sums.sums is None or self.lse.dtype == self.parts.key.dtype  # half precision loses what gates sum up
        return exact and fusible(self.parts, self.plan) and all(part is None for part in asked)

    def add_rows(self, rows: Block) -> None:
        """Add what one block of all heads gives."""
        factors = None if self.plan.factors is None else _Factors(self, rows)
        for block in cut_heads(rows, self.parts, self.plan, self.fuses):
            self.add(block, factors)
        if factors is not None:
            factors.back()

    def add(self, block: Block, factors: "_Factors | None") -> None:
        """Add what one block gives."""
        part, total = self.parts.grown(block), self.sums.cut(block)
        dense = None if self.plan.dense is None else _Dense(self, part, total, block)
        made = None if dense is None else dense.made.detach()
        scores = block_scores(part, made, None if factors is None else factors.detached, self.plan, block, self.buffers)
        if self.fuses:
            self._add_fused(part, total, block, scores)
            return
        score_grad = self._add_values(part, total, block, scores)
        self._add_products(part, total, score_grad.to(part.query.dtype))
        self._add_tables(part, total, block, score_grad)
        if dense is not None:
            dense.back(score_grad)
        if factors is not None:
            factors.take(score_grad, block)

    def _of(self, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return, for a block's queries, the output, its gradient, the log-sum-exp, and the product of the first two."""
        per_query = (self.output, self.grad, self.lse, self.delta)
        output, grad, lse, delta = (each[block.heads, :, block.rows] for each in per_query)
        return output, grad, lse, delta

    def _add_fused(self, part: BlockTensors, total: BlockTensors, block: Block, scores: torch.Tensor) -> None:
        output, grad, lse, _ = self._of(block)
        states = (content_query(part, self.plan), part.key, part.value)
        query, key, value = fused_gradients(grad, states, (output, lse), scores)
        size = part.query.shape[-1]
        _add_query(total, query[..., :size] * self.plan.scale, total.key_offset)
        for sums, found in ((total.key, key[..., :size]), (total.value, value)):
            if sums is not None:
                sums.add_(found)
        if total.sums is not None:
            found = from_channels(query[..., size:], key[..., size:])
            add_growth_gradient(total.sums, *found, int(block.positions.start))

    def _add_values(self, part: BlockTensors, total: BlockTensors, block: Block, scores: torch.Tensor) -> torch.Tensor:
        """Add gradients of values and their vectors; return that of the scores, `(heads, batch, rows, columns)`."""
        _, outward, lse, delta = self._of(block)
        weights = whole_scores(part, self.plan, scores, self.buffers, lse).exp_()
        factor, first = dropout_mask(self.plan, block, weights), self.plan.first(block)
        score_grad = self.buffers.matrix("score_grad", *weights.shape, dtype=weights.dtype)
        exact = weights.dtype == outward.dtype  # half-precision outputs leave a remainder that sums over distances gather
        early = exact and factor is None
        score_grad.copy_(-delta if early else torch.zeros_like(delta))
        add_matmul(score_grad, outward, part.value.transpose(-1, -2))
        if part.value_vectors is not None:
            nothing = outward.new_zeros(1, 1, 1, sum(block.shape) - 1)
            out = self.buffers.empty("numbers", *weights.shape[:-1], nothing.shape[-1])  # the scores were used
            score_grad.add_(to_matrix(products(outward, part.value_vectors, first, nothing, out), *block.shape))
        score_grad = score_grad if factor is None else score_grad.mul_(factor)
        if not exact:
            given = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
            delta = (score_grad * weights).sum(-1, keepdim=True) / given
        if not early:
            score_grad.sub_(delta)
        score_grad.mul_(weights)
        used = weights if factor is None else weights.mul_(factor)
        if total.value is not None:
            add_matmul(total.value, used.to(outward.dtype).transpose(-1, -2), outward)
        if total.value_vectors is not None and part.value_vectors is not None:
            along = padded_to_diagonals(used).to(outward.dtype)
            product_gradients(along, outward, part.value_vectors, first, total.value_vectors)
        return score_grad

    def _add_products(self, part: BlockTensors, total: BlockTensors, score_grad: torch.Tensor) -> None:
        size = part.query.shape[-1]
        _add_query(total, (score_grad @ part.key[..., :size]) * self.plan.scale, total.key_offset)
        if total.key is not None:
            add_matmul(total.key, score_grad.transpose(-1, -2), content_query(part, self.plan)[..., :size])

    def _add_tables(self, part: BlockTensors, total: BlockTensors, block: Block, score_grad: torch.Tensor) -> None:
        """Add gradients of all that is added to the products, and of its sources."""
        scale, first = self.plan.scale, self.plan.first(block)
        if total.sums is not None:
            add_growth_gradient(total.sums, score_grad.sum(-2), score_grad.sum(-1), int(block.positions.start))
        if total.bias is not None:
            total.bias[:, block.distances] += padded_to_diagonals(
                score_grad.sum(1)[:, None] if score_grad.shape[1] > 1 else score_grad
            ).sum((1, 2))
        if part.query_vectors is not None:
            along, query = padded_to_diagonals(score_grad).to(part.query.dtype), distance_query(part, self.plan)
            gradient = product_gradients(along, query, part.query_vectors, first, total.query_vectors)
            _add_query(total, gradient * scale, total.distance_offset)
        if part.key_vectors is not None:
            narrow, key = score_grad.to(part.query.dtype), part.key * scale
            gradient = key_product_gradients(narrow, key, part.key_vectors, first, total.key_vectors, self.buffers)
            if total.key is not None:
                total.key.add_(gradient * scale)


class _Dense:
    """The dense terms of one block, and the way back to what they were made from."""

    def __init__(self, gradients: _Gradients, part: BlockTensors, total: BlockTensors, block: Block) -> None:
        plan = gradients.plan
        self.totals = [total.query, total.key, *plan.learned(gradients.learned_sums, block)]
        given = (part.query, part.key, *plan.learned(gradients.learned, block))
        with torch.enable_grad():
            self.leaves = [tensor.detach().requires_grad_() for tensor in given]
            part = part._replace(query=self.leaves[0], key=self.leaves[1])
            self.made: Any = dense_part(part, self.leaves[2:], plan, block)

    def back(self, score_grad: torch.Tensor) -> None:
        """Carry the gradient of the scores back."""
        _carry([self.made], [score_grad.sum_to_size(self.made.shape).to(self.made.dtype)], self.leaves, self.totals)


class _Factors:
    """The factors of one block of all heads, the gradients that come back to them, and the way back to what made them."""

    def __init__(self, gradients: _Gradients, block: Block) -> None:
        self.totals = gradients.learned_sums
        with torch.enable_grad():
            self.leaves = [tensor.detach().requires_grad_() for tensor in gradients.learned]
            self.made: Any = low_rank_bias_of(self.leaves, gradients.plan, block)
        self.detached = LowRankBias(*(part.detach() for part in self.made))
        self.sums = LowRankBias(*(torch.zeros_like(part) for part in self.detached))

    def take(self, score_grad: torch.Tensor, block: Block) -> None:
        """Take the gradient of the scores of some heads."""
        query, distance = self.detached.query, self.detached.distance[block.heads]
        along = padded_to_diagonals(score_grad)
        along = along.sum_to_size(*along.shape[:1], query.shape[1], *along.shape[2:]).to(query.dtype)
        self.sums.query.add_((distance @ along.transpose(-1, -2)).sum(0, keepdim=True).transpose(-1, -2))
        self.sums.distance[block.heads] += (query.transpose(-1, -2) @ along).sum(1, keepdim=True)
        self.sums.extra[block.heads] += along.index_select(-1, self.detached.where)

    def back(self) -> None:
        """Carry what was taken back."""
        _carry(self.made[:3], self.sums[:3], self.leaves, self.totals)


def _carry(
    made: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    totals: Sequence[torch.Tensor | None],
) -> None:
    """Let autograd carry gradients to all that something was made from, and add them there."""
    asked = [(total, leaf) for total, leaf in zip(totals, leaves, strict=True) if total is not None]
    given = [(part, score_grad) for part, score_grad in zip(made, grads, strict=True) if part.requires_grad]
    if not asked or not given:
        return
    parts, inward = zip(*given, strict=True)
    found = torch.autograd.grad(parts, [leaf for _, leaf in asked], inward, allow_unused=True)
    for (total, _), gradient in zip(asked, found, strict=True):
        if gradient is not None:
            total.add_(gradient)


def _add_query(total: BlockTensors, gradient: torch.Tensor, offset: torch.Tensor | None) -> None:
    """Add to the queries of a block, and to the offset that they met something with."""
    if total.query is not None:
        total.query.add_(gradient)
    if offset is not None:
        offset.add_(gradient.sum((1, 2), dtype=offset.dtype))
