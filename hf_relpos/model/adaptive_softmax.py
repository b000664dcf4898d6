"""Adaptive embeddings and softmax: rare tokens, the last ones of a vocabulary, get less (arXiv 1809.10853)."""

from typing import Any

import torch
from torch import nn


def embedding_width(config: Any) -> int:
    """Return the width of what token embeddings give; adaptive ones project to `hidden_size` themselves."""
    adaptive = getattr(config, "cutoffs", None)
    return config.hidden_size if adaptive else config.embedding_size or config.hidden_size


def cluster_bounds(config: Any) -> list[tuple[int, int]]:
    """Return the first token of each cluster, and the first token beyond."""
    edges = [0, *config.cutoffs, config.vocab_size]
    return list(zip(edges[:-1], edges[1:], strict=True))


def cluster_widths(config: Any) -> list[int]:
    """Return the width of each cluster's table."""
    first = config.embedding_size or config.hidden_size
    return [first // config.div_val**index for index in range(len(config.cutoffs) + 1)]


def _projects(config: Any) -> bool:
    """Return whether the width of the tables is not simply that of the model."""
    return config.div_val > 1 or cluster_widths(config)[0] != config.hidden_size


class AdaptiveEmbedding(nn.Module):
    """Token embeddings with a table for each cluster, projected to `hidden_size`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.bounds = cluster_bounds(config)
        self.tables = nn.ModuleList(
            nn.Embedding(end - start, width) for (start, end), width in zip(self.bounds, cluster_widths(config), strict=True)
        )
        sizes = cluster_widths(config) if _projects(config) else []
        self.projections = nn.ModuleList(nn.Linear(size, config.hidden_size, bias=False) for size in sizes)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed `input_ids (batch, sequence)`: `(batch, sequence, hidden_size)`."""
        parts = []
        for index, (start, end) in enumerate(self.bounds):
            # Every token looks up every table, so that no shape depends on the tokens.
            rows = self.tables[index]((input_ids - start).clamp(0, end - start - 1))
            rows = self.projections[index](rows) if self.projections else rows
            parts.append(rows * ((input_ids >= start) & (input_ids < end))[..., None])
        return sum(parts[1:], parts[0])


class AdaptiveHead(nn.Module):
    """Log-probabilities in two steps: the cluster, or a token of the first one; then a token of the cluster.

    Args:
        config: `cutoffs` and `div_val` shape the clusters, `lm_head_bias` adds a bias for each token and cluster.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.bounds, widths, bias = cluster_bounds(config), cluster_widths(config), config.lm_head_bias
        self.tables = nn.ModuleList(
            nn.Linear(width, end - start, bias=bias) for (start, end), width in zip(self.bounds, widths, strict=True)
        )
        self.clusters = nn.Linear(widths[0], len(config.cutoffs), bias=bias)
        sizes = widths if _projects(config) else []
        self.projections = nn.ModuleList(nn.Linear(config.hidden_size, size, bias=False) for size in sizes)

    def _log_probabilities(self, index: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities of the tokens within a cluster; the first cluster has those of the other clusters too."""
        states = self.projections[index](hidden_states) if self.projections else hidden_states
        scores = self.tables[index](states)
        scores = torch.cat([scores, self.clusters(states)], -1) if index == 0 else scores
        return scores.log_softmax(-1, torch.promote_types(scores.dtype, torch.float32))

    def forward(self, hidden_states: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return log-probabilities of all tokens, `(..., vocab_size)`, from `(..., hidden_size)`.

        With targets, return their losses alone: `_losses`, by a call that hooks of a module's forward see.
        """
        if targets is not None:
            return self._losses(hidden_states, targets)
        first = self._log_probabilities(0, hidden_states)
        shortlist = self.bounds[0][1]
        parts = [first[..., :shortlist]]
        for index in range(1, len(self.bounds)):
            cluster = first[..., shortlist + index - 1, None]
            parts.append(cluster + self._log_probabilities(index, hidden_states))
        return torch.cat(parts, -1)

    def _losses(self, hidden_states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the negative log-probabilities of the targets alone: a cluster is scored only where it is the target's.

        Args:
            hidden_states: `(batch, sequence, hidden_size)`.
            targets: `(batch, sequence)` tokens, -100 where there is none.

        Returns:
            `(batch, sequence)`, 0 where there is no target.
        """
        states, flat = hidden_states.flatten(0, 1), targets.flatten()
        kept = flat.clamp(min=0)
        edges = torch.tensor([start for start, _ in self.bounds[1:]], device=flat.device)
        cluster = torch.bucketize(kept, edges, right=True)
        column = torch.where(cluster == 0, kept, self.bounds[0][1] + cluster - 1)
        found = self._log_probabilities(0, states).gather(1, column[:, None])[:, 0]
        for index in range(1, len(self.bounds)):
            rows = (cluster == index).nonzero()[:, 0]
            within = kept[rows, None] - self.bounds[index][0]
            found = found.index_add(0, rows, self._log_probabilities(index, states[rows]).gather(1, within)[:, 0])
        return (-found).masked_fill(flat < 0, 0.0).view_as(targets)


def tied_tables(config: Any) -> dict[str, str]:
    """Return which tables of a head share the memory of which tables of the embeddings."""
    clusters = range(len(config.cutoffs) + 1)
    return {f"lm_head.tables.{index}.weight": f"model.embed_tokens.tables.{index}.weight" for index in clusters}


def check_clusters(config: Any) -> None:
    """Refuse clusters without tokens or without width.

    Raises:
        ValueError: names the offending value and what is allowed.
    """
    if config.div_val < 1 or (config.div_val > 1 and not config.cutoffs):
        raise ValueError(f"div_val={config.div_val} must be at least 1, and 1 without cutoffs")
    if config.cutoffs is None:
        return
    edges = [0, *config.cutoffs, config.vocab_size]
    if not config.cutoffs or any(start >= end for start, end in zip(edges[:-1], edges[1:], strict=True)):
        raise ValueError(f"cutoffs={config.cutoffs} must rise, from above 0 to below vocab_size={config.vocab_size}")
    if min(widths := cluster_widths(config)) < 1:
        raise ValueError(f"div_val={config.div_val} leaves tables of the widths {widths}: at least 1 is needed")
