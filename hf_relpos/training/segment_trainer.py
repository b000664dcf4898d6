"""Trainer that carries segment memory from batch to batch; on its own it is used like the stock one:

    trainer = SegmentTrainer(model, args, train_dataset=blocks, eval_dataset=blocks)

The data sets are block tables (`hf_relpos.data.lanes`); blocks follow each other as they do in the table. Training also reads
streams (`hf_relpos.data.stream_lanes`). What the memory
holds travels with the Trainer and its checkpoints, where it ends (`reset_mask`) travels with the data, and the model
stays a function of its arguments.
"""

from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data import IterableDataset
from torch.utils.data import SequentialSampler
from transformers import EvalPrediction
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import EvalLoopOutput
from transformers.trainer_utils import denumpify_detensorize

from hf_relpos.data.lanes import LaneView
from hf_relpos.data.packing import IGNORED
from hf_relpos.data.stream_lanes import LANE_STATE
from hf_relpos.data.stream_lanes import LaneCollator
from hf_relpos.data.stream_lanes import LaneState
from hf_relpos.data.stream_lanes import StreamLanes
from hf_relpos.data.stream_lanes import tell
from hf_relpos.data.streams import Streams
from hf_relpos.data.tokenizers import end_token_id
from hf_relpos.evaluation.language_model import language_model_metrics
from hf_relpos.evaluation.language_model import score_rows
from hf_relpos.model.segment_memory import SegmentMemory
from hf_relpos.training.checked_trainer import CheckedTrainer
from hf_relpos.training.segment_checkpoint import load_lane_states
from hf_relpos.training.segment_checkpoint import load_memory
from hf_relpos.training.segment_checkpoint import memory_file

# Private methods of Trainer that are overridden or called here; a test checks that they exist.
TRAINER_INTERNALS = ("_get_dataloader", "_inner_training_loop", "_load_rng_state", "_save_rng_state")


class SegmentTrainer(CheckedTrainer):
    """Trainer for a causal model with `mem_len > 0`.

    Training reads the text in `per_device_train_batch_size * processes * gradient_accumulation_steps` lanes: the
    batches of an accumulation window are different streams with a memory each, so that accumulation equals a larger
    batch. With `lane_groups` there are so many times as many lanes, in groups that take turns: neighbouring steps then
    read different texts, as they do when blocks are shuffled. A checkpoint holds the memory, and goes on with any
    division of the same number of lanes in as many groups.

    Of a stream (an `IterableDataset`, with `max_steps`), each lane reads its own share of the shards, and begins it again at its
    end. A checkpoint also holds where each lane stands, by the stream's own `state_dict`.

    Evaluation reads every document (or every one of `eval_streams`) from an empty memory. Its loss, perplexity and
    accuracy weigh every token the same, and depend neither on batch size and processes nor, with the default window,
    on the length of the blocks. Predictions come in the order of the lanes, aligned with their label ids.

    Args:
        args, kwargs: those of `Trainer`; `compute_loss_func` is handed the aligned `shift_labels` as its labels.
        eval_streams: cut the evaluation text into this many equal streams instead of its documents.
        lane_groups: groups of lanes that take turns in training, each with a memory.
        block_size: the rows of a stream are documents, to be cut into blocks of so many tokens; without it they are blocks, as
            those of a table. After a document, the end token of `processing_class` is to be predicted.
    """

    model: Any
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        *args: Any,
        eval_streams: int | None = None,
        lane_groups: int = 1,
        block_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(lane_groups, int) or lane_groups < 1:
            raise ValueError(f"SegmentTrainer: lane_groups={lane_groups!r} must be a whole number, at least 1")
        self._refuse_what_breaks_lanes()
        self.eval_streams, self.lane_groups, self.block_size = eval_streams, lane_groups, block_size
        self.label_names = ["shift_labels"]
        if self.compute_loss_func is None:  # the stock smoothing would shift the labels of a segment once more
            self.compute_loss_func, self.label_smoother = self.label_smoother, None
        self._eval_loaders: dict[tuple, tuple[Any, DataLoader]] = {}
        self._begin_at: dict[int, LaneState] = {}
        self._forget()
        if self.train_dataset is not None:
            self._train_lanes()

    def _refuse_what_breaks_lanes(self) -> None:
        strategy = self.args.train_sampling_strategy
        copies = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()
        refusals = [
            (not getattr(self.model.config, "mem_len", 0), "a model with mem_len=0 has no memory: use Trainer"),
            (
                not getattr(self.model.config, "causal", True),
                "it trains causal models: an encoder's memory is fed by a loop of your own",
            ),
            (
                strategy not in ("random", "sequential"),  # "random" is Trainer's default, and not followed here
                f"train_sampling_strategy={strategy!r} shuffles blocks, but memory needs the order of the text",
            ),
            (not self.args.dataloader_in_order, "dataloader_in_order=False mixes up the rows of batches"),
            (self.accelerator.dispatch_batches, "dispatch_batches=True skips to other blocks when a run is resumed"),
            (copies > 1, "tensor, context and sequence parallelism give several processes one row"),
        ]
        for refused, reason in refusals:
            if refused:
                raise ValueError(f"SegmentTrainer: {reason}")

    def _forget(self) -> None:
        self._memories: dict[int, SegmentMemory | None] = {}  # training, one for each batch that has lanes of its own
        self._lane_states: dict[int, list[LaneState | None]] = {}  # where the lanes of a stream stand behind their last batch
        self._turn = 0
        self._eval_memory: SegmentMemory | None = None
        self._eval_sums: Any = 0

    # Data

    def _rows(self, batch_size: int) -> int:
        """Return the rows of a batch over all processes; with `split_batches`, Trainer's batch size already counts them all."""
        return batch_size * (1 if self.accelerator.split_batches else self.accelerator.num_processes)

    @property
    def _turns(self) -> int:
        """Return the number of batches that have lanes of their own: those of an accumulation window, in each group."""
        return self.args.gradient_accumulation_steps * self.lane_groups

    def _train_lanes(self) -> LaneView | StreamLanes:
        rows = self._rows(self._train_batch_size)
        if not isinstance(self.train_dataset, IterableDataset):
            return LaneView(self.train_dataset, rows * self._turns)
        end = end_token_id(self.processing_class) if isinstance(self.processing_class, PreTrainedTokenizerBase) else IGNORED
        items = rows * self.args.gradient_accumulation_steps * self.args.max_steps
        return StreamLanes(self.train_dataset, rows * self._turns, items, self.block_size, end, self._begin_at)

    def get_train_dataloader(self) -> DataLoader:
        lanes = self._train_lanes()
        loader = self._loader(lanes, "Training", self._train_batch_size, is_training=True)
        if isinstance(lanes, StreamLanes):
            base: Any = getattr(loader, "base_dataloader", loader)
            base.collate_fn = LaneCollator(base.collate_fn)
        return loader

    def _loader(self, lanes: Any, description: str, batch_size: int, is_training: bool = False) -> DataLoader:
        loader = self._get_dataloader(lanes, description, batch_size, SequentialSampler, is_training)  # pyright: ignore
        # Each reading draws a seed for its workers; drawn from the common generator, it would shift the dropout.
        getattr(loader, "base_dataloader", loader).generator = torch.Generator().manual_seed(self.args.seed)
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        if eval_dataset is None or isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset if eval_dataset is None else self.eval_dataset[eval_dataset]
        if eval_dataset is None:
            raise ValueError("SegmentTrainer: evaluation needs an eval_dataset")
        batch_size = self.args.eval_batch_size
        key = id(eval_dataset), batch_size, self.eval_streams
        if key not in self._eval_loaders:
            streams = Streams(eval_dataset, self.eval_streams)
            share = self.accelerator.num_processes if self.accelerator.split_batches else 1
            while self._rows(batch_size - share) >= len(streams):  # no rows of nothing but padding
                batch_size -= share
            lanes = streams.lanes(self._rows(batch_size))
            loader = self._loader(lanes, "Evaluation", batch_size)
            self._eval_loaders[key] = eval_dataset, loader  # the data set too: its id must stay its own
        return self._eval_loaders[key][1]

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return self.get_eval_dataloader(test_dataset)

    # Memory

    def _checkpoint_parts(self) -> dict[str, bool]:
        return super()._checkpoint_parts() | {"memory": not self.args.ignore_data_skip}

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:  # again for each size of auto_find_batch_size
        self._forget()
        checkpoint = kwargs.get("resume_from_checkpoint")
        self._begin_at = {} if checkpoint is None or self.args.ignore_data_skip else self._load_lanes(checkpoint)
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._begin_at = {}

    def _load_lanes(self, checkpoint: str) -> dict[int, LaneState]:
        """Load where the lanes of a stream stand: before training, as they are read before the rest of a checkpoint is."""
        if not isinstance(self.train_dataset, IterableDataset):
            return {}
        if tell(self.train_dataset) is None:
            raise ValueError(
                f"the {type(self.train_dataset).__name__} cannot go on from {checkpoint}: it has no state_dict and load_state_dict. "
                "ignore_data_skip=True begins the text anew"
            )
        return load_lane_states(checkpoint, self._reading())

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if LANE_STATE in inputs:
            self._lane_states[self._turn] = inputs.pop(LANE_STATE)
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._turn = (self._turn + 1) % self._turns
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if model.training:
            inputs = inputs | {"labels": inputs["shift_labels"], "memory": self._fit(self._memories.get(self._turn))}
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            self._memories[self._turn], outputs = self._take_memory(outputs)
        else:
            targets = inputs["shift_labels"]
            inputs = {name: values for name, values in inputs.items() if "labels" not in name}
            self._eval_memory, outputs = self._take_memory(model(**inputs, memory=self._fit(self._eval_memory)))
            sums = score_rows(outputs["logits"], targets).double().sum(0)
            self._eval_sums = self._eval_sums + sums
            loss = sums[0] / sums[2].clamp(min=1)
        return (loss, outputs) if return_outputs else loss

    def _fit(self, memory: SegmentMemory | None) -> SegmentMemory | None:
        """Return a memory in the length that the model has now, which `set_memory_length` may have changed; None for 0."""
        slots = self.model.config.mem_len
        return memory.resize(slots) if memory is not None and slots else None

    def _take_memory(self, outputs: Any) -> tuple[SegmentMemory | None, dict[str, Any]]:
        """Return the memory, detached and in the model's dtype (autocast returns float32), and the other outputs."""
        rest = {name: value for name, value in outputs.items() if name != "memory"}
        memory = outputs.get("memory")
        return None if memory is None else SegmentMemory(*memory).detach().to(self.model.dtype), rest

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        self._eval_memory, self._eval_sums = None, 0
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        sums: Any = self.accelerator.reduce(self._eval_sums, "sum")
        self._eval_memory = None
        exact: Any = language_model_metrics(EvalPrediction(sums[None].cpu().numpy(), None))  # pyright: ignore
        exact = denumpify_detensorize({f"{metric_key_prefix}_{name}": value for name, value in exact.items()})
        loss = f"{metric_key_prefix}_loss"
        # Only the loss is taken from `compute_metrics`: its other names mean what its author says.
        return output._replace(metrics=exact | (output.metrics or {}) | {loss: exact[loss]})

    # Checkpoints

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        rows, config = self._rows(self._train_batch_size) // self.accelerator.num_processes, self.model.config
        hidden = torch.zeros(rows, config.num_hidden_layers, config.mem_len, config.hidden_size, dtype=self.model.dtype)
        empty = SegmentMemory(hidden, torch.zeros(rows, dtype=torch.long))
        turns = (self._fit(self._memories.get(turn)) or empty for turn in range(self._turns))  # some may not have begun
        memories = [[part.cpu() for part in memory] for memory in turns]
        state = {"memories": memories, "processes": self.args.world_size, "reading": self._reading()}
        state["lanes"] = [self._lane_states.get(turn, [None] * rows) for turn in range(self._turns)]
        torch.save(state, memory_file(output_dir, self.args.process_index))
        self.accelerator.wait_for_everyone()  # then process 0 writes the trainer state: the checkpoint is complete

    def _reading(self) -> dict[str, Any]:
        """Describe how the text is read: a run that goes on must have this in common with the one before."""
        lanes = self._train_lanes()
        return {
            "lanes": lanes.rows, "steps": lanes.steps, "shards": getattr(lanes, "shards", None), "lane_groups": self.lane_groups,
            "block_size": lanes.block_size, "mem_len": self.model.config.mem_len,
        }  # fmt: skip

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is None or self.args.ignore_data_skip:  # the text begins anew, and so does the memory
            return
        memory = load_memory(checkpoint, self._reading()).to(self.args.device)
        shape = self._turns, self.accelerator.num_processes, -1
        own = torch.arange(len(memory.length)).view(shape)[:, self.accelerator.process_index]
        memories = (memory.select(rows) for rows in own)
        self._memories = {turn: part for turn, part in enumerate(memories) if part.length.any()}
        self._lane_states = {turn: [self._begin_at.get(int(lane)) for lane in lanes] for turn, lanes in enumerate(own)}
        self._turn = self.state.global_step * self.args.gradient_accumulation_steps % self._turns
