"""Train with rotary positions, drop them, train on a little without any, and read far more than was trained (arXiv 2512.12167).

    python tests/benchmarks/dropping.py --output_dir runs/dropping

Each seed trains `rope` and `nope` from scratch, goes on from `rope` without positions for 5 and 10 % of its steps and, for comparison,
with them for 10 %. All models then score the same tokens of the validation text at 1 to 16 times the trained length; `rope` also with
yarn, stretched to each length without training, and the dropped one also with sharper attention, as the authors' code allows. How much
sharper is chosen on text that was trained on. Finished cells are kept. Writes table.md, dropping.json and dropping.svg.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers import PreTrainedModel

import hf_relpos  # noqa: F401  registers the models with the Auto classes
from hf_relpos.data.sources import load_files
from hf_relpos.data.sources import stdlib_files
from hf_relpos.data.tokenizers import load_tokenizer
from hf_relpos.evaluation.lengths import evaluate_lengths
from hf_relpos.evaluation.plots import line_plot
from hf_relpos.evaluation.windows import Windows
from hf_relpos.evaluation.windows import take_windows
from hf_relpos.training.run import prepare
from hf_relpos.training.run import run

BLOCK, STEPS = 128, 1200
LENGTHS = [BLOCK * times for times in (1, 2, 4, 8, 16)]
SIZES = "hidden_size=128,num_hidden_layers=4,num_attention_heads=4"
SHARPER = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Candidates for c, where scores are multiplied by 1 + c ln(length / trained length)."""
SETTINGS = ["--vocab_size", "1024", "--block_size", str(BLOCK), "--eval_strategy", "no", "--save_steps", "500"]
SETTINGS += ["--do_train", "true", "--config_overrides", SIZES]
SETTINGS += ["--report_to", "none", "--disable_tqdm", "true", "--sample_tokens", "0", "--per_device_eval_batch_size", "32"]


def train(folder: Path, seed: int, scheme: str, steps: int, start: Path | None = None) -> None:
    """Train by `train_lm.py`'s own functions, from scratch or from another folder; a folder that is finished stays."""
    argv = [
        "configs/base_decoder.yaml",
        *SETTINGS,
        "--position_scheme",
        scheme,
        "--max_steps",
        str(steps),
        "--seed",
        str(seed),
    ]
    argv += [] if start is None else ["--model_name_or_path", str(start)]
    if not (folder / "all_results.json").is_file():
        run(prepare([*argv, "--output_dir", str(folder), "--resume_from_checkpoint", "auto"]))


def windows_of(folder: Path, split: str, tokens: int) -> Windows:
    return take_windows(load_files(stdlib_files()[split]), load_tokenizer(str(folder)), LENGTHS[-1], tokens)


def score(load: Callable[[int], PreTrainedModel], windows: Windows, lengths: list[int] = LENGTHS) -> list[float]:
    """Return the bits per byte at each length; the model may depend on it."""
    return [evaluate_lengths(load(length), windows, [length])[0]["bits_per_byte"] for length in lengths]


def loaded(folder: Path, scheme: str, length: int) -> PreTrainedModel:
    """Load a model with a scheme, for any length."""
    return AutoModelForCausalLM.from_pretrained(folder, position_scheme=scheme)


def stretched(folder: Path, length: int) -> PreTrainedModel:
    """Load a rotary model with yarn for a length, without training."""
    yarn = {"rope_type": "yarn", "factor": length / BLOCK, "original_max_position_embeddings": BLOCK}
    return AutoModelForCausalLM.from_pretrained(folder, position_parameters=yarn if length > BLOCK else {})


def sharpened(folder: Path, share: float, length: int) -> PreTrainedModel:
    """Load a model without positions whose scores are 1 + share * ln(length / BLOCK) times as large: its queries are."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".q_proj." in name:
                weight.mul_(1 + share * math.log(length / BLOCK))
    return model


def tune(folder: Path, tokens: int) -> float:
    """Return the candidate of SHARPER with the lowest loss at the greatest length, on text that was trained on."""
    seen = windows_of(folder, "train", tokens)
    return min(SHARPER, key=lambda share: score(partial(sharpened, folder, share), seen, LENGTHS[-1:])[0])


def cell(path: Path, make: Callable[[], Any]) -> Any:
    """Return what a cell's file holds, or make it and write it."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(make()), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def run_seed(root: Path, seed: int, tokens: int) -> dict[str, Any]:
    """Train and score all arms of one seed: the bits per byte at each length by arm, and how much sharper one is."""
    rope, nope, *dropped, more = (root / f"{name}-seed{seed}" for name in ("rope", "nope", "dropped5", "dropped10", "more"))
    tenth, sharper = STEPS // 10, root / "cells" / f"sharper-seed{seed}.json"
    train(rope, seed, "rope", STEPS)
    for folder, scheme, steps in ((dropped[0], "nope", tenth // 2), (dropped[1], "nope", tenth), (more, "rope", tenth)):
        train(folder, seed, scheme, steps, rope)
    train(nope, seed, "nope", STEPS + tenth)
    unseen = windows_of(rope, "validation", tokens)  # all models have the same tokenizer
    arms: dict[str, Callable[[int], PreTrainedModel]] = {
        "rope": partial(loaded, rope, "rope"),
        "rope, 10 % more steps": partial(loaded, more, "rope"),
        "rope, yarn": partial(stretched, rope),
        "dropped, 0 %": partial(loaded, rope, "nope"),
        "dropped, 5 %": partial(loaded, dropped[0], "nope"),
        "dropped, 10 %": partial(loaded, dropped[1], "nope"),
        "dropped, 10 %, sharper": lambda length: sharpened(
            dropped[1], cell(sharper, lambda: tune(dropped[1], tokens // 2)), length
        ),
        "nope from scratch": partial(loaded, nope, "nope"),
    }
    found = {
        name: cell(root / "cells" / f"{name}-seed{seed}.json", partial(score, load, unseen)) for name, load in arms.items()
    }
    return {"bits_per_byte": found, "sharper": cell(sharper, float)}


def write_report(runs: dict[int, dict[str, Any]], output: Path) -> None:
    """Write means over seeds with their ranges, as a table, as JSON and as a plot."""
    names = list(next(iter(runs.values()))["bits_per_byte"])
    values = {
        name: list(zip(*(found["bits_per_byte"][name] for found in runs.values()), strict=True)) for name in names
    }  # of each length, one a seed
    lines = ["| model | " + " | ".join(f"{length:,}" for length in LENGTHS) + " |", "|---" * (1 + len(LENGTHS)) + "|"]
    for name, found in values.items():
        cells = [f"{statistics.mean(one):.3f} ({min(one):.3f} to {max(one):.3f})" for one in found]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", f"Sharper: {', '.join(str(found['sharper']) for found in runs.values())}"]
    (output / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (output / "dropping.json").write_text(json.dumps({"lengths": LENGTHS, "seeds": runs}, indent=1) + "\n", encoding="utf-8")
    drawn = {
        name: [(length, statistics.mean(one), min(one), max(one)) for length, one in zip(LENGTHS, found, strict=True)]
        for name, found in values.items()
        if name != "dropped, 0 %"  # far above the others
    }
    plot = line_plot(drawn, "tokens read (trained: 128)", "validation bits per byte")
    (output / "dropping.svg").write_text(plot, encoding="utf-8")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=2**16, help="tokens to score at each length")
    arguments = parser.parse_args()
    runs = {seed: run_seed(arguments.output_dir, seed, arguments.tokens) for seed in tqdm(arguments.seeds, desc="seeds")}
    write_report(runs, arguments.output_dir)


if __name__ == "__main__":
    main()
