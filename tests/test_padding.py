"""Padding, packing and batching change nothing on the tokens that count."""

import pytest
import torch
from matrix import Case
from matrix import cases
from matrix import ids_of

EXACT = {"rtol": 1e-9, "atol": 1e-10}
SHORT, LONG = ids_of(1, 4, seed=1), ids_of(1, 7, seed=2)


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The two documents in one batch of 9 columns, and the mask."""
    ids, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for row, document in enumerate((SHORT, LONG)):
        length = document.shape[1]
        place = slice(9 - length, 9) if side == "left" else slice(0, length)
        ids[row, place], mask[row, place] = document[0], 1
    return ids, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", cases(variants=True))
def test_padding(case: Case, side: str) -> None:
    model = case.model()
    ids, mask = padded(side)
    found = model(ids, attention_mask=mask).last_hidden_state
    for row, document in enumerate((SHORT, LONG)):
        torch.testing.assert_close(found[row, mask[row].bool()], model(document).last_hidden_state[0], **EXACT)


MIXED = torch.tensor([[1, 1, 0, 0, 0, 0, 0], [1, 0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1, 1], [0] * 7, [1] * 7])
"""Padding on the right, between tokens, on the left, in all of a row, and nowhere."""


@pytest.mark.parametrize("case", cases())
def test_a_row_depends_on_itself_alone(case: Case) -> None:
    """What is computed at padding too: a client may go on from there, as generation behind right padding does."""
    model, ids = case.model(), ids_of(5, 7)
    together = model(ids, attention_mask=MIXED).last_hidden_state
    for row in range(5):
        alone = model(ids[row : row + 1], attention_mask=MIXED[row : row + 1]).last_hidden_state
        torch.testing.assert_close(together[row : row + 1], alone, **EXACT)


@pytest.mark.parametrize("case", cases("decoder"))
def test_padding_does_not_know_what_follows(case: Case) -> None:
    model, all_ids = case.model(), ids_of(5, 7)
    for ids, mask in zip(all_ids.split(1), MIXED.split(1), strict=True):
        wanted = model(ids, attention_mask=mask).last_hidden_state
        followed = torch.cat([mask, torch.ones_like(mask[:, :2])], 1)
        found = model(torch.cat([ids, ids[:, :2]], 1), attention_mask=followed).last_hidden_state
        torch.testing.assert_close(found[:, :7], wanted, **EXACT)


@pytest.mark.parametrize("scheme", ["rope", "alibi", "shaw", "learned_absolute", "fire"])
def test_a_traced_pass_numbers_padding_alike(scheme: str) -> None:
    """A compiler cannot see whether there is padding, nor where."""
    model, ids = Case("decoder", scheme, {}).model(attn_implementation="sdpa", num_hidden_layers=1), ids_of(5, 7)
    traced = torch.compile(lambda *given: model(given[0], attention_mask=given[1], use_cache=False), backend="eager")
    for rows in (slice(0, 1), slice(0, 5), slice(4, 5)):
        found = traced(ids[rows], MIXED[rows]).last_hidden_state
        wanted = model(ids[rows], attention_mask=MIXED[rows], use_cache=False).last_hidden_state
        torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("scheme", ["rope", "alibi", "shaw", "learned_absolute", "fire"])
def test_assisted_decoding_behind_right_padding(scheme: str) -> None:
    """It goes on from padding, as greedy search does, and sees in one pass what greedy search sees step by step."""
    model = Case("decoder", scheme, {}).model(head=True)
    helper = Case("decoder", "rope", {}).model(head=True)
    ids, mask = ids_of(1, 7), MIXED[:1]
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, assistant_model=helper, **settings), model.generate(ids, **settings))


@pytest.mark.parametrize("case", cases(variants=True))
def test_packing(case: Case) -> None:
    """Documents in one row, marked by their first tokens, with padding before, and right behind, the last."""
    model = case.model()
    gap = torch.zeros(1, 2, dtype=torch.long)
    ids = torch.cat([gap, SHORT, LONG, SHORT, gap], 1)
    reset, mask = torch.zeros_like(ids), torch.ones_like(ids)
    reset[0, [2, 6, 13]] = 1
    mask[0, :2] = mask[0, -2:] = 0
    found = model(ids, attention_mask=mask, reset_mask=reset).last_hidden_state[0]
    for start, document in ((2, SHORT), (6, LONG), (13, SHORT)):
        alone = model(document).last_hidden_state[0]
        torch.testing.assert_close(found[start : start + len(alone)], alone, **EXACT)


@pytest.mark.parametrize("case", cases())
def test_batch_of_one(case: Case) -> None:
    model, ids = case.model(), ids_of(3)
    together = model(ids).last_hidden_state
    torch.testing.assert_close(together, torch.cat([model(row[None]).last_hidden_state for row in ids]), **EXACT)


@pytest.mark.parametrize("case", cases())
def test_mask_of_ones_is_no_mask(case: Case) -> None:
    model, ids = case.model(), ids_of()
    masked = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    torch.testing.assert_close(masked, model(ids).last_hidden_state, **EXACT)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("case", cases())
def test_ready_mask_of_four_dimensions(case: Case, additive: bool) -> None:
    """A mask that the caller made replaces the model's own: here it says the same as right padding."""
    model = case.model()
    ids, mask = padded("right")
    visible = mask[:, None, None, :].bool() & (torch.ones(9, 9).tril().bool() if case.family == "decoder" else True)
    visible = visible.expand(2, 1, 9, 9) | torch.eye(9, dtype=torch.bool)
    ready = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -1e4) if additive else visible
    found, wanted = (model(ids, attention_mask=given).last_hidden_state for given in (ready, mask))
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", cases())
def test_no_nan_where_a_query_sees_no_key(case: Case, dtype: torch.dtype) -> None:
    """A row of padding alone, and queries whose keys are all hidden, give finite numbers and finite gradients."""
    model, ids = case.model(dtype=dtype), ids_of()
    mask = torch.ones_like(ids)
    mask[0], mask[1, :4] = 0, 0
    for given in (mask, torch.zeros(2, 1, 11, 11, dtype=torch.bool)):
        states = model(ids, attention_mask=given).last_hidden_state
        assert states.isfinite().all()
        gradients = torch.autograd.grad(states.float().square().mean(), list(model.parameters()))
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_misfits_are_refused(family: str) -> None:
    model, ids = Case(family, "rope", {}).model(), ids_of()
    with pytest.raises(ValueError, match="attention_mask covers 10 tokens, expected 11"):
        model(ids, attention_mask=torch.ones(2, 10))
    with pytest.raises(ValueError, match="position_ids number 7 tokens, expected 11"):
        model(ids, position_ids=torch.arange(7)[None])
    with pytest.raises(ValueError, match=r"reset_mask of shape \(2, 10\) is refused: expected the shape \(2, 11\)"):
        model(ids, reset_mask=torch.zeros(2, 10))
    with pytest.raises(ValueError, match="reset_mask True, which is no tensor, is refused: expected the shape"):
        model(ids, reset_mask=True)
    for shape in ((2, 11, 11), (2, 1, 11, 10), (3, 1, 11, 11), (2, 1, 10, 11)):
        with pytest.raises(
            ValueError, match=r"attention_mask of shape .* is refused: .*, or \(2, 1, 11, 11\): .batch, 1, query"
        ):
            model(ids, attention_mask=torch.ones(shape))
    with pytest.raises(ValueError, match="token id 37 is beyond vocab_size=37"):
        model(torch.full((1, 2), 37))
    with pytest.raises(ValueError, match="token id -1 is beyond vocab_size=37: 0 to 36"):
        model(torch.full((1, 2), -1))
    for wrong in (torch.zeros(3, dtype=torch.long), torch.zeros(1, 3), [[1, 2]]):
        with pytest.raises(ValueError, match=r"input_ids must be a tensor of integers \(batch, sequence\), found"):
            model(wrong)
    with pytest.raises(ValueError, match=r"input_ids of shape \(2, 0\) hold no token"):
        model(torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(TypeError, match="unknown arguments: attention_masks"):
        model(ids, attention_masks=torch.ones(2, 11))
