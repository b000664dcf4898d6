"""All attention backends compute the same: `eager`, `sdpa` dense and blockwise, `flex_attention`."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from elsewhere import environment
from matrix import BATCH
from matrix import LENGTH
from matrix import SIZES
from matrix import Case
from matrix import cases
from matrix import ids_of

from hf_relpos.model import attention
from hf_relpos.model import attention_backends
from hf_relpos.model import blockwise_forward
from hf_relpos.model.scheme_registry import scheme_class

EXACT = {"rtol": 1e-9, "atol": 1e-10}
ROPE = Case("decoder", "rope", {})


def needs_probabilities(case: Case) -> str | None:
    """Why a case cannot do without attention probabilities, which FlexAttention does not give."""
    kind = scheme_class(case.scheme)
    return kind.needs_probabilities(kind.complete(case.parameters))


ALL = cases(variants=True)
DECODERS = [given for given in ALL if given.values[0].family == "decoder"]
FLEX = [given for given in ALL if needs_probabilities(given.values[0]) is None]
NOT_FLEX = [given for given in ALL if needs_probabilities(given.values[0]) is not None]


def inputs_of(case: Case) -> dict[str, dict[str, Any]]:
    """Calls that differ in who sees whom and at which distance, by name."""
    mask, reset = torch.ones(BATCH, LENGTH, dtype=torch.long), torch.zeros(BATCH, LENGTH, dtype=torch.long)
    mask[0, :4], reset[1, 5] = 0, 1
    between = torch.ones_like(mask)
    between[1, 3:5] = 0
    prefix = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    prefix[:, :5] = True
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "left padding": {"attention_mask": mask},
        "padding between": {"attention_mask": between},
        "documents": {"reset_mask": reset},
        "prefix that sees itself": {"attention_mask": prefix[None, None].expand(BATCH, -1, -1, -1)},
        "position_ids": {"position_ids": torch.arange(LENGTH)[None] * 2},
    }
    return kinds


def pair(case: Case, implementation: str, **fields: Any) -> tuple[Any, Any]:
    """The same model on the eager path and on another."""
    return case.model(**fields), case.model(attn_implementation=implementation, **fields)


def assert_same(case: Case, plain: Any, *others: Any, backward: bool) -> None:
    """Compare hidden states, and gradients of all parameters, over all kinds of inputs."""
    for kind, given in inputs_of(case).items():
        mask = given.get("attention_mask")
        valid = torch.ones(BATCH, LENGTH).bool() if mask is None or mask.dim() == 4 else mask.bool()
        direction = torch.randn(int(valid.sum()), SIZES["hidden_size"], dtype=torch.float64)
        wanted = answer_of(plain, given, valid, direction if backward else None)
        for other in others:
            path = f"{kind}, {other.config._attn_implementation}, {other.config.attention_path}"
            found = answer_of(other, given, valid, direction if backward else None)
            torch.testing.assert_close(found, wanted, **EXACT, msg=lambda text, path=path: f"{path}: {text}")


def answer_of(model: Any, given: dict[str, Any], valid: torch.Tensor, direction: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the hidden states of valid tokens, and the gradients of their sum in a direction."""
    states = model(ids_of(), **given).last_hidden_state[valid]
    gradients = () if direction is None else torch.autograd.grad((states * direction).sum(), list(model.parameters()))
    return [states.detach(), *gradients]


@pytest.mark.parametrize("case", ALL)
def test_sdpa_with_grouped_heads(case: Case) -> None:
    fields = {"num_attention_heads": 4, "head_dim": 6, "num_key_value_heads": 2}
    assert_same(case, *pair(case, "sdpa", attention_path="dense", **fields), backward=True)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four queries, however few pairs there are."""
    monkeypatch.setattr(blockwise_forward, "BLOCK", 4)
    monkeypatch.setattr(attention, "MIN_PAIRS", 0)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("case", ALL)
def test_sdpa_and_blockwise(case: Case) -> None:
    plain, blockwise = pair(case, "sdpa")
    assert_same(case, plain, blockwise, case.model(attn_implementation="sdpa", attention_path="dense"), backward=True)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("case", DECODERS)
def test_blockwise_with_a_window(case: Case) -> None:
    assert_same(case, *pair(case, "sdpa", sliding_window=5), backward=True)


@pytest.fixture
def uncompiled():
    """Run flex attention as it is written: compiling for a processor takes minutes and is not what is tested here."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore::DeprecationWarning:torch.jit")
@pytest.mark.parametrize("case", FLEX)
def test_flex(case: Case) -> None:
    with torch.no_grad():
        assert_same(case, *pair(case, "flex_attention"), backward=False)


TABLES = ("t5", "alibi", "learned_bias", "kerple", "sandwich", "nope", "rope", "rope+alibi", "fox", "rope+fox")


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore::DeprecationWarning:torch.jit")
@pytest.mark.parametrize("case", [case for case in cases() if case.values[0].scheme in TABLES])
def test_flex_looks_numbers_up(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where no dense bias is made but for numbers of the caller and padding between tokens."""
    monkeypatch.setattr(attention_backends, "WITHOUT_TABLES", ())
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(attention_backends, "masked_bias", None)
            mask = torch.ones(BATCH, LENGTH).index_fill(1, torch.arange(3), 0)
            case.model(attn_implementation="flex_attention")(ids_of(), attention_mask=mask)
        assert_same(case, *pair(case, "flex_attention"), backward=False)
        if case.family == "decoder":
            assert_same(case, *pair(case, "flex_attention", sliding_window=4), backward=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention has no backward pass on a processor")
@pytest.mark.parametrize("case", FLEX)
def test_flex_gradients(case: Case) -> None:
    ids, direction = ids_of(length=128).cuda(), torch.randn(BATCH, 128, SIZES["hidden_size"], device="cuda")
    gradients = []
    for model in pair(case, "flex_attention", num_attention_heads=4, head_dim=16):
        model = model.float().cuda()
        states = model(ids).last_hidden_state
        gradients.append(torch.autograd.grad((states * direction).sum(), list(model.parameters())))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("small_blocks", "uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore::DeprecationWarning:torch.jit")
@pytest.mark.parametrize("path", ["dense", "blockwise", "flex"])
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("case", DECODERS)
@torch.no_grad()
def test_decoding_and_memory(case: Case, padding: int, path: str) -> None:
    """Keys outnumber queries: decoding in chunks behind a prompt, padded or not, and a segment behind a memory.

    Without padding no mask is given: a fused kernel's own idea of causality would hide the wrong keys.
    """
    if path == "flex" and needs_probabilities(case):
        with pytest.raises(ValueError, match="cannot do this scheme"):
            pair(case, "flex_attention")
        return
    ids, mask = ids_of(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, :padding] = 0
    implementation = "flex_attention" if path == "flex" else "sdpa"
    fields = {"attention_path": "dense"} if path == "dense" else {}
    plain, other = pair(case, implementation, **fields)
    wanted = plain(ids, attention_mask=mask, use_cache=False).last_hidden_state[mask.bool()]
    states, cache, start = [], None, 0
    for stop in (6, 7, 11):
        given = {"attention_mask": mask[:, :stop]} if padding else {}
        output = other(ids[:, start:stop], cache=cache, use_cache=True, **given)
        states.append(output.last_hidden_state)
        cache, start = output.cache, stop
    torch.testing.assert_close(torch.cat(states, 1)[mask.bool()], wanted, **EXACT)
    if "memory" not in scheme_class(case.scheme).refuses:
        plain, other = pair(case, implementation, mem_len=7, **fields)
        wanted = plain(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        first = other(ids[:, :6], attention_mask=mask[:, :6])
        rest = other(ids[:, 6:], memory=first.memory).last_hidden_state
        found = torch.cat([first.last_hidden_state, rest], 1)[mask.bool()]
        torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("case", NOT_FLEX)
def test_a_backend_that_cannot_is_refused(case: Case) -> None:
    """With the reason, when the model is made and later."""
    reason = needs_probabilities(case) or ""
    with pytest.raises(ValueError, match=f"attn_implementation='flex_attention' cannot do this scheme: {reason[:20]}"):
        case.model(attn_implementation="flex_attention")
    model = case.model(attn_implementation=None)
    with pytest.raises(ValueError, match="cannot do this scheme"):
        model.set_attn_implementation("flex_attention")


@pytest.mark.parametrize("case", ALL)
def test_the_default_is_the_fast_one(case: Case) -> None:
    model = case.model(attn_implementation=None)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("fields", [{}, {"attention_path": "dense"}, {"attn_implementation": "eager"}], ids=str)
@pytest.mark.parametrize("case", cases())
@torch.no_grad()
def test_the_plan_is_what_happens(case: Case, fields: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken = case.model(**{"attn_implementation": None, **fields}), []
    plain = attention.RelPosAttention.path
    monkeypatch.setattr(attention.RelPosAttention, "path", lambda *given: taken.append(plain(*given)) or taken[-1])
    for length in (4, 150):
        plan = model.attention_plan(length)
        taken.clear()
        model(ids_of(length=length))
        assert [layer["path"] for layer in plan] == taken
        assert [layer["scheme"] for layer in plan] == [case.scheme] * len(taken)
    if fields or taken[0] == "fused":
        return
    assert taken == ["blockwise"] * len(taken)


def test_the_plan_counts_what_comes_before() -> None:
    """Tokens in a cache or a memory make pairs enough for blocks; a number of tokens that is none is refused."""
    for family, fields in (("decoder", {}), ("encoder", {"mem_len": 2000})):
        model = Case(family, "t5", {}).model(attn_implementation=None, **fields)
        paths = [[layer["path"] for layer in model.attention_plan(9, cached=cached)] for cached in (0, 2000)]
        assert paths == [["dense"] * 2, ["blockwise"] * 2]
        for length, cached in ((0, 0), (2.5, 0), ("8", 0), (True, 0), (4, -1)):
            with pytest.raises(ValueError, match="is not allowed: a whole number of tokens, at least"):
                model.attention_plan(length, cached)


@pytest.mark.parametrize("case", cases())
def test_attentions_on_any_backend(case: Case) -> None:
    """Asking for probabilities gives them, from the eager path, without changing the output."""
    model, ids = case.model(attn_implementation=None), ids_of()
    plain, asked = model(ids), model(ids, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(asked.last_hidden_state, plain.last_hidden_state, **EXACT)
    heads = SIZES["num_attention_heads"]
    assert [tuple(part.shape) for part in asked.attentions] == [(BATCH, heads, LENGTH, LENGTH)] * 2
    torch.testing.assert_close(asked.attentions[0].sum(-1), torch.ones(BATCH, heads, LENGTH, dtype=torch.float64))
    assert len(asked.hidden_states) == 3 and torch.equal(asked.hidden_states[-1], asked.last_hidden_state)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="does not support Flash Attention 2"):
        ROPE.model(attn_implementation="flash_attention_2")


COMPILED = """
import torch
from hf_relpos import RelPosDecoderModel, RelPosDecoderConfig

def states(implementation):
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = RelPosDecoderConfig(**sizes, position_scheme="SCHEME", attn_implementation=implementation)
    ids = torch.arange(128).reshape(2, 64) % 31
    mask = torch.ones(2, 64).index_fill(1, torch.arange(5), 0)
    with torch.no_grad():
        return RelPosDecoderModel(config).eval()(ids, attention_mask=mask).last_hidden_state[:, 5:]

torch.testing.assert_close(states("flex_attention"), states("eager"), rtol=1e-4, atol=1e-4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nope", "rope", "t5", "transformer_xl"])
def test_flex_as_it_is_compiled(scheme: str) -> None:
    """In a process of its own: with a mask beside the bias, what is compiled for a processor ends it."""
    command = [sys.executable, "-c", COMPILED.replace("SCHEME", scheme)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert result.returncode == 0, result.stderr[-2000:]
