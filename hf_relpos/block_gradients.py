"""The backward pass of blockwise attention: each block's probabilities once more, and where their gradients go."""

from collections.abc import Sequence
from typing import Any

import torch

from .attention_blocks import Block
from .attention_blocks import Parts
from .attention_blocks import Plan
from .attention_blocks import block_scores
from .attention_blocks import content_query
from .attention_blocks import cut
from .attention_blocks import cut_blocks
from .attention_blocks import dense_part
from .attention_blocks import distance_query
from .attention_blocks import kept
from .attention_blocks import whole_scores
from .diagonals import collect
from .diagonals import key_product_gradients
from .diagonals import product_gradients
from .diagonals import products
from .diagonals import spread_out

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
    for block in cut_blocks(plan.positions):
        gradients.add(block)
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
        sums: Any = [torch.zeros_like(t, dtype=self.lse.dtype) if t is not None and w else None for t, w in pairs]
        self.sums, self.learned_sums = Parts(*sums[:FIELDS]), sums[FIELDS:]
        self.delta = (self.grad * self.output).sum(-1, dtype=self.lse.dtype)[..., None]

    @property
    def fuses(self) -> bool:
        """Whether the kernel's own backward pass will do: nothing is learned from the scores but queries and keys."""
        asked = (self.sums.bias, self.parts.query_vectors, self.parts.key_vectors, self.plan.dense)
        return self.parts.fuses and not self.plan.dropout and all(part is None for part in asked)

    def add(self, block: Block) -> None:
        """Add what one block gives."""
        part = cut(self.parts, block)
        dense, leaves = None, []
        if self.plan.dense is not None:
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (part.query, part.key, *self.learned)]
                dense = dense_part(part._replace(query=leaves[0], key=leaves[1]), leaves[2:], self.plan, block)
        scores = block_scores(part, None if dense is None else dense.detach(), self.plan, block)
        if self.fuses:
            self._add_fused(part, block, scores)
            return
        slope = self._add_values(part, block, scores)
        self._add_products(part, block, slope.to(part.query.dtype))
        self._add_tables(part, block, slope)
        if dense is not None:
            self._add_dense(dense, leaves, block, slope)

    def _add_fused(self, part: Parts, block: Block, scores: torch.Tensor) -> None:
        rows, columns = block.rows, block.columns
        mask = scores.expand(*part.query.shape[:2], -1, -1)
        query = content_query(part, self.plan)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            self.grad[:, :, rows], query, part.key, part.value, self.output[:, :, rows], self.lse[:, :, rows], 0.0, False,
            attn_mask=mask, scale=1.0,
        )  # fmt: skip
        self._add_query(block, found[0] * self.plan.scale, self.sums.key_offset)
        for total, part_of in zip((self.sums.key, self.sums.value), found[1:], strict=True):
            if total is not None:
                total[:, :, columns] += part_of

    def _add_values(self, part: Parts, block: Block, scores: torch.Tensor) -> torch.Tensor:
        """Gradients of values and their vectors; returns that of the scores, `(heads, batch, rows, columns)`."""
        rows, (height, width) = block.rows, block.shape
        weights = whole_scores(part, self.plan, scores).sub_(self.lse[:, :, rows, None]).exp_()
        outward, factor = self.grad[:, :, rows], kept(self.plan, block, weights)
        slope = (outward @ part.value.transpose(-1, -2)).to(weights.dtype)
        if part.value_vectors is not None:
            first, distances = self.plan.first(block), height + width - 1
            slope.add_(spread_out(products(outward, part.value_vectors, first, distances), height, width))
        used = weights if factor is None else weights * factor
        slope = slope if factor is None else slope.mul_(factor)
        used = used.to(outward.dtype)
        if self.sums.value is not None:
            self.sums.value[:, :, block.columns] += used.transpose(-1, -2) @ outward
        if self.sums.value_vectors is not None and part.value_vectors is not None:
            first = self.plan.first(block)
            product_gradients(collect(used), outward, part.value_vectors, first, self.sums.value_vectors)
        return slope.sub_(self.delta[:, :, rows]).mul_(weights)

    def _add_products(self, part: Parts, block: Block, slope: torch.Tensor) -> None:
        self._add_query(block, (slope @ part.key) * self.plan.scale, self.sums.key_offset)
        if self.sums.key is not None:
            self.sums.key[:, :, block.columns] += slope.transpose(-1, -2) @ content_query(part, self.plan)

    def _add_tables(self, part: Parts, block: Block, slope: torch.Tensor) -> None:
        """Gradients of what is added to the products, and of what it was made from."""
        scale, first = self.plan.scale, self.plan.first(block)
        if self.sums.bias is not None:
            self.sums.bias[:, block.distances] += collect(slope.sum(1)).sum(1)
        narrow = slope.to(part.query.dtype)
        if part.query_vectors is not None:
            along, query = collect(narrow), distance_query(part, self.plan)
            gradient = product_gradients(along, query, part.query_vectors, first, self.sums.query_vectors)
            self._add_query(block, gradient * scale, self.sums.distance_offset)
        if part.key_vectors is not None:
            gradient = key_product_gradients(narrow, part.key * scale, part.key_vectors, first, self.sums.key_vectors)
            if self.sums.key is not None:
                self.sums.key[:, :, block.columns] += gradient * scale

    def _add_dense(self, dense: torch.Tensor, leaves: list[torch.Tensor], block: Block, slope: torch.Tensor) -> None:
        """Let autograd carry the gradient of dense terms to all that they were made from."""
        totals = [
            None if self.sums.query is None else self.sums.query[:, :, block.rows],
            None if self.sums.key is None else self.sums.key[:, :, block.columns],
            *self.learned_sums,
        ]
        asked = [(total, leaf) for total, leaf in zip(totals, leaves, strict=True) if total is not None]
        if not asked:
            return
        inward = collect(slope)[..., : dense.shape[-1]] if self.plan.per_distance else slope
        inward = inward.sum_to_size(dense.shape).to(dense.dtype)
        found = torch.autograd.grad(dense, [leaf for _, leaf in asked], inward, allow_unused=True)
        for (total, _), gradient in zip(asked, found, strict=True):
            if gradient is not None:
                total.add_(gradient)

    def _add_query(self, block: Block, gradient: torch.Tensor, offset: torch.Tensor | None) -> None:
        """Add to the queries of a block, and to the offset that they met something with."""
        if self.sums.query is not None:
            self.sums.query[:, :, block.rows] += gradient
        if offset is not None:
            offset += gradient.sum((1, 2), dtype=offset.dtype)
