"""The Triton kernels give what attention on all pairs gives in float64: the output, and every gradient.

They run on a GPU where there is one, and else in Triton's interpreter (`make kernels`), which is slow: so the cases are small.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import plain_attention
import pytest
import torch
from matrix import Case
from plain_attention import SCALE
from plain_attention import TABLES
from plain_attention import leaves_of
from plain_attention import plain_attention as attention_of_pairs
from plain_attention import positions_of
from plain_attention import random_states
from plain_attention import random_terms

from hf_relpos.model.blockwise_attention import blockwise_attention
from hf_relpos.model.devices import to_device
from hf_relpos.model.scheme_terms import ScoreTerms

pytest.importorskip("triton", reason="Triton is not installed: `make kernels` runs these tests in an environment of their own")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("the kernels need a GPU, or TRITON_INTERPRET=1: `make kernels`", allow_module_level=True)

from hf_relpos.kernels import attention as kernels  # noqa: E402 (needs Triton)
from hf_relpos.kernels import kernel_attention  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
BATCH = 2
CLOSE = {"rtol": 1e-5, "atol": 2e-5}
XL = {"query_vectors", "key_offset", "distance_offset"}
SHAW = {"query_vectors", "value_vectors"}
BOTH = {"query_vectors", "key_vectors"}
ALL = set(TABLES)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(plain_attention, "HEADS", 2)


def leaf(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in a precision, on the device of the kernels, with a gradient of its own."""
    return tensor.detach().to(DEVICE, dtype).requires_grad_()


def in_precision(terms: ScoreTerms, dtype: torch.dtype) -> ScoreTerms:
    """The same terms of such copies."""
    return replace(terms, **{name: leaf(part, dtype) for name in TABLES if (part := getattr(terms, name)) is not None})


def answers(attend: Any, states: list[torch.Tensor], terms: ScoreTerms, direction: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of queries, keys, values and all tables, in float64."""
    output = attend(states, terms)
    leaves = [*states, *leaves_of(terms)]
    gradients = torch.autograd.grad(output, leaves, direction.to(output), materialize_grads=True)
    return [part.detach().cpu().double() for part in (output, *gradients)]


def compare(positions: Any, names: set[str], span: tuple[int, int] | None, shared: bool, tile: int) -> None:
    """Compare the kernels in float32 with all pairs in float64."""
    states, terms = random_states(positions, BATCH), random_terms(positions, names, span, shared, "")
    direction = torch.randn_like(states[0].transpose(1, 2))
    wanted = answers(lambda states, terms: attention_of_pairs(states, terms, positions), states, terms, direction)
    there = to_device(positions, DEVICE)
    found = answers(
        lambda states, terms: kernel_attention(*states, terms, there, SCALE, tile=tile),
        [leaf(part, torch.float32) for part in states],
        in_precision(terms, torch.float32),
        direction,
    )
    torch.testing.assert_close(found, wanted, **CLOSE)


def mask_of(kind: str, length: int, keys: int) -> dict[str, Any]:
    """What hides keys, by its name."""
    place = torch.arange(length)
    if kind == "left padding":
        return {"attention_mask": (place >= torch.tensor([[3], [0]])).long()}
    if kind == "right padding":
        return {"attention_mask": (place < torch.tensor([[length - 5], [length]])).long()}
    if kind == "documents":
        return {"reset_mask": place == torch.tensor([[length // 2], [length // 3]])}
    if kind == "short memory":
        return {"memory_length": torch.tensor([2, keys - length])}
    if kind == "given":
        sees = torch.rand(BATCH, 1, length, keys) < 0.6
        sees[0, 0, 4] = False  # this query sees nothing
        return {"attention_mask": sees}
    return {}


@pytest.mark.parametrize(
    ("names", "span", "shared"),
    [
        pytest.param(XL, None, False, id="transformer_xl"),
        pytest.param({"query_vectors", "key_offset", "bias"}, (-5, 0), False, id="transformer_xl with learned vectors"),
        pytest.param(SHAW, (-4, 4), True, id="shaw"),
        pytest.param({"query_vectors"}, (-6, 1), True, id="music"),
        pytest.param(BOTH, (-4, 3), False, id="deberta"),
        pytest.param({"key_vectors"}, None, False, id="position to content alone"),
        pytest.param(ALL, None, False, id="all terms"),
        pytest.param({"bias"}, None, False, id="bias alone"),
    ],
)
@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
def test_terms(names: set[str], span: tuple[int, int] | None, shared: bool, causal: bool) -> None:
    compare(positions_of(BATCH, 19, causal=causal), names, span, shared, tile=16)


@pytest.mark.parametrize("kind", ["left padding", "right padding", "documents", "short memory", "given"])
@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
def test_masks(kind: str, causal: bool) -> None:
    memory = 5 if kind == "short memory" else 0
    positions = positions_of(BATCH, 18, memory, causal=causal, **mask_of(kind, 18, 18 + memory))
    if kind == "given":  # the formula has no answer for a query that sees nothing
        assert not positions.visible.any(-1).all()
        positions.visible[0, 0, 4] = False
        return compare_given(positions)
    return compare(positions, XL | {"bias"}, None, False, tile=16)


def compare_given(positions: Any) -> None:
    """A query that sees nothing finds 0, and all others are as in the formula."""
    states, terms = random_states(positions, BATCH), random_terms(positions, XL, None, False, "")
    wanted = attention_of_pairs((states[0], states[1], states[2]), terms, positions).detach()
    given = in_precision(terms, torch.float32)
    found = kernel_attention(*(leaf(part, torch.float32) for part in states), given, to_device(positions, DEVICE), SCALE)
    found.sum().backward()
    torch.testing.assert_close(found.detach().cpu().double(), wanted.nan_to_num(), **CLOSE)
    assert all(part.grad is not None and part.grad.isfinite().all() for part in leaves_of(given))


@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize(("length", "memory"), [(1, 0), (1, 20), (16, 0), (33, 17), (5, 40)])
def test_lengths(tile: int, length: int, memory: int) -> None:
    compare(positions_of(BATCH, length, memory, causal=True), SHAW | BOTH, (-7, 0), False, tile)


@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
@pytest.mark.parametrize("window", [1, 5, 17])
def test_windows(window: int, causal: bool) -> None:
    compare(positions_of(BATCH, 35, 6 * causal, causal=causal, window=window), XL, None, False, tile=16)


@pytest.mark.parametrize("size", [16, 20])
def test_head_sizes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_attention, "SIZE", size)
    compare(positions_of(BATCH, 17, causal=False), ALL, (-3, 9), True, tile=16)


def test_dropout() -> None:
    """What is dropped can be seen where each key has a value of its own; gradients drop the same."""
    positions = positions_of(BATCH, 20, causal=True)
    states, terms = random_states(positions, BATCH), random_terms(positions, ALL - {"value_vectors"}, None, False, "")
    states[2] = torch.eye(20, dtype=torch.float64).expand(BATCH, plain_attention.HEADS, 20, 20).clone().requires_grad_()
    direction = torch.randn_like(states[2].transpose(1, 2))

    def attend(states: Any, terms: ScoreTerms) -> torch.Tensor:
        torch.manual_seed(3)
        return kernel_attention(*states, terms, to_device(positions, DEVICE), SCALE, dropout=0.3, tile=16)

    found = answers(attend, [leaf(part, torch.float32) for part in states], in_precision(terms, torch.float32), direction)
    weights = attention_of_pairs((states[0], states[1], states[2]), terms, positions).detach()
    factor = (found[0] / weights).nan_to_num().transpose(1, 2)
    kept = factor[factor > 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.7), **CLOSE)
    pairs = factor[positions.visible.expand_as(factor)]
    assert 0.2 < (pairs == 0).double().mean() < 0.4
    wanted = answers(lambda states, terms: attention_of_pairs(states, terms, positions, factor), states, terms, direction)
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.fixture
def products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as bits, and multiplies the bits (github.com/triton-lang/triton/issues/11584)."""
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(states: Any) -> Any:
        if states.dtype.scalar != tl.bfloat16:
            return states
        return interpreter.TensorHandle((states.data.astype("uint32") << 16).view("float32"), tl.float32)

    def create(self: Any, left: Any, right: Any, *others: Any) -> Any:
        return create_dot(self, widened(left), widened(right), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create)


@pytest.mark.usefixtures("products_of_bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision(dtype: torch.dtype) -> None:
    """The error in half precision is that of attention in blocks, which rounds at the same places."""
    positions = positions_of(BATCH, 24, causal=True)
    states, terms = random_states(positions, BATCH), random_terms(positions, XL | {"bias"}, None, False, "")
    rounded = [part.detach().to(dtype).double().requires_grad_() for part in states]
    names = [name for name in TABLES if getattr(terms, name) is not None]
    alike = replace(terms, **{name: getattr(terms, name).detach().to(dtype).double().requires_grad_() for name in names})
    direction = torch.randn_like(states[0].transpose(1, 2)).to(dtype).double()
    wanted = answers(lambda states, terms: attention_of_pairs(states, terms, positions), rounded, alike, direction)
    there = to_device(positions, DEVICE)
    errors = []
    for attend in (kernel_attention, blockwise_attention):
        given = [leaf(part, dtype) for part in rounded], in_precision(alike, dtype)
        found = answers(lambda states, terms, attend=attend: attend(*states, terms, there, SCALE), *given, direction)
        errors.append([float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, wanted, strict=True)])
    assert max(errors[0]) < 0.03 and max(errors[0]) < 2 * max(errors[1]), errors


def test_a_gradient_that_nobody_wants_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = positions_of(BATCH, 5, causal=True)
    states, terms = random_states(positions, BATCH), random_terms(positions, XL, None, False, "")
    frozen = replace(terms, **{name: getattr(terms, name).detach().to(DEVICE, torch.float32) for name in XL})
    query, key, value = (leaf(part, torch.float32) for part in states)
    output = kernel_attention(query, key.detach(), value.detach(), frozen, to_device(positions, DEVICE), SCALE)
    for kernel in ("of_keys", "of_tables"):
        monkeypatch.setattr(kernels, kernel, None)  # to run it would be an error
    output.sum().backward()
    assert query.grad is not None and query.grad.abs().sum() > 0


def test_second_derivatives_are_refused() -> None:
    positions = positions_of(BATCH, 3, causal=True)
    states = [leaf(part, torch.float32) for part in random_states(positions, BATCH)]
    terms = in_precision(random_terms(positions, XL, None, False, ""), torch.float32)
    output = kernel_attention(*states, terms, to_device(positions, DEVICE), SCALE)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(output.sum(), states, create_graph=True)


# The models that ask for them.

MODELS = [
    Case("decoder", "shaw", {}),
    Case("decoder", "transformer_xl", {}),
    Case("decoder", "transformer_xl", {"max_distance": 4}),
    Case("decoder", "music", {"max_distance": 5}),
    Case("encoder", "xlnet", {}),
    Case("encoder", "shaw", {"values": False, "meets": "both"}),
    Case("encoder", "deberta", {"max_distance": 4}),
]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many passes the kernels served."""
    passes: list[int] = []
    forward = kernels._Kernels.forward

    def counted(ctx: Any, plan: Any, *given: Any) -> torch.Tensor:
        passes.append(1)
        return forward(ctx, plan, *given)

    monkeypatch.setattr(kernels._Kernels, "forward", staticmethod(counted))
    yield passes


@pytest.mark.parametrize("case", MODELS, ids=lambda case: f"{case.family}, {case.scheme}, {case.parameters}")
def test_models(case: Case, used: list[int]) -> None:
    """States and gradients of all parameters, with grouped heads, by the kernels and where they hand over to `sdpa`."""
    fields = {"num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 6, "num_key_value_heads": 2}
    plain = case.model(attn_implementation="eager", **fields)
    model = case.model(attn_implementation="triton", **fields).to(DEVICE, torch.float32)
    model.load_state_dict(plain.state_dict())
    ids = torch.randint(plain.config.vocab_size, (1, 20))
    between = torch.ones(1, 20, dtype=torch.long)
    between[0, 3:5] = 0
    kinds: list[tuple[int, dict[str, Any]]] = [(1, {}), (0, {"attention_mask": between})]
    for served, given in kinds:
        valid = given.get("attention_mask", torch.ones(1, 20)).bool()
        direction = torch.randn(int(valid.sum()), plain.config.hidden_size, dtype=torch.float64)
        answer = []
        for each in (model, plain):
            there = {name: part.to(each.device) for name, part in given.items()}
            states = each(ids.to(each.device), **there).last_hidden_state[valid.to(each.device)]
            learned = [part for part in each.parameters() if part.requires_grad]
            found = torch.autograd.grad((states * direction.to(states)).sum(), learned, materialize_grads=True)
            answer.append([part.detach().cpu().double() for part in (states, *found)])
        assert len(used) == served
        used.clear()
        torch.testing.assert_close(*answer, rtol=1e-4, atol=1e-4)
