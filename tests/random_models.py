"""Random configurations of all families, and what must hold of a model of each; `test_properties.py` tries some hundred of them.

    python tests/random_models.py --examples 10000 --seed 0        # make properties: the long run, which writes the page

Most draws are sensible, some are not: an odd head size, a head count that divides nothing, a parameter beyond its bounds, a scheme
where it has no meaning, fields that exclude each other.
"""

import argparse
import platform
import random
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from matrix import sharpen
from tqdm import tqdm

from hf_relpos import SCHEMES
from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderForMaskedLM
from hf_relpos import RelPosSeq2SeqConfig
from hf_relpos import RelPosSeq2SeqForConditionalGeneration
from hf_relpos.model.scheme_base import ParameterSpec
from hf_relpos.model.scheme_registry import scheme_class

FAMILIES: dict[str, tuple[Any, Any]] = {
    "decoder": (RelPosDecoderConfig, RelPosDecoderForCausalLM),
    "encoder": (RelPosEncoderConfig, RelPosEncoderForMaskedLM),
    "seq2seq": (RelPosSeq2SeqConfig, RelPosSeq2SeqForConditionalGeneration),
}
COMBINED = (
    "rope+alibi",
    "rope+t5",
    "xpos+kerple",
    "rope+fox",
    "alibi+rope",
    "rope+rope",
    "shaw+rope",
    "t5+alibi",
    "pope+cable",
)
REFUSALS = (ValueError, StrictDataclassError)
"""How a configuration without meaning ends; the second is transformers' own, for a value of another type."""
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "properties.md"
LENGTH, CUT = 13, 8
CLOSE = {"rtol": 1e-7, "atol": 1e-8}


def draw_value(spec: ParameterSpec, rng: random.Random) -> Any:
    """Draw a value of a parameter: mostly one that is allowed and small, rarely one at or beyond a bound."""
    if spec.choices is not None:
        return rng.choice([*spec.choices, *(["no such choice"] if rng.random() < 0.02 else [])])
    if spec.optional and rng.random() < 0.3:
        return None
    low = 1 if spec.minimum is None else spec.minimum
    high = low + 30 if spec.maximum is None else spec.maximum
    if rng.random() < 0.02:
        return rng.choice([low - 1, high + 1, 1e18, "many", float("nan"), -1])
    return rng.randint(int(low), int(min(high, low + 30))) if spec.kind is int else rng.uniform(low, min(high, low + 30.0))


def draw_parameters(scheme: str, rng: random.Random) -> dict[str, Any]:
    """Draw some parameters of a scheme."""
    specs = scheme_class(scheme).parameter_specs
    return {name: draw_value(spec, rng) for name, spec in specs.items() if rng.random() < 0.4}


def draw_scheme(layers: int, rng: random.Random) -> tuple[Any, Any]:
    """Draw `position_scheme` and `position_parameters`: one scheme, a combination, or one a layer."""
    kind = rng.random()
    if kind < 0.15:
        name = rng.choice(COMBINED)
        return name, {part: draw_parameters(part, rng) for part in name.split("+") if rng.random() < 0.5}
    if kind < 0.3:
        names = [rng.choice(list(SCHEMES)) for _ in range(layers + (rng.random() < 0.05))]
        return names, {name: draw_parameters(name, rng) for name in names if rng.random() < 0.5}
    name = rng.choice([*SCHEMES, *(["no_such_scheme"] if rng.random() < 0.05 else [])])
    return name, draw_parameters(name, rng) if name in SCHEMES else {}


def draw_fields(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw a family and the fields of its configuration."""
    family, layers = rng.choice(list(FAMILIES)), rng.randint(1, 3)
    heads = rng.choice([1, 2, 3, 4])
    scheme, parameters = draw_scheme(layers, rng)
    fields: dict[str, Any] = {
        "vocab_size": 30,
        "hidden_size": heads * rng.choice([4, 6, 8]) + (rng.random() < 0.05),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": rng.choice([None, 10]),
        "max_position_embeddings": rng.choice([16, 40]),
        "position_scheme": scheme,
        "position_parameters": parameters,
    }
    fields |= {"pad_token_id": 0, "bos_token_id": 1} if family == "seq2seq" or rng.random() < 0.3 else {}
    sometimes = {
        "num_key_value_heads": lambda: rng.choice([1, 2, heads]),
        "head_dim": lambda: rng.choice([2, 3, 5, 8]),
        "gated_mlp": lambda: True,
        "norm_position": lambda: rng.choice(["pre", "post", "post", "between"]),
        "norm_type": lambda: "rms_norm",
        "final_norm": lambda: False,
        "embedding_norm": lambda: rng.choice([True, "before_projection"]),
        "embedding_size": lambda: rng.choice([6, 12]),
        "scale_embedding": lambda: True,
        "classifier_pooling": lambda: "cls",
        "lm_head_bias": lambda: True,
        "lm_head_dense": lambda: True,
        "reuse_len": lambda: 3,
        "parallel_residual": lambda: True,
        "attention_bias": lambda: True,
        "share_positions": lambda: rng.choice(["model", "model", "model", "nobody"]),
        "attention_path": lambda: "dense",
        "tie_word_embeddings": lambda: False,
        "type_vocab_size": lambda: 2,
        "hidden_act": lambda: rng.choice(["relu", "silu", "silu", "no_such_act"]),
        "mem_len": lambda: rng.choice([1, 5, 9, 9, -1]),
        "sliding_window": lambda: rng.choice([None, 1, 4, 10]),
        "cutoffs": lambda: rng.choice([[10], [10, 20], [40]]),
        "query_stream": lambda: True,
    }
    own = {"mem_len": ("decoder", "encoder"), "sliding_window": ("decoder",), "cutoffs": ("decoder",), "query_stream": ("encoder",),
           "classifier_pooling": ("encoder",), "reuse_len": ("encoder",), "lm_head_bias": ("decoder",), "lm_head_dense": ("decoder",)}  # fmt: skip
    for name, draw in sometimes.items():
        if family in own.get(name, FAMILIES) and rng.random() < 0.08:
            fields[name] = draw()
    return family, fields


def build(family: str, fields: dict[str, Any]) -> Any:
    """Build the model in float64, with weights under which every part matters; a ValueError where the fields have no meaning."""
    config, model = FAMILIES[family]
    return sharpen(model(config(**fields))).double().eval()


def inputs_of(family: str, rng: random.Random) -> dict[str, torch.Tensor]:
    """Return tokens of two rows, and labels."""
    ids = torch.randint(3, 30, (2, LENGTH), generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    given = {"input_ids": ids, "labels": ids.clone()}
    return given | (
        {"decoder_input_ids": ids[:, : LENGTH - 2], "labels": ids[:, 1 : LENGTH - 1]} if family == "seq2seq" else {}
    )


def check(family: str, model: Any, folder: Path, rng: random.Random) -> None:
    """Assert all that must hold of a model: finite gradients, decoding, segments, and a save that gives the same model."""
    given = inputs_of(family, rng)
    logits = check_step(model, given)
    if family == "decoder":
        check_decoding(model, given["input_ids"], logits)
        if model.config.mem_len:
            check_segments(model, given["input_ids"])
    model.save_pretrained(folder)
    again = type(model).from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(**without_labels(given)).logits, logits, **CLOSE)


def without_labels(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in given.items() if name != "labels"}


def check_step(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Assert that the loss and all gradients are finite; return the logits."""
    loss = model(**given).loss
    assert loss.isfinite(), f"the loss is {loss}"
    loss.backward()
    wrong = [name for name, part in model.named_parameters() if part.grad is not None and not part.grad.isfinite().all()]
    assert not wrong, f"gradients that are not finite: {wrong}"
    model.zero_grad()
    with torch.no_grad():
        return model(**without_labels(given)).logits


@torch.no_grad()
def check_decoding(model: Any, ids: torch.Tensor, logits: torch.Tensor) -> None:
    """Assert that tokens behind a cache get what one pass gives them."""
    first = model(ids[:, :CUT], use_cache=True)
    parts, cache = [first.logits], first.cache
    for place in range(CUT, LENGTH):
        step = model(ids[:, place : place + 1], cache=cache, use_cache=True)
        parts, cache = [*parts, step.logits], step.cache
    torch.testing.assert_close(torch.cat(parts, 1), logits, **CLOSE)


@torch.no_grad()
def check_segments(model: Any, ids: torch.Tensor) -> None:
    """Assert that, with a window within the memory, it does not matter where a text is cut."""
    window = model.config.sliding_window
    if window is None or window > model.config.mem_len + 1:
        return
    whole = model(ids).logits
    for cut in (3, CUT):
        first = model(ids[:, :cut])
        second = model(ids[:, cut:], memory=first.memory)
        torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, **CLOSE)


def try_one(seed: int) -> tuple[str, str]:
    """Draw a configuration, and return what came of it: `works`, `refused` or `failed`, and the family or what was said."""
    rng = random.Random(seed)
    family, fields = draw_fields(rng)
    try:
        model = build(family, fields)
    except REFUSALS as error:
        said = str(error)
        readable = len(said) > 20 and "Traceback" not in said and said.count("\n") < 3
        return ("refused", family) if readable else ("failed", f"seed {seed}: {family} {fields}: {error!r}")
    except Exception as error:
        return "failed", f"seed {seed}: {family} {fields}: {error!r}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            check(family, model, Path(folder), rng)
    except Exception as error:
        return "failed", f"seed {seed}: {family} {fields}: {type(error).__name__}: {error}"
    return "works", family


def main() -> int:
    """Try many configurations, write the page, and return 1 if any failed."""
    parser = argparse.ArgumentParser(description="Try random configurations.")
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    counts: Counter[tuple[str, str]] = Counter()
    failures = []
    for seed in tqdm(range(given.seed, given.seed + given.examples), "Configurations"):
        outcome, what = try_one(seed)
        counts[outcome, "" if outcome == "failed" else what] += 1
        if outcome == "failed":
            failures.append(what)
            tqdm.write(what)
    rows = [f"| {family} | {counts['works', family]} | {counts['refused', family]} |" for family in FAMILIES]
    end = given.seed + given.examples - 1
    PAGE.write_text(
        "\n".join(
            [
                "# What random configurations do",
                "",
                f"**Conclusion: of {given.examples:,} random configurations, {len(failures)} failed.** Each of the others works, or is "
                "refused by one readable error.",
                "",
                "A model works if its loss and gradients are finite, tokens behind a cache get what one pass gives them, it does not "
                "matter where a text is cut into segments, and its folder loads as the same model. `make properties` does it again; "
                "some hundred are part of the default tests.",
                "",
                f"Seeds {given.seed} to {end}, on {date.today()}, with Python {platform.python_version()}, torch {torch.__version__} and "
                f"transformers {transformers.__version__}.",
                "",
                "| family | works | refused |",
                "|---|---|---|",
                *rows,
                "",
                *(f"- {failure}" for failure in failures),
            ]
        ).rstrip()
        + "\n",
        encoding="utf-8",
    )
    print(f"{given.examples} tried, {len(failures)} failed; written: {PAGE.relative_to(PAGE.parents[2])}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
