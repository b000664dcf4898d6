"""A whole run of `train_lm.py`: from arguments to a folder with a model, its numbers and its card."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from typing import NamedTuple

from datasets import Dataset
from transformers import PreTrainedConfig
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase
from transformers import default_data_collator
from transformers import set_seed

from hf_relpos.data.sources import Documents
from hf_relpos.data.sources import describe_source
from hf_relpos.data.sources import describe_text
from hf_relpos.evaluation.language_model import RunningMetrics
from hf_relpos.evaluation.language_model import score_rows
from hf_relpos.training.argument_checks import refuse_numbers
from hf_relpos.training.arguments import DataArguments
from hf_relpos.training.arguments import ModelArguments
from hf_relpos.training.arguments import RunArguments
from hf_relpos.training.arguments import parse_arguments
from hf_relpos.training.best_model import refuse_unknown_metric
from hf_relpos.training.checked_trainer import CheckedTrainer
from hf_relpos.training.checkpoints import last_checkpoint
from hf_relpos.training.folder_lock import hold_folder
from hf_relpos.training.model_card import write_model_card
from hf_relpos.training.model_setup import build_config
from hf_relpos.training.model_setup import build_model
from hf_relpos.training.model_setup import check_block_size
from hf_relpos.training.model_setup import is_masked
from hf_relpos.training.optimizer import optimizer_by_kind
from hf_relpos.training.publishing import require_token
from hf_relpos.training.run_folder import RECORD
from hf_relpos.training.run_folder import SAMPLE
from hf_relpos.training.run_folder import check_output_dir
from hf_relpos.training.run_folder import describe_run
from hf_relpos.training.run_folder import find_progress
from hf_relpos.training.run_folder import holds_work
from hf_relpos.training.run_folder import mark_finished
from hf_relpos.training.run_folder import save_results
from hf_relpos.training.run_folder import start_folder
from hf_relpos.training.run_folder import tidy
from hf_relpos.training.segment_trainer import SegmentTrainer
from hf_relpos.training.summary import describe_validation
from hf_relpos.training.summary import format_end
from hf_relpos.training.summary import format_summary
from hf_relpos.training.summary import opening
from hf_relpos.training.summary import sample
from hf_relpos.training.texts import EvaluationText
from hf_relpos.training.texts import choose_tokenizer
from hf_relpos.training.texts import evaluation_text
from hf_relpos.training.texts import masking
from hf_relpos.training.texts import needed_documents
from hf_relpos.training.texts import refuse_lost_text
from hf_relpos.training.texts import training_blocks

# Characters of the validation text that the sample continues.
SAMPLE_PROMPT = 200


@dataclass
class Job:
    """A run that is ready to begin.

    Attributes:
        trainer: Trainer with the blocks to train and validate on.
        args: its arguments.
        model: its model.
        tokenizer: its tokenizer.
        record: all arguments and the description of the text, as they are stored in the folder.
        checkpoint: the folder whose weights the run goes on from, if any.
        finished: whether its training is finished there.
        texts: the texts to evaluate at the end, by the prefix of their metrics.
        validation: the documents behind the text "eval".
    """

    trainer: CheckedTrainer
    args: RunArguments
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    record: dict[str, Any]
    checkpoint: str | None
    finished: bool
    texts: dict[str, EvaluationText]
    validation: Dataset | None


def main(argv: list[str] | None = None) -> None:
    """Run `train_lm.py`; whatever stops it ends it with one line."""
    try:
        run(prepare(sys.argv[1:] if argv is None else argv))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt as stop:
        print(f"interrupted{stop}", file=sys.stderr)
        sys.exit(130)


class Plan(NamedTuple):
    """The plan of a run, before its model is built.

    Attributes:
        arguments, data, args: its arguments.
        config: the configuration of its model.
        documents: its text.
        record: all this as it is stored in the folder.
    """

    arguments: ModelArguments
    data: DataArguments
    args: RunArguments
    config: PreTrainedConfig
    documents: Documents
    record: dict[str, Any]


def plan_run(argv: list[str], load: Callable[[DataArguments, RunArguments], Documents] = needed_documents) -> Plan:
    """Read arguments and text, and refuse what cannot work.

    Args:
        argv: the command line of `train_lm.py`.
        load: loads the text that the arguments name.
    """
    arguments, data, args = parse_arguments(argv)
    refuse_numbers(data, args)
    if args.push_to_hub:
        require_token(args.hub_token)
    config = build_config(arguments, data.block_size)
    data.block_size = check_block_size(config, data.block_size)
    refuse_unknown_metric(args, is_masked(config))
    documents = load(data, args)
    record = describe_run(arguments, data, args, {"source": describe_source(data), **describe_text(documents)}, config)
    if documents.validation is not None:
        record["prompt"] = opening(args.sample_prompt or documents.validation[0]["text"])
    return Plan(arguments, data, args, config, documents, record)


def prepare(argv: list[str]) -> Job:
    """Read arguments, text and model, and refuse what cannot work before anything is written."""
    arguments, data, args, config, documents, record = plan_run(argv)
    checkpoint, finished = find_progress(args, carries_memory(config), arguments.model_name_or_path)
    if args.process_index == 0:
        check_output_dir(args, record)

    tokenizer = choose_tokenizer(arguments, data, documents, checkpoint)
    set_seed(args.seed)
    model = build_model(arguments, config, tokenizer)
    with args.main_process_first(desc="tokenizing"):
        train = training_blocks(documents.train, model, tokenizer, data, args.seed) if documents.train is not None else None
        texts = {
            prefix: evaluation_text(rows, model, tokenizer, data)
            for prefix, rows in (("eval", documents.validation), ("test", documents.test))
            if rows is not None
        }
    refuse_lost_text(args, texts.get("eval"))
    trainer = build_trainer(model, tokenizer, args, data, train, texts.get("eval"))
    texts = {prefix: text for prefix, text in texts.items() if args.do_eval or prefix != "eval"}
    return Job(trainer, args, model, tokenizer, record, checkpoint, finished, texts, documents.validation)


def build_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    args: RunArguments,
    data: DataArguments,
    train: Any = None,
    validation: EvaluationText | None = None,
) -> CheckedTrainer:
    """Build the Trainer of a language model, causal or masked by the family of its configuration."""
    masked = is_masked(model.config)
    args.label_names = ["labels"] if masked else ["shift_labels"]
    args.batch_eval_metrics = True  # else Trainer keeps the labels of the whole text for validation
    blocks: Any = validation and validation.blocks
    lanes: dict[str, Any] = {"lane_groups": args.lane_groups, "block_size": data.block_size}
    kind = partial(SegmentTrainer, **lanes) if carries_memory(model.config) else CheckedTrainer
    return kind(
        model=model,
        args=args,
        data_collator=masking(tokenizer, data) if masked else default_data_collator,
        train_dataset=train,
        eval_dataset=blocks,
        processing_class=tokenizer,
        compute_metrics=RunningMetrics(validation and validation.byte_count),
        preprocess_logits_for_metrics=score_rows,
        optimizer_cls_and_kwargs=optimizer_by_kind(args),
    )


def carries_memory(config: PreTrainedConfig) -> bool:
    """Return whether a model is trained with segment memory."""
    return bool(getattr(config, "mem_len", 0)) and not is_masked(config)


def run(job: Job) -> dict[str, Any]:
    """Train, evaluate, describe and publish, as far as the arguments ask for it; returns the evaluations' metrics.

    What stops a run leaves whole checkpoints and nothing that stands in the way of the next one.

    Raises:
        ValueError: another process writes into the folder, or has done so since the run was prepared.
    """
    if not job.args.should_save:
        return _run_or_tidy(job)
    args, start = job.args, job.record["model"]["model_name_or_path"]
    with hold_folder(args.output_dir):
        check_output_dir(args, job.record)
        if find_progress(args, carries_memory(job.model.config), start) != (job.checkpoint, job.finished):
            raise ValueError(f"output_dir={args.output_dir!r} was written by another run meanwhile: start again")
        return _run_or_tidy(job)


def _run_or_tidy(job: Job) -> dict[str, Any]:
    folder = job.args.output_dir
    was_empty = not holds_work(folder)
    try:
        return _run(job)
    except BaseException as stop:
        if job.args.should_save:
            tidy(folder, was_empty)
        if isinstance(stop, KeyboardInterrupt):
            last = last_checkpoint(folder)
            raise KeyboardInterrupt(
                f": --resume_from_checkpoint auto goes on from {last}" if last else ": no checkpoint was saved"
            ) from None
        raise


def _run(job: Job) -> dict[str, Any]:
    trainer, args = job.trainer, job.args
    trains = args.do_train and not job.finished
    if args.should_save and (trains or not Path(args.output_dir, RECORD).is_file()):
        start_folder(args, job.record, job.checkpoint)
    if trains:
        _train(job)
    elif job.checkpoint:
        trainer.load_weights(job.checkpoint)
    if args.do_train and job.checkpoint != args.output_dir:
        job.model.config.use_cache = True  # Trainer turned it off; generation from the saved folder wants it
        trainer.save_model(_internal_call=True)  # it is published at the end, with its card
        if trains:
            trainer.save_state()  # last: it marks a finished run
        elif job.checkpoint and args.should_save:  # killed before it was marked
            mark_finished(args, job.checkpoint)
    metrics = evaluate(trainer, job.texts)
    if trainer.is_world_process_zero():
        metrics |= describe_validation(job.record["text"], job.texts.get("eval"), job.validation)
        for prefix in job.texts:
            save_results(args.output_dir, prefix, {name: value for name, value in metrics.items() if name.startswith(prefix)})
        print(format_summary(metrics, _write_sample(job) if args.do_train else None))
    if args.do_train and args.should_save:
        write_model_card(args.output_dir)
    if args.push_to_hub:  # Trainer would write a draft of its own over the card
        trainer.create_model_card = lambda **_: write_model_card(args.output_dir)  # pyright: ignore
        trainer.push_to_hub()
    if args.do_train and trainer.is_world_process_zero():
        print(format_end(args.output_dir, job.record.get("prompt", ""), generates=bool(job.model.can_generate())))
    return metrics


def evaluate(trainer: CheckedTrainer, texts: dict[str, EvaluationText]) -> dict[str, Any]:
    """Evaluate texts one after another; the metrics carry the texts' prefixes.

    Raises:
        ValueError: a loss is not finite.
    """
    metrics = {}
    for prefix, text in texts.items():
        blocks: Any = text.blocks
        trainer.compute_metrics = RunningMetrics(text.byte_count)
        metrics |= trainer.evaluate(blocks, metric_key_prefix=prefix)
        if not math.isfinite(metrics[f"{prefix}_loss"]):
            raise ValueError(f"{prefix}_loss is {metrics[f'{prefix}_loss']}: the model gives numbers that are not finite")
        if text.lost:
            metrics[f"{prefix}_no_bits_per_byte"] = text.lost
    return metrics


def _train(job: Job) -> None:
    result = job.trainer.train(resume_from_checkpoint=job.checkpoint)
    if job.trainer.is_world_process_zero():
        save_results(job.args.output_dir, "train", result.metrics)


def _write_sample(job: Job) -> str | None:
    args = job.args
    if not (job.model.can_generate() and args.sample_tokens and job.validation):
        return None
    prompt = args.sample_prompt or job.validation[0]["text"][:SAMPLE_PROMPT]
    text = sample(job.model, job.tokenizer, prompt, args.sample_tokens, args.seed)
    Path(args.output_dir, SAMPLE).write_text(text, encoding="utf-8")
    return text
