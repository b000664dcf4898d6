"""lm-evaluation-harness: its numbers are those of plain passes, over windows as long as the scheme allows."""

from typing import Any

import pytest
import torch
from client_models import DECODERS_AND_LLAMA
from client_models import Kind
from client_models import asks_of
from matrix import Case

from hf_relpos.data.tokenizers import build_byte_tokenizer

asks = asks_of("lm_eval")
pytestmark = pytest.mark.clients
BOUND = 16
TOKENIZER = build_byte_tokenizer()
FIELDS = {"vocab_size": len(TOKENIZER), "eos_token_id": TOKENIZER.eos_token_id, "pad_token_id": TOKENIZER.pad_token_id}
PAIRS = [("The capital of France is", " Paris"), ("2+2=", "4"), ("a longer context, so that rows are padded", " end")]
TEXTS = ["A text of more than one window, which is read from its first token to its last one.", "short"]


def client(model: Any, **settings: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=TOKENIZER, **{"batch_size": 2, **settings})


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def make(kind: Kind) -> Any:
    return kind.model("AutoModelForCausalLM", dtype=torch.float32, **FIELDS)


@torch.no_grad()
def score(model: Any, context: list[int], wanted: list[int]) -> tuple[float, bool]:
    """Return the log-probability of tokens behind others, by one pass, and whether each is the likeliest."""
    ids = torch.tensor([context + wanted])
    found = model(ids[:, :-1], use_cache=False).logits[0, len(context) - 1 :].float().log_softmax(-1)
    targets = ids[0, len(context) :]
    return float(found.gather(-1, targets[:, None]).sum()), bool((found.argmax(-1) == targets).all())


@asks("loglikelihood of continuations, in padded batches, as by one pass")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_continuations(kind: Kind) -> None:
    pytest.importorskip("lm_eval")
    model = make(kind)
    found = client(model).loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    wanted = [score(model, *(TOKENIZER(text).input_ids for text in pair)) for pair in PAIRS]
    for (number, greedy), (value, likeliest) in zip(found, wanted, strict=True):
        assert number == pytest.approx(value, abs=1e-3) and greedy == likeliest


@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
@pytest.mark.parametrize(
    "window",
    [
        pytest.param(BOUND, marks=asks("loglikelihood_rolling in windows (`max_length`), as by passes over them")),
        pytest.param(None, marks=asks("loglikelihood_rolling of a text longer than trained, as by one pass")),
    ],
)
def test_rolling(kind: Kind, window: int | None, record_property: Any) -> None:
    """A window sees the token before its first target; the last one, which is shorter, is filled up with earlier tokens."""
    pytest.importorskip("lm_eval")
    bound = {} if window else {"max_position_embeddings": BOUND}
    model = kind.model("AutoModelForCausalLM", dtype=torch.float32, **FIELDS, **bound)
    harness = client(model, max_length=window)
    found = harness.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in TEXTS]), disable_tqdm=True)
    for text, number in zip(TEXTS, found, strict=True):
        tokens = [harness.prefix_token_id, *TOKENIZER(text).input_ids]
        size, total = window or len(tokens), 0.0
        for start in range(1, len(tokens), size):
            stop = min(start + size, len(tokens))
            total += score(model, tokens[max(0, stop - size - 1) : start], tokens[start:stop])[0]
        if kind.peer and not window and number != pytest.approx(total, abs=1e-2):
            record_property("says", f"in windows of its max_position_embeddings, {BOUND}")
        else:
            assert number == pytest.approx(total, abs=1e-2)


@asks("generate_until, as plain greedy generation up to a string")
@pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)
def test_generation(kind: Kind) -> None:
    pytest.importorskip("lm_eval")
    model = make(kind)
    context = PAIRS[0][0]
    ids = TOKENIZER(context, return_tensors="pt").input_ids
    plain = TOKENIZER.decode(
        model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :], skip_special_tokens=True
    )
    harness, asked = client(model), [(context, {"until": ["\n\n\n"], "max_gen_toks": 12, "do_sample": False})]
    assert harness.generate_until(requests("generate_until", asked), disable_tqdm=True) == [plain]
    stop = plain[4]
    asked = [(text, {"until": [stop], "max_gen_toks": 12, "do_sample": False}) for text in (context, PAIRS[1][0])]
    assert harness.generate_until(requests("generate_until", asked), disable_tqdm=True)[0] == plain[: plain.index(stop)]


@pytest.mark.parametrize("scheme, window", [("alibi", None), ("learned_absolute", BOUND)])
@pytest.mark.row("lm_eval", "window: none where no scheme is bounded, else the bound", kind="decoder alibi, learned_absolute")
def test_window(scheme: str, window: int | None) -> None:
    pytest.importorskip("lm_eval")
    model = Case("decoder", scheme, {}).model(head=True, max_position_embeddings=BOUND, dtype=torch.float32, **FIELDS)
    harness = client(model)
    assert harness.max_length == (window or harness._DEFAULT_MAX_LENGTH)
