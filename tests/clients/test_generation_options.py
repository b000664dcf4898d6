"""`generate` with every option of `GenerationConfig`: with a cache it gives what full passes give, or it says what to use instead.

A full pass for each token, `use_cache=False`, keeps nothing between tokens; that it is right is shown elsewhere.
"""

from functools import lru_cache
from typing import Any

import pytest
import torch
from client_models import DECODERS
from client_models import DECODERS_AND_LLAMA
from client_models import Kind
from client_models import asks_of
from matrix import ids_of
from matrix import sharpen
from transformers import AutoModelForCausalLM
from transformers import CompileConfig
from transformers import GenerationConfig
from transformers import SynthIDTextWatermarkingConfig
from transformers import WatermarkingConfig

from hf_relpos.data.tokenizers import build_byte_tokenizer

asks = asks_of("transformers: generate", package="transformers")
SAMPLE = {"do_sample": True, "top_k": 0}
BEAMS = {"num_beams": 3}
ENDS = [5, 6, 7, 8, 9, 10]
STATIC = {"cache_implementation": "static"}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "max_length": {"max_new_tokens": None, "max_length": 17},
    "max_time": {"max_time": 1000.0},
    "min_length, eos_token_id (several)": {"min_length": 15, "eos_token_id": ENDS},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": ENDS},
    "do_sample": {"do_sample": True},
    "temperature": SAMPLE | {"temperature": 0.7},
    "top_k": {"do_sample": True, "top_k": 5},
    "top_p": SAMPLE | {"top_p": 0.8},
    "min_p": SAMPLE | {"min_p": 0.1},
    "top_h": SAMPLE | {"top_h": 0.4},
    "typical_p": SAMPLE | {"typical_p": 0.7},
    "epsilon_cutoff": SAMPLE | {"epsilon_cutoff": 0.02},
    "eta_cutoff": SAMPLE | {"eta_cutoff": 0.02},
    "renormalize_logits": SAMPLE | {"renormalize_logits": True, "top_p": 0.8},
    "num_return_sequences": SAMPLE | {"num_return_sequences": 3},
    "num_beams": BEAMS,
    "num_beams, length_penalty, early_stopping": BEAMS
    | {"num_return_sequences": 2, "length_penalty": 2.0, "early_stopping": True, "eos_token_id": [5, 6]},
    "early_stopping='never'": BEAMS | {"early_stopping": "never", "eos_token_id": 5},
    "num_beams, do_sample": BEAMS | {"do_sample": True},
    "low_memory": {"low_memory": True},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[5], [6, 7]]},
    "sequence_bias": {"sequence_bias": [[[5], 9.0]]},
    "forced_bos_token_id": {"forced_bos_token_id": 5},
    "forced_eos_token_id": {"forced_eos_token_id": 5},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 5},
    "suppress_tokens": {"suppress_tokens": [5, 6]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [5, 6]},
    "guidance_scale": {"guidance_scale": 1.5},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "watermarking_config (SynthID)": SAMPLE
    | {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3, 4], ngram_len=3)},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
    "cache_implementation='dynamic'": {"cache_implementation": "dynamic"},
    "cache_implementation='static'": STATIC,
    "cache_implementation='static', num_beams": STATIC | BEAMS,
    "cache_implementation='static', num_return_sequences": STATIC | SAMPLE | {"num_return_sequences": 2},
    "cache_implementation='static', max_cache_len": STATIC | {"max_cache_len": 40},
    "cache_implementation='static', prefill_chunk_size": STATIC | {"prefill_chunk_size": 4},
    "cache_implementation='sliding_window', 'hybrid' (old names)": {"cache_implementation": "hybrid"},
}
CACHES = {"cache_implementation", "max_cache_len", "prefill_chunk_size"}
"""What has no meaning without a cache."""


def options(given: dict[str, Any]) -> list[Any]:
    """Return parameters `kind` and `given`.

    By default memory, in a window that slides, runs, and with static caches every kind; the rest is for the table.
    """
    found = []
    for name, fields in given.items():
        for param in DECODERS_AND_LLAMA:
            quick = param.values[0] is DECODERS["memory"] or "static" in name
            marks = [asks(name)] if quick else [asks(name), pytest.mark.clients]
            found.append(pytest.param(param.values[0], fields, id=f"{param.id}-{name}", marks=marks))
    return found


@lru_cache
def model_of(kind: Kind) -> Any:
    return kind.model("AutoModelForCausalLM")


def padded() -> dict[str, torch.Tensor]:
    """Return two prompts of which one is padded on the left."""
    ids = ids_of()
    ids[0, :3] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def generate(kind: Kind, inputs: dict[str, torch.Tensor], **given: Any) -> Any:
    model = model_of(kind)
    torch.manual_seed(0)
    fixed = {
        "max_new_tokens": 6,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_scores": True,
    }
    return model.generate(**inputs, **{**fixed, **given})


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)  # `generate` hands on logits in single precision


def same(found: Any, wanted: Any) -> None:
    """Compare tokens, logits and scores of two outputs."""
    assert found.sequences.tolist() == wanted.sequences.tolist()
    close(found.logits, wanted.logits)
    close(found.scores, wanted.scores)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind, given", options(OPTIONS))
def test_an_option_gives_what_full_passes_give(kind: Kind, given: dict[str, Any]) -> None:
    full = {name: value for name, value in given.items() if name not in CACHES}
    same(generate(kind, padded(), **given), generate(kind, padded(), use_cache=False, **full))


def assistant(kind: Kind) -> Any:
    """Return a model whose drafts are mostly wrong."""
    return sharpen(AutoModelForCausalLM.from_config(kind.config()), seed=1).double().eval()


DRAFTS: dict[str, dict[str, Any]] = {
    "prompt_lookup_num_tokens, max_matching_ngram_size": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
    "assistant_model": {"assistant_model": assistant},
    "assistant_model, do_sample": {"assistant_model": assistant, "do_sample": True, "top_k": 1},
    "num_assistant_tokens, its schedule, assistant_confidence_threshold": {
        "assistant_model": assistant,
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    },
    "assistant_early_exit": {"assistant_early_exit": 1},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind, given", options(DRAFTS))
def test_drafts_change_no_token(kind: Kind, given: dict[str, Any]) -> None:
    made = {name: value(kind) if callable(value) else value for name, value in given.items()}
    found = generate(kind, {"input_ids": ids_of(1)}, max_new_tokens=10, **made)
    assert found.sequences.tolist() == generate(kind, {"input_ids": ids_of(1)}, max_new_tokens=10).sequences.tolist()


@asks("assistant_ensemble_weight")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_an_ensemble_with_its_assistant(kind: Kind) -> None:
    """It is meant to choose other tokens at times."""
    given = {"assistant_model": assistant(kind), "assistant_ensemble_weight": 0.5, "do_sample": True}
    found = generate(kind, {"input_ids": ids_of(1)}, **given)
    assert found.sequences.shape == (1, 17)


@asks("output_attentions, output_hidden_states")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_attentions_and_hidden_states_are_those_of_one_pass(kind: Kind) -> None:
    """Of each new token's step: its row of the probabilities, over the keys that the cache still has."""
    model = kind.model("AutoModelForCausalLM", attn_implementation="eager")
    asked = {"output_attentions": True, "output_hidden_states": True}
    out = model.generate(ids_of(), max_new_tokens=4, do_sample=False, return_dict_in_generate=True, **asked)
    whole = model(out.sequences[:, :-1], use_cache=False, **asked)
    for step in range(4):
        row = 10 + step
        for layer in range(2):
            found = out.attentions[step][layer][:, :, -1]
            close(found, whole.attentions[layer][:, :, row, : row + 1][..., -found.shape[-1] :])
        for found, wanted in zip(out.hidden_states[step], whole.hidden_states, strict=True):
            close(found[:, -1], wanted[:, row])


@asks("stop_strings")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_stop_strings(kind: Kind) -> None:
    tokenizer = build_byte_tokenizer()
    free = generate(kind, {"input_ids": ids_of(1)}).sequences[0].tolist()
    last = tokenizer.decode(free[13])
    out = generate(kind, {"input_ids": ids_of(1)}, stop_strings=[last], tokenizer=tokenizer).sequences[0].tolist()
    assert out == free[: 12 + free[11:].index(free[13])]


@asks("token_healing")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_token_healing(kind: Kind) -> None:
    """Bytes begin no longer token, so that nothing is healed."""
    tokenizer = build_byte_tokenizer()
    model = kind.model("AutoModelForCausalLM", vocab_size=len(tokenizer))
    tokenizer.padding_side = "left"
    ids = tokenizer(["some text", "another"], return_tensors="pt", padding=True)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "pad_token_id")}
    options = {"max_new_tokens": 4, "do_sample": False, **special}
    found = model.generate(**ids, token_healing=True, tokenizer=tokenizer, **options)
    assert found.tolist() == model.generate(**ids, **options).tolist()


MOVED = {
    "penalty_alpha (contrastive search)": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "num_beam_groups, diversity_penalty": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constraints, force_words_ids": {"force_words_ids": [[5]], "num_beams": 3},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind, given", options(MOVED))
def test_what_left_transformers_is_named(kind: Kind, given: dict[str, Any], record_property: Any) -> None:
    with pytest.raises(ValueError, match="requires `trust_remote_code=True` .* loads https://hf.co/transformers-community/"):
        generate(kind, padded(), **given)
    record_property("says", "refused by transformers: its code is now in a repository of transformers-community on the Hub")


@asks("use_mtp")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_no_layers_predict_several_tokens(kind: Kind, record_property: Any) -> None:
    with pytest.raises(ValueError, match="num_mtp_layers"):
        generate(kind, {"input_ids": ids_of(1)}, use_mtp=True)
    record_property("says", "refused by transformers: the model has no layers for it")


@asks("cache_implementation='offloaded', 'offloaded_static'")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_offloaded_caches_need_an_accelerator(kind: Kind, record_property: Any) -> None:
    if torch.cuda.is_available():
        wanted = generate(kind, padded()).sequences.tolist()
        model_of(kind).to("cuda")
        on_device = {name: value.to("cuda") for name, value in padded().items()}
        for name in ("offloaded", "offloaded_static"):
            assert generate(kind, on_device, cache_implementation=name).sequences.tolist() == wanted
        model_of(kind).to("cpu")
        return
    with pytest.raises(AssertionError, match="not compiled with CUDA"):
        generate(kind, padded(), cache_implementation="offloaded")
    record_property("says", "needs an accelerator: torch ends it without one")


@pytest.mark.row("optimum-quanto", "generate, cache_implementation='quantized'")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_a_quantised_cache(kind: Kind, record_property: Any) -> None:
    """Four bits move the logits a little; the window of a memory is refused by the cache itself."""
    given = {"cache_implementation": "quantized", "cache_config": {"nbits": 4, "q_group_size": 3, "residual_length": 2}}
    if kind is DECODERS["memory"]:
        with pytest.raises(ValueError, match="only supported for models with only full attention layers"):
            generate(kind, padded(), **given)
        record_property("says", "refused by transformers: only caches that keep all keys")
        return
    found, wanted = generate(kind, padded(), **given).logits[1], generate(kind, padded()).logits[1]
    assert 0 < (found - wanted).abs().max() < 0.3 * wanted.abs().max()


@pytest.mark.clients
@asks("compile_config, disable_compile (static cache, inductor)")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_a_compiled_step(kind: Kind) -> None:
    """In one graph, which is built for the first step and serves the others."""
    compile_config: Any = CompileConfig(fullgraph=True, mode="default")
    compile_config._compile_all_devices = True
    found = generate(kind, padded(), compile_config=compile_config, **STATIC)
    same(found, generate(kind, padded(), disable_compile=True, **STATIC))
    model_of.cache_clear()


ELSEWHERE = {
    "use_cache": "every row",
    "cache_config": "the quantised cache",
    "stop_strings": "test_stop_strings",
    "compile_config": "test_a_compiled_step",
    "disable_compile": "test_a_compiled_step",
    "token_healing": "test_token_healing",
    "use_mtp": "test_no_layers_predict_several_tokens",
    "assistant_ensemble_weight": "test_an_ensemble_with_its_assistant",
    "output_attentions": "test_attentions_and_hidden_states_are_those_of_one_pass",
    "output_hidden_states": "test_attentions_and_hidden_states_are_those_of_one_pass",
    "output_scores": "every row",
    "output_logits": "every row",
    "return_dict_in_generate": "every row",
    "pad_token_id": "every row: from the configuration",
    "bos_token_id": "from the configuration",
    "is_assistant": "set by generate for an assistant",
    "assistant_lookbehind": "only for an assistant with another tokenizer, which reads text",
    "target_lookbehind": "likewise",
    "speculation_type": "dflash needs a draft model of its own kind",
    "constraints": "as force_words_ids",
    "continuous_batching_config": "continuous batching is refused",
    "decoder_start_token_id": "encoder-decoders",
    "encoder_no_repeat_ngram_size": "encoder-decoders",
    "transformers_version": "no option",
}


def test_every_option_is_tried_or_has_its_reason() -> None:
    tried = {name for table in (OPTIONS, DRAFTS, MOVED) for fields in table.values() for name in fields}
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert known <= tried | ELSEWHERE.keys(), "a new option of transformers"
