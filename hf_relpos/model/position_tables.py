"""Tables over distances: made once for all layers, kept between the steps of decoding, laid out over queries and keys.

`Positions` says who stands where; a scheme answers with a number or a vector for each of some `Distances`; `DistanceTables` stand
between them. What a scheme says of distances depends on these, on the scheme's weights and on nothing else: so one step of decoding
can hand it to the next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import pad

from .positions import Positions
from .positions import lazy
from .toeplitz import relative_shift
from .toeplitz import to_diagonals
from .weight_marks import Mark
from .weight_marks import mark_weights
from .weight_marks import same_weights

DECODED_ALIKE = 256
"""Steps of decoding that share tables."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class Distances:
    """The distances, key minus query, that a scheme makes one entry or vector each for.

    Attributes:
        values: `(distances,)` in ascending order; not all between `low` and `high` where position ids leave wide gaps.
        low, high: the first and the last of them.
        dtype: of numbers that are computed from them: float32, or float64 in a float64 model.
    """

    values: torch.Tensor
    low: int
    high: int
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the distances."""
        return self.values.device


class DistanceTables:
    """Tables over the distances of one forward pass.

    Args:
        positions: who stands where.
        cache: where behind cached tokens this pass goes on, the cache: then what is `kept` is made for the steps after it too.
        store: where behind a memory this pass goes on without gradients, what the passes before it kept.

    Attributes:
        positions: as given.
        made_for: the distances that schemes are asked for: those of this pass, and before them `spare` more.
        spare: how many more distances, further back than any key, `kept` makes tables for.
    """

    def __init__(self, positions: Positions, cache: Any = None, store: dict[Any, Any] | None = None) -> None:
        self.positions = positions
        self.spare = 0
        self._store: dict[Any, _Entry] | None = store if positions.is_toeplitz and positions.causal else None
        self._prepared: dict[str, Any] = {}
        if cache is not None and not torch.compiler.is_compiling():
            self._continue(cache)

    def to(self, device: torch.device | str | int, **_: Any) -> "DistanceTables":
        """Return tables over the same distances on a device, where nothing is kept; these themselves if they are there."""
        positions = self.positions.to(device)
        return self if positions is self.positions else DistanceTables(positions)

    def _continue(self, cache: Any) -> None:
        """Find what earlier steps kept for this cache; what was kept before it was emptied is dropped."""
        positions = self.positions
        if isinstance(positions.start, int) and positions.start == 0:
            _STORES.pop(cache, None)
        elif positions.is_toeplitz and positions.causal and not torch.is_grad_enabled():
            self.spare = positions.bounds[0] % DECODED_ALIKE
            self._store = _STORES.setdefault(cache, {})

    @lazy
    def distances(self) -> Distances:
        """Return all distances between the bounds, or, where position ids leave wide gaps, those that some query meets."""
        low, high = self.positions.bounds
        if self._met is not None:
            return Distances(self._met[0], low, high, self.positions.dtype)
        return Distances(torch.arange(low, high + 1, device=self.positions.query.device), low, high, self.positions.dtype)

    @lazy
    def made_for(self) -> Distances:
        """Return the distances that schemes are asked for: those of this pass, and before them `spare` more."""
        if not self.spare:
            return self.distances
        low, high = self.positions.bounds
        values = torch.arange(low - self.spare, high + 1, device=self.positions.query.device)
        return Distances(values, low - self.spare, high, self.positions.dtype)

    def prepare(self, schemes: Any) -> None:
        """Prepare the distances for some schemes now, ahead of the layers, unless what is kept may do without."""
        for scheme in schemes if self._store is None else ():
            if scheme.adds_terms():
                self.prepared(scheme)

    def prepared(self, scheme: Any) -> Any:
        """Return what a scheme prepares of the distances, the same for all layers of its name."""
        if scheme.name not in self._prepared:
            self._prepared[scheme.name] = scheme.call("prepare_distances", self.made_for)
        return self._prepared[scheme.name]

    def kept(self, name: Any, scheme: nn.Module, make: Callable[[], Made]) -> Made:
        """Return what is made for `made_for`: now, or by an earlier step for the same distances by the same weights.

        Args:
            name: of what is made, the same in each step.
            scheme: whose weights it depends on. In training mode, in which it may depend on chance, nothing is kept.
            make: makes it.
        """
        weights = None if self._store is None or scheme.training else mark_weights(scheme)
        if self._store is None or weights is None:
            return make()
        entry = self._store.get(name)
        if (
            entry is None
            or entry.settings != self._settings
            or entry.scheme is not scheme
            or not same_weights(entry.weights, weights)
        ):
            entry = self._store[name] = _Entry(self._settings, scheme, weights, make())
        return entry.made

    @lazy
    def _settings(self) -> tuple[Any, ...]:
        """Return all that a kept table depends on beside the scheme."""
        low, high, device = self.made_for.low, self.made_for.high, self.made_for.device
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        return low, high, self.made_for.dtype, device, *autocast

    @lazy
    def _met(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the distances that occur and the index of each pair's, where position ids leave wide gaps; None else.

        A compiler cannot count them, so it takes all distances between the bounds.
        """
        low, high = self.positions.bounds
        if (
            self.positions.contiguous
            or torch.compiler.is_compiling()
            or high - low < 2 * sum(self.positions.distance.shape[1:])
        ):
            return None
        return torch.unique(self.positions.distance, return_inverse=True)

    @lazy
    def _column(self) -> torch.Tensor:
        """Index into `distances` of every pair, `(batch|1, query, key)`; unseen pairs are clamped to the ends."""
        if self._met is not None:
            return self._met[1]
        low, high = self.positions.bounds
        return (self.positions.distance - low).clamp(0, high - low)

    def spread(self, per_distance: torch.Tensor) -> torch.Tensor:
        """Lay numbers per distance out over query and key: `(heads, distances)` to `(batch|1, heads, query, key)`."""
        queries, keys = self.positions.query.shape[1], self.positions.key.shape[1]
        if not self.positions.is_toeplitz:
            return per_distance[:, self._column].transpose(0, 1)
        future = queries + keys - 1 - per_distance.shape[-1]  # causal distances end at 0: the rest is never seen
        return pad(per_distance, (0, future)).unfold(-1, keys, 1).flip(-2)[None]

    def gather(self, scores: torch.Tensor) -> torch.Tensor:
        """Pick every pair's distance from scores per query: `(batch, heads, query, distances)` to `(..., query, key)`."""
        if self.positions.is_toeplitz:
            keys = self.positions.key.shape[1]
            missing = keys - scores.shape[-1]  # keys after the last query
            scores = pad(scores, (0, missing)) if missing > 0 else scores
            shifted = scores if scores.shape[-2] == 1 else relative_shift(scores)  # one query: a distance a key, in order
            return shifted[..., :keys]
        return scores.gather(-1, self._column[:, None].expand(*scores.shape[:-1], -1))

    def gather_keys(self, scores: torch.Tensor) -> torch.Tensor:
        """Pick every pair's distance from scores per key: `(batch, heads, key, distances)` to `(..., query, key)`."""
        column = self._column.transpose(-1, -2)[:, None]
        return scores.gather(-1, column.expand(*scores.shape[:-1], -1)).transpose(-1, -2)

    def to_diagonals(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Sum what stands at one distance: `(batch, heads, query, key)` to `(batch, heads, query, distances)`."""
        distances = self.distances.values.shape[0]
        if self.positions.is_toeplitz:
            return to_diagonals(probabilities.flip(-2)).flip(-2)[..., :distances]
        sums = probabilities.new_zeros(*probabilities.shape[:-1], distances)
        return sums.scatter_add(-1, self._column[:, None].expand_as(probabilities), probabilities)


@dataclass(frozen=True)
class _Entry:
    """A table that one step made, and all that it was made of: distances, a scheme, and its weights as they were."""

    settings: tuple[Any, ...]
    scheme: nn.Module
    weights: list[Mark]
    made: Any


_STORES: WeakKeyDictionary[Any, dict[Any, _Entry]] = WeakKeyDictionary()
"""What is kept, by cache: it goes with the cache, and is no part of it, so that a cache can be copied, saved and exported."""
