"""Models whose weights are elsewhere until a module is called, by accelerate's hooks, answer as they do without."""

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrix import BATCH
from matrix import Case
from matrix import cases
from matrix import ids_of
from matrix import sharpen
from pairs import SOURCE
from pairs import TARGET
from pairs import Pair
from pairs import pairs
from torch import nn

from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderForPermutationLM
from hf_relpos.model.devices import to_device
from hf_relpos.model.positions import Positions
from hf_relpos.model.scheme_base import PositionScheme
from hf_relpos.model.scheme_registry import SCHEMES
from hf_relpos.model.scheme_registry import scheme_class

accelerate = pytest.importorskip("accelerate")
from accelerate.hooks import AlignDevicesHook  # noqa: E402
from accelerate.hooks import add_hook_to_module  # noqa: E402

EXACT = {"rtol": 1e-9, "atol": 1e-9}
CPU = torch.device("cpu")


def to_cpu(model: Any, folder: pathlib.Path) -> Any:
    return accelerate.cpu_offload(model, CPU, offload_buffers=True)


def to_disk(model: Any, folder: pathlib.Path) -> Any:
    return accelerate.disk_offload(model, str(folder), CPU, offload_buffers=True)


def by_map(model: Any, folder: pathlib.Path) -> Any:
    """Save a model and load it with all weights on disk."""
    model.save_pretrained(folder / "model")
    children = {name: part for name, part in model.named_children() if name != model.base_model_prefix}
    base = getattr(model, model.base_model_prefix)
    children |= {f"{model.base_model_prefix}.{name}": part for name, part in base.named_children()}
    device_map = {name: "disk" if list(part.parameters()) else "cpu" for name, part in children.items()}
    kind, weights = type(model), str(folder / "weights")
    return kind.from_pretrained(folder / "model", device_map=device_map, offload_folder=weights).eval()


OFFLOADS: dict[str, Callable[[Any, pathlib.Path], Any]] = {"cpu": to_cpu, "disk": to_disk, "map": by_map}


def answers(model: Any, case: Case) -> list[torch.Tensor]:
    """Return the outputs of all ways that a case's model can be called."""
    ids, memory = ids_of(length=7), None
    if case.family == "encoder":
        found = [model(ids)[0]]
    else:
        cache, found = None, [model(ids, use_cache=False)[0]]
        for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:]):
            output = model(part, cache=cache, use_cache=True)
            cache = output.cache
            found.append(output.logits)
    if getattr(model.config, "mem_len", 0):
        memory = model(ids, **({} if case.family == "encoder" else {"use_cache": False})).memory
        found.append(model(ids, memory=memory)[0])
    if memory is not None and case.family == "decoder":
        cache, mask = model.memory_to_cache(model.read(ids))
        found.append(model(ids[:, :2], attention_mask=nn.functional.pad(mask, (0, 2), value=1), cache=cache)[0])
    return found


@torch.no_grad()
def check(model: Any, ask: Callable[[Any], Any], offload: Callable[[Any, pathlib.Path], Any], folder: pathlib.Path) -> None:
    """Compare what a model and its offloaded copy answer, twice."""
    wanted, other = ask(model), offload(copy.deepcopy(model), folder)
    assert all(weight.is_meta for weight in other.parameters())
    for _ in range(2):
        torch.testing.assert_close(ask(other), wanted, **EXACT)


@pytest.mark.parametrize("case", cases(variants=True))
def test_every_scheme(case: Case, tmp_path: pathlib.Path) -> None:
    """Each scheme in each family, with memory where it has one, in one pass and step by step."""
    fields = {} if "memory" in scheme_class(case.scheme).refuses else {"mem_len": 5}
    check(case.model(head=True, **fields), lambda model: answers(model, case), to_cpu, tmp_path)


KINDS = (
    "encoder-deberta",
    "decoder-t5",
    "decoder-transformer_xl",
    "decoder-cope",
    "encoder-learned_absolute",
    "decoder-rope+t5",
)


@pytest.mark.parametrize("offload", ["disk", "map"])
@pytest.mark.parametrize(
    "case", [case for case in cases() if str(case.id).split("-", 2)[:2] in [kind.split("-") for kind in KINDS]]
)
def test_from_disk(case: Case, offload: str, tmp_path: pathlib.Path) -> None:
    check(case.model(head=True), lambda model: answers(model, case), OFFLOADS[offload], tmp_path)


def test_generation(tmp_path: pathlib.Path) -> None:
    case, ids = Case("decoder", "t5", {}), ids_of()

    def ask(model: Any) -> list[torch.Tensor]:
        memories = (None, model.read(ids))
        model.attention_plan(5)
        return [model.generate(ids, memory=memory, max_new_tokens=3, do_sample=False) for memory in memories]

    check(case.model(head=True, mem_len=5), ask, to_cpu, tmp_path)


@pytest.mark.parametrize("pair", pairs())
def test_encoder_decoders(pair: Pair, tmp_path: pathlib.Path) -> None:
    source, target = ids_of(length=SOURCE), ids_of(length=TARGET)

    def ask(model: Any) -> list[torch.Tensor]:
        cache, found = None, [model(source, decoder_input_ids=target).logits]
        for part in (target[:, :3], target[:, 3:]):
            output = model(source, decoder_input_ids=part, cache=cache, use_cache=True)
            cache = output.cache
            found.append(output.logits)
        return found

    check(pair.model(head=True), ask, to_cpu, tmp_path)


ADAPTIVE = {"cutoffs": [10, 20], "div_val": 2, "tie_word_embeddings": True}


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize(
    "fields",
    [{"embedding_size": 12}, {"tie_word_embeddings": False, "lm_head_bias": True}, ADAPTIVE, {"type_vocab_size": 2}],
    ids=["factorised", "untied", "adaptive", "types"],
)
def test_what_stands_around_the_layers(fields: dict[str, Any], offload: str, tmp_path: pathlib.Path) -> None:
    case = Case("decoder", "t5", {})
    model, ids = case.model(head=True, mem_len=5, **fields), ids_of()

    def ask(given: Any) -> list[torch.Tensor]:
        memory = given.read(ids)
        trained = given.train()(ids, labels=ids, memory=memory).loss
        return [trained, given.eval()(ids, labels=ids, memory=memory, output_attentions=True).loss]

    check(model, ask, OFFLOADS[offload], tmp_path)


def test_query_stream(tmp_path: pathlib.Path) -> None:
    sizes = {"vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 28}
    config = RelPosEncoderConfig(**sizes, position_scheme="xlnet", type_vocab_size=2, query_stream=True)
    model = sharpen(RelPosEncoderForPermutationLM(config)).double().eval()
    ids = ids_of(length=6)
    order = torch.arange(6)
    inputs = {
        "perm_mask": (order[:, None] <= order).double().expand(BATCH, -1, -1),
        "target_mapping": nn.functional.one_hot(order[-2:], 6).double().expand(BATCH, -1, -1),
        "token_type_ids": (order > 2).long().expand(BATCH, -1),
    }
    check(model, lambda given: given(ids, **inputs).logits, to_cpu, tmp_path)


class Tilted(PositionScheme):
    """A scheme of a user, who learns how to encode queries and keys and the scale of the scores."""

    def __init__(self, config: Any, **parameters: Any) -> None:
        super().__init__(config, **parameters)
        self.tilt = nn.Parameter(torch.empty(self.head_dim))

    def initialize(self, std: float) -> None:
        nn.init.ones_(self.tilt)

    def scale(self) -> Any:
        return self.tilt.square().mean().item()

    def encode_query(self, query: torch.Tensor, prepared: Any) -> torch.Tensor:
        return query * self.tilt

    def encode_key(self, key: torch.Tensor, prepared: Any) -> torch.Tensor:
        return key + self.tilt

    def scale_after_cache(self, query: torch.Tensor, key: torch.Tensor, prepared: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return query - self.tilt, key

    def embed(self, hidden_states: torch.Tensor, in_document: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.tilt.mean()


def test_every_method_of_a_scheme_may_read_weights(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "tilted", Tilted)
    case = Case("decoder", "tilted", {})
    check(case.model(head=True), lambda given: answers(given, case), to_cpu, tmp_path)


@pytest.mark.parametrize("case", cases())
def test_parts_on_two_devices(case: Case) -> None:
    """What layers are handed follows them to another device: `meta`, which refuses to meet tensors of others."""
    kind = scheme_class(case.scheme)
    if case.scheme in ("fire", "xpos", "xpos+kerple", "dynamic_bias") or kind.serves_all_layers:
        pytest.skip("meta holds no numbers to read or to give back, and has no autocast")
    fields = {} if "memory" in kind.refuses else {"mem_len": 5}
    model = case.model(attn_implementation="sdpa", **fields)
    memory = model(ids_of()).memory
    for part in (model.layers[1], model.norm, *list(model.position_schemes)[1:]):
        add_hook_to_module(part, AlignDevicesHook(execution_device="meta", place_submodules=True))
    output = model(ids_of(), **({"memory": memory} if fields else {}))
    assert output.last_hidden_state.is_meta


def test_to_device() -> None:
    positions = Positions(*[torch.zeros(1, 3)] * 4, start=0, contiguous=True, causal=True)
    assert positions.to("cpu") is positions and to_device({"a": (positions, None)}, "cpu")["a"][0] is positions
    moved = to_device({"a": [(positions, 1)]}, "meta")["a"][0][0]
    assert moved.query.is_meta and moved.in_document.is_meta and moved.start == 0
