"""A whole run of `train_lm.py`: from arguments to a folder with a model, its numbers and its card."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from typing import NamedTuple
from typing import cast

from datasets import Dataset
from datasets import IterableDataset
from safetensors.torch import load_model
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase
from transformers import Trainer
from transformers import TrainerState
from transformers import default_data_collator
from transformers import set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_relpos.data.packing import MaskingCollator
from hf_relpos.data.packing import count_bytes
from hf_relpos.data.packing import mask_once
from hf_relpos.data.packing import pack
from hf_relpos.data.packing import pack_stream
from hf_relpos.data.packing import without_targets
from hf_relpos.data.sources import Documents
from hf_relpos.data.sources import describe_documents
from hf_relpos.data.sources import describe_source
from hf_relpos.data.sources import load_documents
from hf_relpos.data.tokenizers import load_tokenizer
from hf_relpos.evaluation.language_model import language_model_metrics
from hf_relpos.evaluation.language_model import score_rows
from hf_relpos.training.arguments import DataArguments
from hf_relpos.training.arguments import ModelArguments
from hf_relpos.training.arguments import RunArguments
from hf_relpos.training.arguments import parse_arguments
from hf_relpos.training.arguments import refuse_counts
from hf_relpos.training.model_card import SAMPLE
from hf_relpos.training.model_card import write_model_card
from hf_relpos.training.model_setup import build_config
from hf_relpos.training.model_setup import build_model
from hf_relpos.training.model_setup import check_block_size
from hf_relpos.training.model_setup import is_masked
from hf_relpos.training.optimizer import optimizer_by_kind
from hf_relpos.training.run_folder import check_output_dir
from hf_relpos.training.run_folder import describe_run
from hf_relpos.training.run_folder import find_checkpoint
from hf_relpos.training.run_folder import start_folder
from hf_relpos.training.segment_trainer import SegmentTrainer
from hf_relpos.training.summary import compressed_bits_per_byte
from hf_relpos.training.summary import format_summary
from hf_relpos.training.summary import sample

# Documents of a streamed training text from which a BPE is learned.
STREAMED_VOCABULARY = 10_000
# Characters of the validation text that the sample continues.
SAMPLE_PROMPT = 200


class EvaluationText(NamedTuple):
    """Blocks to evaluate on, and the bytes of their text where bits per byte have a meaning."""

    blocks: Dataset
    byte_count: int | None


@dataclass
class Job:
    """A run that is ready to begin.

    Attributes:
        trainer: Trainer with the blocks to train and validate on.
        args: its arguments.
        model: its model.
        tokenizer: its tokenizer.
        record: all arguments and the description of the text, as they are stored in the folder.
        checkpoint: where the run goes on from.
        texts: the texts to evaluate at the end, by the prefix of their metrics.
        validation: the documents behind the text "eval".
    """

    trainer: Trainer
    args: RunArguments
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    record: dict[str, Any]
    checkpoint: str | None
    texts: dict[str, EvaluationText]
    validation: Dataset | None


def main(argv: list[str] | None = None) -> None:
    """Run `train_lm.py`; what is wrong with the arguments or the text ends it with one line."""
    try:
        job = prepare(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        sys.exit(f"error: {error}")
    run(job)


def prepare(argv: list[str]) -> Job:
    """Read arguments, text and model, and refuse what cannot work before anything is written."""
    arguments, data, args = parse_arguments(argv)
    refuse_counts(data, args)
    config = build_config(arguments, data.block_size)
    data.block_size = check_block_size(config, data.block_size)
    documents = _needed_documents(data, args)
    text = {split: describe_documents(rows) for split, rows in vars(documents).items() if isinstance(rows, Dataset)}
    record = describe_run(arguments, data, args, {"source": describe_source(data), **text})
    checkpoint = find_checkpoint(args)
    if args.process_index == 0:
        check_output_dir(args, record)

    tokenizer = _load_tokenizer(arguments, data, documents)
    set_seed(args.seed)
    model = build_model(arguments, config, tokenizer)
    with args.main_process_first(desc="tokenizing"):
        train = _training_blocks(documents.train, model, tokenizer, data, args.seed) if documents.train is not None else None
        texts = {
            prefix: _evaluation_text(rows, model, tokenizer, data)
            for prefix, rows in (("eval", documents.validation), ("test", documents.test))
            if rows is not None
        }
    trainer = build_trainer(model, tokenizer, args, data, train, texts.get("eval"))
    texts = {prefix: text for prefix, text in texts.items() if args.do_eval or prefix != "eval"}
    return Job(trainer, args, model, tokenizer, record, checkpoint, texts, documents.validation)


def build_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    args: RunArguments,
    data: DataArguments,
    train: Any = None,
    validation: EvaluationText | None = None,
) -> Trainer:
    """The Trainer of a language model, causal or masked by the family of its configuration."""
    masked = is_masked(model.config)
    args.label_names = ["labels"] if masked else ["shift_labels"]
    blocks: Any = validation and validation.blocks
    remembers = getattr(model.config, "mem_len", 0) and not masked
    kind = partial(SegmentTrainer, lane_groups=args.lane_groups) if remembers else Trainer
    return kind(
        model=model,
        args=args,
        data_collator=_masking(tokenizer, data) if masked else default_data_collator,
        train_dataset=train,
        eval_dataset=blocks,
        processing_class=tokenizer,
        compute_metrics=partial(language_model_metrics, byte_count=validation and validation.byte_count),
        preprocess_logits_for_metrics=score_rows,
        optimizer_cls_and_kwargs=optimizer_by_kind(args),
    )


def run(job: Job) -> dict[str, Any]:
    """Train, evaluate, describe and publish, as far as the arguments ask for it; returns the evaluations' metrics."""
    trainer, args = job.trainer, job.args
    if args.should_save:
        start_folder(args, job.record)
    if args.do_train:
        _train(job)
    metrics = evaluate(trainer, job.texts)
    if trainer.is_world_process_zero():
        metrics |= _describe_validation(job)
        for prefix in job.texts:
            trainer.save_metrics(prefix, {name: value for name, value in metrics.items() if name.startswith(prefix)})
        print(format_summary(metrics, _write_sample(job) if args.do_train else None))
    if args.do_train and args.should_save:
        write_model_card(args.output_dir)
    if args.push_to_hub:  # Trainer would write a draft of its own over the card
        trainer.create_model_card = lambda **_: write_model_card(args.output_dir)  # pyright: ignore
        trainer.push_to_hub()
    return metrics


def evaluate(trainer: Trainer, texts: dict[str, EvaluationText]) -> dict[str, Any]:
    """Evaluate texts one after another; the metrics carry the texts' prefixes."""
    metrics = {}
    for prefix, text in texts.items():
        blocks: Any = text.blocks
        trainer.compute_metrics = partial(language_model_metrics, byte_count=text.byte_count)
        metrics |= trainer.evaluate(blocks, metric_key_prefix=prefix)
    return metrics


def _train(job: Job) -> None:
    if job.checkpoint and _is_finished(job.args, job.checkpoint):  # Trainer would take one more step
        load_model(job.model, f"{job.checkpoint}/{SAFE_WEIGHTS_NAME}")
    else:
        result = job.trainer.train(resume_from_checkpoint=job.checkpoint)
        job.trainer.save_metrics("train", result.metrics)
        job.trainer.save_state()
    job.model.config.use_cache = True  # Trainer turned it off; generation from the saved folder wants it
    job.trainer.save_model()


def _is_finished(args: RunArguments, checkpoint: str) -> bool:
    state = TrainerState.load_from_json(f"{checkpoint}/{TRAINER_STATE_NAME}")
    if args.max_steps > 0:
        return state.global_step >= args.max_steps
    return (state.epoch or 0) >= args.num_train_epochs


def _describe_validation(job: Job) -> dict[str, Any]:
    """What the numbers of the validation text are to be read against."""
    if "eval" not in job.texts or job.validation is None:
        return {}
    whole = job.record["text"]["validation"]
    text = {"eval_source": job.record["text"]["source"], "eval_sha256": whole["sha256"]}
    if job.texts["eval"].byte_count == whole["bytes"]:  # else only its first blocks were evaluated
        references = compressed_bits_per_byte(job.validation)
        text |= {f"eval_{name}_bits_per_byte": value for name, value in references.items()}
    return text


def _write_sample(job: Job) -> str | None:
    args = job.args
    if not (job.model.can_generate() and args.sample_tokens and job.validation):
        return None
    prompt = args.sample_prompt or job.validation[0]["text"][:SAMPLE_PROMPT]
    text = sample(job.model, job.tokenizer, prompt, args.sample_tokens, args.seed)
    Path(args.output_dir, SAMPLE).write_text(text, encoding="utf-8")
    return text


def _needed_documents(data: DataArguments, args: RunArguments) -> Documents:
    documents = load_documents(data)
    for split, rows, needed in (
        ("train", documents.train, args.do_train),
        ("validation", documents.validation, args.do_eval),
    ):
        if needed and rows is None:
            raise ValueError(f"there is no {split} text: give {split}_file, or a dataset that has it")
    return Documents(
        train=documents.train if args.do_train else None,
        validation=documents.validation,
        test=documents.test if args.do_predict else None,
    )


def _load_tokenizer(arguments: ModelArguments, data: DataArguments, documents: Documents) -> PreTrainedTokenizerBase:
    """A trained model keeps its tokenizer, unless another one is named that is not to be built here."""
    name = data.tokenizer_name or "byte"
    if arguments.model_name_or_path and name in ("byte", "bpe"):
        name = arguments.model_name_or_path
    train: Any = documents.train
    if isinstance(train, IterableDataset):
        train = train.take(STREAMED_VOCABULARY)
    return load_tokenizer(name, (row["text"] for row in train or ()), data.vocab_size)


def _masking(tokenizer: PreTrainedTokenizerBase, data: DataArguments, seed: int | None = None) -> MaskingCollator:
    return MaskingCollator(tokenizer, mlm_probability=data.mlm_probability, seed=seed)


def _training_blocks(
    documents: Dataset | IterableDataset,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: DataArguments,
    seed: int,
) -> Dataset | IterableDataset:
    block_size = cast(int, data.block_size)
    if isinstance(documents, IterableDataset):
        blocks = pack_stream(documents, tokenizer, block_size)
    else:
        if getattr(model.config, "mem_len", 0):
            # Lanes keep the order within documents; neighbours, often alike, need not be read at the same time.
            documents = documents.shuffle(seed=seed)
        try:
            blocks = pack(documents, tokenizer, block_size, num_proc=data.preprocessing_num_workers)
        except ValueError as error:
            raise ValueError(f"training text ({describe_source(data)}): {error}") from error
    if data.max_train_samples is not None:
        blocks = blocks.take(data.max_train_samples)
    return without_targets(blocks) if is_masked(model.config) else blocks


def _evaluation_text(
    documents: Dataset, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: DataArguments
) -> EvaluationText:
    blocks = pack(documents, tokenizer, cast(int, data.block_size), keep_tail=True, num_proc=data.preprocessing_num_workers)
    byte_count = sum(len(text.encode()) for text in documents["text"])
    if data.max_eval_samples is not None and data.max_eval_samples < len(blocks):
        blocks = blocks.take(data.max_eval_samples)
        byte_count = count_bytes(blocks, tokenizer)
    if is_masked(model.config):
        return EvaluationText(mask_once(blocks, _masking(tokenizer, data, seed=0)), None)
    return EvaluationText(blocks, byte_count)
