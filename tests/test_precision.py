"""Half precision: no worse than twice the error of an independent computation in half precision."""

from typing import Any

import pytest
import torch
from matrix import LENGTH
from matrix import Case
from matrix import cases
from matrix import expected
from matrix import ids_of

FAR = 3000
"""A position at which bfloat16 and float16 cannot tell neighbours apart."""
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def error(states: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean squared difference."""
    return (states.double() - exact).square().mean().sqrt().item()


@HALF
@pytest.mark.parametrize("case", cases(variants=True))
@torch.no_grad()
def test_error_in_half_precision(case: Case, dtype: torch.dtype) -> None:
    """At the first positions, and where the position is so large that half precision cannot hold it."""
    for first in (0,) if case.scheme == "learned_absolute" else (0, FAR):
        position, ids = torch.arange(first, first + LENGTH)[None], ids_of()
        models = [case.model(dtype=dtype, attn_implementation=implementation) for implementation in ("eager", "sdpa")]
        weights = {name: weight.double() for name, weight in models[0].named_parameters()}
        exact = expected(models[0], ids, weights=weights, position=position)
        budget = 2 * error(expected(models[0], ids, position=position), exact)
        for model in models:
            found = model(ids, position_ids=position if first else None).last_hidden_state
            assert found.dtype == dtype
            assert error(found, exact) < budget


@HALF
@pytest.mark.parametrize("case", cases())
def test_training_in_mixed_precision(case: Case, dtype: torch.dtype) -> None:
    """Under autocast, loss and gradients stay near those of float32; every parameter has a float32 gradient.

    The norms of most gradients here are 1 to 8. Those of networks of the distance are sums that cancel where all keys share what they
    add: rounding leaves 1e-3 at most. That of the scores leaves more where the network reads them.
    """
    rest = {"fire": 1e-3, "dynamic_bias": 1e-3, "dape": 5e-2}.get(case.scheme, 1e-4)
    model, ids = case.model(head=True, dtype=torch.float32, attn_implementation=None).train(), ids_of()

    def run(enabled: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with torch.autocast("cpu", dtype, enabled=enabled):
            loss = model(ids, labels=ids).loss
        return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))

    (loss, gradients), (exact_loss, exact) = run(True), run(False)
    assert abs(loss - exact_loss) < 0.02 * exact_loss
    for found, wanted in zip(gradients, exact, strict=True):
        assert found.dtype == torch.float32 and found.isfinite().all()
        assert (found - wanted).norm() < 0.15 * wanted.norm() + rest


@HALF
@pytest.mark.parametrize("case", cases("decoder", memory=True))
@torch.no_grad()
def test_memory_and_cache_in_half_precision(case: Case, dtype: torch.dtype) -> None:
    """Streaming and decoding hold the precision of the model and stay within its own error."""
    model, ids = case.model(mem_len=5, dtype=dtype), ids_of()
    weights: dict[str, Any] = {name: weight.double() for name, weight in model.named_parameters()}
    exact = expected(model, ids, weights=weights)
    budget = 2 * error(expected(model, ids), exact)
    first = model(ids[:, :6])
    assert first.memory.hidden.dtype == dtype
    rest = model(ids[:, 6:], memory=first.memory).last_hidden_state
    assert error(torch.cat([first.last_hidden_state, rest], 1), exact) < budget
    prompt = model(ids[:, :6], use_cache=True)
    rest = model(ids[:, 6:], cache=prompt.cache).last_hidden_state
    assert error(torch.cat([prompt.last_hidden_state, rest], 1), exact) < budget
