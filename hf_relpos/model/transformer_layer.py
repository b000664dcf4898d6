"""One layer of a stack, and the parts it is made of."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import RelPosAttention
from .configuration_relpos import RelPosConfig
from .positions import Positions


@dataclass(frozen=True)
class SecondInput:
    """Hold what all layers of a stack are given beside their own inputs: a query stream, or the source of an encoder-decoder.

    The states are passed to a layer by place: reentrant gradient checkpointing sends no gradients through keywords.

    Attributes:
        states: `(batch, length, hidden_size)` the query stream before the first layer, or the source.
        positions: of the query stream and all keys; or of the queries and the source.
        seen: for a query stream, `(batch, length, 1)` 0 for targets that see no key, to which attention adds nothing; else 1. None
            for a source, which layers read but do not change.
    """

    states: torch.Tensor
    positions: Positions
    seen: torch.Tensor | None = None


def make_norm(config: RelPosConfig, size: int) -> nn.Module:
    """Build the normalisation that the configuration names."""
    if config.norm_type == "rms_norm":
        return nn.RMSNorm(size, eps=config.layer_norm_eps)
    return nn.LayerNorm(size, eps=config.layer_norm_eps, bias=config.norm_bias)


class RelPosMLP(nn.Module):
    """Feed-forward layer, gated or not."""

    def __init__(self, config: RelPosConfig) -> None:
        super().__init__()
        size = config.hidden_size
        inner: Any = config.intermediate_size
        self.up_proj = nn.Linear(size, inner, bias=config.mlp_bias)
        self.gate_proj = nn.Linear(size, inner, bias=config.mlp_bias) if config.gated_mlp else None
        self.down_proj = nn.Linear(inner, size, bias=config.mlp_bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        up = self.up_proj(hidden_states)
        inner = self.act(up) if self.gate_proj is None else self.act(self.gate_proj(hidden_states)) * up
        return self.down_proj(inner)


class RelPosLayer(GradientCheckpointingLayer):
    """Attention and feed-forward with residuals, normalised before (pre) or after (post) each sub-layer."""

    def __init__(self, config: RelPosConfig, layer_idx: int) -> None:
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.parallel = config.parallel_residual
        self.attention = RelPosAttention(config, layer_idx)
        self.mlp = RelPosMLP(config)
        self.attention_norm = make_norm(config, config.hidden_size)
        self.mlp_norm = make_norm(config, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        memory: torch.Tensor | None = None,
        second: torch.Tensor | None = None,
        second_inputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run one layer over `(batch, query, hidden_size)`, behind `memory (batch, slots, hidden_size)` among the keys.

        The memory holds inputs of this layer as they were, so a pre-norm layer normalises it like the segment.

        Args:
            hidden_states: inputs of the layer; with a query stream, those of the content stream.
            memory: what the layer remembers.
            second: `(batch, length, hidden_size)` the states of a `SecondInput`, here a query stream: it asks the same keys
                by the same weights (XLNet, arXiv 1906.08237, section 2.3).
            second_inputs: what the attention layer is given for them, in place of the same in `kwargs`.
            kwargs: what the attention layer is given.

        Returns:
            The outputs `(batch, query, hidden_size)`; with a query stream, a tuple of them and of its own.
        """
        content = self._pass(hidden_states, memory, **kwargs)
        if second is None:
            return content
        return content, self._pass(second, memory, hidden_states, **{**kwargs, **(second_inputs or {})})

    def context(self, memory: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
        """Return what keys and values are made of: the layer's inputs, remembered and own, `(batch, slots + query, hidden_size)`."""
        inputs = own if memory is None else torch.cat([memory, own], 1)
        return self.attention_norm(inputs) if self.pre_norm else inputs

    def _pass(
        self, hidden_states: torch.Tensor, memory: torch.Tensor | None, *content: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        middle = self._self_attend(hidden_states, memory, *content, **kwargs)
        return self._feed(middle, hidden_states if self.parallel else middle)

    def _self_attend(
        self,
        hidden_states: torch.Tensor,
        memory: torch.Tensor | None,
        content: torch.Tensor | None = None,
        seen: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend and add; to `content` in place of itself, and adding nothing where `seen (batch, query, 1)` is 0."""
        context, query = self.context(memory, hidden_states if content is None else content), hidden_states
        if self.pre_norm:
            query = self.attention_norm(query) if content is not None else context[:, -query.shape[1] :]
        attended = self.attention(query, context, **kwargs)[0]
        return self._add(hidden_states, attended if seen is None else attended * seen, self.attention_norm)

    def _feed(self, residual: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return self._add(residual, self.mlp(self.mlp_norm(source) if self.pre_norm else source), self.mlp_norm)

    def _add(self, residual: torch.Tensor, added: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        total = residual + self.dropout(added)
        return total if self.pre_norm else norm(total)

    def set_init_gains(self, query_gain: float, num_layers: int) -> None:
        """Set how much smaller than usual some weights begin.

        Args:
            query_gain: of the projections to queries, which a scheme that does not scale its scores makes small.
            num_layers: number of layers; a pre-norm layer begins its output projections smaller by the root of the
                number of residuals in the stack, as GPT-2 does.
        """
        outputs: list[Any] = self.output_projections()
        queries: list[Any] = self.query_projections()
        for projection in outputs if self.pre_norm else []:
            projection.init_gain = (len(outputs) * num_layers) ** -0.5
        for projection in queries:
            projection.init_gain = query_gain

    def query_projections(self) -> list[nn.Linear]:
        """Return the layers that make queries."""
        return [self.attention.q_proj]

    def output_projections(self) -> list[nn.Linear]:
        """Return the layers whose outputs are added to the residual."""
        return [self.attention.o_proj, self.mlp.down_proj]
