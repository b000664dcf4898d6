"""Every scheme where numbers are at their worst: finite differences, huge scores, one token, far positions, long sums."""

from typing import Any

import pytest
import torch
from matrix import Case
from matrix import cases
from matrix import expected
from matrix import ids_of
from transformers import DynamicCache

from hf_relpos.model import blockwise_attention
from hf_relpos.model import blockwise_forward
from hf_relpos.model.position_builder import build_positions
from hf_relpos.model.running_sums import join_gates
from hf_relpos.model.running_sums import running_sums
from hf_relpos.model.running_sums import split_gates
from hf_relpos.model.scheme_registry import SCHEMES

EXACT = {"rtol": 1e-9, "atol": 1e-10}
PATHS: dict[str, dict[str, str]] = {
    "eager": {"attn_implementation": "eager"},
    "dense": {"attn_implementation": "sdpa", "attention_path": "dense"},
    "blocks": {"attn_implementation": "sdpa", "attention_path": "blockwise"},
}
GATED = [name for name, kind in SCHEMES.items() if kind.gates()]
LONG = 16_384


@pytest.mark.parametrize("path", ["eager", "blocks"])
@pytest.mark.parametrize("case", cases())
def test_finite_differences(case: Case, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's gradients, of its input and of all its weights, are what small changes of them do; several blocks and padding."""
    for module in (blockwise_forward, blockwise_attention):
        monkeypatch.setattr(module, "BLOCK", 3)
    model = case.model(num_hidden_layers=1, hidden_size=12, intermediate_size=8, **PATHS[path])
    mask = torch.ones(2, 7)
    mask[0, 5:] = 0
    names, weights = zip(*(pair for pair in model.named_parameters() if "embed_tokens" not in pair[0]), strict=True)

    def states(inputs: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        given = {"inputs_embeds": inputs, "attention_mask": mask}
        found = torch.func.functional_call(model, dict(zip(names, values, strict=True)), kwargs=given)
        return found.last_hidden_state * mask[..., None]

    inputs = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(states, (inputs, *weights), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("path", ["eager", "blocks"])
@pytest.mark.parametrize("case", cases())
def test_scores_of_ten_thousands(case: Case, path: str) -> None:
    """Queries 10,000 times as large let one key win: as by the formula in double precision; in less, finite with its gradients."""
    for dtype in (torch.float64, torch.bfloat16):
        model = case.model(dtype=dtype, num_hidden_layers=1, **PATHS[path])
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".q_proj." in name:
                    weight.mul_(1e4)
        found = model(ids_of()).last_hidden_state
        if dtype == torch.float64:
            torch.testing.assert_close(found, expected(model, ids_of()), rtol=1e-6, atol=1e-6)
        gradients = torch.autograd.grad(found.double().square().mean(), list(model.parameters()))
        assert found.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("case", cases())
def test_one_token(case: Case) -> None:
    """On every path, with finite gradients."""
    for path in PATHS.values():
        model, ids = case.model(**path), ids_of(2, 1)
        found = model(ids).last_hidden_state
        torch.testing.assert_close(found, expected(model, ids), **EXACT)
        assert all(part.isfinite().all() for part in torch.autograd.grad(found.square().sum(), list(model.parameters())))


REFUSED = {
    "learned_absolute": "position 1000000 is beyond the learned positions 0 to",
    "xpos": "xpos scales queries over 1000000 positions in one pass, beyond the range",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", cases(variants=True))
def test_far_beyond_every_table(case: Case, dtype: torch.dtype) -> None:
    """A million positions away all is finite, or refused by name."""
    model, ids = case.model(dtype=dtype), ids_of(1, 5)
    position = torch.tensor([[0, 1, 700, 100_000, 1_000_000]])
    refused = REFUSED.get(case.scheme.split("+")[0])
    if refused:
        with pytest.raises(ValueError, match=refused):
            model(ids, position_ids=position)
        return
    found = model(ids, position_ids=position).last_hidden_state
    gradients = torch.autograd.grad(found.float().square().mean(), list(model.parameters()))
    assert found.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_of_many_cached_steps(dtype: torch.dtype) -> None:
    """Gates kept one step at a time, in the precision of the keys, add up to what double precision says, to the last step."""
    generator = torch.Generator().manual_seed(0)
    gates = -torch.rand(1, 2, LONG, generator=generator)
    steps = [join_gates(torch.zeros(1, 2, 1, 4, dtype=dtype), gate) for gate in gates.split(1, -1)]
    kept = split_gates(torch.cat(steps, 2), 4)[1]
    sums = running_sums(kept, build_positions((1, LONG), torch.empty(0), causal=True))
    exact = gates.double().cumsum(-1)
    assert exact[0, 0, -1] < -8000
    assert (sums - exact).abs().max() < 1e-3, "since the first token"
    near = sums[..., -64:] - sums[..., -1:], exact[..., -64:] - exact[..., -1:]
    assert (near[0] - near[1]).abs().max() < 1e-5, "over the last tokens"


@pytest.mark.slow
@pytest.mark.parametrize("name", GATED)
@torch.no_grad()
def test_decoding_behind_a_long_text(name: str) -> None:
    """Steps behind 16,384 tokens are as near to double precision as those of a model without gates in the same precision."""
    ids, errors = ids_of(1, LONG + 6), {}
    for scheme in ("nope", name):
        for dtype in (torch.float32, torch.bfloat16):
            model = Case("decoder", scheme, {}).model(dtype=dtype, attn_implementation="sdpa")
            exact: Any = Case("decoder", scheme, {}).model(attn_implementation="sdpa")
            exact.load_state_dict({key: value.double() for key, value in model.state_dict().items()})
            cache = DynamicCache()
            model(ids[:, :LONG], cache=cache)
            found = torch.cat([model(token, cache=cache).last_hidden_state for token in ids[:, LONG:].split(1, 1)], 1)
            wanted = exact(ids).last_hidden_state[:, LONG:]
            errors[scheme, dtype] = (found.double() - wanted).square().mean().sqrt().item()
    for dtype in (torch.float32, torch.bfloat16):
        assert errors[name, dtype] < 2 * errors["nope", dtype], errors
