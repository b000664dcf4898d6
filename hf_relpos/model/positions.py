"""Positions of all queries and keys, and who sees whom.

A forward pass builds one `Positions` (`position_builder.py`) and hands it to all layers. Schemes are asked for its distances
(`position_tables.py`) and never see a tensor length; the attention layer reads `visible` from it, so that the mask and the biases
can never disagree.

Notation: `query` tokens are the ones whose outputs are computed; `key` tokens are all that may be attended to, in the order
memory or cache first, then the queries themselves. `start` is the index of the first query among the keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch

from .devices import Movable


class lazy:
    """A property that is computed once; `functools.cached_property` takes a lock, which torch.compile cannot follow."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = self.compute(instance)
        object.__setattr__(instance, self.compute.__name__, value)
        return value


def known(number: torch.Tensor) -> Any:
    """Return the number in a tensor of one element, or None while a compiler traces: then tensors hold no numbers."""
    return None if torch.compiler.is_compiling() else number.item()


READ_FREELY = ("cpu",)
"""Kinds of devices whose numbers can be read at any time; with all others, reading waits until everything before it is computed."""


def reads_freely(tensor: torch.Tensor) -> bool:
    """Return whether numbers of a tensor may be read for nothing but a better error.

    On an accelerator they may not: there the kernels refuse what is out of range themselves, in fewer words.
    """
    return tensor.device.type in READ_FREELY and not torch.compiler.is_compiling()


@dataclass(frozen=True)
class Positions(Movable):
    """Positions of queries and keys in one forward pass, and who sees whom.

    Attributes:
        query: `(batch|1, query)` position number of each query; only differences to `key` have a meaning.
        key: `(batch|1, key)` position number of each key.
        fresh_key: `(batch|1, fresh)` position numbers of the keys projected in this pass (memory and segment, no cache).
        in_document: `(batch|1, query)` number of tokens that precede each query in its document, padding not counted.
        start: index of the first query among the keys; a tensor when a static cache counts on the device.
        contiguous: True when a distance counts tokens (the caller gave no `position_ids`).
        causal: a query sees no key after itself.
        window: number of keys a query sees, itself included; None for all.
        key_valid: `(batch, key)` False for padding and unused memory slots; None when all are valid.
        query_valid: `(batch, query)` False for padding among the queries; None when there is none.
        query_document, key_document: `(batch, query)` and `(batch, key)` number of the document; None when there is one.
        gaps: `(batch, key)` padding that stands between a row's first token and each key and is over there; None when tokens are
            contiguous.
        given_mask: `(batch|1, 1, query, key)` a mask made by the caller, which then replaces all of the above.
        token_types: `(batch, key)` the segment of each key, in an encoder whose scheme has terms for it; None else.
        query_types: `(batch, query)` the segment of each query, likewise.
        dtype: of angles and distances in formulas: float32, or float64 in a float64 model.
    """

    query: torch.Tensor
    key: torch.Tensor
    fresh_key: torch.Tensor
    in_document: torch.Tensor
    start: int | torch.Tensor
    contiguous: bool
    causal: bool
    window: int | None = None
    key_valid: torch.Tensor | None = None
    query_valid: torch.Tensor | None = None
    query_document: torch.Tensor | None = None
    key_document: torch.Tensor | None = None
    gaps: torch.Tensor | None = None
    given_mask: torch.Tensor | None = None
    token_types: torch.Tensor | None = None
    query_types: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32

    @property
    def ordered(self) -> bool:
        """Return whether nobody sees the future; a mask of the caller may show it, as for a prefix."""
        return self.causal and self.given_mask is None

    @property
    def is_toeplitz(self) -> bool:
        """Return whether every distance equals column - row - start, so that shifting views replace gathers."""
        return self.contiguous and self.gaps is None and isinstance(self.start, int) and not torch.compiler.is_exporting()

    @lazy
    def index_distance(self) -> torch.Tensor:
        """Index of the key minus index of the query, `(1, query, key)`: negative in the past."""
        device = self.query.device
        query = torch.arange(self.query.shape[1], device=device) + self.start
        return (torch.arange(self.key.shape[1], device=device) - query[:, None])[None]

    @lazy
    def token_distance(self) -> torch.Tensor:
        """Return the tokens from the query to the key, `(batch|1, query, key)`; padding between them is not counted."""
        if self.gaps is None:
            return self.index_distance
        own = torch.arange(self.query.shape[1], device=self.gaps.device) + self.start
        return self.index_distance - self.gaps[:, None, :] + self.gaps.index_select(1, own)[:, :, None]

    @lazy
    def distance(self) -> torch.Tensor:
        """Return the position of the key minus that of the query, `(batch|1, query, key)`: the sign of Shaw and T5."""
        return self.token_distance if self.contiguous else self.key[:, None, :] - self.query[:, :, None]

    @lazy
    def bounds(self) -> tuple[int, int]:
        """Return the smallest and the largest distance that a query may meet."""
        queries, keys = self.query.shape[1], self.key.shape[1]
        if self.contiguous:
            start = self.start if isinstance(self.start, int) else None
            low = 1 - keys if start is None else 1 - queries - start
            high = keys - 1 - (start or 0)
            return low, min(high, 0) if self.ordered else high
        return int(self.distance.min()), int(self.distance.max())

    @lazy
    def _made(self) -> dict[Callable[["Positions"], Any], Any]:
        return {}

    def once(self, make: Callable[["Positions"], Any]) -> Any:
        """Return what a function makes of these positions, made for the first layer that asks."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    @property
    def hides_more(self) -> bool:
        """Return whether more than order and window limits what is seen."""
        return any(part is not None for part in (self.given_mask, self.key_valid, self.key_document))

    @property
    def needs_mask(self) -> bool:
        """Return False when causality alone (or nothing) limits what is seen, so that fused kernels can do without a mask."""
        queries, keys = self.query.shape[1], self.key.shape[1]
        if self.hides_more or not isinstance(self.start, int) or self.start + queries != keys:
            return True
        outside_window = self.window is not None and self.window < keys
        return outside_window or (self.causal and queries not in (1, keys))

    def block(self, rows: slice, columns: slice) -> "Positions":
        """Return the positions of some queries and some keys, as if they were all: what a blockwise backend works on."""

        def cut(part: torch.Tensor | None, along: slice) -> torch.Tensor | None:
            return None if part is None else part[..., along]

        return replace(
            self,
            query=self.query[:, rows],
            key=self.key[:, columns],
            in_document=self.in_document[:, rows],
            start=self.start + rows.start - columns.start,
            key_valid=cut(self.key_valid, columns),
            query_valid=cut(self.query_valid, rows),
            query_document=cut(self.query_document, rows),
            key_document=cut(self.key_document, columns),
            query_types=cut(self.query_types, rows),
            token_types=cut(self.token_types, columns),
            gaps=cut(self.gaps, columns),
            given_mask=None if self.given_mask is None else self.given_mask[..., rows, columns],
        )

    @property
    def without_limits(self) -> "Positions":
        """Return the same positions where only order and window limit what is seen."""
        return replace(self, key_valid=None, query_document=None, key_document=None)

    @lazy
    def visible(self) -> torch.Tensor:
        """Return who sees whom, `(batch|1, 1, query, key)`. Every query sees itself, so that no row of a softmax is empty."""
        if self.given_mask is not None:
            return self.given_mask
        offset = self.index_distance
        seen = offset <= 0 if self.causal else torch.ones_like(offset, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (self.token_distance.abs() < self.window)
        if self.key_valid is not None:
            seen = seen & self.key_valid[:, None, :]
        if self.query_document is not None and self.key_document is not None:
            seen = seen & (self.query_document[:, :, None] == self.key_document[:, None, :])
        return (seen | (offset == 0))[:, None]

    @lazy
    def furthest(self) -> torch.Tensor:
        """Return the distance from each query to the furthest key that it sees, on either side, `(batch|1, query)`."""
        if not self.contiguous or self.gaps is not None or self.hides_more:
            return self.distance.abs().masked_fill(~self.visible[:, 0], 0).amax(-1)
        back = torch.arange(self.query.shape[1], device=self.query.device)[None] + self.start
        ahead = torch.zeros_like(back) if self.causal else self.key.shape[1] - 1 - back
        furthest = torch.maximum(back, ahead)
        return furthest if self.window is None else furthest.clamp(max=self.window - 1)
