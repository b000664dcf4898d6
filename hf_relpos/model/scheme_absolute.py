"""Schemes without relative positions: none at all, and the two absolute ones. They are the baselines."""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .positions import reads_freely
from .scheme_base import PositionScheme
from .scheme_base import sinusoid

_MEMORY = "absolute positions restart in every segment, so the memory's order would be lost (arXiv 1901.02860, section 3.3)"


class NoPE(PositionScheme):
    """No positions: a causal decoder infers order from its mask alone (arXiv 2305.19466)."""

    refuses = {"bidirectional": "without positions and without a causal mask the tokens are a bag: no order is left"}
    source = "arXiv 2305.19466"


class Sinusoidal(PositionScheme):
    """Fixed sinusoids added to the embeddings: PE(p) = [sin(p w), cos(p w)] (arXiv 1706.03762, section 3.5)."""

    refuses = {"memory": _MEMORY}
    acts_on_embeddings = True
    scales_embeddings = True
    source = "arXiv 1706.03762, section 3.5"

    def embed(self, hidden_states: torch.Tensor, in_document: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        return hidden_states + sinusoid(in_document, hidden_states.shape[-1], dtype).to(hidden_states.dtype)


class LearnedAbsolute(PositionScheme):
    """One learned vector per absolute position, added to the embeddings (arXiv 1705.03122; BERT, GPT-2)."""

    refuses = {"memory": _MEMORY}
    acts_on_embeddings = True
    bounded = True
    source = "arXiv 1705.03122, section 3.1"

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        self.bound: int = config.max_position_embeddings
        self.position_embeddings = nn.Parameter(torch.empty(self.bound, config.hidden_size))

    def initialize(self, std: float) -> None:
        init.normal_(self.position_embeddings, std=std)

    def embed(self, hidden_states: torch.Tensor, in_document: torch.Tensor) -> torch.Tensor:
        if reads_freely(in_document):
            self._check_bound(int(in_document.min()), int(in_document.max()))
        return hidden_states + self.position_embeddings[in_document]

    def _check_bound(self, first: int, last: int) -> None:
        if first < 0 or last >= self.bound:
            raise ValueError(
                f"position {first if first < 0 else last} is beyond the learned positions 0 to {self.bound - 1}: {self.name} is bounded by "
                f"max_position_embeddings={self.bound}; shorten the text or choose a relative scheme"
            )
