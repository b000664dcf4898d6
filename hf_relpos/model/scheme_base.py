"""The contract of a position scheme, and nothing else.

A scheme describes what its paper adds to attention; it never decides how that is computed. It says the cheapest thing that is
true: a number per head and distance, a vector per distance that meets the query (or the key), or, only where nothing less will
do, a dense tensor. `attention.py` turns the description into numbers for whichever backend runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from typing import ClassVar

import torch
from torch import nn

from .position_tables import Distances
from .positions import Positions
from .scheme_terms import ScoreTerms

LARGEST = {int: 2**24, float: 1e15}
"""Bounds of numbers that have no maximum of their own: beyond them single precision counts no longer."""


@dataclass(frozen=True)
class ParameterSpec:
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
        """Return the kind of a number without choices: int or float."""
        return float if isinstance(self.minimum if self.default is None else self.default, float) else int

    @property
    def allowed(self) -> str:
        """Return the allowed values in words."""
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
            good = isinstance(value, int | float) and not isinstance(value, bool) and value == value
        else:
            good = isinstance(value, int) and not isinstance(value, bool)
        if good and self.choices is None and value is not None:
            if self.maximum is None and value > (largest := LARGEST[self.kind]):
                raise ValueError(f"{name}={value!r} is not allowed: at most {largest if self.kind is int else f'{largest:g}'}")
            good = (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)
            value = self.kind(value) if good else value
        if not good:
            raise ValueError(f"{name}={value!r} is not allowed: {self.allowed}")
        return value


@dataclass(frozen=True)
class LayerProjections:
    """The parts of an attention layer that a scheme may use.

    Attributes:
        layer_idx: the layer's number.
        q_proj, k_proj: project `(..., hidden_size)` to `(..., heads * head_dim)`, on the device of what is given.
    """

    layer_idx: int
    q_proj: Callable[[torch.Tensor], torch.Tensor]
    k_proj: Callable[[torch.Tensor], torch.Tensor]


class PositionScheme(nn.Module):
    """Base of all schemes: a no-op in every hook, which is the scheme `nope`.

    Subclasses override what their paper needs. Rules: a scheme encodes queries and keys before the cache or describes score
    terms after it, never both; angles and biases are computed in float32 and cast last; no tensor lengths, no matrices kept.

    Args:
        config: the model's configuration, for head count, head size and direction.
        parameters: the scheme's own parameters, already checked and completed; they become attributes.
    """

    name: ClassVar[str] = ""
    """What `position_scheme` calls it, which the registry says."""
    parameter_specs: ClassVar[dict[str, ParameterSpec]] = {}
    refuses: ClassVar[dict[str, str]] = {}
    """Uses without meaning, `causal`, `bidirectional` or `memory`, each with the reason."""
    acts_on_embeddings: ClassVar[bool] = False
    """Whether the scheme adds to the embeddings, once for the whole stack, instead of acting in each layer."""
    bounded: ClassVar[bool] = False
    """Whether there is no position beyond `max_position_embeddings`."""
    scales_embeddings: ClassVar[bool] = False
    """Whether the paper multiplies the embeddings by the root of their size."""
    serves_all_layers: ClassVar[bool] = False
    """Whether one instance serves all layers of this scheme, whatever `share_positions` says."""
    has_kernel: ClassVar[bool] = False
    """Whether `attn_implementation="triton"` has a kernel for the scheme (`attention_kernels.py`)."""
    reads_token_types: ClassVar[bool] = False
    """Whether token types enter by the scheme's own term, `positions.token_types`, instead of by embeddings."""
    combines_as: ClassVar[str | None] = None
    """Its part beside another scheme: `rotary`, or `bias` for terms that read no query or key but in their product; None if
    it has none (`scheme_combined.py`)."""
    source: ClassVar[str] = ""
    """The paper."""

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__()
        self.heads: int = config.num_attention_heads
        self.head_dim: int = config.head_dim
        self.causal: bool = config.causal
        for name, value in parameters.items():
            setattr(self, name, value)

    def forward(self, method: str, *given: Any) -> Any:
        """Call a method by its name: everything outside of a scheme that may read its weights comes in here.

        What wraps a module's forward, such as accelerate's offloading, has then brought the weights, and takes them away again.
        """
        return getattr(self, method)(*given)

    def call(self, method: str, *given: Any) -> Any:
        """Call a method through `forward`; one that is not overridden reads no weights, for which none are brought.

        Layers are handed this and not the scheme: a module among the arguments would be moved to the layer's device.
        """
        inherited = getattr(type(self), method) is getattr(PositionScheme, method)
        return getattr(self, method)(*given) if inherited else self(method, *given)

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
    def reads_trained_length(cls, parameters: dict[str, Any]) -> bool:
        """Return whether the scheme computes something else in a model that is made for another length."""
        return cls.bounded

    @classmethod
    def adds_terms(cls) -> bool:
        """Return whether the scheme adds to the scores, so that somebody must ask for the distances."""
        return cls.score_terms is not PositionScheme.score_terms

    @classmethod
    def encodes(cls) -> bool:
        """Return whether the scheme changes queries and keys, by what `prepare` makes of the positions of this very pass."""
        return cls.encode_query is not PositionScheme.encode_query

    @classmethod
    def gates(cls) -> bool:
        """Return whether the scheme gives each token a number."""
        return cls.gate_tokens is not PositionScheme.gate_tokens

    @classmethod
    def needs_probabilities(cls, parameters: dict[str, Any]) -> str | None:
        """Return the reason why the scheme needs attention probabilities, which FlexAttention does not give; None if it does not."""
        return None

    def initialize(self, std: float) -> None:
        """Fill the scheme's own tables; `std` is the model's `initializer_range`."""

    def scale(self) -> float:
        """Return the factor on the products of queries and keys."""
        return self.head_dim**-0.5

    def query_gain(self) -> float:
        """Return the factor on the initial query projections, for a scheme whose paper moves the scale of the scores into them."""
        return 1.0

    def embed(self, hidden_states: torch.Tensor, in_document: torch.Tensor) -> torch.Tensor:
        """Add absolute positions `(batch|1, sequence)` to the embeddings `(batch, sequence, hidden)`."""
        return hidden_states

    def prepare(self, positions: Positions) -> Any:
        """Return what all layers of this scheme read when they encode queries and keys; no parameter may enter it."""
        return None

    def encode_query(self, query: torch.Tensor, prepared: Any) -> torch.Tensor:
        """Encode queries `(batch, heads, query, head_dim)` before they meet the keys."""
        return query

    def encode_key(self, key: torch.Tensor, prepared: Any) -> torch.Tensor:
        """Encode new keys `(batch, heads, fresh, head_dim)` before they enter the cache."""
        return key

    def scale_after_cache(self, query: torch.Tensor, key: torch.Tensor, prepared: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Change encoded queries and all keys a last time, cached ones included, `(batch, kv_heads, key, head_dim)`."""
        return query, key

    def gate_tokens(self, context: torch.Tensor) -> torch.Tensor | None:
        """Return a number per head and token, which is added to the scores of all keys before the token, from its own query on.

        Args:
            context: `(batch, fresh, hidden_size)` what the layer makes keys of: its input, normalised where the layer does so.

        Returns:
            `(batch, heads, fresh)` in at least single precision, at most 0, or None when the scheme has no such numbers. They
            are kept with the keys (`running_sums.py`).
        """
        return None

    def prepare_distances(self, distances: Distances) -> Any:
        """Return what all layers of this scheme read in `score_terms`; no parameter may enter it."""
        return None

    def for_layer(self, prepared: Any, attention: "LayerProjections") -> Any:
        """Return what one layer makes of prepared distances with its own projections, `attention.q_proj` and `k_proj`."""
        return prepared

    def score_terms(self, distances: Distances, prepared: Any) -> ScoreTerms | None:
        """Return what is added to the scores at each of the distances; in decoding it serves many steps.

        Terms that depend on more, on queries and keys or on who sees whom, are functions of these (`ScoreTerms.dense`).
        """
        return None


def frequencies(size: int, base: float, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the angle per position of each pair of channels, base^(-2t/size), `(size / 2,)` (arXiv 1706.03762, section 3.5)."""
    return 1.0 / base ** (torch.arange(0, size, 2, device=device, dtype=dtype) / size)


def sinusoid(
    positions: torch.Tensor, size: int, dtype: torch.dtype = torch.float32, interleaved: bool = False
) -> torch.Tensor:
    """Return sinusoids of positions, `(..., size)`: all sines then all cosines, or in turn (arXiv 1706.03762, section 3.5)."""
    angle = positions[..., None].to(dtype) * frequencies(size, 10000.0, positions.device, dtype)
    pair = torch.stack([angle.sin(), angle.cos()], -1 if interleaved else -2).flatten(-2)
    return pair[..., :size]
