"""Attention in blocks gives what attention on all pairs gives, forward and backward, wherever blocks are cut."""

from collections.abc import Iterator
from itertools import combinations
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from matrix import BATCH
from matrix import Case
from matrix import cases
from matrix import ids_of
from plain_attention import DENSE
from plain_attention import SCALE
from plain_attention import TABLES
from plain_attention import leaves_of
from plain_attention import plain_attention
from plain_attention import positions_of
from plain_attention import random_states
from plain_attention import random_terms

from hf_relpos.model import attention
from hf_relpos.model import attention_backends
from hf_relpos.model import blockwise_attention as blockwise
from hf_relpos.model import blockwise_forward
from hf_relpos.model import blockwise_key_terms
from hf_relpos.model import blockwise_masking
from hf_relpos.model.attention_backends import repeat_heads
from hf_relpos.model.blockwise_attention import blockwise_attention
from hf_relpos.model.scheme_registry import scheme_class

EXACT = {"rtol": 1e-9, "atol": 1e-9}
steady = settings(deadline=None, derandomize=True)
ALL = cases(variants=True)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patching:
        yield patching


def cut_into(patching: pytest.MonkeyPatch, block: int, tile: int = 32, area: int = 2**18) -> None:
    """Set the size of blocks and tiles, and let blocks be used for however few pairs."""
    patching.setattr(blockwise_forward, "AREA", area)
    patching.setattr(blockwise_forward, "MIXED", area)
    patching.setattr(blockwise_forward, "BLOCK", block)
    patching.setattr(blockwise_forward, "WIDE", 2 * block)
    patching.setattr(blockwise, "BLOCK", block)
    patching.setattr(blockwise_key_terms, "TILE", tile)
    patching.setattr(attention, "MIN_PAIRS", 0)


# The function, with all terms that there may be, against a formula.


@st.composite
def who_sees_whom(draw: st.DrawFn) -> tuple[int, Any]:
    """A batch size, and positions whose distances are columns minus rows."""
    batch, length, causal = draw(st.integers(1, 3)), draw(st.integers(1, 24)), draw(st.booleans())
    options: dict[str, Any] = {"causal": causal, "window": draw(st.sampled_from([None, 2, 5, 19]))}
    memory = draw(st.sampled_from([0, 0, 1, 9]))
    rows = st.lists(st.integers(0, length - 1), min_size=batch, max_size=batch)
    if memory:
        filled = draw(st.lists(st.integers(0, memory), min_size=batch, max_size=batch))
        options["memory_length"] = torch.tensor(filled)
    place = torch.arange(length)
    kind = draw(st.sampled_from(["plain", "left", "right", "documents", "both", "given"]))
    if kind in ("left", "both") and not memory:
        options["attention_mask"] = (place >= torch.tensor(draw(rows))[:, None]).long()
    if kind == "right":
        options["attention_mask"] = (place <= torch.tensor(draw(rows))[:, None]).long()
    if kind in ("documents", "both"):
        options["reset_mask"] = place == torch.tensor(draw(rows))[:, None]
    if kind == "given":
        keys = memory + length
        sees = torch.rand(batch, 1, length, keys, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < 0.6
        own = torch.arange(keys) - place[:, None] - memory
        options["attention_mask"] = (sees & (own <= 0) if causal else sees) | (own == 0)
    positions = positions_of(batch, length, memory, **options)
    assert positions.is_toeplitz
    return batch, positions


@settings(steady, max_examples=250)
@given(
    scene=who_sees_whom(),
    names=st.sets(st.sampled_from(TABLES)),
    span=st.one_of(st.none(), st.tuples(st.integers(-12, 3), st.integers(0, 9))),
    shared=st.booleans(),
    dense=st.sampled_from(["", "", "factors", *DENSE]),
    groups=st.sampled_from([1, 2]),
    block=st.integers(1, 9),
    tile=st.integers(1, 6),
    area=st.sampled_from([0, 200, 2**18]),
    apart=st.booleans(),
    threads=st.integers(1, 2),
    frozen=st.sets(st.integers(0, 10)),
)
def test_any_terms(
    scene: Any,
    names: set[str],
    span: tuple[int, int] | None,
    shared: bool,
    dense: str,
    groups: int,
    block: int,
    tile: int,
    area: int,
    apart: bool,
    threads: int,
    frozen: set[int],
) -> None:
    """Any terms together, tables of any span, grouped heads, some tensors without a gradient."""
    batch, positions = scene
    names = names - ({"distance_offset"} if "query_vectors" not in names else set())
    span = None if span is None else (span[0], span[0] + span[1])
    states, terms = random_states(positions, batch, groups), random_terms(positions, names, span, shared, dense)
    leaves = [*states, *leaves_of(terms)]
    for number, leaf in enumerate(leaves):
        leaf.requires_grad_(number not in frozen)
    learning = [leaf for leaf in leaves if leaf.requires_grad]
    assume(learning)
    query, key, value = states[0], *(repeat_heads(part, groups) for part in states[1:])
    wanted = plain_attention((query, key, value), terms, positions)
    with pytest.MonkeyPatch.context() as patching:
        cut_into(patching, block, tile, area)
        patching.setattr(blockwise_masking, "ROW_PAIRS", 0 if apart else 2**16)
        patching.setattr(torch, "get_num_threads", lambda: threads)
        found = blockwise_attention(query, key, value, terms, positions, SCALE)
        torch.testing.assert_close(found, wanted, **EXACT)
        if wanted.requires_grad:
            direction = torch.randn_like(wanted)
            gradients = [torch.autograd.grad(out, learning, direction, materialize_grads=True) for out in (found, wanted)]
            torch.testing.assert_close(*gradients, **EXACT)


def test_rows_that_a_mask_shows_nothing() -> None:
    """They find zeros and give no gradients, as in the kernel, and the other rows cannot tell."""
    sees = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    sees[0, 0, 3], sees[1, 0, :2] = False, False
    positions, others = positions_of(2, 9, causal=True, attention_mask=sees), sees.any(-1)[:, 0]
    for names in (set(), {"bias"}, {"query_vectors"}, {"value_vectors", "key_vectors"}):
        states, terms = random_states(positions, 2), random_terms(positions, names, None, False, "")
        leaves = [*states, *leaves_of(terms)]
        found, wanted = blockwise_attention(*states, terms, positions, SCALE), plain_attention(tuple(states), terms, positions)
        assert (found[~others] == 0).all() and not wanted[~others].isfinite().any()
        torch.testing.assert_close(found[others], wanted[others], **EXACT)
        gradients = torch.autograd.grad(found.square().sum(), leaves)
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert (gradients[0].transpose(1, 2)[~others] == 0).all()


def test_a_mask_of_one_row_beside_documents_of_two() -> None:
    """Padding that all rows share, given once."""
    mask, reset = torch.ones(1, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.bool)
    mask[0, :2], reset[1, 5] = 0, True
    for case in (Case("decoder", "t5", {}), Case("encoder", "shaw", {})):
        plain, other = case.model(), case.model(attn_implementation="sdpa", attention_path="blockwise")
        for given_mask in (mask, torch.ones_like(mask)):
            wanted, found = (
                model(ids_of(length=9), attention_mask=given_mask, reset_mask=reset)[0] for model in (plain, other)
            )
            torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("span", [(-5, -2), (-12, -5), (-5, 2), (2, 6), (-3, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("name", ["query_vectors", "key_vectors", "value_vectors"])
def test_spans_that_end_before_the_distances_or_begin_after_them(name: str, span: tuple[int, int], causal: bool) -> None:
    """Distances beyond share the first and the last vector, those that a query sees too."""
    positions = positions_of(2, 5, causal=causal)
    states, terms = random_states(positions, 2), random_terms(positions, {name}, span, False, "")
    found, wanted = blockwise_attention(*states, terms, positions, SCALE), plain_attention(tuple(states), terms, positions)
    torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("dense", DENSE)
def test_values_alone_learn(dense: str) -> None:
    """Terms pair by pair need no gradients then."""
    positions = positions_of(2, 5, causal=True)
    states, terms = random_states(positions, 2), random_terms(positions, set(), None, False, dense)
    for frozen in [*states[:2], *terms.learned, *terms.learned_by_head]:
        frozen.requires_grad_(False)
    found, wanted = blockwise_attention(*states, terms, positions, SCALE), plain_attention(tuple(states), terms, positions)
    gradients = [torch.autograd.grad(out.square().sum(), states[2]) for out in (found, wanted)]
    torch.testing.assert_close(*gradients, **EXACT)


# Models, for every scheme, over the settings that they run under.


LENGTHS, MEMORIES = (1, 7, 63, 64, 65, 257), (0, 5, 64)
GRID = {
    "length": LENGTHS,
    "memory": MEMORIES,
    "padding": ("none", "left", "right"),
    "packed": (False, True),
    "window": (None, 9),
    "block": (16, 64, 128),
}


def pairwise(grid: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Settings in which every pair of values of two different fields stands at least once; greedily, always the same."""
    fields = list(grid)
    every = [dict(zip(fields, values, strict=True)) for values in product(*grid.values())]

    def pairs_of(setting: dict[str, Any]) -> set[Any]:
        return set(combinations(setting.items(), 2))

    missing, chosen = set().union(*map(pairs_of, every)), []
    while missing:
        best = max(every, key=lambda setting: len(pairs_of(setting) & missing))
        missing -= pairs_of(best)
        chosen.append(best)
    return chosen


PAIRWISE = pairwise(GRID)
SHARE = 6
"""Each case runs over one in so many of the settings, and the next case over the next: a scheme's variants meet most."""


def settings_of(case: Case, chosen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings that a case can run under: an encoder has no window, and some schemes have no memory."""
    remembers = "memory" not in scheme_class(case.scheme).refuses
    fitting = [{**given, "memory": given["memory"] if remembers else 0} for given in chosen]
    return [{**given, "window": given["window"] if case.family == "decoder" else None} for given in fitting]


def run_model(model: Any, setting: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states of the tokens that are no padding, and the gradients of all parameters."""
    length, padding = setting["length"], setting["length"] // 3
    mask, reset = torch.ones(BATCH, length, dtype=torch.long), torch.zeros(BATCH, length, dtype=torch.long)
    if setting["padding"] == "left":
        mask[0, :padding] = 0
    if setting["padding"] == "right":
        mask[0, length - padding :] = 0
    reset[1, length // 2] = 1
    given = {"reset_mask": reset} if setting["packed"] else {}
    if setting["memory"]:
        early = torch.ones(BATCH, 80, dtype=torch.long)
        early[1, :77] = 0  # a memory that is not full
        given["memory"] = model(ids_of(length=80, seed=1), attention_mask=early).memory
    states = model(ids_of(length=length), attention_mask=mask, **given).last_hidden_state[mask.bool()]
    direction = torch.randn(states.shape, generator=torch.Generator().manual_seed(2), dtype=states.dtype)
    return states, list(torch.autograd.grad((states * direction).sum(), list(model.parameters())))


def compare(case: Case, setting: dict[str, Any], patching: pytest.MonkeyPatch, **fields: Any) -> None:
    """One setting, on the eager path and in blocks."""
    cut_into(patching, setting["block"], setting.get("tile", 32))
    if setting["memory"]:
        fields |= {"mem_len": setting["memory"]}
    if case.family == "decoder":
        fields |= {"sliding_window": setting["window"]}
    # Behind a memory, padding on the left parts tokens, so that no row of distances is the one before shifted.
    apart = bool(setting["memory"]) and setting["padding"] == "left" and setting["length"] > 2
    path = "auto" if apart else "blockwise"
    calls = []
    patching.setattr(attention_backends, "blockwise_attention", lambda *args: calls.append(1) or blockwise_attention(*args))
    wanted = run_model(case.model(**fields), setting)
    assert not calls
    found = run_model(case.model(attn_implementation="sdpa", attention_path=path, **fields), setting)
    assert bool(calls) or not case.adds_to_scores, "blocks were not used"
    torch.testing.assert_close(found, wanted, **EXACT, msg=lambda text: f"{setting}: {text}")


@pytest.mark.parametrize("number", range(len(ALL)), ids=[given.id for given in ALL])
def test_blocks_are_eager(number: int, patch: pytest.MonkeyPatch) -> None:
    """Each case over a share of settings that cover every pair of lengths, memories, paddings and so on."""
    case: Case = ALL[number].values[0]
    for setting in settings_of(case, PAIRWISE[number % SHARE :: SHARE]):
        compare(case, setting, patch)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL)
def test_blocks_are_eager_everywhere(case: Case, patch: pytest.MonkeyPatch) -> None:
    """All settings, in blocks as they are and in small ones."""
    whole = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
    unique = {tuple(given.items()): given for given in settings_of(case, whole) if given["block"] != 64}
    for setting in unique.values():
        compare(case, setting, patch)


@settings(steady, max_examples=80)
@given(
    number=st.integers(0, len(ALL) - 1),
    setting=st.fixed_dictionaries(
        {
            "length": st.integers(1, 40),
            "memory": st.sampled_from([0, 3, 17]),
            "padding": st.sampled_from(GRID["padding"]),
            "packed": st.booleans(),
            "window": st.sampled_from([None, 2, 6, 23]),
            "block": st.integers(1, 12),
            "tile": st.integers(1, 9),
        }
    ),
    grouped=st.booleans(),
)
def test_any_setting(number: int, setting: dict[str, Any], grouped: bool) -> None:
    """Random settings, with grouped key and value heads and without."""
    case: Case = ALL[number].values[0]
    fields = {"num_attention_heads": 4, "head_dim": 6, "num_key_value_heads": 2} if grouped else {}
    with pytest.MonkeyPatch.context() as patching:
        compare(case, settings_of(case, [setting])[0], patching, **fields)


def test_the_settings_cover_every_pair() -> None:
    """And each setting is run by some case with memory and window."""
    pairs = {pair for setting in PAIRWISE for pair in combinations(setting.items(), 2)}
    assert pairs == {pair for values in product(*GRID.values()) for pair in combinations(zip(GRID, values, strict=True), 2)}
    able = [
        number
        for number, given in enumerate(ALL)
        if given.values[0].family == "decoder" and "memory" not in scheme_class(given.values[0].scheme).refuses
    ]
    assert {number % SHARE for number in able} == set(range(SHARE))
