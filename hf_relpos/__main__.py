"""What is not training: python -m hf_relpos COMMAND --help."""

import argparse
import sys
import tempfile
from collections.abc import Sequence

from hf_relpos.cards import write_model_card
from hf_relpos.comparison import add_compare
from hf_relpos.convert import add_convert
from hf_relpos.report import compressed_bits_per_byte
from hf_relpos.report import format_summary
from hf_relpos.scheme_reference import add_schemes
from hf_relpos.training import evaluate
from hf_relpos.training import prepare


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the sub-commands; what is wrong with its arguments ends it with one line."""
    parser = argparse.ArgumentParser(prog="python -m hf_relpos", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add_evaluate(commands)
    add_card(commands)
    add_compare(commands)
    add_schemes(commands)
    add_convert(commands)
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)  # what follows is for train_lm.py
    arguments = parser.parse_args(words[:cut], argparse.Namespace(rest=words[cut + 1 :]))
    try:
        arguments.run(arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def add_evaluate(commands) -> None:
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


def add_card(commands) -> None:
    """`card`: write the model card of a run's folder again."""
    parser = commands.add_parser("card", help="write the model card of a run's folder again")
    parser.add_argument("folder", help="folder that train_lm.py made")
    parser.set_defaults(run=lambda arguments: print(write_model_card(arguments.folder)))


if __name__ == "__main__":
    main()
