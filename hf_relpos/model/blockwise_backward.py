"""The backward pass of blockwise attention: each block's probabilities once more, and where their gradients go."""

from collections.abc import Sequence
from typing import Any

import torch

from .blockwise_buffers import Scratch
from .blockwise_forward import Block
from .blockwise_forward import Parts
from .blockwise_forward import Plan
from .blockwise_forward import block_scores
from .blockwise_forward import content_query
from .blockwise_forward import cut_blocks
from .blockwise_forward import cut_heads
from .blockwise_forward import dense_part
from .blockwise_forward import distance_query
from .blockwise_forward import factors_of
from .blockwise_forward import fusible
from .blockwise_forward import kept
from .blockwise_forward import whole_scores
from .blockwise_kernel import fused_gradients
from .blockwise_key_terms import key_product_gradients
from .scheme_terms import Factors
from .toeplitz import add_matmul
from .toeplitz import collected
from .toeplitz import product_gradients
from .toeplitz import products
from .toeplitz import spread_out

FIELDS = len(Parts._fields)


def blockwise_gradients(
    plan: Plan,
    tensors: Sequence[torch.Tensor | None],
    wanted: Sequence[bool],
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> list[torch.Tensor | None]:
    """The gradients of all inputs of the forward pass.

    Args:
        plan: how the forward pass was computed.
        tensors: its inputs, `Parts` and then what the dense terms read.
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
        plan: Plan,
        tensors: Sequence[torch.Tensor | None],
        wanted: Sequence[bool],
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        self.plan = plan
        self.output, self.lse, self.grad = results
        given: Any = tensors
        self.parts, self.learned = Parts(*given[:FIELDS]), given[FIELDS:]
        pairs = zip(tensors, wanted, strict=True)
        sums: Any = [self.lse.new_zeros(t.shape) if t is not None and w else None for t, w in pairs]
        self.sums, self.learned_sums = Parts(*sums[:FIELDS]), sums[FIELDS:]
        self.scratch = Scratch(self.parts.query)
        self.delta = (self.grad * self.output).sum(-1, dtype=self.lse.dtype)[..., None]

    @property
    def fuses(self) -> bool:
        """Whether the kernel's own backward pass will do: nothing is learned from the scores but queries and keys."""
        asked = (self.sums.bias, self.parts.query_vectors, self.parts.key_vectors, self.plan.dense, self.plan.factors)
        return fusible(self.parts, self.plan) and all(part is None for part in asked)

    def add_rows(self, rows: Block) -> None:
        """Add what one block of all heads gives."""
        factors = None if self.plan.factors is None else _Factors(self, rows)
        for block in cut_heads(rows, self.parts, self.plan, self.fuses):
            self.add(block, factors)
        if factors is not None:
            factors.back()

    def add(self, block: Block, factors: "_Factors | None") -> None:
        """Add what one block gives."""
        part, total = self.parts.cut(block), self.sums.cut(block)
        dense = None if self.plan.dense is None else _Dense(self, part, total, block)
        made = None if dense is None else dense.made.detach()
        scores = block_scores(part, made, None if factors is None else factors.detached, self.plan, block, self.scratch)
        if self.fuses:
            self._add_fused(part, total, block, scores)
            return
        slope = self._add_values(part, total, block, scores)
        self._add_products(part, total, slope.to(part.query.dtype))
        self._add_tables(part, total, block, slope)
        if dense is not None:
            dense.back(slope)
        if factors is not None:
            factors.take(slope, block)

    def _of(self, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of a block's queries: the output, its gradient, the log-sum-exp, and the product of the first two."""
        per_query = (self.output, self.grad, self.lse, self.delta)
        output, grad, lse, delta = (each[block.heads, :, block.rows] for each in per_query)
        return output, grad, lse, delta

    def _add_fused(self, part: Parts, total: Parts, block: Block, scores: torch.Tensor) -> None:
        output, grad, lse, _ = self._of(block)
        states = (content_query(part, self.plan), part.key, part.value)
        query, key, value = fused_gradients(grad, states, (output, lse), scores)
        _add_query(total, query * self.plan.scale, total.key_offset)
        for sums, found in ((total.key, key), (total.value, value)):
            if sums is not None:
                sums.add_(found)

    def _add_values(self, part: Parts, total: Parts, block: Block, scores: torch.Tensor) -> torch.Tensor:
        """Gradients of values and their vectors; returns that of the scores, `(heads, batch, rows, columns)`."""
        _, outward, lse, delta = self._of(block)
        weights = whole_scores(part, self.plan, scores, self.scratch, lse).exp_()
        factor, first = kept(self.plan, block, weights), self.plan.first(block)
        slope = self.scratch.matrix("slope", *weights.shape, dtype=weights.dtype)
        exact = weights.dtype == outward.dtype  # half-precision outputs leave a remainder that sums over distances gather
        early = exact and factor is None
        slope.copy_(-delta if early else torch.zeros_like(delta))
        add_matmul(slope, outward, part.value.transpose(-1, -2))
        if part.value_vectors is not None:
            nothing = outward.new_zeros(1, 1, 1, sum(block.shape) - 1)
            out = self.scratch.empty("numbers", *weights.shape[:-1], nothing.shape[-1])  # the scores were used
            slope.add_(spread_out(products(outward, part.value_vectors, first, nothing, out), *block.shape))
        slope = slope if factor is None else slope.mul_(factor)
        if not exact:
            given = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
            delta = (slope * weights).sum(-1, keepdim=True) / given
        if not early:
            slope.sub_(delta)
        slope.mul_(weights)
        used = weights if factor is None else weights.mul_(factor)
        if total.value is not None:
            add_matmul(total.value, used.to(outward.dtype).transpose(-1, -2), outward)
        if total.value_vectors is not None and part.value_vectors is not None:
            along = collected(used).to(outward.dtype)
            product_gradients(along, outward, part.value_vectors, first, total.value_vectors)
        return slope

    def _add_products(self, part: Parts, total: Parts, slope: torch.Tensor) -> None:
        _add_query(total, (slope @ part.key) * self.plan.scale, total.key_offset)
        if total.key is not None:
            add_matmul(total.key, slope.transpose(-1, -2), content_query(part, self.plan))

    def _add_tables(self, part: Parts, total: Parts, block: Block, slope: torch.Tensor) -> None:
        """Gradients of what is added to the products, and of what it was made from."""
        scale, first = self.plan.scale, self.plan.first(block)
        if total.bias is not None:
            total.bias[:, block.distances] += collected(slope.sum(1)[:, None] if slope.shape[1] > 1 else slope).sum((1, 2))
        if part.query_vectors is not None:
            along, query = collected(slope).to(part.query.dtype), distance_query(part, self.plan)
            gradient = product_gradients(along, query, part.query_vectors, first, total.query_vectors)
            _add_query(total, gradient * scale, total.distance_offset)
        if part.key_vectors is not None:
            narrow, key = slope.to(part.query.dtype), part.key * scale
            gradient = key_product_gradients(narrow, key, part.key_vectors, first, total.key_vectors, self.scratch)
            if total.key is not None:
                total.key.add_(gradient * scale)


class _Dense:
    """The dense terms of one block, and the way back to what they were made from."""

    def __init__(self, gradients: _Gradients, part: Parts, total: Parts, block: Block) -> None:
        plan = gradients.plan
        self.totals = [total.query, total.key, *plan.learned(gradients.learned_sums, block)]
        given = (part.query, part.key, *plan.learned(gradients.learned, block))
        with torch.enable_grad():
            self.leaves = [tensor.detach().requires_grad_() for tensor in given]
            part = part._replace(query=self.leaves[0], key=self.leaves[1])
            self.made: Any = dense_part(part, self.leaves[2:], plan, block)

    def back(self, slope: torch.Tensor) -> None:
        """Carry the gradient of the scores back."""
        _carry([self.made], [slope.sum_to_size(self.made.shape).to(self.made.dtype)], self.leaves, self.totals)


class _Factors:
    """The factors of one block of all heads, the gradients that come back to them, and the way back to what made them."""

    def __init__(self, gradients: _Gradients, block: Block) -> None:
        self.totals = gradients.learned_sums
        with torch.enable_grad():
            self.leaves = [tensor.detach().requires_grad_() for tensor in gradients.learned]
            self.made: Any = factors_of(self.leaves, gradients.plan, block)
        self.detached = Factors(*(part.detach() for part in self.made))
        self.sums = Factors(*(torch.zeros_like(part) for part in self.detached))

    def take(self, slope: torch.Tensor, block: Block) -> None:
        """Take the gradient of the scores of some heads."""
        query, distance = self.detached.query, self.detached.distance[block.heads]
        along = collected(slope)
        along = along.sum_to_size(*along.shape[:1], query.shape[1], *along.shape[2:]).to(query.dtype)
        self.sums.query.add_((distance @ along.transpose(-1, -2)).sum(0, keepdim=True).transpose(-1, -2))
        self.sums.distance[block.heads] += (query.transpose(-1, -2) @ along).sum(1, keepdim=True)
        self.sums.extra[block.heads] += along.index_select(-1, self.detached.where)

    def back(self) -> None:
        """Carry what was taken back."""
        _carry(self.made[:3], self.sums[:3], self.leaves, self.totals)


def _carry(
    made: Sequence[torch.Tensor],
    slopes: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    totals: Sequence[torch.Tensor | None],
) -> None:
    """Let autograd carry gradients to all that something was made from, and add them there."""
    asked = [(total, leaf) for total, leaf in zip(totals, leaves, strict=True) if total is not None]
    given = [(part, slope) for part, slope in zip(made, slopes, strict=True) if part.requires_grad]
    if not asked or not given:
        return
    parts, inward = zip(*given, strict=True)
    found = torch.autograd.grad(parts, [leaf for _, leaf in asked], inward, allow_unused=True)
    for (total, _), gradient in zip(asked, found, strict=True):
        if gradient is not None:
            total.add_(gradient)


def _add_query(total: Parts, gradient: torch.Tensor, offset: torch.Tensor | None) -> None:
    """Add to the queries of a block, and to the offset that they met something with."""
    if total.query is not None:
        total.query.add_(gradient)
    if offset is not None:
        offset.add_(gradient.sum((1, 2), dtype=offset.dtype))
