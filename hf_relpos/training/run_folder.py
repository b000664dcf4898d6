"""The folder of a run: what it was made with, and whether another run may write into it."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_relpos.training.arguments import DataArguments
from hf_relpos.training.arguments import ModelArguments
from hf_relpos.training.arguments import RunArguments

RECORD = "run_arguments.json"
TRACES = (RECORD, "config.json", "README.md", "*.safetensors", "*_results.json", "trainer_state.json", "checkpoint-*")
# A run stays the same run however it is watched, saved, continued or published.
MAY_DIFFER = ("output_dir", "overwrite_", "resume_", "do_", "max_steps", "num_train_epochs", "eval_", "save_", "load_")
MAY_DIFFER += ("log", "report_to", "run_name", "disable_tqdm", "hub_", "push_to_hub", "dataloader_", "sample_")


def describe_run(model: ModelArguments, data: DataArguments, run: RunArguments, text: dict[str, Any]) -> dict[str, Any]:
    """What a run is made of, as JSON: its arguments, and the text it read."""
    record = {"model": asdict(model), "data": asdict(data), "training": run.to_dict(), "text": text}
    return json.loads(json.dumps(record, default=str))


def find_checkpoint(run: RunArguments) -> str | None:
    """The checkpoint to go on from: `resume_from_checkpoint` is its folder, true (the last one), or auto (if any)."""
    wanted = run.resume_from_checkpoint or "false"
    if wanted.lower() in ("false", "none"):
        return None
    if wanted.lower() not in ("true", "auto"):
        if not Path(wanted, "trainer_state.json").is_file():
            raise ValueError(f"resume_from_checkpoint={wanted!r} is neither true, auto nor the folder of a checkpoint")
        return wanted
    last = last_checkpoint(str(run.output_dir))
    if last is None and wanted.lower() == "true":
        raise ValueError(f"resume_from_checkpoint={wanted}: {run.output_dir} holds no checkpoint")
    return last


def last_checkpoint(folder: str) -> str | None:
    """The last checkpoint that was written to its end, or None: Trainer, killed while it saves, leaves one without a whole state."""
    states = sorted(Path(folder).glob("checkpoint-[0-9]*/trainer_state.json"), key=_step, reverse=True)
    return next((str(state.parent) for state in states if _is_whole(state)), None)


def _step(state: Path) -> int:
    return int(state.parent.name.split("-")[1])


def _is_whole(state: Path) -> bool:
    try:
        return isinstance(json.loads(state.read_text(encoding="utf-8")), dict)
    except ValueError:
        return False


def check_output_dir(run: RunArguments, record: dict[str, Any]) -> None:
    """Refuse a folder that holds another run, before anything is written.

    Args:
        run: names the folder, and says whether its run is continued or overwritten.
        record: the new run, as `describe_run` gives it.
    """
    folder = Path(run.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir={run.output_dir!r} is a file, not a folder")
    if not any(match for trace in TRACES for match in folder.glob(trace)):
        return
    resumes = (run.resume_from_checkpoint or "false").lower() not in ("false", "none")
    if run.overwrite_output_dir:
        if resumes:
            raise ValueError("overwrite_output_dir and resume_from_checkpoint exclude each other")
        return
    choices = "choose another --output_dir, or --overwrite_output_dir to replace it"
    if not (folder / RECORD).is_file():
        raise ValueError(f"output_dir={run.output_dir!r} already holds a model or run; {choices}")
    changed = _differences(json.loads((folder / RECORD).read_text(encoding="utf-8")), record)
    if changed:
        raise ValueError(f"output_dir={run.output_dir!r} already holds another run ({'; '.join(changed)}); {choices}")
    if run.do_train and not resumes:
        raise ValueError(
            f"output_dir={run.output_dir!r} already holds this run; "
            f"--resume_from_checkpoint auto goes on with it, --overwrite_output_dir starts afresh"
        )


def start_folder(run: RunArguments, record: dict[str, Any]) -> None:
    """Write the record of a run that may begin, and take away what an overwritten run would leave behind."""
    folder = Path(run.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if run.overwrite_output_dir:
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        for results in folder.glob("*_results.json"):  # save_metrics adds to what it finds
            results.unlink()
    (folder / RECORD).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_record(folder: str | Path) -> dict[str, Any]:
    """The record of the run that made a folder."""
    path = Path(folder) / RECORD
    if not path.is_file():
        raise ValueError(f"{folder} is not the folder of a run: it has no {RECORD}")
    return json.loads(path.read_text(encoding="utf-8"))


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {old[group].get(name)!r} there, {value!r} here"
        for group in new
        for name, value in new[group].items()
        if not name.startswith(MAY_DIFFER) and old[group].get(name) != value
    ]
