"""The attention layer, written once for all schemes and backends.

A scheme describes its score terms, a backend attends with them (`attention_backends.py`); the layer makes queries, keys and values,
and chooses the backend. One that cannot do a scheme is refused when the model is built (`modeling_relpos.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from typing import cast

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.cache_utils import EncoderDecoderCache

from .attention_backends import AttentionInputs
from .attention_backends import find_backend
from .attention_kernels import KERNELS
from .attention_kernels import kernels_serve
from .devices import to_device
from .memory_projections import MemoryProjections
from .position_tables import DistanceTables
from .positions import Positions
from .running_sums import join_gates
from .running_sums import running_sums
from .running_sums import split_gates
from .scheme_base import LayerProjections
from .scheme_terms import ScoreTerms

MIN_PAIRS = 128 * 128
"""Query-key pairs from which blocks pay: below, one dense bias is as fast (measured, tests/benchmarks)."""


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

    def extend(
        self,
        context: torch.Tensor,
        scheme: Callable[..., Any],
        prepared: Any,
        cache: Cache | None,
        remembered: MemoryProjections | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return keys and values, those of the cache and then those made here, which it keeps, and the scheme's numbers per token.

        Args:
            context: `(batch, fresh, hidden_size)` what keys and values are made of, normalised.
            scheme: encodes the keys.
            prepared: what the scheme prepared of their positions.
            cache: key/value cache.
            remembered: keys and values of a memory, which go before those made here.

        Returns:
            Keys and values, `(batch, kv_heads, key, head_dim)` each, and `(batch, heads, key)` numbers or None.
        """
        key, value = self._heads(self.k_proj(context)), self._heads(self.v_proj(context))
        if remembered is not None:
            key, value = remembered.join(self.layer_idx, key, value)
        key = to_device(scheme("encode_key", key, prepared), key.device)
        gates = to_device(scheme("gate_tokens", context), key.device)
        if cache is None:
            return key, value, gates
        joined = key if gates is None else join_gates(key, gates)
        name = self._owner(scheme).name
        self._check_cache(cache, joined.shape[-1], name)
        joined, value = cache.update(joined, value, self.layer_idx)
        if (layer := self._layer_of(cache)) is not None and not torch.compiler.is_compiling():
            layer.position_scheme = name
        if gates is not None:
            joined, gates = split_gates(joined, key.shape[-1])
        return joined, value, gates

    def _layer_of(self, cache: Cache) -> Any:
        """Return what a cache keeps of this layer; None as long as that is nothing, or where a cache has no layers."""
        layers: Any = getattr(cache, "layers", ())
        return layers[self.layer_idx] if self.layer_idx < len(layers) else None

    def _check_cache(self, cache: Cache, width: int, name: str) -> None:
        """Refuse a cache whose keys another scheme made: it says so, or keeps more of a token or less."""
        layer = self._layer_of(cache)
        kept, maker = getattr(layer, "keys", None), getattr(layer, "position_scheme", name)
        if maker != name and not torch.compiler.is_compiling() and cache.get_seq_length(self.layer_idx):
            raise ValueError(
                f"the cache holds keys of position_scheme {maker!r} in layer {self.layer_idx}, where this model has {name!r}: begin "
                "with a new cache"
            )
        if isinstance(kept, torch.Tensor) and kept.dim() == 4 and kept.shape[-1] != width:
            raise ValueError(
                f"the cache holds {kept.shape[-1]} numbers a key in layer {self.layer_idx}, where this model's position scheme "
                f"{name!r} keeps {width}: it was made by another scheme, in another precision, or by PEFT's prefix tuning, whose "
                "prefix has no gates; begin with a new cache, or tune by LoRA"
            )

    @staticmethod
    def _owner(scheme: Callable[..., Any]) -> Any:
        """Return the scheme of which a layer was handed the `call`; a tracing compiler finds no `__self__` by a default."""
        return scheme if isinstance(scheme, nn.Module) else cast(Any, scheme).__self__

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
        remembered: MemoryProjections | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states (batch, query, hidden_size)` to `context (batch, fresh, hidden_size)` and the cache.

        Args:
            hidden_states: what asks.
            context: what is projected to new keys and values.
            scheme: calls a method of a position scheme by its name: the scheme, or its `call`.
            tables: over the distances of the pass, whose positions say who sees whom.
            prepared: what the scheme prepared of the positions.
            cache: key/value cache.
            force_eager: compute probabilities whatever the backend.
            remembered: keys and values of a memory that `context` then leaves out.

        Returns:
            The output `(batch, query, hidden_size)` and the probabilities `(batch, heads, query, key)`, None if not computed.
        """
        device = hidden_states.device
        prepared = to_device(prepared, device)
        query = to_device(scheme("encode_query", self._heads(self.q_proj(hidden_states)), prepared), device)
        key, value, gates = self.extend(context, scheme, prepared, cache, remembered)
        query, key = to_device(scheme("scale_after_cache", query, key, prepared), device)
        terms = to_device(self.score_terms(scheme, tables, gates), device)
        return self._attend(query, key, value, terms, tables, scheme("scale"), force_eager)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        terms: ScoreTerms | None,
        tables: DistanceTables,
        scale: float,
        force_eager: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Let a backend attend, and project what it finds to `(batch, query, hidden_size)`."""
        dropout = self.attention_dropout if self.training else 0.0
        attend = find_backend(self.path(terms, tables.positions, force_eager))
        output, probabilities = attend(self, AttentionInputs(query, key, value, terms, tables, scale, dropout))
        return self.o_proj(output.flatten(2)), probabilities

    def score_terms(
        self, scheme: Callable[..., Any], tables: DistanceTables, gates: torch.Tensor | None = None
    ) -> ScoreTerms | None:
        """Return what this layer's scheme adds to the scores of a pass, made now or by an earlier step of decoding.

        Args:
            scheme: the `call` of the layer's scheme.
            tables: over the distances of the pass.
            gates: `(batch, heads, key)` what the scheme made of the tokens, if anything.
        """
        if gates is not None:
            return ScoreTerms(sums=running_sums(gates, tables.positions))
        owner = self._owner(scheme)  # whose weights tell whether tables are still true
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
        bias is as fast; `dense` else. Vectors of values that blocks cannot serve make it `eager`. Under `triton` it is `triton`
        where the kernels can attend, and what it would be under `sdpa` elsewhere.
        """
        implementation = "eager" if force_eager else self.config._attn_implementation or "eager"
        if implementation == KERNELS and (terms is None or not kernels_serve(terms, positions)):
            implementation = "sdpa"
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
        tables: DistanceTables,
        scale: float,
        cache: EncoderDecoderCache | None = None,
        force_eager: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states (batch, query, hidden_size)` to `source (batch, source, hidden_size)`.

        Args:
            hidden_states: what asks.
            source: the encoder's output.
            tables: of positions that say which keys of the source are padding (`source_positions`).
            scale: factor on the scores: that of the layer's scheme, so that T5 scales nowhere.
            cache: key/value cache of decoder and source.
            force_eager: compute probabilities whatever the backend.

        Returns:
            The output `(batch, query, hidden_size)` and the probabilities `(batch, heads, query, source)` or None.
        """
        query = self._heads(self.q_proj(hidden_states))
        key, value = self._project_source(source, cache)
        return self._attend(query, key, value, None, tables, scale, force_eager)
