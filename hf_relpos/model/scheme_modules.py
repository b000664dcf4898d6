"""The schemes of a stack as modules: a weight's name says which layer and which scheme it belongs to."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from .scheme_base import PositionScheme
from .scheme_registry import SCHEMES
from .scheme_registry import build_scheme
from .scheme_registry import layer_schemes
from .scheme_registry import parts_of
from .scheme_registry import scheme_class

SHARED = "shared"
"""Stands in names for the number of a layer, where several layers share a scheme."""
_NUMBERED = re.compile(r"(?:^|\.)position_schemes\.(\d+)\.([^.]+)")


class PositionSchemes(nn.Module):
    """The schemes of a stack in the order in which its layers use them; it reads like an `nn.ModuleList`.

    Weights are named `LAYER.SCHEME.weight`, as in `3.t5.bias` or `shared.t5.bias`. So what one scheme or layer has learned is
    never loaded into another.

    Args:
        config: the configuration of the stack.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        of_layers = scheme_places(config)
        self.places = list(dict.fromkeys(of_layers))
        self.of_layers: list[int] = [self.places.index(place) for place in of_layers]
        for owner, name in self.places:
            if owner not in self._modules:
                self.add_module(owner, nn.ModuleDict())
            self.get_submodule(owner).add_module(name, build_scheme(config, name))

    def for_layers(self) -> list[PositionScheme]:
        """Return the scheme of each layer. A stack asks by this name: PEFT's `modules_to_save` hands on no `[]` and no iteration."""
        return [self[index] for index in self.of_layers]

    def __getitem__(self, index: int) -> PositionScheme:
        owner, name = self.places[index]
        return getattr(getattr(self, owner), name)

    def __iter__(self) -> Iterator[PositionScheme]:
        return iter([self[index] for index in range(len(self))])

    def __len__(self) -> int:
        return len(self.places)


def scheme_places(config: Any) -> list[tuple[str, str]]:
    """Return for each layer of a stack the owner of its scheme, the layer's number or `SHARED`, and the scheme's name.

    Layers share a scheme when `share_positions` or the scheme itself says so.
    """

    def shared(name: str) -> bool:
        kind = scheme_class(name)
        return config.share_positions == "model" or kind.acts_on_embeddings or kind.serves_all_layers

    return [(SHARED if shared(name) else str(layer), name) for layer, name in enumerate(layer_schemes(config))]


def is_numbered(weight: str) -> bool:
    """Return whether a weight is named as version 0.1.0 did, by `position_schemes.NUMBER.` and then its name in the scheme."""
    found = _NUMBERED.search(weight)
    return found is not None and not set(parts_of(found[2])) <= SCHEMES.keys()


def name_numbered(weight: str, config: Any) -> str:
    """Return the name of today of a weight that `is_numbered`, given the configuration of the stack that it was saved from."""
    places = list(dict.fromkeys(scheme_places(config)))
    found: Any = _NUMBERED.search(weight)
    return ".".join([weight[: found.start(1) - 1], *places[int(found[1])], weight[found.start(2) :]])
