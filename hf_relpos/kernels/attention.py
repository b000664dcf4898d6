"""Attention by the kernels, with gradients for queries, keys, values and every table of distances."""

from contextlib import AbstractContextManager
from contextlib import nullcontext
from typing import Any
from typing import NamedTuple

import torch
import triton
from torch.nn.functional import pad

from hf_relpos.model.blockwise_masking import labels_of
from hf_relpos.model.positions import Positions
from hf_relpos.model.scheme_terms import ScoreTerms
from hf_relpos.model.toeplitz import fold_to_entries

from .backward import Results
from .backward import TableGradients
from .backward import of_keys
from .backward import of_queries
from .backward import of_tables
from .forward import attend
from .tiles import Inputs

WARPS = {16: 4, 32: 4, 64: 8}
"""Groups of threads that share a tile, by its size: so that few numbers leave the registers. Not timed: no GPU was at hand."""

NARROWEST = 16
"""Numbers that products on a GPU take at least."""

EVERYWHERE = 2**30
"""A distance beyond any."""


class Tensors(NamedTuple):
    """The first fields of `Inputs`: what has gradients."""

    content: torch.Tensor
    asking: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor
    query_vectors: torch.Tensor | None
    key_vectors: torch.Tensor | None
    value_vectors: torch.Tensor | None
    bias: torch.Tensor | None


class Plan(NamedTuple):
    """How to attend: all that has no gradient."""

    rest: tuple[Any, ...]
    """The other fields of `Inputs`."""
    tile: int

    def inputs(self, tensors: Tensors) -> Inputs:
        """Return what the kernels read."""
        return Inputs(*tensors, *self.rest)

    def sizes(self, tensors: Tensors) -> dict[str, Any]:
        """Return what the kernels are compiled for."""
        width = tensors.key.shape[-1]
        return {
            "PRECISION": "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
            "TILE": self.tile,
            "WIDTH": width,
            "ASKING": NARROWEST if tensors.asking is None else tensors.asking.shape[-1],
            "VALUE": tensors.value.shape[-1],
            "num_warps": WARPS.get(self.tile, 8),
            "num_stages": 1,  # more would load tiles ahead, for which shared memory is too small with vectors beside keys
        }


def _on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context that launches kernels where a tensor is, which may be another GPU than the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


class _Kernels(torch.autograd.Function):
    """Attention of contiguous tensors whose widths the kernels can take."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *given: Any) -> torch.Tensor:
        tensors = Tensors(*given)
        batch, heads, queries, _ = tensors.content.shape
        output = tensors.value.new_empty(batch, heads, queries, tensors.value.shape[-1])
        lse = tensors.value.new_empty(batch, heads, queries, dtype=torch.float32)
        grid = (triton.cdiv(queries, plan.tile), batch * heads)
        with _on_device_of(output):
            attend[grid](plan.inputs(tensors), output, lse, **plan.sizes(tensors))
        ctx.plan = plan
        ctx.save_for_backward(*given, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "attention by kernels has no second derivatives (create_graph=True): use attn_implementation='eager'"
            )
        *given, output, lse = ctx.saved_tensors
        with _on_device_of(grad):
            found = _gradients(ctx.plan, Tensors(*given), Tensors(*ctx.needs_input_grad[1:]), (output, lse, grad.contiguous()))
        return None, *(found.get(name) for name in Tensors._fields)


def _gradients(
    plan: Plan, tensors: Tensors, wanted: Any, results: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the gradients by the names of `Tensors`, of those that are wanted at least; `results` are output, log-sum-exp and gradient."""
    output, lse, grad = results
    inputs, sizes = plan.inputs(tensors), plan.sizes(tensors)
    known = Results(grad, lse, (grad * output).sum(-1, dtype=torch.float32))
    matrices = inputs.batch * inputs.heads
    found: dict[str, torch.Tensor] = {}
    if wanted.content or wanted.asking:
        found["content"] = torch.empty_like(tensors.content)
        if tensors.asking is not None:
            found["asking"] = torch.empty_like(tensors.asking)
        grid = (triton.cdiv(inputs.queries, plan.tile), matrices)
        of_queries[grid](inputs, known, found["content"], found.get("asking"), **sizes)
    if wanted.key or wanted.value:
        found |= {"key": torch.empty_like(tensors.key), "value": torch.empty_like(tensors.value)}
        of_keys[triton.cdiv(inputs.keys, plan.tile), matrices](inputs, known, found["key"], found["value"], **sizes)
    tables = {name: getattr(tensors, name) for name in TableGradients._fields if getattr(wanted, name)}
    if tables:
        found |= _table_gradients(plan, inputs, known, tables, sizes)
    return found


def _table_gradients(
    plan: Plan, inputs: Inputs, results: Results, tables: dict[str, torch.Tensor], sizes: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the gradients of some tables by their name."""
    tiles = triton.cdiv(inputs.queries, plan.tile)
    diagonals = tiles + triton.cdiv(inputs.keys, plan.tile) - 1
    sums = {
        name: table.new_empty(inputs.heads, diagonals, 2, plan.tile, *table.shape[2:], dtype=torch.float32)
        for name, table in tables.items()
    }
    wanted = TableGradients(*(sums.get(name) for name in TableGradients._fields))
    of_tables[(diagonals, inputs.heads)](inputs, results, wanted, diagonals, **sizes)
    found, first = {}, 1 - tiles * plan.tile - inputs.start  # the smallest distance of the first diagonal
    for name, halves in sums.items():
        lower, upper = (half.flatten(1, 2) for half in halves.unbind(2))
        behind = [0, 0] * (lower.dim() - 2)  # nothing is added to the width of vectors
        total = pad(lower, (*behind, 0, plan.tile)) + pad(upper, (*behind, plan.tile, 0))
        start = first - (inputs.bias_first if name == "bias" else inputs.first)
        found[name] = _fold(total, tables[name], start)
    return found


def _fold(total: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
    """Return sums per distance `(heads, distances, ...)` as the gradient of a table; `first` is the entry of distance number 0."""
    total = total.sum(0, keepdim=True) if table.shape[0] == 1 else total
    numbers = total.movedim(1, -1)
    kept, entries = fold_to_entries(numbers, table, first)
    result = torch.zeros_like(table)
    result[:, entries] = kept.movedim(-1, 1).to(table.dtype)
    return result


def kernel_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: ScoreTerms,
    positions: Positions,
    scale: float,
    dropout: float = 0.0,
    tile: int | None = None,
) -> torch.Tensor:
    """Attend with numbers and vectors per distance, without a query x key tensor of all heads.

    Args:
        query: `(batch, heads, query, head_dim)`, without offsets, in float32 or half precision.
        key, value: `(batch, heads, key, head_dim)`, heads already repeated for grouped queries.
        terms: what the scheme adds: no `sums` and no `dense`.
        positions: who sees whom, at which distance; `is_toeplitz` must hold.
        scale: factor on products of queries and keys.
        dropout: rate at which probabilities are dropped.
        tile: queries, and keys, of a tile, a power of two from 16 on; None for what suits the precision.

    Returns:
        `(batch, query, heads, head_dim)`.
    """
    size, dtype = value.shape[-1], query.dtype
    vectors = (terms.query_vectors, terms.key_vectors, terms.value_vectors)
    shared = all(part is None or part.shape[0] == 1 for part in vectors)

    def table(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else _ready(part if shared else part.expand(query.shape[1], -1, -1), dtype)

    def scaled(offset: torch.Tensor | None) -> torch.Tensor:
        return _ready((query if offset is None else query + offset[:, None].to(dtype)) * scale, dtype)

    tensors = Tensors(
        content=scaled(terms.key_offset),
        asking=None if terms.query_vectors is None else scaled(terms.distance_offset),
        key=_ready(key, dtype),
        value=_ready(value, dtype),
        query_vectors=table(terms.query_vectors),
        key_vectors=table(None if terms.key_vectors is None else terms.key_vectors * scale),
        value_vectors=table(terms.value_vectors),
        bias=None if terms.bias is None else terms.bias.float().contiguous(),
    )
    plan = Plan(_rest(tensors, terms, positions, dropout), tile or _tile_for(tensors))
    return _Kernels.apply(plan, *tensors)[..., :size].transpose(1, 2)


def _tile_for(tensors: Tensors) -> int:
    """Return how many queries, and keys, a tile has: as many as shared memory holds on every GPU from 2020 on."""
    widest = max(part.shape[-1] * part.element_size() for part in tensors[:4] if part is not None)
    return 64 if widest <= 128 else 32 if widest <= 256 else 16


def _ready(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return states in a dtype, contiguous, and as wide as a power of two."""
    missing = max(NARROWEST, triton.next_power_of_2(states.shape[-1])) - states.shape[-1]
    return (pad(states, (0, missing)) if missing else states).to(dtype).contiguous()


def _rest(tensors: Tensors, terms: ScoreTerms, positions: Positions, dropout: float) -> tuple[Any, ...]:
    """Return the fields of `Inputs` that have no gradient."""
    batch, heads, queries, _ = tensors.content.shape
    keys, start = tensors.key.shape[2], int(positions.start)
    windowed = positions.window is not None and positions.given_mask is None
    low = 1 - int(positions.window or 0) if windowed else -EVERYWHERE
    high = 0 if positions.ordered else -low
    tables = [part for part in tensors[4:7] if part is not None]
    first = terms.span[0] if terms.span else positions.bounds[0]
    counted = (tables[0].shape[1], int(tables[0].shape[0] > 1)) if tables else (1, 0)
    numbers = (positions.bounds[0], 1 if tensors.bias is None else tensors.bias.shape[1])
    limits = positions.once(_limits) if positions.hides_more else (None, None, None)
    limits = [None if part is None else part.expand(batch, *part.shape[1:]).contiguous() for part in limits]
    seed = int(torch.randint(2**31, ())) | 1 if dropout else 1  # odd, for which Triton compiles one kernel
    return (*limits, batch, heads, queries, keys, start, low, high, first, *counted, *numbers, dropout or None, seed)


def _limits(positions: Positions) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return labels of queries and of keys, `(batch|1, length)`, and the caller's mask, `(batch|1, query, key)`."""
    if positions.given_mask is not None:
        return None, None, positions.given_mask[:, 0].to(torch.uint8)
    keys = labels_of(positions.key_valid, positions.key_document)
    queries = positions.query_document
    if keys is None:
        return None, None, None
    queries = torch.zeros_like(keys[:, :1]).expand(-1, positions.query.shape[1]) if queries is None else queries
    return queries.int(), keys.int(), None
