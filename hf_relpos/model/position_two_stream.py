"""The two streams of XLNet (arXiv 1906.08237, section 2.3): who sees whom in an order of factorization.

The content stream is the usual one, except that a token sees only those before it in the order, and itself. The query stream
has one row for each target: it stands where its target stands, but has not read it. Both ask the same keys, those of the content
stream, by the same weights; all that differs is in their `Positions`.
"""

from dataclasses import replace

import torch
from torch.nn.functional import pad

from .positions import Positions
from .positions import known
from .positions import reads_freely


def check_perm_mask(perm_mask: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return the mask as booleans, `(batch, query, key)`; a ValueError if it does not fit the input's `(batch, sequence)`."""
    expected = (shape[0], shape[1], shape[1])
    if tuple(perm_mask.shape) != expected:
        raise ValueError(
            f"perm_mask has the shape {tuple(perm_mask.shape)}, expected {expected}: (batch, query, key), where 1 hides the key"
        )
    return perm_mask > 0


def find_targets(target_mapping: torch.Tensor, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token that each row names, `(batch, predict)`, and whether it names any: rows of zeros pad.

    Args:
        target_mapping: `(batch, predict, sequence)`, 1 where the target stands and 0 elsewhere.
        shape: `(batch, sequence)` of the input.

    Raises:
        ValueError: the shape does not fit the input, or a row is neither one-hot nor all 0.
    """
    if target_mapping.dim() != 3 or (target_mapping.shape[0], target_mapping.shape[2]) != shape:
        raise ValueError(
            f"target_mapping has the shape {tuple(target_mapping.shape)}, expected ({shape[0]}, predict, {shape[1]}): "
            "(batch, predict, sequence)"
        )
    named = target_mapping != 0
    count = named.sum(-1)
    wrong = (count > 1) | (named & (target_mapping != 1)).any(-1)
    if reads_freely(wrong) and wrong.any():
        row, target = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"target_mapping[{row}, {target}] names {int(count[row, target])} tokens with values in "
            f"{sorted(set(target_mapping[row, target].tolist()))}; a row must be 1 at one token and 0 elsewhere, or all 0"
        )
    return named.int().argmax(-1), count > 0


def content_positions(positions: Positions, hidden: torch.Tensor) -> Positions:
    """Return the positions of the content stream: nobody sees what `hidden (batch, query, key of the segment)` hides, but itself."""
    return replace(positions, given_mask=(positions.visible & ~_over_keys(hidden, positions)) | _itself(positions))


def query_positions(
    positions: Positions, hidden: torch.Tensor, targets: torch.Tensor, named: torch.Tensor
) -> tuple[Positions, torch.Tensor]:
    """Return the positions of the query stream, and which of its rows see any key, `(batch, predict)`.

    A row that sees nothing, the first of an order, must still run through a softmax; it is shown everything, and what
    comes out has to be left out by the caller. (The released code lets it attend evenly to everything, itself included.)

    Args:
        positions: those of the input without any order.
        hidden: `(batch, query, key of the segment)` true where the order hides a key; it decides on itself too.
        targets: `(batch, predict)` index of each target among the tokens.
        named: `(batch, predict)` False for rows that are no target.
    """
    visible = positions.visible & ~_over_keys(hidden, positions)
    if positions.key_valid is not None:
        visible = visible & positions.key_valid[:, None, None, :]
    batch, predict = targets.shape
    visible = visible.expand(batch, -1, -1, -1).gather(2, targets[:, None, :, None].expand(-1, -1, -1, visible.shape[-1]))
    seen = visible.any(-1)[:, 0] & named
    given_mask = visible | ~seen[:, None, :, None]
    order = torch.arange(positions.query.shape[1], device=targets.device)
    if predict == len(order) and known((targets == order).all()):
        return replace(positions, given_mask=given_mask), seen  # every token is a target: distances stay in order

    def pick(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else part.expand(batch, -1).gather(1, targets)

    picked = {name: pick(getattr(positions, name)) for name in ("query", "in_document", "query_types")}
    queries = replace(positions, **picked, given_mask=given_mask, contiguous=False, gaps=None)
    queries = replace(queries, query_valid=None, query_document=None, key_document=None)
    # The distances of all tokens are those of some of them too: so no tensor has to be read for its smallest and largest.
    object.__setattr__(queries, "bounds", positions.bounds)
    return queries, seen


def _over_keys(hidden: torch.Tensor, positions: Positions) -> torch.Tensor:
    """Return `(batch, 1, query, key)` from a mask over the keys of the segment: no order hides a memory."""
    return pad(hidden, (positions.key.shape[1] - hidden.shape[-1], 0))[:, None]


def _itself(positions: Positions) -> torch.Tensor:
    """Return where query and key are one token, `(1, 1, query, key)`."""
    return (positions.index_distance == 0)[:, None]
