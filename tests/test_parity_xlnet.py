"""XLNet as a whole, next to the one of transformers: both streams, memory over segments, token types, padding; with gradients."""

from typing import Any

import pytest
import torch
from matrix import ids_of
from originals import XLNET
from originals import converted
from originals import original
from parity import FLOAT32
from parity import left_padding
from test_permutation import hidden_by
from test_permutation import order_of
from test_permutation import rows_of

from hf_relpos.conversion.api import convert_checkpoint

PREDICT = torch.tensor([[7, 1, 4], [10, 0, 3]])
FLOAT64 = {"rtol": 1e-9, "atol": 1e-9}
"""Beyond float32: the sinusoids of transformers, which are made in float32 whatever the model's dtype, are replaced."""


def sinusoids(theirs: Any) -> Any:
    """The position vectors of an XLNet of transformers as it makes them, but in float64."""
    base = getattr(theirs, "transformer", theirs)

    def in_float64(queries: int, keys: int, bsz: int, device: Any) -> torch.Tensor:
        frequency = 10000 ** (-torch.arange(0, base.d_model, 2, dtype=torch.float64) / base.d_model)
        back = torch.arange(keys, -queries, -1, dtype=torch.float64)
        if base.clamp_len > 0:
            back = back.clamp(-base.clamp_len, base.clamp_len)
        angle = back[:, None] * frequency
        made = torch.cat([angle.sin(), angle.cos()], -1)[:, None].expand(-1, bsz, -1)
        torch.testing.assert_close(made.float(), as_it_was(queries, keys, bsz=bsz, device=device), **FLOAT32)
        return made

    as_it_was = base.relative_positional_encoding
    base.relative_positional_encoding = in_float64
    return theirs


def both(kind: str, backend: str = "eager", **fields: Any) -> tuple[Any, Any]:
    """The model here and the one of transformers that it was converted from."""
    theirs = original(kind, **{**XLNET, **fields})
    theirs.config.architectures = [kind]
    ours, report = converted("xlnet", theirs.config, theirs.state_dict())
    assert not report.missing and set(report.unused) <= {"mask_emb", "transformer.mask_emb"}
    ours.set_attn_implementation(backend)
    return ours, sinusoids(theirs)


def gradients_of(ours: Any, theirs: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of all weights by their names here, 0 where there is none: the rules that move weights move gradients."""

    def gradient(weight: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(weight) if weight.grad is None else weight.grad

    given = {name: gradient(weight) for name, weight in theirs.named_parameters(remove_duplicate=False)}
    _, wanted, _ = convert_checkpoint("xlnet", theirs.config, given)
    found = {name: gradient(weight) for name, weight in ours.named_parameters()}
    return found, {name: wanted[name] for name in found}


def inputs_of(seed: int, targets: bool, types: bool) -> dict[str, torch.Tensor]:
    inputs = {}
    if targets:
        inputs = {"perm_mask": hidden_by(order_of(seed)).double(), "target_mapping": rows_of(PREDICT).double()}
        inputs["labels"] = ids_of(seed=seed + 9)[:, :3].contiguous()
    if types:
        inputs["token_type_ids"] = (ids_of(seed=seed + 5) % 2).long()
    return inputs


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("types", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize("targets", [False, True], ids=["content", "targets"])
@pytest.mark.parametrize("reuse_len", [None, 5])
def test_three_segments(reuse_len: int | None, targets: bool, types: bool, backend: str) -> None:
    """Logits, losses and memories of each segment, and the gradients of all weights over the last one."""
    ours, theirs = both("XLNetLMHeadModel", backend, mem_len=7, reuse_len=reuse_len, clamp_len=9)
    assert (ours.config.mem_len, ours.config.reuse_len) == (7, reuse_len)
    memory = memories = None
    for seed in range(3):
        ids, inputs = ids_of(seed=seed), inputs_of(seed, targets, types)
        found = ours(ids, memory=memory, **inputs)
        wanted = theirs(ids, mems=memories, use_mems=True, **inputs)
        torch.testing.assert_close(found.logits, wanted.logits, **FLOAT64)
        if targets:
            torch.testing.assert_close(found.loss, wanted.loss, **FLOAT32, check_dtype=False)
        memory, memories = found.memory, wanted.mems
        for layer, states in enumerate(memories):
            kept = memory.hidden[:, layer, -len(states) :]
            assert memory.length.tolist() == [len(states)] * 2
            torch.testing.assert_close(kept, states.transpose(0, 1), **FLOAT64)
    direction = torch.randn_like(found.logits)
    for output in (found, wanted):
        (output.logits * direction).sum().backward()
    mine, wanted = gradients_of(ours, theirs)
    torch.testing.assert_close(mine, wanted, **FLOAT64)
    silent = {name for name, gradient in mine.items() if not gradient.any()}
    assert ("model.mask_emb" in silent) == (not targets)
    assert all("segment" in name for name in silent - {"model.mask_emb"}) and (types or silent)


@pytest.mark.parametrize("every", [False, True], ids=["some", "all"])
@torch.no_grad()
def test_padding(every: bool) -> None:
    """Left padding with an order; transformers would remember it, so there is one segment."""
    ours, theirs = both("XLNetLMHeadModel", mem_len=7)
    targets = torch.arange(11).expand(2, -1) if every else torch.tensor([[7, 9, 4], [10, 0, 3]])
    mask, inputs = left_padding(), inputs_of(0, True, True)
    inputs["perm_mask"][0, :4, :4] = 0  # what is padding is hidden by its mask alone
    inputs |= {
        "target_mapping": rows_of(targets).double(),
        "attention_mask": mask,
        "labels": ids_of()[:, : targets.shape[1]].contiguous(),
    }
    found, wanted = ours(ids_of(), **inputs).logits, theirs(ids_of(), **inputs).logits
    valid = order_of(0).gather(1, targets) > 0  # the first of an order sees nothing
    torch.testing.assert_close(found[valid], wanted[valid], **FLOAT64)


@torch.no_grad()
def test_an_order_without_targets() -> None:
    """`perm_mask` for the content stream alone, in the model without a head."""
    ours, theirs = both("XLNetModel", mem_len=7, clamp_len=4)
    assert ours.config.query_stream
    hidden = hidden_by(order_of()).double()
    found, wanted = ours(ids_of(), perm_mask=hidden)[0], theirs(ids_of(), perm_mask=hidden)[0]
    torch.testing.assert_close(found, wanted, **FLOAT64)
    mapping = rows_of(PREDICT).double()
    found, wanted = (model(ids_of(), perm_mask=hidden, target_mapping=mapping)[0] for model in (ours, theirs))
    torch.testing.assert_close(found, wanted, **FLOAT64)


@torch.no_grad()
def test_rows_of_zeros_pad() -> None:
    """As in the released data pipeline, where segments have unlike numbers of targets."""
    ours, theirs = both("XLNetLMHeadModel", mem_len=7)
    inputs = inputs_of(0, True, False)
    inputs["target_mapping"][0, 1:] = 0
    torch.testing.assert_close(ours(ids_of(), **inputs).logits, theirs(ids_of(), **inputs).logits, **FLOAT64)


@torch.no_grad()
def test_memory_of_other_heads() -> None:
    ours, theirs = both("XLNetForTokenClassification", mem_len=7, num_labels=3)
    assert not ours.config.query_stream and ours.config.mem_len == 7
    found, wanted = ours.model(ids_of()).memory, theirs(ids_of(), use_mems=True).mems
    following = ours(ids_of(seed=1), memory=found).logits, theirs(ids_of(seed=1), mems=wanted).logits
    torch.testing.assert_close(*following, **FLOAT64)
