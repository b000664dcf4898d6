"""Two schemes in one layer: a rotary one turns queries and keys, and a bias one adds to the scores of what was turned."""

from functools import cache
from typing import Any
from typing import ClassVar

import torch

from .position_tables import Distances
from .positions import Positions
from .scheme_base import LayerProjections
from .scheme_base import PositionScheme
from .scheme_terms import ScoreTerms

_ALLOWED = "a combination is one rotary scheme and one that adds a number per distance or token to the scores"


class Combined(PositionScheme):
    """The scores of a rotary scheme and, added to them, the numbers of a bias scheme: q_i R_(i-j) k_j scale + b_(i-j).

    Each part is what it is alone. The scale is the bias scheme's, so that T5's `scale_scores` keeps its meaning; rotary
    schemes have none of their own. Subclasses come from `combine`.
    """

    kinds: ClassVar[dict[str, type[PositionScheme]]] = {}
    """The class of each part by its name, the rotary one first."""

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters of each part by its name; the errors are those of the parts."""
        for name, parameters in given.items():
            if name not in cls.kinds or not isinstance(parameters, dict):
                raise ValueError(
                    f"position_parameters of {'+'.join(cls.kinds)!r} map its schemes ({', '.join(cls.kinds)}) to dicts: "
                    f"{name!r}={parameters!r}"
                )
        return {name: kind.complete(given.get(name, {})) for name, kind in cls.kinds.items()}

    @classmethod
    def reads_trained_length(cls, parameters: dict[str, Any]) -> bool:
        return any(kind.reads_trained_length(parameters[name]) for name, kind in cls.kinds.items())

    @classmethod
    def check(cls, config: Any, parameters: dict[str, Any]) -> None:
        for name, kind in cls.kinds.items():
            kind.check(config, parameters[name])

    @classmethod
    def adds_terms(cls) -> bool:
        return any(kind.adds_terms() for kind in cls.kinds.values())

    @classmethod
    def gates(cls) -> bool:
        return any(kind.gates() for kind in cls.kinds.values())

    @classmethod
    def needs_probabilities(cls, parameters: dict[str, Any]) -> str | None:
        reasons = (kind.needs_probabilities(parameters[name]) for name, kind in cls.kinds.items())
        return next((reason for reason in reasons if reason is not None), None)

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config)
        # The parts are modules of their own: the model initialises them, and `initialize` here has nothing to fill.
        self.rotary, self.added = (kind(config, **parameters[name]) for name, kind in self.kinds.items())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the classes of the parts: that of the combination was made while running, so no import finds it."""
        return _blank, tuple(self.kinds.items()), self.__dict__

    def scale(self) -> float:
        return self.added.scale()

    def query_gain(self) -> float:
        return self.added.query_gain()

    def prepare(self, positions: Positions) -> Any:
        return self.rotary.call("prepare", positions)

    def encode_query(self, query: torch.Tensor, prepared: Any) -> torch.Tensor:
        return self.rotary.call("encode_query", query, prepared)

    def encode_key(self, key: torch.Tensor, prepared: Any) -> torch.Tensor:
        return self.rotary.call("encode_key", key, prepared)

    def scale_after_cache(self, query: torch.Tensor, key: torch.Tensor, prepared: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rotary.call("scale_after_cache", query, key, prepared)

    def gate_tokens(self, context: torch.Tensor) -> torch.Tensor | None:
        return self.added.call("gate_tokens", context)

    def prepare_distances(self, distances: Distances) -> Any:
        return self.added.call("prepare_distances", distances)

    def for_layer(self, prepared: Any, attention: LayerProjections) -> Any:
        return self.added.call("for_layer", prepared, attention)

    def score_terms(self, distances: Distances, prepared: Any) -> ScoreTerms | None:
        return self.added.call("score_terms", distances, prepared)


@cache
def combine(*parts: tuple[str, type[PositionScheme]]) -> type[Combined]:
    """Return the class of a combination, the same one each time.

    Args:
        parts: name and class of each scheme, in any order.

    Raises:
        ValueError: the schemes have no meaning together; names the reason and what is allowed.
    """
    names = "+".join(name for name, _ in parts)
    reason = _refusal(parts)
    if reason is not None:
        raise ValueError(f"position_scheme {names!r} is refused: {reason}; {_ALLOWED}")
    kinds = dict(sorted(parts, key=lambda part: part[1].combines_as != "rotary"))
    members = {
        "kinds": kinds,
        "name": "+".join(kinds),
        "__doc__": f"{' and '.join(kinds)} in one layer.",
        "refuses": {use: f"{name}: {why}" for name, kind in kinds.items() for use, why in kind.refuses.items()},
        "source": " and ".join(kind.source for kind in kinds.values()),
        "serves_all_layers": any(kind.serves_all_layers for kind in kinds.values()),
    }
    return type("And".join(kind.__name__ for kind in kinds.values()), (Combined,), members)


def _blank(*parts: tuple[str, type[PositionScheme]]) -> Combined:
    kind = combine(*parts)
    return kind.__new__(kind)


def _refusal(parts: tuple[tuple[str, type[PositionScheme]], ...]) -> str | None:
    """Return why some schemes have no meaning together, or None."""
    if len(parts) != 2:
        return f"it names {len(parts)} schemes"
    roles = {kind.combines_as for _, kind in parts}
    for name, kind in parts:
        if kind.acts_on_embeddings:
            return f"{name} adds absolute positions to the embeddings, so that scores would not depend on distances alone"
        if not kind.combines_as and not kind.adds_terms():
            return f"{name} adds nothing to combine"
        if not kind.combines_as and "rotary" in roles:
            return (
                f"the terms of {name} read the query or the key itself, which a rotary scheme has turned by its place: "
                "they would depend on where the tokens stand, not on their distance"
            )
    if roles == {"rotary"}:
        return "both turn queries and keys, and two turns are one turn by the sum of their angles"
    if roles == {"bias"}:
        return "both add numbers to the scores that read no query and no key, and a layer has one scheme of such numbers"
    return None if "rotary" in roles else "neither is rotary, and terms of two other schemes compete for the same distances"
