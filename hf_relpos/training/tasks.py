"""What the tasks of `examples/` share: their arguments, a tokenizer and a model to start from, and the end."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from datasets import DatasetDict
from transformers import HfArgumentParser
from transformers import PreTrainedConfig
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase
from transformers import Trainer
from transformers import TrainingArguments
from transformers import set_seed

from hf_relpos.data.tokenizers import load_tokenizer
from hf_relpos.training.arguments import ModelArguments
from hf_relpos.training.arguments import argument
from hf_relpos.training.model_setup import build_config
from hf_relpos.training.model_setup import build_model

# Rows that the order of a table is shuffled by before some are taken: the same in every run.
ORDER = 0


@dataclass
class TaskArguments(ModelArguments):
    """A task: its data, its model (new, or a folder to fine-tune), and how much of each row and table is used."""

    data: str = argument("data", "Folder that holds the files of the task.")
    tokenizer_name: str = argument("bpe", "'byte', 'bpe' (learned from the training rows) or a tokenizer; of a new model.")
    vocab_size: int = argument(4096, "Vocabulary of the tokenizer 'bpe'.")
    max_length: int = argument(64, "Tokens of a row; longer ones are cut off.")
    max_train_samples: int | None = argument(None, "Use only so many rows for training.")
    max_eval_samples: int | None = argument(None, "Use only so many rows for validation, and for the test.")
    early_stopping_patience: int = argument(5, "Evaluations without a better metric after which training stops.")


def parse_task(argv: Sequence[str] | None, kind: type[TrainingArguments] = TrainingArguments, **defaults: Any) -> tuple:
    """Read the command line of a task.

    Args:
        argv: its words; None for those of the process.
        kind: the class of the trainer's arguments.
        defaults: defaults of the task, for any argument.

    Returns:
        Its `TaskArguments`, and the trainer's arguments: evaluated and saved alike, with the best model kept at the end.
    """
    parser = HfArgumentParser((TaskArguments, kind), allow_abbrev=False)  # pyright: ignore[reportArgumentType]
    parser.set_defaults(model_type="relpos_encoder", learning_rate=1e-3, warmup_steps=0.1, report_to="none")
    parser.set_defaults(
        eval_strategy="steps", save_strategy="best", load_best_model_at_end=True, save_total_limit=1, **defaults
    )
    return parser.parse_args_into_dataclasses(None if argv is None else list(argv))


def take_rows(tables: Mapping[str, Dataset | list[dict[str, Any]]], task: TaskArguments) -> DatasetDict:
    """Take as many rows of each split as the task uses, spread over the whole split, always the same ones.

    Args:
        tables: the splits train, validation and test, each a table or a list of its rows.
        task: the arguments.
    """

    def take(name: str, rows: Any) -> Dataset:
        if not len(rows):
            raise ValueError(f"no row is left for the split {name!r}: the files have too few rows of that task")
        table = Dataset.from_list(rows) if isinstance(rows, list) else rows
        limit = task.max_train_samples if name == "train" else task.max_eval_samples
        return table if limit is None else table.shuffle(seed=ORDER).take(min(limit, len(table)))

    return DatasetDict({name: take(name, rows) for name, rows in tables.items()})


def start_task(
    auto: Any, task: TaskArguments, seed: int, texts: Iterable[str], labels: Sequence[str] = ()
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Return a tokenizer and a model: those of `model_name_or_path`, with a new head, or new ones.

    Args:
        auto: the class of the head, as `AutoModelForTokenClassification`.
        task: the arguments.
        seed: of what begins at random.
        texts: the training text, from which "bpe" learns.
        labels: the names of the classes of the head, if it has any.

    Raises:
        ValueError: the folder holds a classifier of other classes.
    """
    config = build_config(task, task.max_length)
    if labels:
        _refuse_other_classes(config, labels, task.model_name_or_path)
        config.id2label, config.label2id = dict(enumerate(labels)), {name: number for number, name in enumerate(labels)}
    tokenizer = load_tokenizer(task.model_name_or_path or task.tokenizer_name, texts, task.vocab_size)
    tokenizer.model_max_length = task.max_length  # where truncation cuts, also in the saved folder
    set_seed(seed)
    return tokenizer, build_model(task, config, tokenizer, auto)


def _refuse_other_classes(config: PreTrainedConfig, labels: Sequence[str], name: str | None) -> None:
    """Refuse a folder whose head tells other classes apart: of as many, it would be loaded as if they were these."""
    own = list((config.id2label or {}).values())
    if own != list(labels) and any(kind.endswith("Classification") for kind in config.architectures or ()):
        raise ValueError(
            f"{name} tells {len(own)} classes apart, {own}, but the data have {len(labels)}, {list(labels)}: "
            "start from the model that it was fine-tuned from"
        )


def train_and_test(trainer: Trainer, rows: Dataset) -> dict[str, float]:
    """Train, save the best model, and return the metrics of the test rows, which are saved beside it."""
    trainer.train()
    trainer.save_model()
    found: Any = trainer.predict(rows)  # pyright: ignore[reportArgumentType]
    trainer.log_metrics("test", found.metrics)
    trainer.save_metrics("test", found.metrics)
    return found.metrics
