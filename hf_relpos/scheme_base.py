"""The contract of a position scheme, and nothing else.

A scheme describes what its paper adds to attention; it never decides how that is computed. It says the cheapest thing that is
true: a number per head and distance, a vector per distance that meets the query (or the key), or, only where nothing less will
do, a dense tensor. `attention.py` turns the description into numbers for whichever backend runs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from typing import Any
from typing import ClassVar
from typing import NamedTuple

import torch
from torch import nn

from .positions import Positions


@dataclass(frozen=True)
class Parameter:
    """One parameter of a scheme: its default, what it may be, and what it means.

    Attributes:
        default: the paper's value.
        help: one line for the documentation.
        minimum, maximum: inclusive bounds of a number; where the default is None, a float here means a float.
        choices: the allowed values, where they can be listed.
        optional: whether None is allowed.
    """

    default: Any
    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[Any, ...] | None = None
    optional: bool = False

    @property
    def kind(self) -> type:
        """Of a number without choices: int or float."""
        return float if isinstance(self.minimum if self.default is None else self.default, float) else int

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.choices is not None:
            return "one of " + ", ".join(repr(choice) for choice in self.choices)
        bounds = [f"at least {self.minimum:g}"] if self.minimum is not None else []
        bounds += [f"at most {self.maximum:g}"] if self.maximum is not None else []
        return " ".join([self.kind.__name__, " and ".join(bounds)]).strip() + (" or None" if self.optional else "")

    def check(self, name: str, value: Any) -> Any:
        """Return `value` in the type of the default, or raise a ValueError that names it and what is allowed."""
        if value is None and self.optional:
            return None
        if self.choices is not None:
            good = any(value == choice and type(value) is type(choice) for choice in self.choices)
        elif self.kind is float:
            good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else:
            good = isinstance(value, int) and not isinstance(value, bool)
        if good and self.choices is None and value is not None:
            value = self.kind(value)
            good = (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)
        if not good:
            raise ValueError(f"{name}={value!r} is not allowed: {self.allowed}")
        return value


class Factors(NamedTuple):
    """Numbers per query and distance as products of what queries and what distances have, and exceptions at some distances.

    Attributes:
        query: `(batch|1, query, size)`.
        distance: `(heads, size, distances)`, which meets it.
        extra: `(batch|1, heads, query, some)`, added to the products.
        where: `(some,)` at which distances, by number.
    """

    query: torch.Tensor
    distance: torch.Tensor
    extra: torch.Tensor
    where: torch.Tensor

    def numbers(self) -> torch.Tensor:
        """All of them, `(batch|1, heads, query, distances)`."""
        with torch.autocast(self.query.device.type, enabled=False):  # numbers of positions stay in float32
            products = self.query[:, None] @ self.distance
        return products.index_add(-1, self.where, self.extra)


@dataclass(frozen=True)
class ScoreTerms:
    """What a scheme adds to the scores, in the cheapest shape that says it. All parts are optional and add up.

    The score of query q and key k at distance r is
    `scale * ((q + key_offset) . k + (q + distance_offset) . query_vectors[r] + k . key_vectors[r]) + bias[r] + dense`,
    and the value that it finds there is `v + value_vectors[r]`.

    Attributes:
        bias: `(heads, distances)` a number per head and distance, added to the scaled scores.
        query_vectors: `(heads|1, distances, head_dim)` a vector per distance that meets the query.
        key_vectors: `(heads|1, distances, head_dim)` a vector per distance that meets the key.
        value_vectors: `(heads|1, distances, head_dim)` a vector per distance added to the value.
        span: the first and last distance that the vectors stand for; those before and after share the first and last vector. None
            when they stand for all distances.
        key_offset: `(heads, head_dim)` added to the query where it meets the keys: u of Transformer-XL.
        distance_offset: `(heads, head_dim)` added to the query where it meets the distances: v of Transformer-XL.
        dense: for what no table says: a function of the positions, the queries and keys `(batch, heads, length, head_dim)`, and
            what is `learned`, that gives `(batch|1, heads, query, key)`, added to the scaled scores. It is asked for some heads
            and some queries at a time, with all keys that they see.
        factors: for numbers per query and distance: a function of the positions and `learned` that gives them as `Factors`, added to
            the scaled scores; for positions that are `is_toeplitz`. It is asked for some queries at a time, and for all heads.
        learned: the parameters that `dense` or `factors` reads, so that blocks can be computed anew in the backward pass.
        learned_by_head: those of them that have an entry a head, `(heads, ...)`, which come last.
    """

    bias: torch.Tensor | None = None
    query_vectors: torch.Tensor | None = None
    key_vectors: torch.Tensor | None = None
    value_vectors: torch.Tensor | None = None
    span: tuple[int, int] | None = None
    key_offset: torch.Tensor | None = None
    distance_offset: torch.Tensor | None = None
    dense: Callable[..., torch.Tensor] | None = None
    factors: Callable[..., Factors] | None = None
    learned: tuple[torch.Tensor, ...] = ()
    learned_by_head: tuple[torch.Tensor, ...] = ()

    @property
    def is_bias(self) -> bool:
        """Whether numbers per head and distance are all."""
        vectors = (self.query_vectors, self.key_vectors, self.value_vectors, self.key_offset, self.distance_offset)
        return self.bias is not None and all(part is None for part in (*vectors, self.dense, self.factors))


def every_distance(terms: ScoreTerms, positions: Positions) -> ScoreTerms:
    """The same terms with a vector for each of `positions.distances`."""
    if terms.span is None:
        return terms
    low, high = terms.span
    entry = positions.distances.clamp(low, high) - low
    names = [name for name in ("query_vectors", "key_vectors", "value_vectors") if getattr(terms, name) is not None]
    return replace(terms, span=None, **{name: getattr(terms, name).index_select(1, entry) for name in names})


def without_room(terms: ScoreTerms, room: int) -> ScoreTerms:
    """The same terms without the first `room` distances."""
    names = ["bias"] if terms.span else ["bias", "query_vectors", "key_vectors", "value_vectors"]
    cut = {name: getattr(terms, name)[:, room:] for name in names if room and getattr(terms, name) is not None}
    return replace(terms, **cut) if cut else terms


def dense_bias(
    terms: ScoreTerms, positions: Positions, query: torch.Tensor, key: torch.Tensor, scale: float
) -> torch.Tensor | None:
    """All that `terms` add to the scaled scores, as one tensor.

    Args:
        terms: what the scheme adds.
        positions: which distance each pair has.
        query: `(batch, heads, query, head_dim)` without offsets.
        key: `(batch, heads, key, head_dim)`.
        scale: factor on products of vectors.

    Returns:
        `(batch|1, heads, query, key)` in the dtype of the query, or None when nothing is added.
    """
    terms, parts = every_distance(terms, positions), []
    if terms.bias is not None:
        parts.append(positions.spread(terms.bias))
    if terms.query_vectors is not None:
        offset = query if terms.distance_offset is None else query + terms.distance_offset[:, None].to(query.dtype)
        vectors = terms.query_vectors.to(query.dtype)
        parts.append(positions.gather((offset * scale) @ vectors.transpose(-1, -2)))
    if terms.key_vectors is not None:
        parts.append(positions.gather_keys((key * scale) @ terms.key_vectors.to(key.dtype).transpose(-1, -2)))
    if terms.dense is not None:
        parts.append(terms.dense(positions, query, key, *terms.learned, *terms.learned_by_head))
    if terms.factors is not None:
        parts.append(positions.gather(terms.factors(positions, *terms.learned, *terms.learned_by_head).numbers()))
    return sum(parts[1:], parts[0]).to(query.dtype) if parts else None


class PositionScheme(nn.Module):
    """Base of all schemes: a no-op in every hook, which is the scheme `nope`.

    Subclasses override what their paper needs. Rules: a scheme encodes queries and keys before the cache or describes score
    terms after it, never both; angles and biases are computed in float32 and cast last; no tensor lengths, no matrices kept.

    Args:
        config: the model's configuration, for head count, head size and direction.
        parameters: the scheme's own parameters, already checked and completed; they become attributes.
    """

    parameter_specs: ClassVar[dict[str, Parameter]] = {}
    refuses: ClassVar[dict[str, str]] = {}
    """Uses without meaning, `causal`, `bidirectional` or `memory`, each with the reason."""
    acts_on_embeddings: ClassVar[bool] = False
    """Whether the scheme adds to the embeddings, once for the whole stack, instead of acting in each layer."""
    serves_all_layers: ClassVar[bool] = False
    """Whether one instance serves all layers of this scheme, whatever `share_positions` says."""
    reads_token_types: ClassVar[bool] = False
    """Whether token types enter by the scheme's own term, `positions.token_types`, instead of by embeddings."""
    combines_as: ClassVar[str | None] = None
    """Its part beside another scheme: `rotary`, or `bias` for terms that read no query or key but in their product; None if
    it has none (`schemes_combined.py`)."""
    source: ClassVar[str] = ""
    """The paper."""

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__()
        self.heads: int = config.num_attention_heads
        self.head_dim: int = config.head_dim
        self.causal: bool = config.causal
        for name, value in parameters.items():
            setattr(self, name, value)

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Check the given parameters and add the defaults of the others.

        Raises:
            ValueError: an unknown parameter, or a value that is not allowed; the message names what is.
        """
        unknown = sorted(set(given) - set(cls.parameter_specs))
        if unknown:
            known = ", ".join(cls.parameter_specs) or "it has none"
            raise ValueError(f"unknown parameter {', '.join(map(repr, unknown))} of {cls.__name__}; its parameters: {known}")
        return {
            name: spec.check(f"{cls.__name__} parameter {name}", given.get(name, spec.default))
            for name, spec in cls.parameter_specs.items()
        }

    @classmethod
    def check(cls, config: Any, parameters: dict[str, Any]) -> None:
        """Refuse, by a ValueError, completed parameters that do not fit the model's configuration or each other."""

    @classmethod
    def encodes(cls) -> bool:
        """Whether the scheme changes queries and keys, by what `prepare` makes of the positions of this very pass."""
        return cls.encode_query is not PositionScheme.encode_query

    @classmethod
    def needs_probabilities(cls, parameters: dict[str, Any]) -> str | None:
        """The reason why the scheme needs attention probabilities, which FlexAttention does not give; None if it does not."""
        return None

    def initialize(self, std: float) -> None:
        """Fill the scheme's own tables; `std` is the model's `initializer_range`."""

    def scale(self) -> float:
        """Factor on the products of queries and keys."""
        return self.head_dim**-0.5

    def query_gain(self) -> float:
        """Factor on the initial query projections, for a scheme whose paper moves the scale of the scores into them."""
        return 1.0

    def embed(self, hidden_states: torch.Tensor, in_document: torch.Tensor) -> torch.Tensor:
        """Add absolute positions `(batch|1, sequence)` to the embeddings `(batch, sequence, hidden)`."""
        return hidden_states

    def prepare(self, positions: Positions) -> Any:
        """Work without parameters that all layers of this scheme share in one forward pass."""
        return None

    def for_layer(self, prepared: Any, attention: nn.Module) -> Any:
        """What one layer makes of `prepared` with its own projections, `attention.q_proj` and `k_proj`."""
        return prepared

    def encode_query(self, query: torch.Tensor, prepared: Any) -> torch.Tensor:
        """Encode queries `(batch, heads, query, head_dim)` before they meet the keys."""
        return query

    def encode_key(self, key: torch.Tensor, prepared: Any) -> torch.Tensor:
        """Encode new keys `(batch, heads, fresh, head_dim)` before they enter the cache."""
        return key

    def meet(self, query: torch.Tensor, key: torch.Tensor, prepared: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Last change of encoded queries and of all keys, cached ones included, `(batch, kv_heads, key, head_dim)`."""
        return query, key

    def score_terms(self, positions: Positions, prepared: Any, query: torch.Tensor, key: torch.Tensor) -> ScoreTerms | None:
        """What is added to the scores of `query` and all keys, cached ones included."""
        return None


def frequencies(size: int, base: float, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Angle per position of each pair of channels, base^(-2t/size), `(size / 2,)` (arXiv 1706.03762, section 3.5)."""
    return 1.0 / base ** (torch.arange(0, size, 2, device=device, dtype=dtype) / size)


def sinusoid(
    positions: torch.Tensor, size: int, dtype: torch.dtype = torch.float32, interleaved: bool = False
) -> torch.Tensor:
    """Sinusoids of positions, `(..., size)`: all sines then all cosines, or in turn (arXiv 1706.03762, section 3.5)."""
    angle = positions[..., None].to(dtype) * frequencies(size, 10000.0, positions.device, dtype)
    pair = torch.stack([angle.sin(), angle.cos()], -1 if interleaved else -2).flatten(-2)
    return pair[..., :size]
