"""Training in blocks: dropout inside of them, half precision, frozen parts, and how memory grows."""

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from elsewhere import environment
from matrix import Case
from matrix import cases
from matrix import ids_of
from plain_attention import HEADS
from plain_attention import SCALE
from plain_attention import leaves_of
from plain_attention import plain_attention
from plain_attention import positions_of
from plain_attention import random_states
from plain_attention import random_terms

from hf_relpos.model import blockwise_attention as blockwise
from hf_relpos.model import blockwise_backward
from hf_relpos.model import blockwise_forward
from hf_relpos.model.blockwise_attention import blockwise_attention
from hf_relpos.model.scheme_registry import scheme_class

EXACT = {"rtol": 1e-9, "atol": 1e-9}
LONG = 140
"""More than one block."""
RATE = 0.3
BLOCKS = {"attn_implementation": "sdpa", "attention_path": "blockwise"}
BATCH, LENGTH = 2, 11
TERMS = {
    "none": (set(), ""),
    "bias": ({"bias"}, ""),
    "queries": ({"query_vectors", "key_offset", "distance_offset"}, ""),
    "keys and values": ({"bias", "key_vectors", "value_vectors"}, ""),
    "pairs": ({"value_vectors"}, "of both"),
    "factors": ({"bias"}, "factors"),
}


@pytest.fixture
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(blockwise_forward, "BLOCK", 4)
        patching.setattr(blockwise, "BLOCK", 4)
        yield


@pytest.fixture
def masks() -> Iterator[list[Any]]:
    """The block and the factor of each draw of dropout, forward and backward, in order."""
    drawn: list[Any] = []
    draw = blockwise_forward.dropout_mask

    def remember(plan: Any, block: Any, weights: torch.Tensor) -> torch.Tensor | None:
        factor = draw(plan, block, weights)
        drawn.append((block, None if factor is None else factor.clone()))
        return factor

    with pytest.MonkeyPatch.context() as patching:
        for module in (blockwise, blockwise_backward):
            patching.setattr(module, "dropout_mask", remember)
        yield drawn


def whole_factor(drawn: list[Any], queries: int, keys: int) -> torch.Tensor:
    """The factors of all blocks as `(batch, heads, query, key)`."""
    whole = torch.zeros(HEADS, BATCH, queries, keys, dtype=torch.float64)
    for block, factor in drawn:
        whole[block.heads, :, block.rows, block.columns] = factor
    return whole.flip(-2).transpose(0, 1)


def scene(name: str, causal: bool, batch: int = BATCH, **options: Any) -> tuple[Any, Any, Any, list[torch.Tensor]]:
    """Positions, terms, states and all that learns."""
    positions = positions_of(batch, LENGTH, causal=causal, **options)
    names, dense = TERMS[name]
    terms, states = random_terms(positions, names, None, False, dense), random_states(positions, batch)
    return positions, terms, states, [*states, *leaves_of(terms)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", TERMS)
def test_dropout_is_that_of_its_masks(name: str, causal: bool, masks: list[Any]) -> None:
    """Output and all gradients are those of plain attention whose probabilities are multiplied by the very same factors."""
    mask = torch.ones(BATCH, LENGTH)
    mask[:, :2] = 0
    positions, terms, states, leaves = scene(name, causal, attention_mask=mask, window=6)
    found = blockwise_attention(*states, terms, positions, SCALE, RATE)
    forward = whole_factor(masks, LENGTH, LENGTH)
    wanted = plain_attention(tuple(states), terms, positions, forward)
    torch.testing.assert_close(found, wanted, **EXACT)
    masks.clear()
    gradients = [torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(1)) for out in (found, wanted)]
    torch.testing.assert_close(*gradients, **EXACT)
    assert torch.equal(whole_factor(masks, LENGTH, LENGTH), forward), "the backward pass drops what the forward pass did"


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", TERMS)
def test_finite_differences_with_dropout(name: str) -> None:
    positions, terms, states, leaves = scene(name, causal=True)

    def attend(*_: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return blockwise_attention(*states, terms, positions, SCALE, RATE)

    assert torch.autograd.gradcheck(attend, leaves, atol=1e-6, fast_mode=True)


@pytest.mark.usefixtures("small_blocks")
def test_rate_of_dropout_and_where_it_falls(masks: list[Any]) -> None:
    """As often as asked, scaled to keep the sum, and another mask for each block, head, row of the batch and call."""
    positions, terms, states, _ = scene("bias", causal=False)
    for _ in range(150):
        blockwise_attention(*states, terms, positions, SCALE, RATE)
    shapes = {tuple(factor.shape) for _, factor in masks}
    assert shapes == {(HEADS, BATCH, rows, LENGTH) for rows in (4, 3)}
    factors = torch.cat([factor.flatten() for _, factor in masks])
    assert set(factors.unique().tolist()) == {0.0, 1 / (1 - RATE)}
    error = math.sqrt(RATE * (1 - RATE) / len(factors))
    assert abs((factors == 0).double().mean() - RATE) < 4 * error
    calls = torch.stack([whole_factor(masks[at : at + 3], LENGTH, LENGTH) for at in range(0, len(masks), 3)])
    dropped = (calls == 0).double()  # (call, batch, heads, query, key)
    spread = 5 * math.sqrt(RATE * (1 - RATE) / len(calls))
    assert ((dropped.mean(0) - RATE).abs() < spread).all(), "every place alike"
    for one, other in (
        (dropped[0], dropped[1]),
        (dropped[:, 0], dropped[:, 1]),
        (dropped[:, :, 0], dropped[:, :, 1]),
        (dropped[..., 0:4, :], dropped[..., 4:8, :]),
        (dropped[..., 0, :], dropped[..., 1, :]),
    ):
        together = (one * other).mean()
        assert abs(together - RATE**2) < 6 * math.sqrt(RATE**2 / one.numel()), "drawn apart"


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", TERMS)
def test_mean_over_many_masks_is_what_nothing_is_dropped_from(name: str) -> None:
    positions, terms, states, _ = scene(name, causal=True)
    with torch.no_grad():
        plain = blockwise_attention(*states, terms, positions, SCALE)
        many = torch.stack([blockwise_attention(*states, terms, positions, SCALE, RATE) for _ in range(600)])
    error = many.std(0) / math.sqrt(len(many))
    assert ((many.mean(0) - plain).abs() < 5 * error + 1e-12).all()
    assert (many.std(0) > 0.01).any()


@pytest.mark.usefixtures("small_blocks")
def test_groups_of_rows_drop_apart(masks: list[Any]) -> None:
    """Rows with padding are attended to apart from the others: both drop, by masks of their own."""
    mask = torch.ones(4, LENGTH)
    mask[1:3, :2] = 0
    positions, terms, states, leaves = scene("bias", causal=True, batch=4, attention_mask=mask)
    found = blockwise_attention(*states, terms, positions, SCALE, RATE)
    half = len(masks) // 2
    first, second = (whole_factor(part, LENGTH, LENGTH) for part in (masks[:half], masks[half:]))
    assert not torch.equal(first, second)
    factor = torch.stack([first[0], second[0], second[1], first[1]])
    wanted = plain_attention(tuple(states), terms, positions, factor)
    torch.testing.assert_close(found[:, 2:], wanted[:, 2:], **EXACT)
    gradients = [torch.autograd.grad(out[:, 2:].square().sum(), leaves) for out in (found, wanted)]
    torch.testing.assert_close(*gradients, **EXACT)


BLOCKED = [given for given in cases() if given.values[0].adds_to_scores]


def gradients_of(model: Any, ids: torch.Tensor, seed: int = 3, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of all parameters, by name."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(ids, labels=ids, **inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize("case", BLOCKED)
def test_recomputed_layers_drop_the_same(case: Case, masks: list[Any]) -> None:
    """The same seed gives the same twice, and the same with gradient checkpointing of both kinds; another seed does not."""
    remembers = case.family == "decoder" and "memory" not in scheme_class(case.scheme).refuses
    rates = {"hidden_dropout": 0.1, "attention_dropout": 0.2, **({"mem_len": 5} if remembers else {})}
    model, ids = case.model(head=True, **rates, **BLOCKS).train(), ids_of()

    def run(seed: int = 3) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        torch.manual_seed(9)
        return gradients_of(model, ids, seed, **({"memory": model(ids).memory} if remembers else {}))

    plain = run()
    assert masks and all(factor is not None for _, factor in masks), "dropout inside of blocks"
    torch.testing.assert_close(run(), plain, rtol=0, atol=0)
    assert (run(seed=4)[0] - plain[0]).abs() > 1e-6
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        torch.testing.assert_close(run(), plain, **EXACT)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", TERMS)
def test_nothing_depends_on_how_heads_are_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither dropout nor gradients; nor, then, on the number of threads, which may even change between forward and backward."""
    positions, terms, states, leaves = scene(name, causal=True)

    def run(forward: int, backward: int) -> list[torch.Tensor]:
        torch.manual_seed(5)
        monkeypatch.setattr(blockwise_forward, "AREA", forward)
        found = blockwise_attention(*states, terms, positions, SCALE, RATE)
        monkeypatch.setattr(blockwise_forward, "AREA", backward)
        return [found, *torch.autograd.grad(found.square().sum(), leaves)]

    torch.testing.assert_close(run(0, 2**18), run(2**18, 0), **EXACT)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("case", BLOCKED)
@torch.no_grad()
def test_evaluation_drops_nothing(case: Case, masks: list[Any]) -> None:
    model, ids = case.model(attention_dropout=0.5, **BLOCKS), ids_of()
    torch.testing.assert_close(model(ids)[0], case.model()(ids)[0], **EXACT)
    assert all(factor is None for _, factor in masks)
    assert (model.train()(ids)[0] - model(ids)[0]).abs().max() > 1e-3
    assert masks and masks[-1][1] is not None


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Norm of all differences, relative to all there is."""
    apart = sum((one.double() - other).square().sum() for one, other in zip(found, exact, strict=True))
    return math.sqrt(apart / sum(other.square().sum() for other in exact))


PRECISIONS = {
    "float32": (torch.float32, None, 1e-6),
    "bfloat16": (torch.bfloat16, None, 0.02),
    "float16": (torch.float16, None, 0.005),
    "autocast": (torch.float32, torch.bfloat16, 0.02),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", BLOCKED)
def test_error_of_blocks(case: Case, precision: str) -> None:
    """Over more than one block, no worse than twice the error of the eager path in the same precision.

    Gradients are sums with much cancellation: there, the error that such a precision has by itself is allowed beside.
    """
    dtype, mixed, floor = PRECISIONS[precision]
    if case.scheme.startswith("xpos") and dtype == torch.float16:
        return  # refused at this length, as test_schemes.py shows
    ids, mask = ids_of(length=LONG), torch.ones(2, LONG, dtype=torch.long)
    mask[0, :9] = 0
    direction = torch.randn(2, LONG, 24, dtype=torch.float64) * mask[..., None]

    def run(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with torch.autocast("cpu", mixed) if mixed and model.dtype == torch.float32 else nullcontext():
            states = model(ids, attention_mask=mask).last_hidden_state
        gradients = torch.autograd.grad((states * direction.to(states.dtype)).sum(), list(model.parameters()))
        assert all(gradient.dtype == p.dtype for gradient, p in zip(gradients, model.parameters(), strict=True))
        return states[mask.bool()].detach(), list(gradients)

    eager, blocks = case.model(dtype=dtype), case.model(dtype=dtype, **BLOCKS)
    (found, gradients), (other, others) = run(blocks), run(eager)
    exact, exact_gradients = run(eager.double())
    assert found.dtype == other.dtype
    assert error([found], [exact]) < 2 * error([other], [exact])
    assert error(gradients, exact_gradients) < 2 * error(others, exact_gradients) + floor


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["bias", "keys and values"])
@pytest.mark.parametrize("rate", [0.0, RATE])
def test_score_gradients_of_a_row_cancel(name: str, rate: float, dtype: torch.dtype) -> None:
    """In half precision too, though outputs are rounded: else what sums them over distances gathers the remainders."""
    positions, terms, states, _ = scene(name, causal=True)
    bias = terms.bias.detach().float().requires_grad_()
    vectors = {part: getattr(terms, part) for part in ("key_vectors", "value_vectors")}
    terms = replace(terms, bias=bias, **{part: None if v is None else v.to(dtype) for part, v in vectors.items()})
    states = [state.detach().to(dtype).requires_grad_() for state in states]
    found = blockwise_attention(*states, terms, positions, SCALE, rate)
    gradient = torch.autograd.grad(found.square().sum(), bias)[0]
    assert gradient.sum(-1).abs().max() < 1e-4 < gradient.abs().max()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("case", BLOCKED)
def test_frozen_parts(case: Case) -> None:
    """Whatever is frozen, tables or projections, the others have the gradients that they have on the eager path."""
    eager, blocks, ids = case.model(), case.model(**BLOCKS), ids_of()
    states = eager(ids).last_hidden_state
    names = [name for name, _ in eager.named_parameters()]
    wanted = dict(zip(names, torch.autograd.grad(states.square().sum(), list(eager.parameters())), strict=True))
    with torch.no_grad():
        found = blocks(ids).last_hidden_state
    assert not found.requires_grad
    torch.testing.assert_close(found, states, **EXACT)
    for kept in ("position_schemes", "q_proj", "k_proj", "v_proj", "layers"):
        learning = [name for name in names if kept in name]
        for name, parameter in blocks.named_parameters():
            parameter.requires_grad_(name in learning)
        if learning:
            loss = blocks(ids).last_hidden_state.square().sum()
            found = torch.autograd.grad(loss, [p for p in blocks.parameters() if p.requires_grad])
            torch.testing.assert_close(list(found), [wanted[name] for name in learning], **EXACT)


@pytest.mark.parametrize("case", BLOCKED)
def test_second_derivatives_are_refused(case: Case) -> None:
    """With what to use instead, before a sum is made that lacks those of attention."""
    with pytest.raises(RuntimeError, match="no second derivatives.*use attn_implementation='eager'"):
        second_derivatives(case.model(**BLOCKS), ids_of())
    assert all(gradient.isfinite().all() for gradient in second_derivatives(case.model(), ids_of()))


def second_derivatives(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of the squared norm of the gradient, which asks for both."""
    weights = list(model.parameters())
    loss = model(ids).last_hidden_state.pow(3).mean()
    first = torch.autograd.grad(loss, weights, create_graph=True)
    return list(torch.autograd.grad(sum(gradient.square().sum() for gradient in first), weights, materialize_grads=True))


MEMORY_OF_A_STEP = """
import resource, sys, torch
from matrix import CONFIGS, LANGUAGE_MODELS
torch.set_num_threads(1)
family, scheme = sys.argv[1:]
sizes = dict(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
config = CONFIGS[family](position_scheme=scheme, attention_dropout=0.1, attn_implementation="sdpa", **sizes)
model = LANGUAGE_MODELS[family](config).train()

def step(length):
    ids = torch.randint(3, 50, (1, length))
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    model(ids, attention_mask=mask, labels=ids).loss.backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

print(step(512), *(step(length) for length in (2048, 4096, 8192)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="counts memory by the resource module")
@pytest.mark.parametrize(
    "family, scheme",
    [
        ("decoder", "t5"),
        ("decoder", "transformer_xl"),
        ("decoder", "shaw"),
        ("decoder", "alibi"),
        ("decoder", "fire"),
        ("encoder", "fire"),
        ("decoder", "cope"),
        ("decoder", "dape"),
        ("encoder", "deberta"),
        ("encoder", "shaw"),
    ],
)
def test_memory_of_a_step_grows_with_the_length(family: str, scheme: str) -> None:
    """Twice the length takes about twice the memory, padding and dropout included; on all pairs it takes four times."""
    command = [sys.executable, "-c", MEMORY_OF_A_STEP, family, scheme]
    result = subprocess.run(command, capture_output=True, text=True, env=environment() | {"MALLOC_MMAP_THRESHOLD_": "65536"})
    assert result.returncode == 0, result.stderr
    base, _, middle, last = map(int, result.stdout.split())
    assert math.log2((last - base) / (middle - base)) < 1.3, result.stdout
