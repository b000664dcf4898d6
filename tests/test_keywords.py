"""Keyword arguments that other software hands on: ignored as in transformers, or refused where something else was meant."""

import inspect
import pathlib
import warnings
from typing import Any

import pytest
import torch
from matrix import SIZES
from matrix import Case
from matrix import ids_of
from matrix import sharpen
from transformers import DynamicCache
from transformers import EncoderDecoderCache
from transformers import LogitsProcessor

import hf_relpos
from hf_relpos.data.tokenizers import build_byte_tokenizer
from hf_relpos.model.forward_keywords import NAMES
from hf_relpos.model.forward_keywords import REPLACED
from hf_relpos.training.arguments import parse_arguments

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def decoder(scheme: str = "alibi", **fields: Any) -> Any:
    return Case("decoder", scheme, {}).model(head=True, **fields)


def encoder(**fields: Any) -> Any:
    return Case("encoder", "t5", {}).model(head=True, **fields)


def seq2seq(**fields: Any) -> Any:
    config = hf_relpos.RelPosSeq2SeqConfig.t5(**{**SIZES, **fields})
    return sharpen(hf_relpos.RelPosSeq2SeqForConditionalGeneration(config)).double().eval()


def test_names_are_those_of_all_forwards() -> None:
    """A new argument of a forward is protected from misspellings by its place in `NAMES`."""
    kinds = [getattr(hf_relpos, name) for name in hf_relpos.__all__ if name.startswith("RelPos") and "Config" not in name]
    named = {name for kind in kinds for name in inspect.signature(kind.forward).parameters}
    assert named - NAMES == {"self", "kwargs", "num_items_in_batch"}
    assert NAMES - named == {"past_key_values", "shift_labels", "encoder_hidden_states", "encoder_attention_mask"}


@pytest.mark.parametrize("model", [decoder, encoder, seq2seq], ids=lambda make: make.__name__)
def test_what_other_software_hands_on_is_ignored(model: Any) -> None:
    """Also what says nothing, by any name."""
    made, ids = model(), ids_of()
    given = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :4]} if model is seq2seq else {})
    handed = {
        "head_mask": None,
        "tokenizer": "any",
        "use_cache": False,
        "cache_position": torch.arange(11),
        "position_bias": None,
    }
    torch.testing.assert_close(made(**given, **handed).logits, made(**given).logits, **CLOSE)


@pytest.mark.parametrize(
    "name", ["atention_mask", "attention_masks", "position_id", "memmory", "reset_masks", "lables", "past_key_value"]
)
def test_misspellings_are_refused(name: str) -> None:
    for model in (decoder(), encoder()):
        with pytest.raises(TypeError, match=rf"forward got unknown arguments: {name} \(did you mean \w+\?\)"):
            model(ids_of(), **{name: torch.ones(2, 11)})


def test_what_another_model_takes_is_refused() -> None:
    """It would be forgotten: a decoder has no source, an encoder no cache."""
    states = torch.zeros(2, 3, SIZES["hidden_size"])
    with pytest.raises(TypeError, match="RelPosDecoderModel.forward got unknown arguments: encoder_hidden_states$"):
        decoder()(ids_of(), encoder_hidden_states=states)
    with pytest.raises(TypeError, match="RelPosEncoderModel.forward got unknown arguments: cache$"):
        encoder()(ids_of(), cache=DynamicCache())
    with pytest.raises(TypeError, match="RelPosEncoderModel.forward got unknown arguments: shift_labels$"):
        encoder()(ids_of(), shift_labels=ids_of())
    for model, causal in ((decoder(), True), (encoder(), False)):
        model(ids_of(), is_causal=causal)
        with pytest.raises(ValueError, match=f"is_causal={not causal} contradicts the model"):
            model(ids_of(), is_causal=not causal)


@pytest.mark.parametrize("name, successor", {"mems": "memory", "use_mems": "mem_len", "past_index": "mem_len"}.items())
def test_replaced_names_say_what_replaced_them(name: str, successor: str) -> None:
    model = decoder(mem_len=4)
    for call in (model, model.generate, encoder()):
        with pytest.raises(TypeError, match=f"takes no {name}; what replaced it is {successor}"):
            call(ids_of(), **{name: [torch.zeros(1)]})
    assert name in REPLACED


def test_replaced_arguments_of_a_run_say_what_replaced_them(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.yaml").write_text("past_index: 2")
    for argv in (["--past_index", "2"], [str(tmp_path / "run.yaml")]):
        with pytest.raises(ValueError, match="unknown argument 'past_index'; what replaced it is mem_len"):
            parse_arguments(argv)


class Saying(LogitsProcessor):
    """Makes a model say a text, whatever it has read."""

    def __init__(self, tokens: list[int], start: int) -> None:
        self.tokens, self.start = tokens, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = self.tokens[input_ids.shape[1] - self.start]
        return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([wanted]), 0)


@pytest.mark.parametrize("options", [{}, {"memory": True}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
def test_generation_stops_at_strings(options: dict[str, Any]) -> None:
    """`generate` needs the tokenizer for that, and hands it on to forward."""
    tokenizer = build_byte_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = decoder(mem_len=8, vocab_size=len(tokenizer), **special)
    prompt = tokenizer("begin", return_tensors="pt").input_ids
    begins = {**options, "memory": model.read(prompt)} if "memory" in options else options
    says = Saying(tokenizer("un caf\u00e9 noir, sans sucre").input_ids, prompt.shape[1])
    found = model.generate(
        prompt,
        max_new_tokens=15,
        do_sample=False,
        stop_strings=["\u00e9 n"],
        tokenizer=tokenizer,
        logits_processor=[says],
        **begins,
    )
    assert tokenizer.decode(found[0, prompt.shape[1] :], skip_special_tokens=True) == "un caf\u00e9 n"


def deprecations(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in seen if "past_key_values" in str(warning.message)]


def test_the_old_name_of_the_cache_warns() -> None:
    """Once, and names the method that was called."""
    ids, model, pair = ids_of(), decoder(), seq2seq()
    sources = {"input_ids": ids, "decoder_input_ids": ids[:, :2]}
    calls = {
        "RelPosDecoderForCausalLM.forward": lambda **cache: model(ids, **cache),
        "RelPosDecoderModel.forward": lambda **cache: model.model(ids, **cache),
        "RelPosSeq2SeqForConditionalGeneration.forward": lambda **cache: pair(**sources, **cache),
    }
    for name, call in calls.items():
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if "Seq2Seq" in name else DynamicCache()
        (message,) = deprecations(lambda call=call, cache=cache: call(past_key_values=cache))
        assert message == f"`past_key_values` is deprecated for `{name}`. Use `cache` instead."
        assert cache.get_seq_length() == (2 if "Seq2Seq" in name else 11)
        assert not deprecations(lambda call=call: call(past_key_values=None))


def test_both_names_of_the_cache() -> None:
    """The new one counts, but gives way where it is empty and the old one is not: so PEFT hands on a prefix."""
    model, ids = decoder(), ids_of()
    wanted = model(ids).logits[:, 6:]

    def filled() -> Any:
        return model(ids[:, :6], use_cache=True).cache

    for caches in (
        {"cache": DynamicCache(), "past_key_values": filled()},
        {"cache": filled(), "past_key_values": DynamicCache()},
    ):
        with pytest.warns(FutureWarning, match="Both are given; the one that holds tokens is used"):
            torch.testing.assert_close(model(ids[:, 6:], **caches).logits, wanted)
    with pytest.warns(FutureWarning, match="Both are given"):
        found = model(ids[:, 6:], cache=filled(), past_key_values=model(ids[:, 1:6], use_cache=True).cache)
    torch.testing.assert_close(found.logits, wanted)


@pytest.mark.parametrize("scheme", ["rope", "alibi"])
def test_prefix_tuning_generates_behind_its_prefix(scheme: str) -> None:
    peft = pytest.importorskip("peft")
    model = decoder(scheme, dtype=torch.float32)
    tuned = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    torch.nn.init.normal_(tuned.prompt_encoder["default"].embedding.weight, std=3)
    ids, options = ids_of(), {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)
        found = tuned.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        wanted = tuned(input_ids=found.sequences, attention_mask=torch.ones_like(found.sequences)).logits[:, 10:-1]
    torch.testing.assert_close(torch.stack(found.logits, 1), wanted, rtol=1e-4, atol=1e-4)
    assert (wanted - model(found.sequences).logits[:, 10:-1]).abs().max() > 0.1, "the prefix is read"
