"""Numbers per token that add up from a key to a query: how they are kept with the keys, and summed without loss.

A scheme that reads the tokens between a key and a query gives each token t a number g_t (`PositionScheme.gate_tokens`); what is added
to the score of query i and key j is g_{j+1} + ... + g_i = c_i - c_j, with running sums c. Over a long text these grow beyond what
single precision tells apart, their differences to the near keys do not. So the numbers themselves are kept, which a cache can crop,
reorder and append to; sums are made of them in double precision, in each pass, and leave it as differences.
"""

import torch

from .positions import Positions


def to_parts(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Write numbers as sums of numbers of a dtype: `(..., parts)`, one for single precision and three for half.

    Numbers beyond its range become its largest. The sum of the parts' gradients is the gradient of the number.
    """
    limit, parts = torch.finfo(dtype).max / 2, []
    rest = numbers.clamp(-limit, limit)
    for _ in range(parts_in(dtype)):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(rest.dtype)
    return torch.stack(parts, -1)


def parts_in(dtype: torch.dtype) -> int:
    """Return how many numbers of a dtype say one of single precision."""
    return 3 if dtype.itemsize < 4 else 1


def join_gates(key: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Return keys `(batch, kv_heads, fresh, head_dim)` with `gates (batch, heads, fresh)` as more channels, as a cache keeps them."""
    grouped = to_parts(gates.unflatten(1, (key.shape[1], -1)), key.dtype)  # (batch, kv_heads, groups, fresh, parts)
    return torch.cat([key, grouped.transpose(2, 3).flatten(-2)], -1)


def split_gates(joined: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `join_gates` joined: keys, and gates `(batch, heads, key)` in at least single precision."""
    parts = joined[..., head_dim:].unflatten(-1, (-1, parts_in(joined.dtype)))  # (batch, kv_heads, key, groups, parts)
    gates = parts.to(torch.promote_types(joined.dtype, torch.float32)).sum(-1)
    return joined[..., :head_dim], gates.transpose(2, 3).flatten(1, 2)


FORGOTTEN = -1000.0
"""The least a token adds: nothing is left of what was before it. Sums of steeper numbers would leave the precision of the scores."""


def running_sums(gates: torch.Tensor, positions: Positions) -> torch.Tensor:
    """Return c of all keys, `(batch, heads, key)` in double precision where the device has it.

    Padding adds nothing, and no token less than `FORGOTTEN`.
    """
    wide = torch.float32 if gates.device.type == "mps" else torch.float64
    if positions.key_valid is not None:
        gates = gates.masked_fill(~positions.key_valid[:, None], 0)
    return gates.clamp(min=FORGOTTEN).to(wide).cumsum(-1)


def sums_of_queries(sums: torch.Tensor, positions: Positions) -> torch.Tensor:
    """Return c of the queries, `(batch, heads, query)`, of those of all keys."""
    own = torch.arange(positions.query.shape[1], device=sums.device) + positions.start
    return sums.index_select(-1, own)
