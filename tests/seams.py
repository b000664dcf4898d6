"""The matrix of seams: one row a head and one row a kind of scheme, and the documents that their models read.

A head that joins the Auto classes, or a scheme of a new kind, fails `test_seams.py` until it has its row here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from matrix import ROWS
from matrix import SIZES
from matrix import sharpen
from torch.nn.functional import pad
from transformers import Trainer
from transformers import TrainingArguments

import hf_relpos
from hf_relpos.model.scheme_registry import scheme_class

CONFIGS = {
    "decoder": hf_relpos.RelPosDecoderConfig,
    "encoder": hf_relpos.RelPosEncoderConfig,
    "seq2seq": hf_relpos.RelPosSeq2SeqConfig,
}
PREFIX = {"decoder": "RelPosDecoder", "encoder": "RelPosEncoder", "seq2seq": "RelPosSeq2Seq"}
CLASSES = 3
SIZE = SIZES | {"num_labels": CLASSES, "type_vocab_size": 2, "max_position_embeddings": 16, "attn_implementation": None}
SGD = {"max_steps": 1, "learning_rate": 0.5, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0}
Inputs = dict[str, torch.Tensor]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return tokens that are neither padding nor special."""
    return torch.randint(3, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def token_labels(inputs: Inputs, classes: int | None = None) -> Inputs:
    """Return a target for each token: the tokens themselves or classes. Each row has fewer than the row before it."""
    ids = inputs.get("decoder_input_ids", inputs["input_ids"])
    hidden = torch.arange(ids.shape[1])[None] < torch.arange(len(ids))[:, None]
    return {"labels": (ids if classes is None else ids % classes).masked_fill(hidden, -100)}


def class_labels(inputs: Inputs) -> Inputs:
    return {"labels": torch.arange(len(inputs["input_ids"])) * 2 % CLASSES}


def number_labels(inputs: Inputs) -> Inputs:
    return {"labels": torch.linspace(-2, 3, len(inputs["input_ids"]))}


def several_labels(inputs: Inputs) -> Inputs:
    return {"labels": (random(len(inputs["input_ids"]), CLASSES) % 2).float()}


def span_labels(inputs: Inputs) -> Inputs:
    start = torch.arange(len(inputs["input_ids"]))
    return {"start_positions": start, "end_positions": start + 2}


def choice_labels(inputs: Inputs) -> Inputs:
    return {"labels": torch.arange(len(inputs["input_ids"])) % 2}


def target_labels(inputs: Inputs) -> Inputs:
    """Return the tokens that `target_mapping` names. Each row has fewer than the row before it."""
    targets = inputs["input_ids"].gather(1, inputs["target_mapping"].argmax(-1))
    hidden = torch.arange(targets.shape[1])[None] < torch.arange(len(targets))[:, None]
    return {"labels": targets.masked_fill(hidden, -100)}


@dataclass(frozen=True)
class Head:
    """One head of a family.

    Attributes:
        family: decoder, encoder or seq2seq.
        name: what the name of its class ends with.
        answers: what an answer is for: a `token`, a whole `row`, a `target` of `target_mapping`, or a row of `choices`.
        losses: for each kind of loss the fields of its configuration and its labels.
    """

    family: str
    name: str
    answers: str = "token"
    losses: dict[str, tuple[dict[str, Any], Callable[[Inputs], Inputs]]] = field(default_factory=dict)

    @property
    def kind(self) -> Any:
        """The class."""
        return getattr(hf_relpos, PREFIX[self.family] + self.name)


TOKENS = {"tokens": ({}, token_labels)}
TOKEN_CLASSES = {"classes": ({}, lambda inputs: token_labels(inputs, CLASSES))}
SEQUENCES = {
    "one class": ({}, class_labels),
    "number": ({"num_labels": 1, "problem_type": "regression"}, number_labels),
    "several classes": ({"problem_type": "multi_label_classification"}, several_labels),
}
SPANS = {"spans": ({}, span_labels)}
HEADS = [
    Head("decoder", "Model"),
    Head("decoder", "ForCausalLM", losses=TOKENS),
    Head("decoder", "ForSequenceClassification", "row", SEQUENCES),
    Head("decoder", "ForTokenClassification", losses=TOKEN_CLASSES),
    Head("decoder", "ForQuestionAnswering", losses=SPANS),
    Head("encoder", "Model"),
    Head("encoder", "ForMaskedLM", losses=TOKENS),
    Head("encoder", "ForPermutationLM", "target", {"targets": ({}, target_labels)}),
    Head("encoder", "ForSequenceClassification", "row", SEQUENCES),
    Head("encoder", "ForTokenClassification", losses=TOKEN_CLASSES),
    Head("encoder", "ForQuestionAnswering", losses=SPANS),
    Head("encoder", "ForMultipleChoice", "choices", {"choice": ({}, choice_labels)}),
    Head("seq2seq", "Model"),
    Head("seq2seq", "ForConditionalGeneration", losses=TOKENS),
    Head("seq2seq", "ForSequenceClassification", "row", SEQUENCES),
]
KINDS = {
    "rotary": ("rope", "xpos", "alibi"),
    "bias": ("t5", "learned_bias"),
    "vectors": ("transformer_xl", "music", "shaw"),
    "two_vectors": ("deberta", "shaw"),
    "factors": ("fire", "kerple"),
    "dense": ("cope", "nope"),
    "gates": ("fox", "nope"),
    "absolute": ("learned_absolute", "sinusoidal"),
}
"""For each kind of scheme the one that stands for it, then those that a model of it may be loaded with, the first that fits."""


@dataclass(frozen=True)
class Cell:
    """A head with a kind of scheme."""

    head: Head
    kind: str

    @property
    def name(self) -> str:
        return f"{self.head.family}-{self.head.name}-{self.kind}"

    def fields(self, scheme: str | None = None) -> dict[str, Any]:
        """Return the fields of a tiny model. An encoder-decoder has a scheme on one side where the other refuses it."""
        scheme = KINDS[self.kind][0] if scheme is None else scheme
        own = {"scheme": scheme, "parameters": ROWS[scheme].variants[0]}
        fields = {f"position_{name}": value for name, value in own.items()}
        if self.head.family == "seq2seq":
            refuses = scheme_class(scheme).refuses
            encoder = {"scheme": "alibi", "parameters": {}} if "bidirectional" in refuses else own
            decoder = {"scheme": "rope", "parameters": {}} if "causal" in refuses else own
            fields = {f"encoder_position_{name}": value for name, value in encoder.items()}
            fields |= {f"decoder_position_{name}": value for name, value in decoder.items()}
        return SIZE | fields

    def config(self, **fields: Any) -> Any:
        return CONFIGS[self.head.family](**{**self.fields(), **fields})

    def model(self, **fields: Any) -> Any:
        """Return a tiny model in float64 whose weights make every part matter."""
        return sharpen(self.head.kind(self.config(**fields))).double().eval()

    def document(self, length: int = 7, rows: int = 1, seed: int = 0) -> Inputs:
        """Return what the head cannot do without: `rows` documents of `length` tokens; targets are two tokens shorter."""
        choices = (2,) if self.head.answers == "choices" else ()
        found = {"input_ids": random(rows, *choices, length, seed=seed)}
        if self.head.family == "seq2seq":
            found["decoder_input_ids"] = random(rows, length - 2, seed=seed + 1)
        if self.head.answers == "target":
            generator = torch.Generator().manual_seed(seed)
            order = torch.rand(rows, length, generator=generator).argsort(1)
            found["perm_mask"] = (order[:, :, None] <= order[:, None, :]).double()
            found["target_mapping"] = torch.nn.functional.one_hot(order.argsort(1)[:, -3:], length).double()
        return found


def has_meaning(cell: Cell, scheme: str | None = None) -> bool:
    """Return whether the configuration accepts a scheme, and the query stream where the head needs one."""
    try:
        config = cell.config(**cell.fields(scheme))
        if cell.head.answers == "target":
            config.require_query_stream()
    except ValueError as error:
        assert "is refused for" in str(error)
        return False
    return True


CELLS = [cell for cell in (Cell(head, kind) for head in HEADS for kind in KINDS) if has_meaning(cell)]


def widths(inputs: Inputs) -> dict[str, int]:
    """Return the number of tokens of the source and, in an encoder-decoder, of the target, by the name of the mask."""
    found = {"attention_mask": inputs["input_ids"].shape[-1]}
    if "decoder_input_ids" in inputs:
        found["decoder_attention_mask"] = inputs["decoder_input_ids"].shape[-1]
    return found


def pad_together(documents: list[Inputs], side: str) -> Inputs:
    """Return one batch of documents, each padded on one side, with their masks."""
    wide = {name: max(widths(inputs)[name] for inputs in documents) for name in widths(documents[0])}
    rows = []
    for inputs in documents:
        masks = {name: torch.ones_like(inputs[name.replace("attention_mask", "input_ids")]) for name in wide}
        row = {}
        for name, value in {**inputs, **masks}.items():
            missing = wide["decoder_attention_mask" if name.startswith("decoder") else "attention_mask"] - value.shape[-1]
            ends = (missing, 0) if side == "left" else (0, missing)
            row[name] = pad(value, ends * 2 if name == "perm_mask" else ends)
        rows.append(row)
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def pack_together(documents: list[Inputs]) -> Inputs:
    """Return one row of documents one after another, numbered anew from each one's first token."""

    def numbers(name: str) -> torch.Tensor:
        return torch.cat([torch.arange(inputs[name].shape[-1]).expand(inputs[name].shape) for inputs in documents], -1)

    packed = {}
    for name in documents[0]:
        parts = [inputs[name] for inputs in documents]
        square = name in ("perm_mask", "target_mapping")
        packed[name] = torch.block_diag(*(part[0] for part in parts))[None] if square else torch.cat(parts, -1)
        if name.endswith("input_ids"):
            packed[name.replace("input", "position")] = numbers(name)
    return packed


@torch.no_grad()
def answers(model: Any, inputs: Inputs, **options: Any) -> Inputs:
    """Return what a forward pass answers, without the loss."""
    return tensors(model(**inputs, **options))


def tensors(output: Any) -> Inputs:
    """Return the answers of an output."""
    names = ("logits", "start_logits", "end_logits", "last_hidden_state")
    return {name: output[name].detach() for name in names if output.get(name) is not None}


def rows_of(data: Inputs) -> list[Inputs]:
    """Return a batch as a data set of rows."""
    return [{name: value[row] for name, value in data.items()} for row in range(len(next(iter(data.values()))))]


def trainer_of(model: Any, folder: str, **arguments: Any) -> Trainer:
    """Return the stock Trainer, which neither reports nor saves."""
    data = {name: arguments.pop(name) for name in ("train_dataset", "eval_dataset") if name in arguments}
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    return Trainer(model, TrainingArguments(folder, **quiet, **arguments), **data)


def update_of_whole_batch(model: Any, data: Inputs) -> Inputs:
    """Return what one step of SGD adds to each weight, for all rows in one plain call."""
    model(**data).loss.backward()
    return {name: -SGD["learning_rate"] * weight.grad for name, weight in model.named_parameters()}


def update_by_trainer(model: Any, data: Inputs, folder: str, **arguments: Any) -> Inputs:
    """Return what Trainer adds to each weight in one step."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trainer_of(model, folder, train_dataset=rows_of(data), **SGD, **arguments).train()
    return {name: weight.detach() - before[name] for name, weight in model.named_parameters()}


def losses(cell: Cell, **more: Any) -> Any:
    """Yield each loss of a head: its name, a model in training mode, which may have `more` fields, and four rows with labels."""
    for name, (fields, labels) in cell.head.losses.items():
        data = cell.document(rows=4)
        yield name, cell.model(**fields, **more).train(), {**data, **labels(data)}
