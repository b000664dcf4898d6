"""What a trained scheme adds to the scores at each distance, where that is a number per head."""

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_relpos.model.attention import RelPosAttention
from hf_relpos.model.position_builder import build_positions
from hf_relpos.model.position_tables import DistanceTables
from hf_relpos.model.scheme_terms import dense_bias
from hf_relpos.model.transformer_stack import RelPosStack

# With one of these, a number per head and distance does not say all.
OTHER_TERMS = ("query_vectors", "key_vectors", "value_vectors", "sums", "key_offset", "distance_offset", "dense")


@torch.no_grad()
def bias_by_distance(model: PreTrainedModel, length: int) -> list[dict[str, Any]]:
    """Return what the first layer adds to the score of a key, by how many tokens it stands before the query.

    Args:
        model: a model of this package.
        length: tokens that are read; the query is the last of them.

    Returns:
        For the distances 1, 2, 4, ... below the length: `distance`; `heads`, the number of each head less that at distance 0, which
        softmax does not see; `bias`, their mean. Nothing for a scheme whose terms are not a number per head and distance.
    """
    stack = next((module for module in model.modules() if isinstance(module, RelPosStack)), None)
    if stack is None:
        return []
    attention: Any = next(module for module in stack.layers[0].modules() if isinstance(module, RelPosAttention))
    nothing = torch.zeros(1, stack.config.num_attention_heads, 1, attention.head_dim, device=model.device)
    behind = (length - 1, length, 0)  # one query, and a cache of all that stands before it
    tables = DistanceTables(build_positions((1, 1), nothing, causal=stack.config.causal, cached=behind))
    scheme = stack.schemes_of_layers()[0]
    stack.prepare(tables)
    terms = attention.score_terms(scheme.call, tables)
    if terms is None or any(getattr(terms, part) is not None for part in OTHER_TERMS):
        return []
    bias = dense_bias(terms, tables, nothing, nothing, 1.0)
    assert bias is not None, "numbers per distance are a bias"
    row = bias[0, :, -1].flip(-1)  # by distance, the query itself first
    row = row - row[:, :1]
    distances = [2**power for power in range(length.bit_length()) if 2**power < length]
    return [
        {"distance": one, "bias": float(row[:, one].mean()), "heads": [round(float(value), 6) for value in row[:, one]]}
        for one in distances
    ]
