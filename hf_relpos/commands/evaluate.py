"""`evaluate`: compute what a model folder makes of a text."""

import argparse
import tempfile
from typing import Any

from hf_relpos.training.run import evaluate
from hf_relpos.training.run import prepare
from hf_relpos.training.summary import compressed_bits_per_byte
from hf_relpos.training.summary import format_summary


def add_evaluate(commands: Any) -> None:
    """`evaluate`: what a model folder makes of a text."""
    parser = commands.add_parser("evaluate", help="loss, perplexity, bits per byte and accuracy of a model folder on a text")
    parser.add_argument("folder", help="folder of a model and its tokenizer, or their name on the Hub")
    parser.add_argument("text", nargs="*", help="files, folders or patterns; default: validation part of the stdlib")
    parser.add_argument("--text_column", default="text", help="column of jsonl, csv and parquet files (default: text)")
    parser.add_argument("--block_size", type=int, help="tokens in a block (default: what the model was trained with)")
    parser.add_argument("--batch_size", type=int, default=16, help="blocks in a batch (default: 16)")
    parser.set_defaults(run=run_evaluate)


def run_evaluate(arguments: argparse.Namespace) -> None:
    """Evaluate as `train_lm.py --do_eval` does, without leaving files behind."""
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
