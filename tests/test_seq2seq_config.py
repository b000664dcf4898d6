"""Encoder-decoders: what their configuration refuses, completes and brings back, and which weights are one."""

import pathlib
from typing import Any

import pytest
import torch
from matrix import SIZES
from matrix import ids_of
from pairs import EXACT
from pairs import TARGET
from pairs import Pair
from pairs import pairs

from hf_relpos import RelPosSeq2SeqConfig
from hf_relpos import RelPosSeq2SeqForConditionalGeneration
from hf_relpos import RelPosSeq2SeqModel

ROPE = Pair("rope", "rope")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "memory": ({"mem_len": 4}, "mem_len=4 is refused for an encoder-decoder: segment memory goes on with one text"),
    "window": ({"sliding_window": 4}, "sliding_window=4 is refused for an encoder-decoder: generate would cut"),
    "parallel": ({"parallel_residual": True}, "parallel_residual=True is refused for an encoder-decoder"),
    "depth": ({"num_decoder_layers": 0}, "num_decoder_layers=0 must be at least 1"),
    "one scheme for both that the encoder refuses": (
        {"position_scheme": "nope"},
        "position_scheme 'nope' is refused for a bidirectional model: without positions",
    ),
    "encoder": ({"encoder_position_scheme": "music"}, "'music' is refused for a bidirectional model"),
    "decoder": ({"decoder_position_scheme": "deberta"}, "'deberta' is refused for a causal model"),
    "unknown scheme": ({"decoder_position_scheme": "ropee"}, "unknown position_scheme 'ropee'; the schemes are: nope"),
    "length of a list": (
        {"num_hidden_layers": 2, "num_decoder_layers": 3, "decoder_position_scheme": ["rope", "nope"]},
        "position_scheme lists 2 schemes for num_hidden_layers=3",
    ),
    "parameters of no stack": (
        {"position_parameters": {"slopes": "geometric"}, "position_scheme": "alibi"}
        | {"encoder_position_scheme": "t5", "decoder_position_scheme": "rope"},
        "belong to position_scheme='alibi', which no stack uses",
    ),
    "unknown parameter": (
        {"encoder_position_scheme": "t5", "encoder_position_parameters": {"buckets": 8}},
        "unknown parameter 'buckets' of T5; its parameters: num_buckets",
    ),
    "parameter of the other scheme": (
        {"position_scheme": "t5", "decoder_position_parameters": {"rope_theta": 10.0}},
        "unknown parameter 'rope_theta' of T5",
    ),
}


@pytest.mark.parametrize("fields, message", REFUSED.values(), ids=REFUSED)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RelPosSeq2SeqConfig(**fields)


def test_off_switches_of_other_families_are_no_fault() -> None:
    config = RelPosSeq2SeqConfig(mem_len=0, sliding_window=None)
    assert not hasattr(config, "mem_len") and not hasattr(config, "sliding_window")


def test_completed() -> None:
    """One scheme serves both stacks; a stack with its own takes its own parameters or the defaults."""
    parameters = {"num_buckets": 8, "max_distance": 20}
    config = RelPosSeq2SeqConfig(position_scheme="t5", position_parameters=parameters, num_hidden_layers=4)
    assert config.num_decoder_layers == 4 and config.is_encoder_decoder
    encoder, decoder = config.stacks()
    assert encoder.position_parameters == decoder.position_parameters == parameters
    config = RelPosSeq2SeqConfig(
        position_scheme="t5", position_parameters=parameters, decoder_position_scheme="rope", num_decoder_layers=2
    )
    encoder, decoder = config.stacks()
    assert (encoder.position_scheme, encoder.position_parameters) == ("t5", parameters)
    assert (decoder.position_scheme, decoder.position_parameters) == ("rope", {})
    named = RelPosSeq2SeqConfig(position_scheme="t5", position_parameters=parameters, encoder_position_scheme="t5")
    assert named.encoder_position_parameters == named.decoder_position_parameters == parameters
    assert (encoder.num_hidden_layers, decoder.num_hidden_layers) == (6, 2)
    assert (encoder.causal, decoder.causal) == (False, True)
    assert config.get_text_config() is config
    assert config.get_text_config(decoder=True).num_hidden_layers == 2
    assert config.get_text_config(encoder=True).num_hidden_layers == 6


def test_embeddings_are_scaled_where_the_paper_scales_them() -> None:
    encoder, decoder = RelPosSeq2SeqConfig(encoder_position_scheme="sinusoidal").stacks()
    assert (encoder.scale_embedding, decoder.scale_embedding) == (True, False)


@pytest.mark.parametrize(
    "tokens, start",
    [
        ({"pad_token_id": 5, "bos_token_id": 6}, 5),
        ({"bos_token_id": 6}, 6),
        ({"pad_token_id": 5, "decoder_start_token_id": 2}, 2),
        ({}, None),
    ],
)
def test_start_of_the_decoder(tokens: dict[str, int], start: int | None) -> None:
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = RelPosSeq2SeqConfig(**sizes, **tokens)
    assert config.decoder_start_token_id == start
    if start is None:
        assert RelPosSeq2SeqModel(config).encoder is not None, "without a head nothing is generated"
        with pytest.raises(ValueError, match="decoder_start_token_id=None: the decoder needs a token to begin with"):
            RelPosSeq2SeqForConditionalGeneration(config)
    else:
        model = RelPosSeq2SeqForConditionalGeneration(config)
        assert model.generation_config.decoder_start_token_id == start
        assert model.generate(torch.tensor([[7]]), max_new_tokens=2)[0, 0] == start


@pytest.mark.parametrize("pair", pairs())
def test_file_brings_back_what_was_saved(pair: Pair, tmp_path: pathlib.Path) -> None:
    config = pair.config(num_key_value_heads=1, scale_head=True)
    config.save_pretrained(tmp_path)
    again = RelPosSeq2SeqConfig.from_pretrained(tmp_path)
    assert again.to_dict() == {**config.to_dict(), "transformers_version": again.transformers_version}
    found, wanted = ([stack.to_dict() for stack in each.stacks()] for each in (again, config))
    assert found == wanted


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_t5_geometry(version: str) -> None:
    config = RelPosSeq2SeqConfig.t5(version, vocab_size=37, hidden_size=24, num_attention_heads=3, num_hidden_layers=2)
    model = RelPosSeq2SeqForConditionalGeneration(config)
    names = dict(model.named_parameters())
    assert not [name for name in names if "bias" in name and "position_schemes" not in name]
    assert sum("position_schemes" in name for name in names) == 2, "one set of buckets a stack"
    assert ("lm_head.weight" in names) == (version == "1.1")
    assert {layer.mlp.gate_proj is None for layer in model.model.decoder.layers} == {version == "1.0"}
    assert RelPosSeq2SeqConfig.t5(version, layer_norm_eps=1e-3).layer_norm_eps == 1e-3


def embeddings(model: Any) -> list[torch.Tensor]:
    """Of the encoder, of the decoder, and the head's."""
    stacks = (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens, model.lm_head)
    return [layer.weight for layer in stacks]


@pytest.mark.parametrize("tied", [True, False])
def test_shared_embeddings(tied: bool, tmp_path: pathlib.Path) -> None:
    """The stacks share their embeddings always, the head when asked; after a reload and after another size too."""
    model = ROPE.model(head=True, tie_word_embeddings=tied)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    for _ in range(2):
        encoder, decoder, head = embeddings(model)
        assert encoder is decoder and (head is encoder) == tied
        assert tied == torch.equal(head, encoder)
        model.save_pretrained(tmp_path)
        again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values())
        torch.testing.assert_close(embeddings(again), embeddings(model), rtol=0, atol=0)
        assert embeddings(again)[0] is embeddings(again)[1] and (embeddings(again)[2] is embeddings(again)[0]) == tied
        model.resize_token_embeddings(SIZES["vocab_size"] + 6)
        assert {len(weight) for weight in embeddings(model)} == {43} and model.config.vocab_size == 43
        assert model(torch.tensor([[42]]), labels=torch.tensor([[42]])).loss.isfinite()
        assert type(model)(model.config).lm_head.out_features == 43
    base = RelPosSeq2SeqModel.from_pretrained(tmp_path)
    assert base.encoder.embed_tokens.weight is base.decoder.embed_tokens.weight


def test_embeddings_of_another_size(tmp_path: pathlib.Path) -> None:
    model = ROPE.model(head=True, embedding_size=10)
    given = {"input_ids": ids_of(), "decoder_input_ids": ids_of(length=TARGET)}
    assert model.get_input_embeddings().embedding_dim == 10 and embeddings(model)[2] is embeddings(model)[0]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**given).logits, model(**given).logits, **EXACT)


def test_initial_weights() -> None:
    """Output projections shrink with three residuals a layer; T5's unscaled queries begin small on both sides."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 37, "pad_token_id": 0}
    model = RelPosSeq2SeqModel(RelPosSeq2SeqConfig(**sizes, position_scheme="t5"))
    layer, plain = model.decoder.layers[1], model.encoder.layers[1]
    for projection in layer.output_projections():
        assert abs(projection.weight.std() / (0.02 / 9**0.5) - 1) < 0.1
    assert abs(plain.mlp.down_proj.weight.std() / (0.02 / 6**0.5) - 1) < 0.1
    for projection in (*layer.query_projections(), *plain.query_projections()):
        assert abs(projection.weight.std() / (0.02 / 16**0.5) - 1) < 0.1
    assert len(layer.output_projections()) == 3 and len(layer.query_projections()) == 2
    assert model.encoder.embed_tokens.weight[0].any(), "the decoder begins with the padding token, which must learn"
