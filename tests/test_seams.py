"""The seams where other software calls a model: across each, every head with every kind of scheme gives what a plain call gives."""

import copy
import pathlib
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any
from typing import get_type_hints
from unittest import mock

import pytest
import seams
import torch
from elsewhere import answer_by_remote_code
from elsewhere import environment
from elsewhere import run_script
from safetensors.torch import load_file
from safetensors.torch import save_file
from seams import CELLS
from seams import KINDS
from seams import Cell
from torch import nn
from transformers import DataCollatorWithFlattening

import hf_relpos
from hf_relpos.model.scheme_registry import scheme_class

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
LOSS = {"rtol": 1e-5, "atol": 1e-7}
"""transformers computes most losses in float32."""
NOT_YET: set[str] = set()
"""Patterns of cells, as `seam-family-head-kind`, that do not hold yet."""


def column_data(cell: Cell, rows: int = 3, length: int = 7) -> seams.Inputs:
    """Return all that a data set may hold for a family."""
    data = cell.document(length, rows)
    ids = data["input_ids"]
    order = torch.arange(length).expand(ids.shape)
    late = torch.arange(rows).view(-1, *[1] * (ids.dim() - 1))
    data["attention_mask"] = (order < length - late).long()
    data["token_type_ids"] = (order > 2).long()
    data["position_ids"] = order + (order > 3)
    if cell.head.family == "seq2seq":
        target = torch.arange(length - 2).expand(rows, -1)
        data["decoder_attention_mask"] = (target < length - 2 - late).long()
        data["decoder_position_ids"] = target + (target > 2)
    else:
        data["reset_mask"] = order % 5 == 0
        data["seq_idx"] = order // 5
    if cell.head.family == "encoder":
        data.setdefault("perm_mask", (ids[..., None] < ids[..., None, :]).double())
    return data


def as_embeddings(cell: Cell, model: Any, data: seams.Inputs) -> seams.Inputs:
    """Return the same data with embeddings in the place of ids."""
    embed = model.get_input_embeddings()
    return {
        name.replace("input_ids", "inputs_embeds"): embed(value).detach() if "input_ids" in name else value
        for name, value in data.items()
    }


def close(found: Any, wanted: Any, **tolerances: float) -> None:
    torch.testing.assert_close(found, wanted, **(tolerances or CLOSE))


def columns(cell: Cell, folder: pathlib.Path) -> None:
    """Trainer feeds, by default, all that the data hold: ids or embeddings, masks, positions, types, documents."""
    model = cell.model()
    for data in (column_data(cell), as_embeddings(cell, model, column_data(cell))):
        batch = next(
            iter(seams.trainer_of(copy.deepcopy(model), str(folder), eval_dataset=seams.rows_of(data)).get_eval_dataloader())
        )
        assert set(batch) == set(data)
        close(seams.answers(model, batch), seams.answers(model, data))


def accumulation(cell: Cell, folder: pathlib.Path) -> None:
    """Four rows one after another give the update of one batch of four."""
    for _, model, data in seams.losses(cell):
        wanted = seams.update_of_whole_batch(copy.deepcopy(model), data)
        found = seams.update_by_trainer(model, data, str(folder), per_device_train_batch_size=1, gradient_accumulation_steps=4)
        close(found, wanted, **LOSS)


def evaluated(cell: Cell, folder: pathlib.Path) -> None:
    """Trainer, whose last batch is smaller, finds the loss of all rows, and predicts answers and nothing else, memory or not."""
    for memory in ({}, {"mem_len": 4})[: 1 + hasattr(cell.config(), "mem_len")]:
        for _, model, data in seams.losses(cell, **memory):
            check_evaluation(model.eval(), data, seams.answers(model, data), str(folder))


def check_evaluation(model: Any, data: seams.Inputs, wanted: seams.Inputs, folder: str) -> None:
    """Compare what Trainer finds for four rows, three a batch, with plain calls, whose answers are given."""
    seen: list[Any] = []
    arguments = {"per_device_eval_batch_size": 3, "include_for_metrics": ["loss"]}
    trainer = seams.trainer_of(model, folder, eval_dataset=seams.rows_of(data), **arguments)
    trainer.compute_metrics = lambda prediction: seen.append(prediction) or {"rows": len(prediction.losses)}
    parts = [{name: value[rows] for name, value in data.items()} for rows in (slice(3), slice(3, 4))]
    with torch.no_grad():
        mean = sum(rows * float(model(**part).loss) for rows, part in zip((3, 1), parts, strict=True)) / 4
    metrics = trainer.evaluate()
    close(metrics["eval_loss"], mean, **LOSS)
    assert metrics["eval_rows"] == 4
    result = trainer.predict(trainer.eval_dataset)
    labels = [value for name, value in data.items() if "label" in name or name in ("start_positions", "end_positions")]
    for found in (seen[0], result):
        close([torch.tensor(value) for value in as_tuple(found.label_ids)], labels)
        close([torch.tensor(value) for value in as_tuple(found.predictions)], list(wanted.values()))
    trainer.compute_metrics = None  # then the loss alone is computed
    close(trainer.evaluate()["eval_loss"], mean, **LOSS)


def as_tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def packed(cell: Cell, folder: pathlib.Path) -> None:
    """Documents in one row, told apart by positions that begin anew, are answered as each is alone."""
    model, documents = cell.model(), [cell.document(length, seed=length) for length in (5, 7)]
    row = seams.pack_together(documents)
    found = seams.answers(model, row)
    if cell.head.answers in ("token", "target"):
        alone = [seams.answers(model, document) for document in documents]
        close(found, {name: torch.cat([part[name] for part in alone], 1) for name in found})
    reset = {name: value for name, value in row.items() if name != "position_ids"}
    close(found, seams.answers(model, {**reset, "reset_mask": row["position_ids"] == 0}))
    if cell.head.answers == "choices":
        return  # the collator knows no choices
    features = [{"input_ids": document["input_ids"][0].tolist()} for document in documents]
    extra = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(features) | row
    extra.pop("labels")
    close(found, seams.answers(model, extra))


def padding(cell: Cell, folder: pathlib.Path) -> None:
    """Each document of a batch is answered as it is alone, whichever side is padded."""
    model, documents = cell.model(), [cell.document(length, seed=length) for length in (7, 5, 6)]
    alone = [seams.answers(model, document) for document in documents]
    for side in ("left", "right"):
        batch = seams.pad_together(documents, side)
        real = batch.get("decoder_attention_mask", batch["attention_mask"]).bool()
        for name, values in seams.answers(model, batch).items():
            for row, value in enumerate(values):
                close(value[real[row]] if cell.head.answers == "token" else value, alone[row][name][0])


def cached(cell: Cell, folder: pathlib.Path) -> None:
    """Steps of one token and chunks of several, behind prompts padded on either side, answer as one pass of each row alone."""
    model, documents = cell.model(), [cell.document(length, seed=length) for length in (9, 7)]
    alone = [seams.answers(model, document, use_cache=False) for document in documents]
    ids = "decoder_input_ids" if cell.head.family == "seq2seq" else "input_ids"
    mask = ids.replace("input_ids", "attention_mask")
    rest = torch.cat([document[ids][:, -3:] for document in documents])
    for side in ("left", "right"):
        batch = seams.pad_together([{**document, ids: document[ids][:, :-3]} for document in documents], side)
        batch |= {ids: torch.cat([batch[ids], rest], 1), mask: torch.cat([batch[mask], torch.ones_like(rest)], 1)}
        real, total = batch[mask].bool(), batch[ids].shape[1]
        for sizes in ([total - 3, 1, 1, 1], [total - 3, 3], [2, total - 4, 2], [1] * total):
            found = in_chunks(model, batch, ids, mask, sizes)
            for row, wanted in enumerate(alone):
                close(
                    {name: values[row][real[row]] for name, values in found.items()},
                    {name: wanted[name][0] for name in wanted},
                )


def in_chunks(model: Any, batch: seams.Inputs, ids: str, mask: str, sizes: list[int]) -> seams.Inputs:
    """Return what a model answers that reads a batch in chunks of the given sizes, each behind the cache of those before."""
    cache, parts, past = None, [], 0
    for size in sizes:
        cut = {ids: batch[ids][:, past : past + size], mask: batch[mask][:, : past + size]}
        with torch.no_grad():
            output = model(**{**batch, **cut}, cache=cache, use_cache=True)
        cache, past = output.cache, past + size
        parts.append(seams.tensors(output))
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def offloaded(cell: Cell, folder: pathlib.Path) -> None:
    """Weights that accelerate keeps elsewhere and brings for each module's call give the same answers."""
    accelerate = pytest.importorskip("accelerate")
    model, document = cell.model(), cell.document(rows=2)
    wanted = seams.answers(model, document)
    close(seams.answers(accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=True), document), wanted)


class StoredInBytes(nn.Module):
    """A linear layer as libraries for quantised weights put it in: bytes of another shape, and a scale a row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight: Any = nn.Parameter(self.quantise(linear).view(-1, 1), requires_grad=False)

    def quantise(self, linear: nn.Linear) -> torch.Tensor:
        return (linear.weight.detach() / self.scale).round().to(torch.int8)

    def real_weight(self) -> torch.Tensor:
        return self.weight.view(self.out_features, self.in_features) * self.scale

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden_states, self.real_weight().to(hidden_states.dtype), self.bias)


class StoredBehindMethod(StoredInBytes):
    """A linear layer whose `weight` is a method, as those of torch.ao are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        del self.weight
        self.stored = self.quantise(linear)
        self.weight = lambda: self.stored * self.scale

    def real_weight(self) -> torch.Tensor:
        return self.weight()


def quantised(cell: Cell, folder: pathlib.Path) -> None:
    """Linear layers that store bytes give what plain ones give whose weights are those bytes times the scales."""
    document = cell.document(rows=2)
    for stored in (StoredInBytes, StoredBehindMethod):
        model = cell.model()
        plain = copy.deepcopy(model)
        for name, linear in list(model.named_modules()):
            if isinstance(linear, nn.Linear):
                layer = stored(linear)
                model.set_submodule(name, layer)
                plain.get_submodule(name).weight = nn.Parameter(layer.real_weight().clone())
        close(seams.answers(model, document), seams.answers(plain, document))


OTHER_FIELDS: list[dict[str, Any]] = [
    {"mem_len": 4},
    {"sliding_window": 3},
    {"num_attention_heads": 6, "attention_path": "dense", "layer_norm_eps": 0.1, "hidden_act": "relu"},
]


def as_dict(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration without those that tell how it was saved."""
    ours = config.to_dict()
    return {name: ours[name] for name in ours.keys() - {"transformers_version", "dtype", "architectures", "_name_or_path"}}


def save_without_code(model: Any, folder: pathlib.Path) -> None:
    """Save what a class of this package loads: the code that goes with it takes longer than all else."""
    with mock.patch.object(type(model), "_auto_class", None), mock.patch.object(type(model.config), "_auto_class", None):
        model.save_pretrained(folder)


def reloaded(cell: Cell, folder: pathlib.Path) -> None:
    """A saved model that is loaded with another field is the model of that configuration with the same weights."""
    model, document = cell.model(), cell.document(rows=2)
    save_without_code(model, folder)
    for fields in OTHER_FIELDS:
        try:
            plain = cell.head.kind(cell.config(**fields)).double().eval()
        except ValueError:
            with pytest.raises((ValueError, TypeError)):  # transformers hands on what is no field to the head
                cell.head.kind.from_pretrained(folder, **fields)
            continue
        found = cell.head.kind.from_pretrained(folder, **fields)
        assert as_dict(found.config) == as_dict(plain.config)
        kept, new = model.state_dict(), found.state_dict()
        differ = {name for name in kept if not torch.equal(kept[name], new[name])}
        assert not differ or "num_attention_heads" in fields  # of some schemes the tables have another size then, and are new
        assert all("position_schemes" in name and kept[name].shape != new[name].shape for name in differ)
        plain.load_state_dict(new)
        close(seams.answers(found, document), seams.answers(plain, document))


def other_scheme(cell: Cell, folder: pathlib.Path) -> None:
    """A saved model that is loaded with another scheme keeps all weights but those of positions, which are new."""
    model, document = cell.model(), cell.document(rows=2)
    save_without_code(model, folder)
    fields = next(cell.fields(scheme) for scheme in KINDS[cell.kind][1:] if seams.has_meaning(cell, scheme))
    plain = cell.head.kind(cell.config(**fields)).double().eval()
    found = cell.head.kind.from_pretrained(folder, **{name: value for name, value in fields.items() if "position_" in name})
    assert as_dict(found.config) == as_dict(plain.config)
    kept, new = model.state_dict(), found.state_dict()
    own = {name for name in new if name not in kept or "position_schemes" in name}
    for name in new.keys() & kept.keys():
        same = new[name].shape == kept[name].shape and torch.equal(new[name], kept[name])
        assert same == (name not in own), name
    plain.load_state_dict(new)
    close(seams.answers(found, document), seams.answers(plain, document))


def with_loss(cell: Cell) -> bool:
    return bool(cell.head.losses)


def with_cache(cell: Cell) -> bool:
    """Whether a head answers for each token, its configuration can ask for a cache and its output has one."""
    output = get_type_hints(cell.head.kind.forward)["return"]
    has_cache = "cache" in getattr(output, "__dataclass_fields__", ())
    return cell.head.answers == "token" and hasattr(cell.config(), "use_cache") and has_cache


SEAMS: dict[str, tuple[Callable[[Cell, pathlib.Path], None], Callable[[Cell], bool]]] = {
    "columns": (columns, lambda cell: True),
    "accumulation": (accumulation, with_loss),
    "evaluated": (evaluated, lambda cell: with_loss(cell) and cell.kind == "rotary"),
    "packed": (packed, lambda cell: getattr(cell.config(), "position_ids_mark_documents", True)),
    "padding": (padding, lambda cell: True),
    "cached": (cached, with_cache),
    "offloaded": (offloaded, lambda cell: True),
    "quantised": (quantised, lambda cell: True),
    "reloaded": (reloaded, lambda cell: True),
    "other_scheme": (other_scheme, lambda cell: True),
}
"""For each seam its equality and the cells where it has a meaning."""


def matrix() -> list[Any]:
    """Return the cells of all seams that one process can cross."""
    found = []
    for seam, (_, has_meaning) in SEAMS.items():
        for cell in filter(has_meaning, CELLS):
            mark = [pytest.mark.xfail(strict=True, raises=Exception)] if is_not_yet(seam, cell) else []
            found.append(pytest.param(seam, cell, id=name_of(seam, cell), marks=mark))
    return found


def name_of(seam: str, cell: Cell) -> str:
    return f"{seam}-{cell.name}"


def is_not_yet(seam: str, cell: Cell) -> bool:
    return any(fnmatch(name_of(seam, cell), pattern) for pattern in NOT_YET)


@pytest.mark.parametrize("seam, cell", matrix())
def test_seam(seam: str, cell: Cell, tmp_path: pathlib.Path) -> None:
    SEAMS[seam][0](cell, tmp_path)


def check_all(seam: str, cells: list[Cell], check: Callable[[Cell], None]) -> None:
    """Check all cells of a seam that other processes have crossed, and name each that does not hold."""
    wrong = {}
    for cell in cells:
        try:
            check(cell)
        except Exception as error:
            wrong[name_of(seam, cell)] = str(error)
    expected = {name_of(seam, cell) for cell in cells if is_not_yet(seam, cell)}
    assert wrong.keys() == expected, {name: text for name, text in wrong.items() if name not in expected}


def test_two_processes(tmp_path: pathlib.Path) -> None:
    """Two processes with two rows each, one after another, give the update of one batch of four."""
    run_script("seams_of_two_processes.py", tmp_path, **environment())

    def check(cell: Cell) -> None:
        for name, model, data in seams.losses(cell):
            found = load_file(tmp_path / f"{cell.name}-{name}.safetensors")
            wanted = seams.update_of_whole_batch(model, data)
            close(found, {weight: wanted[weight] for weight in found}, **LOSS)

    check_all("two_processes", list(filter(with_loss, CELLS)), check)


def test_remote_code(tmp_path: pathlib.Path) -> None:
    """A saved folder answers the same by the code in it, where this package cannot be imported."""
    for cell in CELLS:
        model, document = cell.model(), cell.document(rows=2)
        model.save_pretrained(tmp_path / cell.name / "model")
        kind = next(auto for auto, name in model.config.family_auto_map.items() if name.endswith(f".{type(model).__name__}"))
        save_file(document, tmp_path / cell.name / "document.safetensors", {"auto": kind})
        save_file(seams.answers(model, document), tmp_path / cell.name / "wanted.safetensors")
    answer_by_remote_code(tmp_path)

    def check(cell: Cell) -> None:
        found, wanted = (load_file(tmp_path / cell.name / f"{name}.safetensors") for name in ("found", "wanted"))
        close(found, wanted)

    check_all("remote_code", CELLS, check)


def test_every_head_has_its_row() -> None:
    rows = {head.kind.__name__ for head in seams.HEADS}
    for config in seams.CONFIGS.values():
        assert {name.split(".")[1] for auto, name in config.family_auto_map.items() if auto != "AutoConfig"} <= rows
    for head in seams.HEADS:
        assert len([cell for cell in CELLS if cell.head == head]) >= len(KINDS) - 3, "no cell is lost by mistake"


def test_every_kind_of_scheme_has_its_row() -> None:
    """The kind of a scheme is the file of its class."""
    assert {scheme_class(names[0]).__module__ for names in KINDS.values()} >= {
        kind.__module__ for kind in hf_relpos.SCHEMES.values()
    }
