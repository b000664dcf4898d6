"""Schemes whose positions depend on what the tokens say."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import initialization as init

from .positions import Positions
from .scheme_base import Parameter
from .scheme_base import PositionScheme
from .score_terms import ScoreTerms


class CoPE(PositionScheme):
    """A key's position is how many tokens from it to the query pass a gate (arXiv 2405.18719, section 4).

    g_ij = sigmoid(q_i . k_j / sqrt(d)), p_ij = sum of g_it for t = j..i, and q_i . e[p_ij] is added to the scaled
    score; between two whole positions the two products are mixed. Only keys that the query sees are counted. The
    released code divides q_i . e[p_ij] by sqrt(d) too (`divide`).
    """

    parameter_specs = {
        "positions": Parameter(64, "vectors e[0], e[1], ...: keys further away share the last", minimum=2),
        "divide": Parameter(False, "divide what is added by the root of the head size", choices=(False, True)),
    }
    refuses = {"bidirectional": "it counts the tokens from a key to a query after it"}
    source = "arXiv 2405.18719, section 4"
    positions: int
    divide: bool

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        self.table = nn.Parameter(torch.empty(self.positions, self.head_dim))

    def initialize(self, std: float) -> None:
        init.zeros_(self.table)

    def score_terms(self, positions: Positions, prepared: Any, query: torch.Tensor, key: torch.Tensor) -> ScoreTerms:
        return ScoreTerms(dense=self._places, learned=(self.table,))

    def _places(self, positions: Positions, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """q_i . e[p_ij], mixed between two whole positions, `(batch, heads, query, key)`."""
        # The keys run backwards, so that a running sum counts from the query.
        scores = ((query * self.scale()) @ key.flip(-2).transpose(-1, -2)).to(positions.dtype)
        place = scores.masked_fill_(~positions.visible.flip(-1), float("-inf")).sigmoid_().cumsum(-1)
        below = place.detach().clamp(max=self.positions - 1).long()
        whole = (query @ table.to(query.dtype).T * (self.scale() if self.divide else 1.0)).to(positions.dtype)
        step = pad(whole.diff(dim=-1), (0, 1))  # beyond the last position all is as there
        return torch.addcmul(whole.gather(-1, below), place - below, step.gather(-1, below)).flip(-1)
