"""The attention layer, written once for all schemes and backends.

A scheme describes its score terms; here they become the `position_bias` that transformers' own `eager`, `sdpa` and
`flex_attention` take. A backend that cannot do a scheme is refused when the model is built (`modeling_relpos.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from typing import cast

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .blockwise_attention import blockwise_attention
from .devices import to_device
from .position_tables import DistanceTables
from .positions import Positions
from .scheme_base import LayerProjections
from .scheme_terms import ScoreTerms
from .scheme_terms import dense_bias
from .scheme_terms import every_distance

MIN_PAIRS = 128 * 128
"""Query-key pairs from which blocks pay: below, one dense bias is as fast (measured, tests/benchmarks)."""


WITHOUT_TABLES = ("cpu",)
"""Kinds of devices for which FlexAttention is given one dense bias."""


def repeat_heads(states: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeat key or value heads for grouped queries: `(batch, kv_heads, key, head_dim)` to `(batch, heads, key, head_dim)`."""
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


def eager_attention_forward(
    module: "RelPosAttention",
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


def backend_mask(positions: Positions, implementation: str) -> torch.Tensor | None:
    """Return the mask in the form that a backend takes: booleans, or nothing where `is_causal` or the bias says it all."""
    if implementation == "flex_attention":
        return None
    return positions.visible if implementation != "sdpa" or positions.needs_mask else None


def masked_bias(bias: torch.Tensor | None, positions: Positions, query: torch.Tensor) -> torch.Tensor:
    """Return the tensor that flex_attention adds to the scores, `(batch, heads, query, key)`, with the mask in it.

    Compiled for a processor, it does not survive a mask that is a tensor beside the bias (torch 2.13).
    """
    bias = query.new_zeros(()) if bias is None else bias
    hidden = bias.masked_fill(~positions.visible, torch.finfo(query.dtype).min)
    return hidden.expand(*query.shape[:2], -1, -1)


def looks_up(terms: ScoreTerms | None, positions: Positions, device: torch.device) -> bool:
    """Return whether FlexAttention can look everything up in its kernel that is added per distance (`attention_flex.py`)."""
    return (terms is None or (terms.is_bias and positions.is_toeplitz)) and device.type not in WITHOUT_TABLES


class RelPosAttention(nn.Module):
    """Self-attention with memory and cache, for any position scheme.

    Args:
        config: the model's configuration.
        layer_idx: which cache entry is this layer's.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim: int = config.head_dim
        self.num_key_value_groups: int = config.num_attention_heads // config.num_key_value_heads
        self.attention_dropout: float = config.attention_dropout
        self.is_causal: bool = config.causal
        inner, shared = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, shared, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, shared, bias=config.attention_bias)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=config.attention_bias)

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (batch, heads, length, head_dim)

    def project_context(
        self, context: torch.Tensor, scheme: Callable[..., Any], prepared: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return encoded keys and values of `(batch, length, hidden_size)`: `(batch, kv_heads, length, head_dim)` each."""
        key, value = self._heads(self.k_proj(context)), self._heads(self.v_proj(context))
        return to_device(scheme("encode_key", key, prepared), key.device), value

    @staticmethod
    def _project_elsewhere(device: torch.device, projection: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """Project what a scheme has, which may be on another device than this layer."""
        return projection(states.to(device)).to(states.device)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        scheme: Callable[..., Any],
        tables: DistanceTables,
        prepared: Any,
        cache: Cache | None = None,
        force_eager: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states (batch, query, hidden_size)` to `context (batch, fresh, hidden_size)` and the cache.

        Args:
            hidden_states: what asks.
            context: what is projected to new keys and values.
            scheme: calls a method of a position scheme by its name: the scheme, or its `call`.
            positions: who sees whom, at which distance.
            prepared: what the scheme prepared of them.
            cache: key/value cache.
            force_eager: compute probabilities whatever the backend.

        Returns:
            The output `(batch, query, hidden_size)` and the probabilities `(batch, heads, query, key)`, None if not computed.
        """
        device = hidden_states.device
        prepared = to_device(prepared, device)
        query = to_device(scheme("encode_query", self._heads(self.q_proj(hidden_states)), prepared), device)
        key, value = self.project_context(context, scheme, prepared)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        query, key = to_device(scheme("scale_after_cache", query, key, prepared), device)
        output, probabilities = self._attend(query, key, value, scheme, tables, force_eager)
        return self.o_proj(output.flatten(2)), probabilities

    def score_terms(self, scheme: Callable[..., Any], tables: DistanceTables) -> ScoreTerms | None:
        """Return what this layer's scheme adds to the scores of a pass, made now or by an earlier step of decoding.

        Args:
            scheme: the `call` of the layer's scheme.
            tables: over the distances of the pass.
        """
        # Whose weights tell whether tables are still true; a tracing compiler finds no `__self__` by `getattr` with a default.
        owner: Any = scheme if isinstance(scheme, nn.Module) else cast(Any, scheme).__self__
        project = partial(self._project_elsewhere, tables.positions.query.device)
        projections = LayerProjections(self.layer_idx, partial(project, self.q_proj), partial(project, self.k_proj))

        if not owner.adds_terms():
            return None

        def make() -> ScoreTerms | None:
            return scheme("score_terms", tables.made_for, scheme("for_layer", tables.prepared(owner), projections))

        terms = tables.kept(self.layer_idx, owner, make)
        return None if terms is None else terms.for_pass(tables.positions, tables.spare)

    def path(self, terms: ScoreTerms | None, positions: Positions, force_eager: bool = False) -> str:
        """Return how the layer attends: `eager`, `flex_attention`, or under `sdpa` one of three.

        `fused` where nothing is added to the scores; `blockwise` wherever it can, unless so few pairs are scored that one dense
        bias is as fast; `dense` else. Vectors of values that blocks cannot serve make it `eager`.
        """
        implementation = "eager" if force_eager else self.config._attn_implementation or "eager"
        if implementation != "sdpa" or terms is None:
            return "fused" if implementation == "sdpa" else implementation
        able = positions.is_toeplitz and not torch.compiler.is_compiling()
        wish, queries, keys = self.config.attention_path, positions.query.shape[1], positions.key.shape[1]
        if wish == "blockwise" and not able:
            raise ValueError(
                "attention_path='blockwise' is refused for this pass: blocks need every distance to count the tokens from one place "
                "to another, so no position_ids, no padding between a row's first token or memory and its others, no targets in "
                "another order, no static cache and no torch.compile; use 'auto' or 'dense'"
            )
        if able and (wish == "blockwise" or (wish == "auto" and queries * keys >= MIN_PAIRS and queries > 1)):
            return "blockwise"
        return "dense" if terms.value_vectors is None else "eager"

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scheme: Callable[..., Any],
        tables: DistanceTables,
        force_eager: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Let a backend attend; the output is `(batch, query, heads, head_dim)`."""
        all_keys = repeat_heads(key, self.num_key_value_groups)
        terms, positions = self.score_terms(scheme, tables), tables.positions
        terms, scale = to_device(terms, query.device), scheme("scale")
        path, bias = self.path(terms, positions, force_eager), None
        dropout = self.attention_dropout if self.training else 0.0
        if terms is not None and path == "blockwise":
            all_values = repeat_heads(value, self.num_key_value_groups)
            return blockwise_attention(query, all_keys, all_values, terms, positions, scale, dropout), None
        if path == "flex_attention" and not dropout and looks_up(terms, positions, query.device):
            from .attention_flex import flex_by_distance  # FlexAttention takes long to import

            all_values, bias = repeat_heads(value, self.num_key_value_groups), None if terms is None else terms.bias
            return flex_by_distance(query, all_keys, all_values, bias, positions, scale, self.training), None
        if terms is not None:
            bias = dense_bias(terms, tables, query, all_keys, scale)
            if terms.key_offset is not None:
                query = query + terms.key_offset[:, None].to(query.dtype)
        return self._call_backend(
            path,
            query,
            key,
            value,
            positions,
            scaling=scale,
            position_bias=bias,
            value_term=partial(_value_term, terms, tables),
        )

    def _call_backend(
        self,
        path: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: Positions,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call an attention function of transformers; the output is `(batch, query, heads, head_dim)`."""
        implementation = "sdpa" if path in ("fused", "dense") else path
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        mask = backend_mask(positions, implementation)
        if implementation == "flex_attention":
            kwargs["position_bias"] = masked_bias(kwargs.get("position_bias"), positions, query)
        dropout = self.attention_dropout if self.training else 0.0
        size, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
        if missing and implementation == "sdpa":  # fused kernels take queries, keys and values of one width only
            value = nn.functional.pad(value, (0, missing))
        output, probabilities = attend(self, query, key, value, mask, dropout=dropout, is_causal=self.is_causal, **kwargs)
        return output[..., :size], probabilities


class RelPosCrossAttention(RelPosAttention):
    """Attention to the encoder's output: no scheme acts, and a cached source is projected once."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.is_causal = False

    def _project_source(self, source: torch.Tensor, cache: EncoderDecoderCache | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the source, `(batch, kv_heads, source, head_dim)` each; cached ones where there are any."""
        if cache is not None and cache.is_updated.get(self.layer_idx):
            cached: Any = cache.cross_attention_cache.layers[self.layer_idx]
            return cached.keys, cached.values
        key, value = self._heads(self.k_proj(source)), self._heads(self.v_proj(source))
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, self.layer_idx)
            cache.is_updated[self.layer_idx] = True
        return key, value

    def forward(
        self,
        hidden_states: torch.Tensor,
        source: torch.Tensor,
        positions: Positions,
        scaling: float,
        cache: EncoderDecoderCache | None = None,
        force_eager: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states (batch, query, hidden_size)` to `source (batch, source, hidden_size)`.

        Args:
            hidden_states: what asks.
            source: the encoder's output.
            positions: which keys of the source are padding (`source_positions`).
            scaling: factor on the scores: that of the layer's scheme, so that T5 scales nowhere.
            cache: key/value cache of decoder and source.
            force_eager: compute probabilities whatever the backend.

        Returns:
            The output `(batch, query, hidden_size)` and the probabilities `(batch, heads, query, source)` or None.
        """
        query = self._heads(self.q_proj(hidden_states))
        key, value = self._project_source(source, cache)
        path = self.path(None, positions, force_eager)
        output, probabilities = self._call_backend(path, query, key, value, positions, scaling=scaling)
        return self.o_proj(output.flatten(2)), probabilities
