"""The models that train on two processes: every family with every kind of scheme, and what else a plan has to cut."""

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import seams
import torch
from matrix import sharpen
from segments import make_documents
from segments import make_table
from segments import make_trainer

from hf_relpos.model.scheme_registry import scheme_class

ENGINES: dict[str, dict[str, int]] = {"ddp": {}, "fsdp": {"fsdp_size": 2}, "tp": {"tp_size": 2}}
"""How two processes share the work, and the fields of transformers' `DistributedConfig` that say so."""
RATE = 0.5
"""Of one step of SGD: weights that are equal after it had equal gradients."""


@dataclass(frozen=True)
class Row:
    """A head with a scheme, and with memory where both have it; `fields` of the configuration beside those that are tiny."""

    head: seams.Head
    scheme: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "-".join([self.head.family, self.head.name, self.scheme, *self.fields])

    @property
    def remembers(self) -> bool:
        return self.head.family != "seq2seq" and "memory" not in scheme_class(self.scheme).refuses

    @property
    def engines(self) -> list[str]:
        """Engines that are tried: DDP without memory is tried elsewhere (`test_seams.py`)."""
        return [engine for engine in ENGINES if engine != "ddp" or self.remembers]

    @property
    def shards(self) -> bool:
        """Whether sharded files are tried too, which cost as much as the step: in each family, and with the most unusual tables."""
        return self.scheme in ("transformer_xl", "deberta")

    def model(self) -> Any:
        """Return a tiny model in float64, in training mode."""
        fields = seams.Cell(self.head, "rotary").fields(self.scheme) | ({"mem_len": 4} if self.remembers else {})
        fields |= {"vocab_size": 38, "num_hidden_layers": 2 if self.shards else 1} | self.fields
        return sharpen(self.head.kind(seams.CONFIGS[self.head.family](**fields))).double().train()

    def segments(self) -> list[seams.Inputs]:
        """Return two segments of four texts, with labels."""
        documents = [seams.Cell(self.head, "rotary").document(rows=4, seed=seed) for seed in (0, 5)]
        return [document | self.head.losses[next(iter(self.head.losses))][1](document) for document in documents]

    def targets(self, segment: seams.Inputs) -> int:
        """Return how many labels are predicted: the first token of a decoder is not."""
        return int((segment["labels"][:, self.head.family == "decoder" :] != -100).sum())


def run_segments(model: Any, row: Row, segments: list[seams.Inputs], targets: int) -> tuple[torch.Tensor, Any]:
    """Return the loss of the second segment behind the first, its sum over `targets`; and the memory after it."""
    if not row.remembers:
        return model(**segments[1], num_items_in_batch=targets).loss, None
    with torch.no_grad():
        memory = model(**{name: value for name, value in segments[0].items() if name != "labels"}).memory
    outputs = model(**segments[1], memory=memory, num_items_in_batch=targets)
    return outputs.loss, outputs.memory


def take_step(model: Any, loss: torch.Tensor) -> None:
    """Take one step of SGD."""
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    optimizer.step()
    optimizer.zero_grad()


def lane_trainer(folder: Path, model: Any, rows: int, **options: Any) -> Any:
    """Return a `SegmentTrainer` that reads eight lanes, `rows` of them in this process."""
    tables = make_table(make_documents(9, 200, 70, 300)), make_table(make_documents(17, 40, 9), padding=0)
    return make_trainer(folder, *tables, model, max_steps=3, per_device_train_batch_size=rows, **options)


def folder_of(root: Path, row: Row, engine: str | None = None) -> Path:
    """Return the folder of a row's model, before a step or, by an engine, after it."""
    return root / row.name / (engine or "before")


def _rows() -> Iterator[Row]:
    named = {(head.family, head.name): head for head in seams.HEADS}
    decoder, encoder = named["decoder", "ForCausalLM"], named["encoder", "ForMaskedLM"]
    permutation, seq2seq = named["encoder", "ForPermutationLM"], named["seq2seq", "ForConditionalGeneration"]
    for scheme in (names[0] for names in seams.KINDS.values()):
        kind = scheme_class(scheme)
        heads = [decoder] * ("causal" not in kind.refuses) + [encoder] * ("bidirectional" not in kind.refuses)
        heads += [permutation] * ("bidirectional" not in kind.refuses and not kind.acts_on_embeddings)
        yield from (Row(head, scheme) for head in (*heads, seq2seq))
    shared = {"num_key_value_heads": 1}
    yield Row(
        permutation, "xlnet", {"type_vocab_size": 0}
    )  # without token types, what is learned of them would have no gradient
    yield Row(encoder, "deberta", {"position_parameters": {"max_distance": 4, "projections": "layer"}} | shared)
    yield Row(decoder, "pope", {"gated_mlp": True, "attention_bias": True, "mlp_bias": True} | shared)
    yield Row(
        decoder, "shaw", {"norm_position": "post", "norm_type": "rms_norm", "tie_word_embeddings": False, "vocab_size": 37}
    )
    yield Row(decoder, "transformer_xl", {"cutoffs": [10, 20], "div_val": 2, "share_positions": "model"})
    yield Row(decoder, "alibi", {"embedding_size": 10, "lm_head_bias": True})


ROWS = list(_rows())
