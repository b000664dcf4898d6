"""The texts of a run: which documents it needs, its tokenizer, and the blocks that it trains and evaluates on."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from typing import NamedTuple
from typing import cast

from datasets import Dataset
from datasets import IterableDataset
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase

from hf_relpos.data.packing import MaskingCollator
from hf_relpos.data.packing import mask_once
from hf_relpos.data.packing import pack
from hf_relpos.data.packing import pack_stream
from hf_relpos.data.packing import tokenize_stream
from hf_relpos.data.packing import without_targets
from hf_relpos.data.sources import Documents
from hf_relpos.data.sources import describe_source
from hf_relpos.data.sources import load_documents
from hf_relpos.data.tables import shuffle_documents
from hf_relpos.data.tokenizers import load_tokenizer
from hf_relpos.evaluation.text_bytes import count_bytes
from hf_relpos.training.arguments import DataArguments
from hf_relpos.training.arguments import ModelArguments
from hf_relpos.training.arguments import RunArguments
from hf_relpos.training.model_setup import is_masked

logger = logging.getLogger(__name__)

# Documents of a streamed training text from which a BPE is learned.
STREAMED_VOCABULARY = 10_000


class EvaluationText(NamedTuple):
    """Blocks to evaluate on, and the bytes of their text where bits per byte have a meaning; else, the reason why they have none."""

    blocks: Dataset
    byte_count: int | None
    lost: str | None = None


def needed_documents(data: DataArguments, args: RunArguments) -> Documents:
    """Load the documents that a run needs.

    Raises:
        ValueError: the source has none of them.
    """
    documents = load_documents(data)
    for split, rows, needed in (
        ("train", documents.train, args.do_train),
        ("validation", documents.validation, args.do_eval),
    ):
        if needed and rows is None:
            raise ValueError(f"there is no {split} text: give {split}_file, or a dataset that has it")
    return replace(
        documents,
        train=documents.train if args.do_train else None,
        test=documents.test if args.do_predict else None,
    )


def choose_tokenizer(
    arguments: ModelArguments, data: DataArguments, documents: Documents, checkpoint: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer: a trained model keeps its own, unless another one is named that is not to be built here.

    Args:
        arguments, data: name the model and the tokenizer.
        documents: the text that a BPE is learned from.
        checkpoint: where the run goes on from; a BPE that was learned stands there.
    """
    name = data.tokenizer_name or "byte"
    if name == "bpe" and checkpoint and Path(checkpoint, "tokenizer.json").is_file():
        name = checkpoint
    if arguments.model_name_or_path and name in ("byte", "bpe"):
        name = arguments.model_name_or_path
    train: Any = documents.train or ()
    if isinstance(train, IterableDataset):
        train = (row["text"] for row in train.take(STREAMED_VOCABULARY))
    return load_tokenizer(name, train, data.vocab_size)


def masking(tokenizer: PreTrainedTokenizerBase, data: DataArguments, seed: int | None = None) -> MaskingCollator:
    """Return the collator that masks tokens; with a seed, the same ones every time."""
    return MaskingCollator(tokenizer, mlm_probability=data.mlm_probability, seed=seed)


def training_blocks(
    documents: Dataset | IterableDataset,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: DataArguments,
    seed: int,
) -> Dataset | IterableDataset:
    """Cut the training text into blocks; a ValueError names a text that is too short for one."""
    block_size = cast(int, data.block_size)
    if isinstance(documents, IterableDataset):
        if getattr(model.config, "mem_len", 0) and not is_masked(model.config):
            if data.max_train_samples is not None:
                raise ValueError("max_train_samples cannot limit streamed text that is read in lanes (mem_len): set max_steps")
            return tokenize_stream(documents, tokenizer)
        blocks = pack_stream(documents, tokenizer, block_size)
    else:
        if getattr(model.config, "mem_len", 0):
            # Lanes keep the order within documents; neighbours, often alike, need not be read at the same time.
            documents = shuffle_documents(documents, seed)
        try:
            blocks = pack(documents, tokenizer, block_size, num_proc=data.preprocessing_num_workers)
        except ValueError as error:
            raise ValueError(f"training text ({describe_source(data)}): {error}") from error
    if data.max_train_samples is not None:
        blocks = blocks.take(data.max_train_samples)
    return without_targets(blocks) if is_masked(model.config) else blocks


def evaluation_text(
    documents: Dataset, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: DataArguments
) -> EvaluationText:
    """Cut a text for evaluation into blocks, and count the bytes that they predict."""
    blocks = pack(documents, tokenizer, cast(int, data.block_size), keep_tail=True, num_proc=data.preprocessing_num_workers)
    targets = None
    if data.max_eval_samples is not None and data.max_eval_samples < len(blocks):
        blocks = blocks.take(data.max_eval_samples)
        targets = data.max_eval_samples * cast(int, data.block_size)
    if is_masked(model.config):
        return EvaluationText(mask_once(blocks, masking(tokenizer, data, seed=0)), None)
    byte_count, lost = count_bytes(documents, tokenizer, targets)
    if lost:
        logger.warning("no bits per byte: %s", lost)
    return EvaluationText(blocks, byte_count, lost)


def refuse_lost_text(args: RunArguments, text: EvaluationText | None) -> None:
    """Raise a ValueError if the best model is to be chosen by bits per byte and the text for it has none."""
    if args.metric_for_best_model and args.metric_for_best_model.endswith("bits_per_byte") and text and text.lost:
        raise ValueError(f"metric_for_best_model={args.metric_for_best_model!r} is not reported: {text.lost}")
