"""Attention layers, tables and masks against numbers made by other implementations, in float64.

Committed below `tests/goldens`, so that no clone and no CI skips them, and made by `tests/goldens/make.py`:

- from transformers 4.35.2, the last with these models: `bert_relative_key`, `bert_relative_key_query_causal`,
  `transfoxl_hf_div1`, `transfoxl_hf_adaptive_div2` (memories, clamped distances, the same length, adaptive softmax) and
  `transfoxl_tables` (the shift of distances, masks behind a memory);
- from transformers 5 and x-transformers: `distance_tables` (buckets of T5 and DeBERTa-v2, slopes of BLOOM, MPT and
  x-transformers), `xt_rotary` (decoders with RoPE, with a memory, and with xPos);
- from `reference_model.py`: `plain_references`, every row of the test matrix with all its parameters; they also hold where the
  reference and the package would be changed together.

All others (`shaw_separate_kv_k2`, `music_transformer_attn`, `kimi_attn0_postln`, `kerple`, `fire`, `cope_ram`, and more
cases of the above) come from repositories that no package index has. They lie beside this one, and their tests skip without.
"""

from typing import Any

import pytest
import torch
from golden_reader import assert_gradients
from golden_reader import assert_outputs
from golden_reader import case_names
from golden_reader import golden

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderModel
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderModel
from hf_relpos.model.position_builder import build_positions
from hf_relpos.model.position_tables import DistanceTables
from hf_relpos.model.scheme_bias import alibi_slopes
from hf_relpos.model.scheme_bias import t5_bucket
from hf_relpos.model.scheme_deberta import deberta_bucket
from hf_relpos.model.toeplitz import relative_shift

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


TABLES = ("distance_tables", "unit_tables")
MEMORY_TABLES = {"transfoxl_tables": "shifted", "unit_tables": "kimi"}


def layer_of(causal: bool, scheme: str, parameters: dict[str, Any]) -> tuple[Any, Any]:
    """An attention layer with biases and its scheme, in float64."""
    kind, model = (RelPosDecoderConfig, RelPosDecoderModel) if causal else (RelPosEncoderConfig, RelPosEncoderModel)
    fields = {"attention_bias": True, "attn_implementation": "eager"}
    config = kind(**SIZES, **fields, position_scheme=scheme, position_parameters=parameters)
    built = model(config).double().eval()
    return built.layers[0].attention, built.position_schemes[0]


def functional(
    layer: Any, scheme: Any, weights: dict[str, torch.Tensor], causal: bool, states: torch.Tensor, mask: Any
) -> Any:
    """Run a layer on itself with the given weights in place of its own: output and probabilities."""
    positions = build_positions(tuple(states.shape[:2]), states, causal=causal, attention_mask=mask)
    parts = {
        part: {name.removeprefix(f"{part}."): weight for name, weight in weights.items() if name.startswith(f"{part}.")}
        for part in ("attention", "scheme")
    }
    with torch.nn.utils.stateless._reparametrize_module(scheme, parts["scheme"]):
        call = (states, states, scheme, DistanceTables(positions), scheme.prepare(positions))
        return torch.func.functional_call(layer, parts["attention"], call)


@pytest.mark.parametrize("name, case", case_names("shaw_separate_kv_k2"))
def test_shaw(name: str, case: str) -> None:
    """Separate tables for keys and values, in both directions, with padding, and causal."""
    reader, causal = golden(name, case), case == "causal"
    weights = {key: weight.requires_grad_() for key, weight in reader.weights().items()}
    layer, scheme = layer_of(causal, "shaw", {"max_distance": 2})
    rows = slice(0, 3 if causal else 5)  # a decoder's table ends at distance 0
    mapped = {f"attention.{part}_proj.{kind}": weights[f"fc_{part}.{kind}"] for part in "qkvo" for kind in ("weight", "bias")}
    for part in ("key", "value"):
        mapped[f"scheme.{part}_table"] = weights[f"relative_position_{part[0]}.embeddings_table"][rows]
    inputs = reader.inputs(case)
    mask = inputs["keep"].bool().expand(2, 1, 12, 12) if "keep" in inputs else None
    outputs = {"output": functional(layer, scheme, mapped, causal, inputs["x"], mask)[0]}
    assert_outputs(reader, case, outputs)
    assert_gradients(reader, case, outputs, weights)


@pytest.mark.parametrize("name, case", case_names("music_transformer_attn"))
def test_music(name: str, case: str) -> None:
    """One table for all heads, as long as the text or longer. Without a causal mask the scheme is refused."""
    if case.endswith("nomask"):
        with pytest.raises(ValueError, match="refused for a bidirectional model"):
            RelPosEncoderConfig(position_scheme="music")
        return
    reader = golden(name, case)
    weights = {key: weight.requires_grad_() for key, weight in reader.weights(case).items()}
    layer, scheme = layer_of(True, "music", {"max_distance": weights["Er"].shape[0], "share_heads": True})
    mapped = {f"attention.o_proj.{kind}": weights[f"out_proj.{kind}"] for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        for part, piece in zip("qkv", weights[f"in_proj_{kind}"].chunk(3), strict=True):
            mapped[f"attention.{part}_proj.{kind}"] = piece
    mapped["scheme.table"] = weights["Er"][None]
    states = reader.inputs(case)["x"].transpose(0, 1)
    output, probabilities = functional(layer, scheme, mapped, True, states, None)
    outputs = {"output": output.transpose(0, 1), "attn_mean": probabilities.mean(1)}
    assert_outputs(reader, case, outputs)
    assert_gradients(reader, case, outputs, weights)


@pytest.mark.parametrize("name", TABLES)
def test_t5_buckets(name: str) -> None:
    """All distances up to 600, several sizes, as transformers and as x-transformers have them."""
    reader = golden(name)
    distance = reader.inputs("buckets")["rel_key_minus_query"].long()
    wanted = {key: table for key, table in reader.outputs("buckets").items() if key.startswith(("t5_", "xt_"))}
    assert len(wanted) == 16
    for key, table in wanted.items():
        _, direction, buckets, furthest = key.split("_")
        assert torch.equal(t5_bucket(distance, direction == "bi", int(buckets), int(furthest)), table.long()), key


@pytest.mark.parametrize("name", TABLES)
def test_deberta_buckets(name: str) -> None:
    """All distances up to 600, several sizes, as DeBERTa-v2 has them."""
    reader = golden(name)
    distance = reader.inputs("buckets")["rel_key_minus_query"].long()
    wanted = {key: table for key, table in reader.outputs("buckets").items() if key.startswith("deberta_")}
    assert len(wanted) == 4
    for key, table in wanted.items():
        _, buckets, furthest = key.split("_")
        assert torch.equal(deberta_bucket(distance, int(buckets), int(furthest)), table.long()), key


@pytest.mark.parametrize("name", TABLES)
def test_alibi_slopes(name: str) -> None:
    """1 to 20 heads, as BLOOM, MPT and x-transformers have them."""
    wanted = golden(name).outputs("slopes")
    assert len(wanted) == 60
    for key, slopes in wanted.items():
        torch.testing.assert_close(alibi_slopes(len(slopes)), slopes, rtol=1e-6, atol=0, msg=key)


@pytest.mark.parametrize("name", MEMORY_TABLES)
def test_relative_shift(name: str) -> None:
    """Only the entries that a causal mask leaves: the others belong to nobody."""
    reader = golden(name)
    shifted = relative_shift(reader.inputs("rel_shift")["x"])
    wanted = reader.outputs("rel_shift")[MEMORY_TABLES[name]].double()
    seen = torch.ones_like(wanted).tril(wanted.shape[-1] - wanted.shape[-2]).bool()
    assert torch.equal(shifted[seen], wanted[seen]) and seen.sum() > seen.shape[0]


@pytest.mark.parametrize("name", MEMORY_TABLES)
@pytest.mark.parametrize("table", ["xl_causal_mask", "xl_same_length_mask"])
def test_masks_behind_a_memory(name: str, table: str) -> None:
    """All of the memory, or as many keys as the memory is long (`same_length`), whatever the memory holds."""
    wanted = golden(name).outputs(table)
    assert wanted
    for key, hidden in wanted.items():
        queries, held, *limit = (int(part.lstrip("qml")) for part in key.split("_"))
        for slots in (held, held + 3):
            positions = build_positions(
                (1, queries), torch.empty(0), causal=True, window=limit[0] if limit else None,
                memory_length=torch.tensor([held]), memory_slots=slots,
            )  # fmt: skip
            assert torch.equal(positions.visible[0, 0, :, slots - held :], hidden == 0), key
            assert not positions.visible[0, 0, :, : slots - held].any()


def bert_weights(weights: dict[str, torch.Tensor], entries: int) -> dict[str, torch.Tensor]:
    """BERT's weights by this package's names; tables turned round, because BERT counts query minus key."""
    names = {"word_embeddings": "embed_tokens", "token_type_embeddings": "embed_types", "LayerNorm": "embed_norm"}
    mapped = {
        key.replace(f"embeddings.{old}", new): weight
        for key, weight in weights.items()
        for old, new in names.items()
        if key.startswith(f"embeddings.{old}.")
    }
    parts = {
        "attention.self.query": "attention.q_proj", "attention.self.key": "attention.k_proj",
        "attention.self.value": "attention.v_proj", "attention.output.dense": "attention.o_proj",
        "attention.output.LayerNorm": "attention_norm", "intermediate.dense": "mlp.up_proj",
        "output.dense": "mlp.down_proj", "output.LayerNorm": "mlp_norm",
    }  # fmt: skip
    for index in range(2):
        for old, new in parts.items():
            for kind in ("weight", "bias"):
                mapped[f"layers.{index}.{new}.{kind}"] = weights[f"encoder.layer.{index}.{old}.{kind}"]
        table = weights[f"encoder.layer.{index}.attention.self.distance_embedding.weight"]
        mapped[f"position_schemes.{index}.shaw.key_table"] = table.flip(0)[:entries]
    return mapped


@pytest.mark.parametrize("name, case", case_names("bert_relative_key", "bert_relative_key_query_causal"))
def test_bert(name: str, case: str) -> None:
    """`relative_key` is Shaw's vectors on keys; in a decoder with `relative_key_query` the keys meet them too."""
    reader, causal = golden(name, case), name.endswith("causal")
    weights = {key: weight.requires_grad_() for key, weight in reader.weights().items()}
    kind, family = (RelPosDecoderConfig, RelPosDecoderModel) if causal else (RelPosEncoderConfig, RelPosEncoderModel)
    config = kind(
        **SIZES, norm_position="post", embedding_norm=True, type_vocab_size=2, layer_norm_eps=1e-12,
        attention_bias=True, mlp_bias=True, position_scheme="shaw",
        position_parameters={"max_distance": 15, "values": False, "meets": "both" if causal else "query"},
    )  # fmt: skip
    mapped, model = bert_weights(weights, 16 if causal else 31), family(config).double().eval()
    assert mapped.keys() == dict(model.named_parameters()).keys()

    def run(ids: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(model, mapped, (ids, mask), kwargs)

    inputs = reader.inputs(case)
    if case == "causal_cached_steps":
        states, cache = [], None
        for token in inputs["input_ids"].unbind(1):
            output = run(token[:, None], None, cache=cache, use_cache=True)
            states.append(output.last_hidden_state)
            cache = output.cache
        assert_outputs(reader, case, {"steps": torch.cat(states, 1)})
        return
    found = run(inputs["input_ids"], inputs["attention_mask"], output_attentions=True, output_hidden_states=True)
    valid = inputs["attention_mask"][..., None].bool()
    outputs = {
        "valid_last": found.last_hidden_state.masked_fill(~valid, 0.0),
        "hidden_states/0": found.hidden_states[0],
    }
    assert_outputs(reader, case, outputs)
    assert_gradients(reader, case, outputs, weights)
    wanted = (reader.outputs(case)[f"attentions/{index}"] for index in range(2))
    for mine, theirs in zip(found.attentions, wanted, strict=True):
        torch.testing.assert_close(mine * valid[:, None], theirs * valid[:, None], rtol=0, atol=1e-9)
