"""What the private kernel and the views by stride take for granted: how tensors lie in memory, and that the kernel is there."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from matrix import Case
from matrix import ids_of
from plain_attention import SCALE
from plain_attention import TABLES
from plain_attention import leaves_of
from plain_attention import plain_attention
from plain_attention import positions_of
from plain_attention import random_states
from plain_attention import random_terms

from hf_relpos.model import blockwise_attention
from hf_relpos.model import blockwise_backward
from hf_relpos.model import blockwise_kernel
from hf_relpos.model.blockwise_attention import blockwise_attention as attend
from hf_relpos.model.toeplitz import padded_to_diagonals
from hf_relpos.model.toeplitz import to_diagonals
from hf_relpos.model.toeplitz import to_matrix

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers with NaN between them."""
    wide = torch.full((*tensor.shape, 2), float("nan"), dtype=tensor.dtype)
    wide[..., 0] = tensor.detach()
    return wide[..., 0].requires_grad_(tensor.requires_grad)


def across(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers with the first dimension innermost in memory."""
    moved = tensor.detach().movedim(0, -1).contiguous().movedim(-1, 0)
    return moved.requires_grad_(tensor.requires_grad)


def repeated(tensor: torch.Tensor) -> torch.Tensor:
    """Return its first number everywhere, once in memory."""
    return tensor.detach().flatten()[0].expand(tensor.shape)


@pytest.mark.parametrize("names", [{"bias"}, {"query_vectors", "key_offset"}, set(TABLES)], ids=["fused", "vectors", "all"])
@pytest.mark.parametrize("layout", [apart, across])
def test_any_layout_of_memory(layout: Callable[[torch.Tensor], torch.Tensor], names: set[str]) -> None:
    """Whatever the strides of states, of tables and of the gradient that comes in."""
    positions = positions_of(2, 9, causal=True)
    states, terms = random_states(positions, 2), random_terms(positions, names, None, False, "")
    wanted = plain_attention(tuple(states), terms, positions)
    laid_out = [layout(state) for state in states]
    tables = {name: layout(part) for name in TABLES if (part := getattr(terms, name)) is not None}
    other = replace(terms, **tables)
    found = attend(*laid_out, other, positions, SCALE)
    torch.testing.assert_close(found, wanted, **EXACT)
    for lie in (layout, repeated):
        direction = lie(torch.randn_like(wanted))
        gradients = (
            torch.autograd.grad(out, leaves, direction, retain_graph=True)
            for out, leaves in ((found, [*laid_out, *leaves_of(other)]), (wanted, [*states, *leaves_of(terms)]))
        )
        torch.testing.assert_close(*gradients, **EXACT)


@pytest.mark.parametrize("layout", [apart, across])
def test_kernel_takes_any_layout(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = [torch.randn(2, 3, rows, 2, dtype=torch.float64) for rows in (4, 5, 5)]
    mask, grad = torch.randn(2, 1, 4, 5, dtype=torch.float64), torch.randn(2, 3, 4, 2, dtype=torch.float64)
    wanted = blockwise_kernel.fused_attention(*tensors, mask)
    found = blockwise_kernel.fused_attention(*map(layout, tensors), layout(mask))
    torch.testing.assert_close(found, wanted, **EXACT)
    gradients = blockwise_kernel.fused_gradients(grad, tuple(tensors), wanted, mask)
    other = tuple(map(layout, tensors))
    results = (layout(wanted[0]), wanted[1])
    torch.testing.assert_close(
        blockwise_kernel.fused_gradients(layout(grad), other, results, layout(mask)), gradients, **EXACT
    )


@pytest.mark.parametrize("layout", [apart, across])
def test_views_by_stride_take_any_layout(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    numbers, matrix = torch.randn(2, 3, 7), torch.randn(2, 3, 5)
    assert torch.equal(to_matrix(layout(numbers), 3, 5), to_matrix(numbers, 3, 5))
    assert torch.equal(padded_to_diagonals(layout(matrix)), to_diagonals(matrix))


@pytest.mark.parametrize("head_dim", [1, 2, 4])
@pytest.mark.parametrize("scheme", ["rope+alibi", "xpos+kerple"])
def test_rotated_heads_of_one_pair(scheme: str, head_dim: int) -> None:
    """Rotated heads of two channels lie in memory as no others do."""
    if head_dim == 1:
        scheme = scheme.split("+")[1]
    case, ids = Case("decoder", scheme, {}), ids_of(length=130)
    sizes = {"hidden_size": 6, "head_dim": head_dim, "num_attention_heads": 3}
    wanted = case.model(**sizes)(ids, use_cache=False)[0]
    model = case.model(attn_implementation="sdpa", **sizes)
    assert model.attention_plan(130)[0]["path"] == "blockwise"
    torch.testing.assert_close(model(ids, use_cache=False)[0], wanted, **EXACT)


def removed(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError


def without_mask(query: torch.Tensor, *args: Any) -> Any:
    """Takes no mask any more."""
    return query, query[..., 0]


def with_other_numbers(*args: Any, **kwargs: Any) -> Any:
    """Gives the log-sum-exp to another base."""
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(*args, **kwargs)
    return output, lse / 2


@pytest.fixture(params=[None, removed, without_mask, with_other_numbers])
def other_torch(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Another torch: without the kernel, or with another under its name."""
    name = "an_operator_of_another_torch"
    if request.param is not None:
        monkeypatch.setattr(torch.ops.aten, name, request.param, raising=False)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        monkeypatch.setattr(torch.ops.aten, f"{name}_backward", backward, raising=False)
    monkeypatch.setattr(blockwise_kernel, "NAME", name)
    return name


def test_without_the_kernel(other_torch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks give the same output and gradients in plain products, and say so once."""
    told: list[str] = []
    monkeypatch.setattr(blockwise_kernel.logger, "warning", told.append)
    for module, name in ((blockwise_attention, "fused_attention"), (blockwise_backward, "fused_gradients")):
        monkeypatch.setattr(module, name, removed)
    case = Case("decoder", "t5", {})
    models = [case.model(), case.model(attn_implementation="sdpa", attention_path="blockwise")]
    outputs = [model(ids_of(length=9), use_cache=False)[0] for model in models]
    torch.testing.assert_close(*outputs, **EXACT)
    gradients = [
        torch.autograd.grad(output.square().sum(), list(model.parameters()), allow_unused=True)
        for model, output in zip(models, outputs, strict=True)
    ]
    torch.testing.assert_close(*gradients, **EXACT)
    blockwise_kernel.kernel_works()
    assert len(told) <= 1 and all("plain products" in text for text in told)


def test_the_kernel_of_this_torch_is_used() -> None:
    assert blockwise_kernel.kernel_works()
