"""The file of a comparison, and the cells that it asks for: schemes x seeds x tasks."""

import json
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_relpos.data.labelled_files import LabelledSource
from hf_relpos.data.labelled_files import describe_labelled
from hf_relpos.data.probes import PROBES
from hf_relpos.data.sources import describe_source
from hf_relpos.data.sources import describe_text
from hf_relpos.evaluation.cells import Cell
from hf_relpos.evaluation.matching import match_parameters
from hf_relpos.model.scheme_registry import SCHEMES
from hf_relpos.model.scheme_registry import scheme_class
from hf_relpos.training.model_setup import build_config
from hf_relpos.training.settings_file import read_yaml
from hf_relpos.training.settings_file import refuse_unknown
from hf_relpos.training.texts import needed_documents

KEYS = ("title", "also", "schemes", "seeds", "baseline", "encoder_baseline", "output_dir", "match", "settings", "tasks")
# What a task may say, with its default; the rest are arguments of train_lm.py under `settings`.
COMMON: dict[str, Any] = {"kind": None, "settings": {}, "schemes": None, "batch_size": 16}
LABELLED: dict[str, Any] = {"examples": 1000, "train_examples": None}
LABELLED |= {"train_file": None, "validation_file": None, "label_before": None}
OPTIONS: dict[str, dict[str, Any]] = {
    "language_modelling": COMMON | {"lengths": [1, 2, 4, 8, 16], "tokens": 2**15, "mem_len": 0},
    "masked_lm": COMMON | {"lengths": [1, 2, 4], "tokens": 2**15},
    "permutation_lm": COMMON | {"lengths": [1, 2, 4], "tokens": 2**15},
    "classification": COMMON | LABELLED | {"text_column": "text", "label_column": "label"},
    "tagging": COMMON | LABELLED | {"text_column": "words", "label_column": "tags"},
    "probe": COMMON | {"probe": None, "examples": 200, "train_examples": None, "sizes": None, "mem_len": 0, "segment": None},
}
# A cell keeps nothing but its numbers.
FIXED = {
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "sample_tokens": 0,
    "do_train": True,
    "do_eval": True,
}
TEXT = ("dataset_name", "dataset_config_name", "train_file", "validation_file", "text_column", "validation_split_percentage")
"""Settings that say which text is read."""
PLAIN_SETTINGS = {"logging_steps": 10, "lr_scheduler_type": "constant_with_warmup"}


@dataclass(frozen=True)
class Comparison:
    """A comparison as its file describes it.

    Attributes:
        title: what it is called.
        file: the file.
        output: the folder of its cells, tables and reports.
        schemes, seeds, tasks: their names.
        baselines: by task, the scheme that the others are compared with.
        cells: all of its cells.
        match: `parameters` if models were widened to the same number of them, None if they have the same shape.
        also: files of `evaluate --lengths --output` whose models stand in the same plots, by name.
    """

    title: str
    file: Path
    output: Path
    schemes: list[str]
    seeds: list[int]
    tasks: list[str]
    baselines: dict[str, str]
    cells: list[Cell]
    match: str | None
    also: dict[str, Path]


def read_comparison(file: str | Path, output: str | None = None) -> Comparison:
    """Read the file of a comparison, and refuse what cannot work before anything is run.

    Args:
        file: YAML with the keys `schemes`, `seeds`, `tasks`, `settings` and those of `KEYS`.
        output: a folder in the place of the file's `output_dir`.
    """
    given, where = read_yaml(file), f"{file}: "
    refuse_unknown(given, KEYS, where)
    if not given.get("tasks") or not isinstance(given["tasks"], dict):
        raise ValueError(f"{where}a comparison needs `tasks: {{name: {{kind: ...}}}}`; kinds are {', '.join(OPTIONS)}")
    schemes, seeds = _schemes(given.get("schemes", "all"), where), given.get("seeds", [0, 1, 2])
    if (
        not isinstance(seeds, list)
        or not seeds
        or len(set(map(str, seeds))) < len(seeds)
        or not all(type(s) is int for s in seeds)
    ):
        raise ValueError(f"{where}seeds: {seeds!r} must be a list of different whole numbers, such as [0, 1, 2]")
    tasks = dict(_tasks(given["tasks"], where))
    baselines = {name: _baseline(given, task, schemes) for name, task in tasks.items()}
    texts: dict[str, dict[str, Any]] = {}
    cells = []
    for name, task in tasks.items():
        for scheme in task["schemes"] or schemes:
            if scheme not in schemes:
                raise ValueError(f"{where}tasks: {name}: schemes: {scheme!r} is none of {', '.join(schemes)}")
            for seed in seeds:
                settings = _settings(given.get("settings", {}), task, schemes[scheme], seed)
                fields = schemes.get(baselines[name], {"position_scheme": baselines[name]})
                cells.append(_cell(name, task, scheme, seed, settings, fields))
    _refuse_wrong_settings(cells, where)
    match = given.get("match")
    if match not in (None, "parameters"):
        raise ValueError(f"{where}match: {match!r} is none of parameters, and null for models of the same shape")
    cells = match_parameters(cells, baselines) if match else cells
    cells = [_with_text(cell, texts) for cell in cells]
    folder = Path(output or given.get("output_dir") or f"runs/compare/{Path(file).stem}")
    title = str(given.get("title", Path(file).stem))
    also = _also(given.get("also") or {}, schemes, cells, where)
    return Comparison(title, Path(file), folder, list(schemes), seeds, list(tasks), baselines, cells, match, also)


def _also(given: dict[str, str], schemes: Mapping[str, Any], cells: list[Cell], where: str) -> dict[str, Path]:
    """Read which checkpoints stand in the plots too, and refuse one that would stand nowhere, or in the place of a scheme."""
    texts = {cell.text["validation"]["sha256"] for cell in cells if cell.kind == "language_modelling" and cell.text}
    for name, path in given.items():
        if name in schemes:
            raise ValueError(f"{where}also: {name!r} is a scheme of this comparison; give the checkpoint another name")
        if not Path(path).is_file():
            raise ValueError(
                f"{where}also: there is no file {path}; `evaluate FOLDER --lengths ... --output {path}` writes it"
            )
        if (text := json.loads(Path(path).read_text(encoding="utf-8")).get("text")) not in texts:
            raise ValueError(
                f"{where}also: {name}: {path} measured the text with SHA-256 {text}, which is none of the validation texts of"
                f" this comparison's language models: {', '.join(sorted(texts)) or 'there are none'}"
            )
    return {str(name): Path(path) for name, path in given.items()}


def _schemes(given: Any, where: str) -> dict[str, dict[str, Any]]:
    """Return the settings of each scheme by its name in the comparison."""
    listed = list(SCHEMES) if given == "all" else given
    if isinstance(listed, list):
        listed = {name: {} for name in listed}
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{where}schemes: {given!r} is neither 'all', a list of schemes nor a mapping of names to settings")
    found = {str(name): {"position_scheme": name} | (settings or {}) for name, settings in listed.items()}
    for settings in found.values():
        for name in _names(settings["position_scheme"]):
            scheme_class(name)
    return found


def _names(scheme: str | list[str]) -> list[str]:
    return [scheme] if isinstance(scheme, str) else scheme


def _tasks(given: dict[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the tasks with their defaults; a list of probes, or `all`, is a task for each."""
    for name, task in given.items():
        here = f"{where}tasks: {name}: "
        if not isinstance(task, dict) or task.get("kind") not in OPTIONS:
            raise ValueError(f"{here}{task!r} needs a `kind`, one of {', '.join(OPTIONS)}")
        refuse_unknown(task, OPTIONS[task["kind"]], here)
        task = OPTIONS[task["kind"]] | task
        for key in ("batch_size", "tokens", "examples", "train_examples", "sizes"):
            if task.get(key) is not None and (type(task[key]) is not int or task[key] < 1):
                raise ValueError(f"{here}{key}: {task[key]!r} must be a whole number of at least 1")
        if _is_labelled(task):
            if not isinstance(task["train_file"], str):
                raise ValueError(f"{here}train_file: {task['train_file']!r} must name the file of labelled rows")
            if (Path(task["train_file"]).suffix == ".conllu") != (task["kind"] == "tagging"):
                raise ValueError(
                    f"{here}train_file: {task['train_file']!r}: tagging reads .conllu files, classification reads tables"
                )
            yield name, task
            continue
        if task["kind"] != "probe":
            lengths = task["lengths"]
            if not isinstance(lengths, list) or not lengths or not all(type(one) is int and one > 0 for one in lengths):
                raise ValueError(
                    f"{here}lengths: {lengths!r} must be a list of multiples of the trained length, such as [1, 2, 4]"
                )
            yield name, task
            continue
        asked = task["probe"]
        probes = list(PROBES) if asked == "all" else asked if isinstance(asked, list) else [asked or name]
        for probe in probes:
            if probe not in PROBES:
                raise ValueError(f"{here}probe: {probe!r} is none of {', '.join(PROBES)}")
            if task["mem_len"] and PROBES[probe].family == "encoder":
                raise ValueError(f"{here}mem_len: the probe {probe!r} is for encoders, which are trained without memory")
            yield (f"{name}-{probe}" if isinstance(asked, list) or asked == "all" else name), task | {"probe": probe}


def _is_labelled(task: Mapping[str, Any]) -> bool:
    return "label_column" in task


def _is_causal(task: Mapping[str, Any]) -> bool:
    return task["kind"] == "language_modelling" or (task["kind"] == "probe" and PROBES[task["probe"]].family == "decoder")


def _baseline(given: dict[str, Any], task: dict[str, Any], schemes: dict[str, dict[str, Any]]) -> str:
    """Return the scheme that a task's others are compared with: the named one, or the first that can do the task."""
    named = given.get("baseline" if _is_causal(task) else "encoder_baseline")
    if named in SCHEMES and task["kind"] == "permutation_lm" and _refusals(task, {"position_scheme": named}):
        named = None  # a baseline of encoders, which this head cannot have
    able = (name for name in task["schemes"] or schemes if name in schemes and not _refusals(task, schemes[name]))
    found = named or next(able, next(iter(schemes)))
    if found not in schemes:
        scheme_class(found)
    return found


def _refusals(task: Mapping[str, Any], scheme: Mapping[str, Any]) -> list[str]:
    """Return why a scheme cannot do a task."""
    uses = [
        "causal" if _is_causal(task) else "bidirectional",
        *(["memory"] if scheme.get("mem_len", task.get("mem_len")) else []),
    ]
    kinds = [scheme_class(one) for one in _names(scheme["position_scheme"])]
    found = [f"refused for {use}: {kind.refuses[use]}" for use in uses for kind in kinds if use in kind.refuses]
    if task["kind"] == "permutation_lm" and any(kind.acts_on_embeddings for kind in kinds):
        found.append("refused for two streams: positions in the embeddings do not tell a target where it stands")
    return found


def _settings(shared: dict[str, Any], task: dict[str, Any], scheme: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the arguments of `train_lm.py` of a cell: those of the comparison, the task and the scheme, in this order."""
    found: dict[str, Any] = dict(PLAIN_SETTINGS)
    for layer in (shared, task["settings"], scheme):
        overrides = found.get("config_overrides", {}) | layer.get("config_overrides", {})
        found |= layer | ({"config_overrides": overrides} if overrides else {})
    own = {"model_type": "relpos_decoder" if _is_causal(task) else "relpos_encoder", "seed": seed}
    if _is_causal(task):
        own["mem_len"] = scheme.get("mem_len", task["mem_len"])
    if task["kind"] == "probe":
        probe = PROBES[task["probe"]]
        found["config_overrides"] = found.get("config_overrides", {}) | {"vocab_size": probe.vocab_size}
        own |= {"block_size": probe.width(probe.trained_size), "eval_strategy": "no"}  # asked at the end, at all sizes
    if _is_labelled(task):
        found = {key: value for key, value in found.items() if key not in TEXT}
    if _is_labelled(task) or task["kind"] == "permutation_lm":
        own["eval_strategy"] = "no"  # scored at the end
    return found | own | FIXED


def _cell(name: str, task: dict[str, Any], scheme: str, seed: int, settings: dict[str, Any], baseline: dict[str, Any]) -> Cell:
    options = {key: value for key, value in task.items() if key not in ("kind", "settings", "schemes", "mem_len")}
    if task["kind"] == "probe":
        segment = task["segment"] or settings["block_size"] // 2
        options["segment"] = segment if settings.get("mem_len") else None
    if _is_labelled(task):
        options["source"] = {key: options.pop(key) for key in LabelledSource._fields}
    options["baseline"] = {key: baseline[key] for key in ("position_scheme", "position_parameters") if key in baseline}
    refused = _refusals(task, settings)
    return Cell(name, task["kind"], scheme, seed, settings, options, {}, refused[0] if refused else None)


def _refuse_wrong_settings(cells: list[Cell], where: str) -> None:
    """Refuse settings that no run can have, once for each task and each scheme."""
    seen: set[tuple[str, str]] = set()
    for cell in cells:
        new = {("task", cell.task), ("scheme", cell.scheme)} - seen
        if cell.not_applicable is None and new:
            seen |= new
            try:
                arguments, _, args = cell.arguments
                build_config(arguments, cell.settings.get("block_size"))
                if "block_size" not in cell.settings:
                    raise ValueError("block_size is missing: the trained length, in tokens")
                if cell.kind == "permutation_lm" and cell.settings["block_size"] % 2:
                    raise ValueError(f"block_size={cell.settings['block_size']} must be even for a permutation language model")
                if args.max_steps < 1:
                    raise ValueError("max_steps is missing: cells are trained for so many steps")
            except ValueError as error:
                raise ValueError(f"{where}task {cell.task}, scheme {cell.scheme}: {error}") from error


def _with_text(cell: Cell, texts: dict[str, dict[str, Any]]) -> Cell:
    """Add the digests of the text that a cell reads; each text is read once."""
    if cell.kind == "probe" or cell.not_applicable is not None:
        return cell
    if "source" in cell.options:
        source = LabelledSource(**cell.options["source"])
        if (key := repr(source)) not in texts:
            try:
                texts[key] = describe_labelled(source)
            except ValueError as error:
                raise ValueError(f"task {cell.task}: {error}") from error
        return Cell(**{**vars(cell), "text": texts[key]})
    key = json.dumps({name: cell.settings.get(name) for name in TEXT})
    if key not in texts:
        _, data, args = cell.arguments
        texts[key] = {"source": describe_source(data), **describe_text(needed_documents(data, args))}
    return Cell(**{**vars(cell), "text": texts[key]})
