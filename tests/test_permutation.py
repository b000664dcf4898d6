"""Two-stream attention: who may know what, the same query stream on every path, and what is refused."""

from typing import Any

import pytest
import torch
from matrix import BATCH
from matrix import LENGTH
from matrix import Case
from matrix import cases
from matrix import ids_of
from matrix import sharpen
from test_encoder_memory import BACKENDS
from test_encoder_memory import CLOSE
from test_encoder_memory import backend_of
from torch.nn.functional import cross_entropy
from torch.nn.functional import one_hot

from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderForMaskedLM
from hf_relpos import RelPosEncoderForPermutationLM
from hf_relpos import RelPosEncoderForSequenceClassification
from hf_relpos import RelPosEncoderModel
from hf_relpos.model.position_builder import build_positions
from hf_relpos.model.position_two_stream import query_positions

TARGETS = torch.tensor([[7, 1, 4], [10, 0, 3]])
RELATIVE = [given for given in cases("encoder") if given.values[0].scheme not in ("sinusoidal", "learned_absolute")]
XLNET = Case("encoder", "xlnet", {})


def order_of(seed: int = 0) -> torch.Tensor:
    """When each token comes in a random order, `(batch, sequence)`; token 5 comes first, so that all others see one."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(LENGTH, generator=generator) for _ in range(BATCH)]) + 1
    order[:, 5] = 0
    return order


def hidden_by(order: torch.Tensor) -> torch.Tensor:
    """The `perm_mask` of an order: a token sees those before it alone."""
    return (order[:, :, None] <= order[:, None, :]).float()


def rows_of(targets: torch.Tensor) -> torch.Tensor:
    return one_hot(targets, LENGTH).float()


def language_model(given: Case, **fields: Any) -> Any:
    return sharpen(RelPosEncoderForPermutationLM(given.config(**fields))).double().eval()


@pytest.mark.parametrize("given", RELATIVE)
@torch.no_grad()
def test_what_a_target_knows(given: Case) -> None:
    """Its own token and those after it in the order change nothing; each one before it does."""
    model, order, ids = language_model(given), order_of(), ids_of()
    inputs = {"perm_mask": hidden_by(order), "target_mapping": rows_of(TARGETS)}
    logits = model(ids, **inputs).logits
    for place in range(LENGTH):
        changed = ids.clone()
        changed[:, place] = (ids[:, place] - 3 + 11) % 34 + 3
        moved = (model(changed, **inputs).logits - logits).abs().amax(-1)
        knows = order.gather(1, TARGETS) > order[:, place : place + 1]
        assert (moved[~knows] == 0).all()
        assert (moved[knows] > 1e-6).all()


@pytest.mark.parametrize("given", RELATIVE)
@torch.no_grad()
def test_a_query_is_a_token_that_is_not_read(given: Case) -> None:
    """One layer: a target that begins as token 9 is what token 9 in its place sees of the others, for every scheme."""
    model = given.model(num_hidden_layers=1, query_stream=True)
    model.mask_emb.copy_(model.embed_tokens.weight[9])
    ids, order = ids_of(), order_of()
    hidden = hidden_by(order).bool()
    found = model(ids, perm_mask=hidden, target_mapping=rows_of(TARGETS)).last_hidden_state
    for row in range(BATCH):
        for index, place in enumerate(TARGETS[row].tolist()):
            swapped = ids[row : row + 1].clone()
            swapped[0, place] = 9
            wanted = model(swapped, attention_mask=~hidden[row][None, None]).last_hidden_state[0, place]
            torch.testing.assert_close(found[row, index], wanted, **CLOSE)


@pytest.mark.parametrize("number", range(len(BACKENDS)))
@pytest.mark.parametrize("given", RELATIVE)
@torch.no_grad()
def test_paths_agree(given: Case, number: int) -> None:
    """Some targets or all, on every backend, with a memory and padding: the same logits and the same memory."""
    inputs = {"perm_mask": hidden_by(order_of()), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}
    inputs["attention_mask"][1, 8:] = 0
    targets = torch.tensor([[7, 1, 4], [6, 0, 3]])
    plain, other = language_model(given, mem_len=6), language_model(given, mem_len=6, **backend_of(given, number))
    memory = plain(ids_of(seed=1)).memory
    few = plain(ids_of(), target_mapping=rows_of(targets), memory=memory, **inputs)
    every = torch.arange(LENGTH).expand(BATCH, -1)
    all_of_them = other(ids_of(), target_mapping=rows_of(every), memory=memory, **inputs)
    picked = all_of_them.logits.gather(1, targets[..., None].expand(-1, -1, few.logits.shape[-1]))
    torch.testing.assert_close(few.logits, picked, **CLOSE)
    torch.testing.assert_close(few.memory.hidden, all_of_them.memory.hidden, **CLOSE)
    turned = plain(ids_of(), target_mapping=rows_of(every.flip(1)), memory=memory, **inputs).logits
    torch.testing.assert_close(turned.flip(1), all_of_them.logits, **CLOSE)
    without = plain(ids_of(), target_mapping=rows_of(targets), **inputs).logits
    assert not torch.allclose(few.logits, without, atol=1e-3), "memory changes nothing"


@pytest.mark.parametrize("scheme", ["xlnet", "t5", "rope"])
@torch.no_grad()
def test_padding_and_given_positions(scheme: str) -> None:
    """Left padding changes nothing; position numbers count for the query stream as for the other."""
    model, order = language_model(Case("encoder", scheme, {})), order_of()
    inputs = {"perm_mask": hidden_by(order), "target_mapping": rows_of(TARGETS)}
    wanted = model(ids_of(), **inputs).logits
    numbered = model(ids_of(), position_ids=torch.arange(LENGTH)[None] + 50, **inputs).logits
    torch.testing.assert_close(numbered, wanted, **CLOSE)
    stretched = model(ids_of(), position_ids=2 * torch.arange(LENGTH)[None], **inputs).logits
    assert not torch.allclose(stretched, wanted, atol=1e-3)

    def beside(part: torch.Tensor, *sides: int) -> torch.Tensor:
        return torch.nn.functional.pad(part, sides)

    padded = {"perm_mask": beside(hidden_by(order), 3, 0, 3, 0), "target_mapping": beside(rows_of(TARGETS), 3, 0)}
    mask = beside(torch.ones(BATCH, LENGTH, dtype=torch.long), 3, 0)
    found = model(beside(ids_of(), 3, 0), attention_mask=mask, **padded).logits
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("number", range(len(BACKENDS)))
def test_the_first_of_an_order_knows_nothing(number: int) -> None:
    """It sees no key, so only its place and the model decide; rows of zeros are targets of nothing."""
    model = language_model(XLNET, **backend_of(XLNET, number))
    hidden = torch.ones(BATCH, LENGTH, LENGTH)
    every = rows_of(torch.arange(LENGTH).expand(BATCH, -1))
    first, second = (model(ids_of(seed=seed), perm_mask=hidden, target_mapping=every).logits for seed in (0, 1))
    assert torch.isfinite(first).all()
    gradients = torch.autograd.grad(first.square().sum(), list(model.parameters()), allow_unused=True)
    assert all(gradient is None or torch.isfinite(gradient).all() for gradient in gradients)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    mapping, model = rows_of(TARGETS), language_model(XLNET)
    mapping[0, 2] = 0
    found = model(ids_of(), perm_mask=hidden_by(order_of()), target_mapping=mapping).logits
    torch.testing.assert_close(found[0, 2], first[0, 0], **CLOSE)
    whole = model(ids_of(), perm_mask=hidden_by(order_of()), target_mapping=rows_of(TARGETS)).logits
    torch.testing.assert_close(found[0, :2], whole[0, :2], **CLOSE)
    torch.testing.assert_close(found[1], whole[1], **CLOSE)


def test_no_row_of_a_softmax_is_empty() -> None:
    """Some backends make NaN of such rows, so a target that sees nothing is shown everything, and marked."""
    positions = build_positions((BATCH, LENGTH), torch.zeros(BATCH, LENGTH, 1), causal=False)
    hidden, named = hidden_by(order_of()).bool(), torch.ones_like(TARGETS, dtype=torch.bool)
    targets = TARGETS.clone()
    targets[0, 1], named[1, 2] = 5, False
    found, seen = query_positions(positions, hidden, targets, named)
    assert seen.tolist() == [[True, False, True], [True, True, False]]
    assert found.visible[0, 0, 1].all() and found.visible[1, 0, 2].all()
    assert torch.equal(found.visible[0, 0, 0], ~hidden[0, 7])


@torch.no_grad()
def test_an_order_without_targets() -> None:
    """`perm_mask` alone rules the content stream, where every token sees itself, also for absolute positions."""
    hidden = hidden_by(order_of()).bool()
    for scheme in ("xlnet", "sinusoidal"):
        model = Case("encoder", scheme, {}).model()
        sees = (~hidden | torch.eye(LENGTH, dtype=torch.bool))[:, None]
        found, wanted = model(ids_of(), perm_mask=hidden), model(ids_of(), attention_mask=sees)
        torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state, **CLOSE)


def test_loss_and_outputs() -> None:
    """The mean over targets that are not -100; a hidden state a layer, and the attentions of both streams."""
    model, labels = language_model(XLNET), torch.tensor([[5, -100, 7], [8, 9, -100]])
    inputs = {"perm_mask": hidden_by(order_of()), "target_mapping": rows_of(TARGETS)}
    output = model(ids_of(), labels=labels, output_hidden_states=True, output_attentions=True, **inputs)
    wanted = cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(output.loss, wanted, rtol=1e-6, atol=1e-6, check_dtype=False)
    view = torch.cat([labels, labels], 1)[:, :3]  # not contiguous
    assert torch.equal(model(ids_of(), labels=view, **inputs).loss, output.loss)
    divided = model(ids_of(), labels=labels, num_items_in_batch=8, **inputs).loss
    torch.testing.assert_close(divided, output.loss * 4 / 8)
    assert [tuple(part.shape) for part in output.hidden_states] == [(BATCH, LENGTH, 24)] * 2 + [(BATCH, 3, 24)]
    assert [part.shape[2] for part in output.attentions] == [LENGTH, 3] * 2
    assert not output.attentions[1][0, :, 0, 7].any(), "a target attends to itself"
    output.loss.backward()
    idle = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert idle == [] and model.model.mask_emb.grad.any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_give_the_same_gradients(reentrant: bool) -> None:
    """Gradient checkpointing with both streams, a memory and dropout off."""
    inputs = {"perm_mask": hidden_by(order_of()), "target_mapping": rows_of(TARGETS), "labels": TARGETS}
    gradients = []
    for recompute in (False, True):
        model = language_model(XLNET, mem_len=4).train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        memory = model(ids_of(seed=1)).memory
        model(ids_of(), memory=memory, **inputs).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    torch.testing.assert_close(*gradients, **CLOSE)


@pytest.mark.parametrize("targets", [TARGETS, torch.arange(LENGTH).expand(BATCH, -1)], ids=["some", "all"])
@torch.no_grad()
def test_one_graph(targets: torch.Tensor) -> None:
    """Both streams compile as a whole, with a memory: nothing is read back from the device."""
    model = language_model(XLNET, mem_len=4, attn_implementation="sdpa")
    memory = model(ids_of(seed=1)).memory
    inputs = {"perm_mask": hidden_by(order_of()), "target_mapping": rows_of(targets), "memory": memory}
    torch._dynamo.reset()
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(ids_of(), **inputs)
    torch._dynamo.reset()
    torch.testing.assert_close(found.logits, model(ids_of(), **inputs).logits, **CLOSE)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"perm_mask": torch.zeros(BATCH, LENGTH)}, r"perm_mask has the shape \(2, 11\), expected \(2, 11, 11\)"),
        ({"perm_mask": torch.zeros(3, LENGTH, LENGTH)}, r"perm_mask has the shape \(3, 11, 11\), expected \(2, 11, 11\)"),
        ({"perm_mask": None}, "target_mapping needs a perm_mask"),
        ({"target_mapping": rows_of(TARGETS)[..., :9]}, r"shape \(2, 3, 9\), expected \(2, predict, 11\)"),
        ({"target_mapping": rows_of(TARGETS)[:1]}, r"shape \(1, 3, 11\), expected \(2, predict, 11\)"),
        ({"target_mapping": torch.ones(BATCH, 3, LENGTH)}, r"target_mapping\[0, 0\] names 11 tokens.*1 at one token"),
        ({"target_mapping": 0.5 * rows_of(TARGETS)}, r"names 1 tokens with values in \[0.0, 0.5\]; a row must be 1"),
        ({"labels": torch.zeros(BATCH, LENGTH).long()}, r"labels of the shape \(2, 11\) need \(2, 3\): \(batch, predict\)"),
        ({"labels": ids_of(), "target_mapping": None}, r"labels of the shape \(2, 11\) need a target_mapping"),
    ],
)
def test_refused_inputs(change: dict[str, Any], message: str) -> None:
    inputs = {"perm_mask": hidden_by(order_of()), "target_mapping": rows_of(TARGETS), "labels": TARGETS, **change}
    if "labels" not in change:
        inputs.pop("labels")
    with pytest.raises(ValueError, match=message):
        language_model(XLNET)(ids_of(), **inputs)


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned_absolute"])
def test_absolute_positions_are_refused(scheme: str) -> None:
    """By the configuration, and by the head on a configuration that did not ask yet."""
    message = f"'{scheme}' is refused for a query stream: it puts positions into the embeddings"
    with pytest.raises(ValueError, match=message):
        RelPosEncoderConfig(position_scheme=scheme, query_stream=True)
    with pytest.raises(ValueError, match=message):
        RelPosEncoderForPermutationLM(RelPosEncoderConfig(position_scheme=scheme))
    with pytest.raises(ValueError, match="without a query stream: set query_stream=True"):
        XLNET.model()(ids_of(), perm_mask=hidden_by(order_of()), target_mapping=rows_of(TARGETS))


def test_other_heads_have_no_query_stream(tmp_path: Any) -> None:
    """From one pretrained folder, the base model has `mask_emb`; heads that would never train it do not, nor their folders."""
    language_model(XLNET).float().save_pretrained(tmp_path / "pretrained")
    assert RelPosEncoderModel.from_pretrained(tmp_path / "pretrained").mask_emb.any()
    for kind in (RelPosEncoderForSequenceClassification, RelPosEncoderForMaskedLM):
        model = kind.from_pretrained(tmp_path / "pretrained").train()
        model.save_pretrained(tmp_path / kind.__name__)
        labels = torch.zeros((BATCH, LENGTH) if kind is RelPosEncoderForMaskedLM else (BATCH,), dtype=torch.long)
        model(ids_of(), labels=labels).loss.backward()
        assert [name for name, weight in model.named_parameters() if weight.grad is None] == []
        assert RelPosEncoderModel.from_pretrained(tmp_path / kind.__name__).mask_emb is None


def test_a_new_query_stream_is_initialised(tmp_path: Any) -> None:
    """A model that had none gets one of the usual size; nothing is left as memory happened to be."""
    Case("encoder", "t5", {}).model().save_pretrained(tmp_path)
    model, report = RelPosEncoderForPermutationLM.from_pretrained(tmp_path, output_loading_info=True)
    assert "model.mask_emb" in report["missing_keys"]
    assert 0.005 < float(model.model.mask_emb.detach().std()) < 0.05
