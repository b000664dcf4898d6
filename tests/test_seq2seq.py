"""Encoder-decoders of every scheme: decoding with a cache, padding, backends, and what the two stacks share."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from matrix import BATCH
from matrix import SIZES
from matrix import ids_of
from pairs import EXACT
from pairs import SOURCE
from pairs import TARGET
from pairs import Pair
from pairs import pairs
from transformers import DynamicCache
from transformers import EncoderDecoderCache
from transformers import StaticCache

from hf_relpos import RelPosDecoderModel
from hf_relpos import RelPosEncoderModel
from hf_relpos.model import attention
from hf_relpos.model import blockwise_forward
from hf_relpos.model.attention import RelPosCrossAttention
from hf_relpos.model.position_builder import source_positions
from hf_relpos.model.position_tables import DistanceTables
from hf_relpos.model.scheme_registry import probabilities_reason

ROPE = Pair("rope", "rope")
PORTIONS = {"tokens": [1] * TARGET, "chunks": [3, 1, 2], "prompt": [4, 1, 1]}
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def inputs(padding: int = 0) -> dict[str, torch.Tensor]:
    """A source whose first row has padding on the left, and a target."""
    ids, mask = ids_of(length=SOURCE), torch.ones(BATCH, SOURCE, dtype=torch.long)
    mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids_of(length=TARGET, seed=1)}


def static_cache(model: Any) -> EncoderDecoderCache:
    config = model.config.get_text_config(decoder=True)
    return EncoderDecoderCache(*(StaticCache(config=config, max_cache_len=size) for size in (TARGET + 3, SOURCE)))


def decode(model: Any, given: dict[str, torch.Tensor], portions: list[int], cache: Any = None) -> torch.Tensor:
    """Hidden states of the target, portion by portion."""
    encoded = model.encoder(given["input_ids"], attention_mask=given["attention_mask"])
    states, start = [], 0
    for length in portions:
        output = model(
            attention_mask=given["attention_mask"],
            encoder_outputs=encoded,
            decoder_input_ids=given["decoder_input_ids"][:, start : start + length],
            cache=cache,
            use_cache=True,
        )
        states.append(output.last_hidden_state)
        cache, start = output.cache, start + length
    return torch.cat(states, 1)


@pytest.mark.parametrize("pair", pairs())
def test_decoding_equals_one_pass(pair: Pair) -> None:
    model, given = pair.model(), inputs(padding=3)
    wanted = model(**given, use_cache=False).last_hidden_state
    for portions in PORTIONS.values():
        torch.testing.assert_close(decode(model, given, portions), wanted, **EXACT)
        torch.testing.assert_close(decode(model, given, portions, static_cache(model)), wanted, **EXACT)


def assert_generates(pair: Pair, given: dict[str, Any]) -> None:
    """Greedy search, sampling and beams with a cache choose the tokens that full passes choose."""
    model = pair.model(head=True)
    start = torch.full((BATCH, 1), model.config.decoder_start_token_id)
    tokens = start
    for _ in range(GREEDY["max_new_tokens"]):
        logits = model(**given, decoder_input_ids=tokens, use_cache=False).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)

    def generate(**kwargs: Any) -> torch.Tensor:
        torch.manual_seed(5)
        return model.generate(**given, **{**GREEDY, **kwargs})

    assert torch.equal(generate(), tokens)
    assert torch.equal(generate(use_cache=False), tokens)
    assert torch.equal(generate(cache_implementation="static", disable_compile=True), tokens)
    for search in ({"do_sample": True, "top_k": 20}, {"num_beams": 3}):
        assert torch.equal(generate(**search), generate(**search, use_cache=False))


@pytest.mark.parametrize("pair", pairs())
def test_generate(pair: Pair) -> None:
    given = inputs(padding=2)
    del given["decoder_input_ids"]
    assert_generates(pair, given)


@pytest.mark.parametrize("source, target", [(7, 3), (2, 9), (1, 1), (9, 9)])
@pytest.mark.parametrize("pair", pairs())
def test_lengths(pair: Pair, source: int, target: int) -> None:
    """Any two lengths; what follows in the target changes nothing before it, all of the source matters."""
    model, ids, labels = pair.model(), ids_of(length=source), ids_of(length=target, seed=1)
    states = model(ids, decoder_input_ids=labels).last_hidden_state
    assert states.shape == (BATCH, target, SIZES["hidden_size"]) and states.isfinite().all()
    shorter = model(ids, decoder_input_ids=labels[:, : max(1, target - 1)]).last_hidden_state
    torch.testing.assert_close(states[:, : shorter.shape[1]], shorter, **EXACT)
    for place in (0, source - 1):
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 1) % SIZES["vocab_size"]
        assert (model(changed, decoder_input_ids=labels).last_hidden_state - states).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize("pair", pairs())
def test_padding_of_the_source(pair: Pair) -> None:
    """A batch of sources of different lengths, padded on either side, is read and answered as each alone."""
    model = pair.model(head=True)
    sources, target = [ids_of(1, 5, seed=1), ids_of(1, SOURCE, seed=2)], ids_of(length=TARGET, seed=3)
    alone = [model(source, decoder_input_ids=target[row : row + 1]).logits for row, source in enumerate(sources)]
    answers = {beams: [model.generate(source, num_beams=beams, **GREEDY) for source in sources] for beams in (1, 2)}
    for side in ("left", "right"):
        ids, mask = torch.zeros(2, SOURCE, dtype=torch.long), torch.zeros(2, SOURCE, dtype=torch.long)
        for row, source in enumerate(sources):
            length = source.shape[1]
            place = slice(SOURCE - length, None) if side == "left" else slice(length)
            ids[row, place], mask[row, place] = source[0], 1
        together = model(ids, attention_mask=mask, decoder_input_ids=target).logits
        torch.testing.assert_close(together, torch.cat(alone), **EXACT)
        for beams, wanted in answers.items():
            assert torch.equal(model.generate(ids, attention_mask=mask, num_beams=beams, **GREEDY), torch.cat(wanted))


@pytest.mark.parametrize("pair", pairs())
def test_padding_of_the_target(pair: Pair) -> None:
    model, given = pair.model(), inputs()
    mask = torch.ones(BATCH, TARGET, dtype=torch.long)
    mask[:, :2] = 0
    found = model(**given, decoder_attention_mask=mask).last_hidden_state[:, 2:]
    given["decoder_input_ids"] = given["decoder_input_ids"][:, 2:]
    torch.testing.assert_close(found, model(**given).last_hidden_state, **EXACT)


@pytest.mark.parametrize("pair", pairs())
def test_stacks_are_those_of_the_other_families(pair: Pair) -> None:
    """The encoder is an encoder; a decoder that takes nothing from its source is a decoder."""
    model, given = pair.model(), inputs(padding=3)
    encoder, decoder = model.config.stacks()
    alone = RelPosEncoderModel(encoder).double().eval()
    alone.load_state_dict(model.encoder.state_dict())
    wanted = alone(given["input_ids"], attention_mask=given["attention_mask"]).last_hidden_state
    found = model(**given)
    assert torch.equal(found.encoder_last_hidden_state, wanted)
    alone = RelPosDecoderModel(decoder).double().eval()
    weights = {name: weight for name, weight in model.decoder.state_dict().items() if ".cross_" not in name}
    alone.load_state_dict(weights)
    wanted = alone(given["decoder_input_ids"]).last_hidden_state
    assert not torch.allclose(found.last_hidden_state, wanted)
    for layer in model.decoder.layers:
        torch.nn.init.zeros_(layer.cross_attention.o_proj.weight)
    torch.testing.assert_close(model(**given).last_hidden_state, wanted, **EXACT)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Run flex attention as it is written: compiling for a processor takes minutes and is not what is tested here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def needs_probabilities(pair: Pair) -> bool:
    return any(probabilities_reason(stack) is not None for stack in pair.config().stacks())


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore::DeprecationWarning")
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("scaling", [1.0, 6**-0.5])
def test_cross_attention_by_hand(implementation: str, scaling: float) -> None:
    """Softmax over the visible tokens of the source, pair by pair, keys and values shared by two heads each."""
    fields = {"num_attention_heads": 4, "head_dim": 6, "num_key_value_heads": 2, "attention_bias": True}
    config = ROPE.config(**fields, attn_implementation=implementation).stacks()[1]
    layer = RelPosCrossAttention(config, 0).double()
    queries, source = torch.randn(2, 3, 24, dtype=torch.double), torch.randn(2, 5, 24, dtype=torch.double)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    with torch.no_grad():
        found = layer(queries, source, DistanceTables(source_positions(3, source, mask)), scaling)[0]
    projected = layer.q_proj(queries), layer.k_proj(source), layer.v_proj(source)
    q, k, v = (part.unflatten(-1, (-1, 6)) for part in projected)
    wanted = torch.zeros(2, 3, 4, 6, dtype=torch.double)
    for b, i, h in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        seen = [j for j in range(5) if mask[b, j]]
        weights = torch.stack([scaling * (q[b, i, h] * k[b, j, h // 2]).sum() for j in seen]).softmax(0)
        wanted[b, i, h] = sum(weight * v[b, j, h // 2] for weight, j in zip(weights, seen, strict=True))
    torch.testing.assert_close(found, layer.o_proj(wanted.flatten(2)), **EXACT)


@pytest.mark.parametrize("pair", pairs())
def test_sdpa(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states and every gradient, with norms before and after; dense, and blockwise wherever it can."""
    monkeypatch.setattr(blockwise_forward, "BLOCK", 4)
    monkeypatch.setattr(attention, "MIN_PAIRS", 0)
    for position in ("pre", "post"):
        results = []
        for implementation, path in (("eager", "auto"), ("sdpa", "dense"), ("sdpa", "auto")):
            model = pair.model(norm_position=position, attn_implementation=implementation, attention_path=path)
            states = model(**inputs(padding=3), use_cache=False).last_hidden_state
            results.append((states, *torch.autograd.grad(states.square().sum(), list(model.parameters()))))
        for found in results[1:]:
            torch.testing.assert_close(found, results[0], rtol=1e-8, atol=1e-8)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore::DeprecationWarning")
@pytest.mark.parametrize("pair", [given for given in pairs() if not needs_probabilities(given.values[0])])
@torch.no_grad()
def test_flex_attention(pair: Pair) -> None:
    given = inputs(padding=3)
    found = decode(pair.model(attn_implementation="flex_attention"), given, PORTIONS["prompt"])
    torch.testing.assert_close(found, pair.model()(**given).last_hidden_state, **EXACT)


def test_backend_is_set_for_both_stacks() -> None:
    model = ROPE.model(attn_implementation=None)
    stacks = (model, model.encoder, model.decoder)
    assert {stack.config._attn_implementation for stack in stacks} == {"sdpa"}
    model.set_attn_implementation("eager")
    assert {stack.config._attn_implementation for stack in stacks} == {"eager"}
    shaw = Pair("shaw", "rope")
    assert shaw.model(attn_implementation=None).config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="'flex_attention' cannot do this scheme: shaw adds vectors to the values"):
        shaw.model(attn_implementation="flex_attention")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_source_without_tokens(implementation: str) -> None:
    given = inputs()
    given["attention_mask"] = torch.zeros(BATCH, SOURCE, dtype=torch.long)
    assert ROPE.model(attn_implementation=implementation)(**given).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("pair", pairs())
def test_attentions_and_hidden_states(pair: Pair) -> None:
    model, given = pair.model(head=True), inputs(padding=3)
    output = model(**given, output_attentions=True, output_hidden_states=True)
    shapes = {
        "encoder_attentions": (2, (BATCH, 3, SOURCE, SOURCE)),
        "decoder_attentions": (3, (BATCH, 3, TARGET, TARGET)),
        "cross_attentions": (3, (BATCH, 3, TARGET, SOURCE)),
        "encoder_hidden_states": (3, (BATCH, SOURCE, 24)),
        "decoder_hidden_states": (4, (BATCH, TARGET, 24)),
    }
    for name, (count, shape) in shapes.items():
        assert len(output[name]) == count and all(part.shape == shape for part in output[name]), name
        if "attentions" in name:
            torch.testing.assert_close(output[name][0].sum(-1), torch.ones(shape[:-1], dtype=torch.double), **EXACT)
    assert not output.cross_attentions[0][0, ..., :3].any(), "padding is not attended to"
    assert torch.equal(output.encoder_hidden_states[-1], output.encoder_last_hidden_state)
    plain = model(**given)
    assert torch.equal(output.logits, plain.logits) and not {*shapes} & {*plain}
    generated = model.generate(given["input_ids"], output_attentions=True, return_dict_in_generate=True, num_beams=2, **GREEDY)
    assert generated.cross_attentions[0][0].shape == (2 * BATCH, 3, 1, SOURCE)


def test_embeddings_in_the_place_of_ids() -> None:
    model, given = ROPE.model(head=True), inputs(padding=3)
    embed = model.get_input_embeddings()
    found = model(
        inputs_embeds=embed(given["input_ids"]),
        attention_mask=given["attention_mask"],
        decoder_inputs_embeds=embed(given["decoder_input_ids"]),
    ).logits
    assert torch.equal(found, model(**given).logits)
    encoded = model.get_encoder()(given["input_ids"], attention_mask=given["attention_mask"])
    for outputs in (encoded, encoded.to_tuple()):
        rest = {name: value for name, value in given.items() if name != "input_ids"}
        assert torch.equal(model(encoder_outputs=outputs, **rest).logits, found)


def test_names_and_kinds_of_cache() -> None:
    model, given = ROPE.model(head=True), inputs()
    wanted = model(**given, use_cache=False)
    first, rest = given["decoder_input_ids"][:, :4], given["decoder_input_ids"][:, 4:]
    cache = model(**{**given, "decoder_input_ids": first}, cache=DynamicCache()).cache
    assert isinstance(cache, EncoderDecoderCache) and wanted.cache is None
    later = {**given, "decoder_input_ids": rest, "past_key_values": cache}
    torch.testing.assert_close(model(**later).logits, wanted.logits[:, 4:], **EXACT)
    assert model(**given, labels=given["decoder_input_ids"]).cache is None, "a loss needs no cache"
    with pytest.raises(ValueError, match="the cache holds a batch of 2, the input a batch of 1"):
        model(**{name: value[:1] for name, value in later.items() if name != "past_key_values"}, cache=cache)
    with pytest.raises(TypeError, match="got unknown arguments: memory"):
        model(**given, memory=torch.zeros(2))


def test_a_given_cache_is_read_whatever_use_cache_says() -> None:
    model, given = ROPE.model(), inputs()
    wanted = model(**given, use_cache=False).last_hidden_state[:, 4:]
    parts = [given | {"decoder_input_ids": given["decoder_input_ids"][:, part]} for part in (slice(0, 4), slice(4, None))]
    cache = model(**parts[0], use_cache=True).cache
    found = model(**parts[1], cache=cache, use_cache=False)
    torch.testing.assert_close(found.last_hidden_state, wanted, **EXACT)
    assert found.cache is None, "none was asked for"


def test_targets_that_do_not_fit_are_refused() -> None:
    given = inputs()
    model = ROPE.model(head=True, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="the source has a batch of 2, the target a batch of 1"):
        model(given["input_ids"], decoder_input_ids=given["decoder_input_ids"][:1])
    with pytest.raises(ValueError, match=r"labels of shape .* are refused: expected whole numbers of shape"):
        model(given["input_ids"], decoder_input_ids=given["decoder_input_ids"], labels=given["decoder_input_ids"][:, 1:])


def test_logits_to_keep() -> None:
    model, given = ROPE.model(head=True), inputs()
    logits = model(**given).logits
    assert torch.equal(model(**given, logits_to_keep=2).logits, logits[:, -2:])
    assert torch.equal(model(**given, logits_to_keep=torch.tensor([0, 4])).logits, logits[:, [0, 4]])


def test_mask_of_four_dimensions_and_token_types() -> None:
    """What no token of the source sees is not attended to; token types enter the encoder alone."""
    model, given = ROPE.model(type_vocab_size=2), inputs(padding=3)
    wanted = model(**given).last_hidden_state
    four = given["attention_mask"].bool()[:, None, None].expand(-1, -1, SOURCE, -1)
    torch.testing.assert_close(model(**{**given, "attention_mask": four}).last_hidden_state, wanted, **EXACT)
    types = torch.zeros(BATCH, SOURCE, dtype=torch.long)
    assert torch.equal(model(**given, token_type_ids=types).last_hidden_state, wanted)
    assert not torch.allclose(model(**given, token_type_ids=types + 1).last_hidden_state, wanted)
    with pytest.raises(ValueError, match="attention_mask covers 4 tokens, expected 9"):
        model(**{**given, "attention_mask": torch.ones(BATCH, 4)})
