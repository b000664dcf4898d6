"""The ways to attend, as functions of one signature; `attention.py` chooses among them.

What a scheme adds becomes the `position_bias` that transformers' own `eager`, `sdpa` and `flex_attention` take, unless blocks or
FlexAttention's kernel read it as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_kernels import KERNELS
from .attention_kernels import import_kernels
from .blockwise_attention import blockwise_attention
from .position_tables import DistanceTables
from .positions import Positions
from .scheme_terms import ScoreTerms
from .scheme_terms import dense_bias
from .scheme_terms import every_distance

WITHOUT_TABLES = ("cpu",)
"""Kinds of devices for which FlexAttention is given one dense bias."""


@dataclass(frozen=True)
class AttentionInputs:
    """Hold what a layer attends with in one pass.

    Attributes:
        query: `(batch, heads, query, head_dim)`, encoded.
        key, value: `(batch, kv_heads, key, head_dim)`, with those of the cache.
        terms: what the layer's scheme adds to the scores; None for nothing.
        tables: over the distances of the pass, whose positions say who sees whom.
        scale: factor on products of queries and keys.
        dropout: rate at which probabilities are dropped.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    terms: ScoreTerms | None
    tables: DistanceTables
    scale: float
    dropout: float

    def with_all_heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, the last two repeated for grouped queries."""
        groups = self.query.shape[1] // self.key.shape[1]
        return self.query, repeat_heads(self.key, groups), repeat_heads(self.value, groups)


Attended = tuple[torch.Tensor, torch.Tensor | None]
"""The output `(batch, query, heads, head_dim)` and the probabilities `(batch, heads, query, key)`, None if not computed."""

Backend = Callable[[Any, AttentionInputs], Attended]
"""Lets a layer attend: a function of the attention layer and its inputs."""


def repeat_heads(states: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeat key or value heads for grouped queries: `(batch, kv_heads, key, head_dim)` to `(batch, heads, key, head_dim)`."""
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


def eager_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    value_term: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention in plain products, with transformers' signature; the softmax runs in float32.

    Returns:
        The output `(batch, query, heads, head_dim)` and the probabilities `(batch, heads, query, key)`.
    """
    groups = module.num_key_value_groups
    scores = (query * scaling) @ repeat_heads(key, groups).transpose(-1, -2)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    wide = torch.promote_types(scores.dtype, torch.float32)
    probabilities = nn.functional.softmax(scores, dim=-1, dtype=wide).to(value.dtype)
    probabilities = nn.functional.dropout(probabilities, dropout, module.training)
    output = probabilities @ repeat_heads(value, groups)
    added = value_term(probabilities) if value_term is not None else None
    return (output if added is None else output + added).transpose(1, 2).contiguous(), probabilities


def _value_term(terms: ScoreTerms | None, tables: DistanceTables, probabilities: torch.Tensor) -> torch.Tensor | None:
    """Return the contribution of value vectors to the output, `(batch, heads, query, head_dim)`."""
    if terms is None or terms.value_vectors is None:
        return None
    vectors: Any = every_distance(terms, tables.distances).value_vectors
    return tables.to_diagonals(probabilities) @ vectors.to(probabilities.dtype)


def masked_bias(bias: torch.Tensor | None, positions: Positions, query: torch.Tensor) -> torch.Tensor:
    """Return the tensor that flex_attention adds to the scores, `(batch, heads, query, key)`, with the mask in it.

    Compiled for a processor, it does not survive a mask that is a tensor beside the bias (torch 2.13).
    """
    bias = query.new_zeros(()) if bias is None else bias
    hidden = bias.masked_fill(~positions.visible, torch.finfo(query.dtype).min)
    return hidden.expand(*query.shape[:2], -1, -1)


def looks_up(terms: ScoreTerms | None, positions: Positions, device: torch.device) -> bool:
    """Return whether FlexAttention can look everything up in its kernel that is added per distance or key (`attention_flex.py`)."""
    able = terms is None or terms.sums is not None or (terms.is_bias and positions.is_toeplitz)
    return able and device.type not in WITHOUT_TABLES


def _attend_by_name(
    name: str, layer: nn.Module, inputs: AttentionInputs, mask: torch.Tensor | None, hide: bool = False
) -> Attended:
    """Attend by an attention function of transformers, or one that a user registered there.

    Args:
        name: of the function.
        layer: the attention layer, whose settings it reads.
        inputs: what is attended with; the terms become one bias of all pairs.
        mask: booleans, `(batch|1, 1, query, key)`; None where order alone limits what is seen, or the bias says it all.
        hide: put the mask into the bias.
    """
    query, terms, tables, bias = inputs.query, inputs.terms, inputs.tables, None
    if terms is not None:
        bias = dense_bias(terms, tables, query, inputs.with_all_heads()[1], inputs.scale)
        query = query if terms.key_offset is None else query + terms.key_offset[:, None].to(query.dtype)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)(
        layer,
        query,
        inputs.key,
        inputs.value,
        mask,
        scaling=inputs.scale,
        dropout=inputs.dropout,
        is_causal=layer.is_causal,
        position_bias=masked_bias(bias, tables.positions, query) if hide else bias,
        value_term=partial(_value_term, terms, tables),
    )


def attend_by_masked_function(name: str, layer: nn.Module, inputs: AttentionInputs) -> Attended:
    """Attend by `eager`, or by a function that a user registered in transformers, with a mask of all pairs."""
    return _attend_by_name(name, layer, inputs, inputs.tables.positions.visible)


def attend_by_sdpa(layer: nn.Module, inputs: AttentionInputs) -> Attended:
    """Attend by torch's fused kernels; they take queries, keys and values of one width only."""
    positions, size = inputs.tables.positions, inputs.value.shape[-1]
    missing = inputs.query.shape[-1] - size
    wide = replace(inputs, value=nn.functional.pad(inputs.value, (0, missing))) if missing else inputs
    output, _ = _attend_by_name("sdpa", layer, wide, positions.visible if positions.needs_mask else None)
    return output[..., :size] if missing else output, None


def attend_by_flex(layer: nn.Module, inputs: AttentionInputs) -> Attended:
    """Attend by FlexAttention, which looks numbers per distance up in its kernel where it can."""
    if inputs.dropout or not looks_up(inputs.terms, inputs.tables.positions, inputs.query.device):
        return _attend_by_name("flex_attention", layer, inputs, None, hide=True)
    from .attention_flex import flex_by_distance  # FlexAttention takes long to import

    states = inputs.with_all_heads()
    return flex_by_distance(*states, inputs.terms, inputs.tables.positions, inputs.scale, layer.training), None


def attend_in_blocks(layer: nn.Module, inputs: AttentionInputs) -> Attended:
    """Attend in memory linear in the length."""
    terms: Any = inputs.terms
    positions, states = inputs.tables.positions, inputs.with_all_heads()
    return blockwise_attention(*states, terms, positions, inputs.scale, inputs.dropout), None


def attend_by_kernels(layer: nn.Module, inputs: AttentionInputs) -> Attended:
    """Attend by the package's kernels for a GPU, which read vectors per distance as they are."""
    positions, states = inputs.tables.positions, inputs.with_all_heads()
    attend = import_kernels().kernel_attention
    return attend(*states, inputs.terms, positions, inputs.scale, inputs.dropout), None


BACKENDS: dict[str, Backend] = {
    "fused": attend_by_sdpa,
    "dense": attend_by_sdpa,
    "blockwise": attend_in_blocks,
    "flex_attention": attend_by_flex,
    KERNELS: attend_by_kernels,
}
"""By the path that a layer chose; every other path is the name of a function."""


def find_backend(path: str) -> Backend:
    """Return the backend of a path."""
    return BACKENDS.get(path, partial(attend_by_masked_function, path))
