"""`evaluate`: compute what a model folder makes of a text."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from hf_relpos.commands.generate import load_causal_model
from hf_relpos.data.sources import load_files
from hf_relpos.data.sources import stdlib_files
from hf_relpos.data.tokenizers import load_tokenizer
from hf_relpos.evaluation.lengths import format_lengths
from hf_relpos.evaluation.lengths import length_report
from hf_relpos.evaluation.plots import line_plot
from hf_relpos.training.run import evaluate
from hf_relpos.training.run import prepare
from hf_relpos.training.summary import compressed_bits_per_byte
from hf_relpos.training.summary import format_summary


def add_evaluate(commands: Any) -> None:
    """Add `evaluate`, which measures a model folder on a text."""
    parser = commands.add_parser("evaluate", help="loss, perplexity, bits per byte and accuracy of a model folder on a text")
    parser.add_argument("folder", help="folder of a model and its tokenizer, or their name on the Hub")
    parser.add_argument("text", nargs="*", help="files, folders or patterns; default: validation part of the stdlib")
    parser.add_argument("--text_column", default="text", help="column of jsonl, csv and parquet files (default: text)")
    parser.add_argument("--block_size", type=int, help="tokens in a block (default: what the model was trained with)")
    parser.add_argument("--batch_size", type=int, default=16, help="blocks in a batch (default: 16)")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        help="score the same tokens at each of these lengths, by position and by context; any causal model of transformers",
    )
    parser.add_argument("--tokens", type=int, default=2**16, help="with --lengths: about how many to score (default: 65536)")
    parser.add_argument("--output", help="with --lengths: a JSON file for the numbers; the plot stands beside it as SVG")
    parser.set_defaults(run=run_evaluate)


def run_evaluate(arguments: argparse.Namespace) -> None:
    """Evaluate as `train_lm.py --do_eval` does, without leaving files behind; or at several lengths."""
    if arguments.lengths:
        evaluate_at_lengths(arguments)
        return
    if arguments.output:
        raise ValueError(f"--output {arguments.output} is for --lengths: without them, the numbers are printed only")
    argv = ["--model_name_or_path", arguments.folder, "--do_eval", "--report_to", "none"]
    argv += ["--per_device_eval_batch_size", str(arguments.batch_size)]
    argv += [] if arguments.block_size is None else ["--block_size", str(arguments.block_size)]
    argv += ["--text_column", arguments.text_column]
    if arguments.text:
        argv += ["--validation_file", *arguments.text]
    with tempfile.TemporaryDirectory() as scratch:
        job = prepare([*argv, "--output_dir", scratch])
        metrics = evaluate(job.trainer, job.texts)
    if job.texts["eval"].byte_count and job.validation is not None:
        found = compressed_bits_per_byte(job.validation)
        metrics |= {f"eval_{name}_bits_per_byte": value for name, value in found.items()}
    print(format_summary(metrics))


def evaluate_at_lengths(arguments: argparse.Namespace) -> None:
    """Print a table by length, by position and by context, and write the numbers if a file is named for them."""
    if arguments.block_size is not None:
        raise ValueError(f"--block_size {arguments.block_size} and --lengths exclude each other: name the length in --lengths")
    if min(arguments.tokens, arguments.batch_size) < 1:
        raise ValueError(f"--tokens {arguments.tokens} and --batch_size {arguments.batch_size} must be at least 1")
    folder = arguments.folder
    model = load_causal_model(folder)
    documents = load_files(arguments.text or stdlib_files()["validation"], arguments.text_column)
    tokenizer = load_tokenizer(folder)
    report = length_report(model, tokenizer, documents, arguments.lengths, arguments.tokens, arguments.batch_size)
    if arguments.output:
        path = Path(arguments.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"model": folder, **report}, indent=2) + "\n", encoding="utf-8")
        path.with_suffix(".svg").write_text(draw_lengths(folder, report), encoding="utf-8")
    print(format_lengths(report))


def draw_lengths(name: str, report: dict[str, Any]) -> str:
    """Return a plot of the loss by length and by context as SVG."""
    loss = [(row["length"], row["loss"], None, None) for row in report["lengths"] if "loss" in row]
    context = [(row["context"], row["loss"], None, None) for row in report["context"]]
    lines = {"all tokens, by length": loss, "the last tokens, by context": context}
    across = f"{name}: tokens"
    return line_plot({label: points for label, points in lines.items() if points}, across, "loss (nats a token)")
