"""Every scheme against the formulas of its paper, forward and every gradient, in float64."""

from typing import Any

import pytest
import torch
from matrix import BATCH
from matrix import LENGTH
from matrix import MATRIX
from matrix import Case
from matrix import cases
from matrix import expected
from matrix import ids_of
from matrix import sharpen
from matrix import visibility

from hf_relpos import SCHEMES
from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderModel
from hf_relpos.model.scheme_registry import scheme_class

EXACT = {"rtol": 1e-9, "atol": 1e-10}
ONE_ROW = ids_of(1)
"""Where all rows would be alike: who sees whom and the positions. Rows that differ are those of padding and of `position_ids`."""
HYBRIDS = {
    "rope-nope": (["rope", "nope", "rope"], {"rope": {"interleaved": True}}),
    "t5-alibi-shaw": (["t5", "alibi", "shaw"], {"t5": {"num_buckets": 6}, "shaw": {"max_distance": 3}}),
    "rope+t5-nope-rope": (["rope+t5", "nope", "rope"], {"t5": {"num_buckets": 6}, "rope": {"interleaved": True}}),
    "transformer_xl-music-transformer_xl": (["transformer_xl", "music", "transformer_xl"], {}),
}


def test_every_scheme_has_one_row() -> None:
    names = [row.scheme for row in MATRIX if "+" not in row.scheme]
    assert sorted(names) == sorted(SCHEMES), "SCHEMES and tests/matrix.py must name the same schemes"


def assert_like_reference(model: Any, ids: torch.Tensor, sees: Any = None, position: Any = None, **inputs: Any) -> None:
    """Compare hidden states and the gradients of a random projection of them, on valid tokens, with the reference."""
    valid = inputs.get("attention_mask", torch.ones_like(ids)).double()[..., None]
    found = model(ids, **inputs).last_hidden_state * valid
    wanted = expected(model, ids, sees, position) * valid
    torch.testing.assert_close(found, wanted, **EXACT)
    direction = torch.randn_like(wanted)
    parameters = dict(model.named_parameters())
    mine = torch.autograd.grad((found * direction).sum(), list(parameters.values()), allow_unused=True)
    theirs = torch.autograd.grad((wanted * direction).sum(), list(parameters.values()), allow_unused=True)
    for name, gradient, reference in zip(parameters, mine, theirs, strict=True):
        assert gradient is not None and bool(gradient.any()), f"{name} exists but has no influence"
        note = f"gradient of {name}: "
        torch.testing.assert_close(gradient, reference, rtol=1e-8, atol=1e-9, msg=lambda text, note=note: note + text)


@pytest.mark.parametrize("case", cases(variants=True))
def test_reference(case: Case) -> None:
    assert_like_reference(case.model(), ONE_ROW)


@pytest.mark.parametrize("case", cases())
def test_reference_post_norm(case: Case) -> None:
    assert_like_reference(case.model(norm_position="post"), ONE_ROW)


@pytest.mark.parametrize("case", cases("decoder"))
def test_reference_window(case: Case) -> None:
    assert_like_reference(case.model(sliding_window=4), ONE_ROW)


@pytest.mark.parametrize("case", cases())
def test_reference_grouped_heads(case: Case) -> None:
    assert_like_reference(case.model(num_attention_heads=4, head_dim=6, num_key_value_heads=2), ONE_ROW)


@pytest.mark.parametrize("case", cases(variants=True))
def test_reference_padding_and_documents(case: Case) -> None:
    """One row is padded on the left, the other holds documents of 4 and 7 tokens."""
    model, ids = case.model(), ids_of()
    mask, reset = torch.ones_like(ids), torch.zeros_like(ids)
    mask[0, :3] = 0
    reset[1, 4] = 1
    position = torch.arange(LENGTH).repeat(BATCH, 1)
    position[0], position[1, 4:] = (position[0] - 3).clamp(min=0), position[1, :7].clone()

    def hidden(b: int, i: int, j: int) -> bool:
        return (b == 0 and j < 3) or (b == 1 and (i < 4) != (j < 4))

    sees = visibility(model.config, BATCH, LENGTH, hidden)
    assert_like_reference(model, ids, sees, position, attention_mask=mask, reset_mask=reset)


@pytest.mark.parametrize("case", cases(variants=True))
def test_reference_position_ids(case: Case) -> None:
    """Positions that skip, repeat and start late, another row in each row of the batch."""
    position = torch.tensor([[0, 1, 2, 2, 3, 7, 8, 9, 9, 9, 14], [5, 6, 7, 9, 11, 13, 14, 15, 16, 17, 18]])
    assert_like_reference(case.model(), ids_of(), position=position, position_ids=position)


@pytest.mark.parametrize("case", cases())
def test_reference_without_dropout_in_evaluation(case: Case) -> None:
    assert_like_reference(case.model(hidden_dropout=0.5, attention_dropout=0.5), ONE_ROW)


@pytest.mark.parametrize("case", cases())
def test_positions_given_as_counted(case: Case) -> None:
    """Numbers that count the tokens change nothing, whichever path they take."""
    model, ids = case.model(), ids_of()
    given = model(ids, position_ids=torch.arange(LENGTH)[None]).last_hidden_state
    torch.testing.assert_close(given, model(ids).last_hidden_state, **EXACT)


@pytest.mark.parametrize("case", cases())
def test_order_matters(case: Case) -> None:
    """Permuting the tokens before the last one changes what the last one sees; without positions it must not."""
    model, ids = case.model(num_hidden_layers=1), ids_of()
    swapped = ids.clone()
    swapped[:, [1, 8]] = ids[:, [8, 1]]
    change = (model(ids).last_hidden_state - model(swapped).last_hidden_state)[:, -1].abs().max()
    assert change < 1e-12 if case.scheme == "nope" else change > 1e-3


@pytest.mark.parametrize("case", cases())
def test_shared_positions(case: Case) -> None:
    """One set of position parameters for the stack: its gradient gathers the parts of all layers."""
    model = case.model(share_positions="model")
    assert len(model.position_schemes) == 1
    assert_like_reference(model, ONE_ROW)


@pytest.mark.parametrize("share", ["layer", "model"])
@pytest.mark.parametrize("names, parameters", HYBRIDS.values(), ids=HYBRIDS)
def test_scheme_of_each_layer(names: list[str], parameters: dict[str, Any], share: str) -> None:
    config = Case("decoder", names, parameters).config(num_hidden_layers=3, share_positions=share)
    model = sharpen(RelPosDecoderModel(config)).double()
    assert len(model.position_schemes) == (3 if share == "layer" else len(set(names)))
    assert_like_reference(model, ONE_ROW)


@pytest.mark.parametrize("case", cases("decoder", variants=True))
def test_future_changes_nothing(case: Case) -> None:
    """Bit for bit, in float32, with and without a mask that says so explicitly."""
    model, ids = case.model(dtype=torch.float32), ids_of()
    changed = torch.cat([ids[:, :6], ids_of(seed=1)[:, 6:]], 1)
    for mask in (None, torch.tensor([[1] * 11, [0] * 2 + [1] * 9])):
        before, after = (model(tokens, attention_mask=mask).last_hidden_state for tokens in (ids, changed))
        assert torch.equal(before[:, :6], after[:, :6])
        assert not torch.equal(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("case", cases())
def test_four_times_the_length(case: Case) -> None:
    """Distance schemes go on beyond the length that the configuration mentions; learned positions have a bound."""
    model = case.model(max_position_embeddings=16, dtype=torch.float32)
    assert model(ids_of(length=16)).last_hidden_state.isfinite().all()
    if case.scheme == "learned_absolute":
        with pytest.raises(ValueError, match="position 16 is beyond the learned positions 0 to 15.*=16"):
            model(ids_of(length=17))
    else:
        assert model(ids_of(length=64)).last_hidden_state.isfinite().all()


def test_bound_of_learned_positions_counts_the_document() -> None:
    """Padding does not count and a new document starts again; cached tokens count."""
    model = Case("decoder", "learned_absolute", {}).model(max_position_embeddings=8)
    mask, reset = torch.ones(1, 11), torch.zeros(1, 11)
    mask[0, :3], reset[0, 5] = 0, 1
    assert model(ids_of(1), attention_mask=mask).last_hidden_state.isfinite().all()
    assert model(ids_of(1), reset_mask=reset).last_hidden_state.isfinite().all()
    cache = model(ids_of(1, 8), use_cache=True).cache
    with pytest.raises(ValueError, match="position 8 is beyond"):
        model(ids_of(1, 1), cache=cache)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", cases())
def test_gradient_checkpointing(case: Case, reentrant: bool) -> None:
    """Recomputed layers, dropout and memory included, give the same loss and the same gradients."""
    memory = case.family == "decoder" and "memory" not in scheme_class(case.scheme).refuses
    fields = {"hidden_dropout": 0.2, "attention_dropout": 0.2, **({"mem_len": 5} if memory else {})}
    model = case.model(head=True, **fields).train()
    ids = ids_of()

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        torch.manual_seed(3)
        model.zero_grad()
        kwargs = {"memory": model(ids).memory} if memory else {}
        loss = model(ids, labels=ids, **kwargs).loss
        loss.backward()
        return loss, {name: p.grad.clone() for name, p in model.named_parameters()}

    plain_loss, plain = run()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    loss, gradients = run()
    torch.testing.assert_close(loss, plain_loss, **EXACT)
    torch.testing.assert_close(gradients, plain, **EXACT)


def test_every_layer_of_a_list_needs_a_name() -> None:
    with pytest.raises(ValueError, match="lists 2 schemes for num_hidden_layers=3"):
        RelPosDecoderConfig(num_hidden_layers=3, position_scheme=["rope", "nope"])
