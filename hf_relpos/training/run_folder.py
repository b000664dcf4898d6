"""The folder of a run: what it was made with, whether another run may write into it, and whether it is finished."""

import hashlib
import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.trainer import TRAINER_STATE_NAME

from hf_relpos.training.arguments import DataArguments
from hf_relpos.training.arguments import ModelArguments
from hf_relpos.training.arguments import RunArguments
from hf_relpos.training.checkpoints import last_checkpoint
from hf_relpos.training.checkpoints import list_checkpoints
from hf_relpos.training.checkpoints import require_whole
from hf_relpos.training.checkpoints import was_completed
from hf_relpos.training.folder_lock import named_if_not_written
from hf_relpos.training.model_setup import ADJUSTABLE

RECORD, SAMPLE = "run_arguments.json", "sample.txt"
# What a run leaves that is worth keeping; its record alone is not.
WORTH = ("config.json", "README.md", "*.safetensors", "*_results.json", TRAINER_STATE_NAME)
# What a run writes in all, but for logs and code.
WRITTEN = (*WORTH, RECORD, SAMPLE, "generation_config.json", "*.safetensors.index.json", "training_args.bin")
WRITTEN += ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# How a run is watched, stored and published, which shapes none of its numbers.
WATCHED = ("output_dir", "overwrite_", "resume_", "do_", "log", "report_to", "run_name", "disable_tqdm", "hub_", "push_to_hub")
WATCHED += ("sample_", "save_total_limit", "per_device_eval_batch_size", "preprocessing_num_workers", "dataloader_num_workers")
WATCHED += ("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor")
# A run that is continued may be made longer, and be evaluated and saved otherwise.
MAY_DIFFER = (*WATCHED, "max_steps", "num_train_epochs", "eval_", "save_", "load_")


def describe_run(
    model: ModelArguments, data: DataArguments, run: RunArguments, text: dict[str, Any], config: PreTrainedConfig | None = None
) -> dict[str, Any]:
    """Return what a run is made of, as JSON: its arguments, the text it reads, and the model and tokenizer it starts from.

    Args:
        model, data, run: the arguments.
        text: the source of the text, and what `describe_text` says of each split.
        config: the model's configuration, which knows the commit of a model of the Hub.
    """
    start = {
        "model_sha256": _fingerprint(model.model_name_or_path),
        "model_commit": getattr(config, "_commit_hash", None),
        "tokenizer_sha256": _fingerprint(data.tokenizer_name),
        "changed": _changed_fields(model.model_name_or_path, config),
    }
    start = {name: value for name, value in start.items() if value}
    record = {"model": asdict(model), "data": asdict(data), "training": run.to_dict(), "text": text, "start": start}
    return json.loads(json.dumps(record, default=str))


def _changed_fields(name: str | None, config: PreTrainedConfig | None) -> dict[str, list[Any]]:
    """Return the fields of a trained model that a run goes on without, `{name: [old, new]}`."""
    if not name or config is None:
        return {}
    saved, _ = PreTrainedConfig.get_config_dict(name)
    now = config.to_dict()
    return {
        field: [saved[field], now[field]]
        for field in ADJUSTABLE
        if field in saved.keys() & now.keys() and saved[field] != now[field]
    }


def _fingerprint(name: str | None) -> str | None:
    """Return the SHA-256 of a model folder's configuration, weights and tokenizer; None for what is no folder."""
    if not name or not Path(name).is_dir():
        return None
    digest = hashlib.sha256()
    for pattern in ("config.json", "tokenizer.json", "*.safetensors"):
        for path in sorted(Path(name).glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def find_checkpoint(run: RunArguments, memory: bool = False) -> str | None:
    """Return the checkpoint to go on from: `resume_from_checkpoint` is its folder, true (the last whole one), or auto (if any).

    Args:
        run: names the checkpoint, or the folder of the run.
        memory: whether the run carries segment memory.

    Raises:
        ValueError: the checkpoint is not whole, or there is none.
    """
    wanted, parts = _wanted(run), {"memory": memory, "scaler": run.fp16}
    if wanted == "false":
        return None
    if wanted not in ("true", "auto"):
        if not Path(wanted).is_dir():
            raise ValueError(f"resume_from_checkpoint={wanted!r} is neither true, auto nor the folder of a checkpoint")
        require_whole(wanted, **parts)
        return wanted
    last = last_checkpoint(str(run.output_dir), **parts)
    if last is None and wanted == "true":
        raise ValueError(f"resume_from_checkpoint={wanted}: {run.output_dir} holds no checkpoint")
    return last


def find_progress(run: RunArguments, memory: bool = False, start: str | None = None) -> tuple[str | None, bool]:
    """Return the folder whose weights a run goes on from, if any, and whether its training is finished there.

    The weights of a finished run are those in its folder, which may be its best ones. If it was stopped before it wrote them, they
    are its best checkpoint's with `load_best_model_at_end`, else its last one's. A run that only evaluates `start` goes on from none.
    """
    if start and not run.do_train:
        return None, False
    folder = Path(run.output_dir)
    if _wanted(run) in ("true", "auto") and _is_finished(run, folder):
        return str(folder), True
    checkpoint = find_checkpoint(run, memory)
    if checkpoint is None or not _is_finished(run, Path(checkpoint)):
        return checkpoint, False
    best = _read_json(Path(checkpoint) / TRAINER_STATE_NAME).get("best_model_checkpoint")
    if not (run.load_best_model_at_end and best):
        return checkpoint, True
    kept = Path(checkpoint).with_name(Path(best).name)  # the folder may have been moved since
    if not kept.is_dir():
        raise ValueError(f"{checkpoint} is the end of the run, but its best checkpoint {kept} is gone: start afresh")
    return str(kept), True


def mark_finished(run: RunArguments, checkpoint: str | Path) -> None:
    """Take over the state of the checkpoint that ended the training: this one, or one beside it if this is the best one."""
    beside = (Path(checkpoint), *list_checkpoints(Path(checkpoint).parent))
    state = _read_json(next(folder for folder in beside if _is_finished(run, folder)) / TRAINER_STATE_NAME)
    _write_json(Path(run.output_dir, TRAINER_STATE_NAME), state)


def _wanted(run: RunArguments) -> str:
    """Return what to go on from: false, true, auto or a folder; a run that is only evaluated takes what it has trained."""
    wanted = run.resume_from_checkpoint or ("false" if run.do_train else "auto")
    words = {"none": "false", "false": "false", "true": "true", "auto": "auto"}
    return words.get(wanted.lower(), wanted)


def _is_finished(run: RunArguments, folder: Path) -> bool:
    """Return whether the state and the weights in a folder are those of a run that has taken all its steps."""
    if not was_completed(folder) or not any(folder.glob("model*.safetensors")):
        return False
    state = _read_json(folder / TRAINER_STATE_NAME)
    if run.max_steps > 0:
        return state["global_step"] >= run.max_steps
    return (state["epoch"] or 0) >= run.num_train_epochs


def holds_work(folder: str | Path) -> bool:
    """Return whether a folder holds a model, results or a checkpoint that was written to its end."""
    folder = Path(folder)
    return any(match for trace in WORTH for match in folder.glob(trace)) or any(map(was_completed, list_checkpoints(folder)))


def check_output_dir(run: RunArguments, record: dict[str, Any]) -> None:
    """Refuse a folder that holds another run, before anything is written.

    Args:
        run: names the folder, and says whether its run is continued or overwritten.
        record: the new run, as `describe_run` gives it.
    """
    folder = Path(run.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir={run.output_dir!r} is a file, not a folder")
    if not holds_work(folder):
        return
    if run.overwrite_output_dir:
        _refuse_loss_of_start(run, record)
        return
    choices = "choose another --output_dir, or --overwrite_output_dir to replace it"
    if not (folder / RECORD).is_file():
        raise ValueError(f"output_dir={run.output_dir!r} already holds a model or run; {choices}")
    changed = [f"{name}: {old!r} there, {new!r} here" for name, (old, new) in differences(read_record(folder), record).items()]
    if changed:
        raise ValueError(f"output_dir={run.output_dir!r} already holds another run ({'; '.join(changed)}); {choices}")
    if run.do_train and _wanted(run) == "false":
        raise ValueError(
            f"output_dir={run.output_dir!r} already holds this run; "
            f"--resume_from_checkpoint auto goes on with it, --overwrite_output_dir starts afresh"
        )


def _refuse_loss_of_start(run: RunArguments, record: dict[str, Any]) -> None:
    """Refuse to overwrite a folder together with what the new run starts from."""
    if run.resume_from_checkpoint and _wanted(run) != "false":
        raise ValueError("overwrite_output_dir and resume_from_checkpoint exclude each other")
    for name in (record["model"]["model_name_or_path"], record["data"]["tokenizer_name"]):
        if name and Path(name).resolve().is_relative_to(Path(run.output_dir).resolve()):
            raise ValueError(
                f"overwrite_output_dir would remove {name!r}, from which the run starts: choose another output_dir"
            )


def start_folder(run: RunArguments, record: dict[str, Any], checkpoint: str | None = None) -> None:
    """Write the record of a run that may begin, and take away what an overwritten or broken off run would leave behind.

    Args:
        run: names the folder.
        record: the run; what it changes of the run that it continues is added to it.
        checkpoint: where it goes on from.
    """
    folder = Path(run.output_dir)
    with named_if_not_written(run.output_dir):
        tidy(folder, was_empty=False)
        if run.overwrite_output_dir:
            clear_away(folder)
        if checkpoint is not None and (folder / RECORD).is_file():
            record["resumed"] = _history(read_record(folder), record, checkpoint)
        _write_json(folder / RECORD, record)


def _history(old: dict[str, Any], new: dict[str, Any], checkpoint: str) -> list[dict[str, Any]]:
    """Return what each continuation of a run changed, the newest last: `{"step", "changed": {name: [old, new]}}`."""
    step = _read_json(Path(checkpoint, TRAINER_STATE_NAME))["global_step"]
    changed = {name: list(values) for name, values in differences(old, new, WATCHED).items()}
    return old.get("resumed", []) + ([{"step": step, "changed": changed}] if changed else [])


def clear_away(folder: Path) -> None:
    """Remove what a run wrote into its folder, but for its logs; other files stay."""
    for checkpoint in list_checkpoints(folder):
        shutil.rmtree(checkpoint)
    for path in [path for pattern in WRITTEN for path in folder.glob(pattern)]:
        path.unlink(missing_ok=True)


def tidy(folder: str | Path, was_empty: bool) -> None:
    """Remove what a run that broke off leaves incomplete, so that nothing stands in the way of the next one.

    Args:
        folder: the folder of the run.
        was_empty: whether it held no work before; if it holds none now either, the run's other files go too.
    """
    folder = Path(folder)
    for checkpoint in list_checkpoints(folder):
        if not was_completed(checkpoint):
            shutil.rmtree(checkpoint, ignore_errors=True)
    if was_empty and not list_checkpoints(folder) and not was_completed(folder):
        clear_away(folder)


def save_results(folder: str | Path, text: str, metrics: dict[str, Any]) -> None:
    """Write the metrics of one text to `{text}_results.json`, and add them to `all_results.json`.

    JSON has no NaN and no infinity: a metric that is neither finite nor text becomes null.
    """
    metrics = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in metrics.items()
    }
    whole = Path(folder, "all_results.json")
    before = json.loads(whole.read_text(encoding="utf-8")) if whole.is_file() else {}
    _write_json(Path(folder, f"{text}_results.json"), metrics)
    _write_json(whole, before | metrics)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file that is whole, or not there, wherever the program is stopped."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_record(folder: str | Path) -> dict[str, Any]:
    """Return the record of the run that made a folder."""
    path = Path(folder) / RECORD
    if not path.is_file():
        raise ValueError(f"{folder} is not the folder of a run: it has no {RECORD}")
    return _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def differences(
    old: dict[str, Any], new: dict[str, Any], may_differ: tuple[str, ...] = MAY_DIFFER
) -> dict[str, tuple[Any, Any]]:
    """Return what differs between the records of two runs, `{name: (old, new)}`.

    Args:
        old, new: the records; an argument that an older version did not know counts as the same.
        may_differ: beginnings of names that are left out.
    """
    return {
        name: (old[group][name], value)
        for group in ("model", "data", "training", "text", "start")
        for name, value in new[group].items()
        if not name.startswith(may_differ) and name in old.get(group, {}) and old[group][name] != value
    }
