"""Checkpoints of Trainer: which are whole, and which one a run goes on from.

A checkpoint is whole when every file that resuming reads is there and was written to its end. Trainer takes others too, begins the
missing parts anew, and computes other numbers without a word.
"""

import json
import logging
import re
import zipfile
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError
from safetensors import safe_open
from transformers.trainer import OPTIMIZER_NAME
from transformers.trainer import SCALER_NAME
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from transformers.utils import SAFE_WEIGHTS_NAME
from transformers.utils import WEIGHTS_NAME

from hf_relpos.data.files import file_sha256

logger = logging.getLogger(__name__)

DIGESTED = (".safetensors", ".json", ".pt", ".pth", ".bin")
WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, ADAPTER_SAFE_WEIGHTS_NAME, WEIGHTS_NAME)


def flaw_of(checkpoint: str | Path, memory: bool = False, scaler: bool = False) -> str | None:
    """Return why a checkpoint is not whole, with the name of the file; None for a whole one.

    Args:
        checkpoint: its folder.
        memory: whether the run carries segment memory, which the checkpoint then has to hold.
        scaler: whether the run scales its losses (fp16).
    """
    folder = Path(checkpoint)
    files = {path.name: path for path in folder.iterdir()} if folder.is_dir() else {}
    missing = [name for name in _required(files, memory, scaler) if name not in files]
    if missing:
        return f"lacks {', '.join(missing)}"
    for path in sorted(files.values()):
        if damage := _damage(path):
            return f"has a damaged {path.name} ({damage})"
    return _changed(folder, files)


DIGESTS = "digests.json"
"""The SHA-256 of each file of a checkpoint, by name: a bit that changes on the disk still makes numbers."""


def write_digests(checkpoint: str | Path) -> None:
    """Write down the digests of a checkpoint that is whole.

    What other processes write for themselves is left out: it may not be written to its end.
    """
    others = re.compile(r"_0*[1-9]\d*$")
    files = [path for path in Path(checkpoint).iterdir() if path.suffix in DIGESTED and not others.search(path.stem)]
    found = {path.name: file_sha256(path) for path in sorted(files) if path.name != DIGESTS}
    part = Path(checkpoint, f"{DIGESTS}.part")
    part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    part.replace(Path(checkpoint, DIGESTS))


@lru_cache(maxsize=256)  # a start asks for a checkpoint several times, and large files take seconds each
def _known_sha256(path: Path, time: int) -> str:
    return file_sha256(path)


def _changed(folder: Path, files: dict[str, Path]) -> str | None:
    """Return which file of a checkpoint is not as it was written; checkpoints of other Trainers have no digests."""
    if DIGESTS not in files:
        return None
    written = json.loads(files[DIGESTS].read_text(encoding="utf-8"))
    changed = [
        name
        for name, digest in written.items()
        if name in files and _known_sha256(files[name], files[name].stat().st_mtime_ns) != digest
    ]
    return f"has a changed {', '.join(changed)} (remove {folder / DIGESTS} to take it nevertheless)" if changed else None


def was_completed(checkpoint: str | Path) -> bool:
    """Return whether a checkpoint was once written to its end: Trainer writes its own state last."""
    path = Path(checkpoint, TRAINER_STATE_NAME)
    return path.is_file() and _damage(path) is None


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a run, the newest first, whole or not."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]), reverse=True)


def last_checkpoint(folder: str | Path, memory: bool = False, scaler: bool = False) -> str | None:
    """Return the newest whole checkpoint of a run, or None when it has none and may begin anew.

    A newer one that is not whole is named in a warning, with the one that is taken instead.

    Raises:
        ValueError: checkpoints were completed, but no whole one is left: to begin anew would overwrite them.
    """
    flaws: dict[Path, str] = {}
    for checkpoint in list_checkpoints(folder):
        flaw = flaw_of(checkpoint, memory, scaler)
        if flaw is None:
            for newer, its_flaw in flaws.items():
                logger.warning("%s %s: going on from %s instead", newer, its_flaw, checkpoint)
            return str(checkpoint)
        flaws[checkpoint] = flaw
    if completed := {path: flaw for path, flaw in flaws.items() if was_completed(path)}:
        listed = "; ".join(f"{path} {flaw}" for path, flaw in completed.items())
        raise ValueError(f"no checkpoint is whole, so the run cannot go on: {listed}. {advice(next(iter(completed)))}")
    return None


def require_whole(checkpoint: str | Path, memory: bool = False, scaler: bool = False) -> None:
    """Raise a ValueError that names the flaw of a checkpoint, and the one to use instead."""
    flaw = flaw_of(checkpoint, memory, scaler)
    if flaw is None:
        return
    others = [*list_checkpoints(checkpoint), *list_checkpoints(Path(checkpoint).parent)]
    whole = next((path for path in others if path != Path(checkpoint) and flaw_of(path, memory, scaler) is None), None)
    use = advice(Path(checkpoint)) if whole is None else f"use {whole} instead"
    raise ValueError(f"{checkpoint} {flaw}: {use}")


def advice(checkpoint: Path) -> str:
    """Return what can be done with a checkpoint that is not whole when there is no other."""
    return (
        f"start afresh, or a new run from its weights by model_name_or_path={str(checkpoint)!r}; save_only_model=False "
        "saves whole checkpoints"
    )


LOADED = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
"""Files beside the weights that loading a model reads."""


def check_folder(name: str | Path) -> None:
    """Refuse, by a ValueError that names the file, a model folder of which a file is cut off or a part of the weights is missing.

    Args:
        name: a folder; a name on the Hub, whose files are checked when they are fetched, is passed over.
    """
    folder = Path(name)
    again = "copy or download the folder again, or name another one, such as an earlier checkpoint"
    read = [folder / name for name in (*LOADED, SAFE_WEIGHTS_INDEX_NAME) if (folder / name).is_file()]
    for path in [*read, *sorted(folder.glob("*.safetensors"))]:
        if (damage := _damage(path)) is not None:
            raise ValueError(f"{path} is damaged ({damage}): {again}")
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else ()
    for part in sorted(set(parts)):
        if not (folder / part).is_file():
            raise ValueError(f"{folder / part} is missing, although {index.name} names it: {again}")


def _required(files: dict[str, Path], memory: bool, scaler: bool) -> list[str]:
    """Return the names of the files that a checkpoint needs, given those that it has."""
    names = [TRAINER_STATE_NAME]
    # FSDP and DeepSpeed keep weights and optimizer in folders of their own, which their own loaders check.
    if not any(path.is_dir() for path in files.values()):
        names += [next((name for name in WEIGHTS if name in files), SAFE_WEIGHTS_NAME), OPTIMIZER_NAME, SCHEDULER_NAME]
    if (index := files.get(SAFE_WEIGHTS_INDEX_NAME)) and _damage(index) is None:
        names += sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    # Several processes number their files. A disk may hold those of some processes only, but none of them is left out.
    ranks = [int(name[10:-4]) for name in files if name.startswith("rng_state_") and name[10:-4].isdigit()]
    ranks = range(min(ranks), max(ranks) + 1) if ranks else ()
    names += [f"rng_state_{rank}.pth" for rank in ranks] or ["rng_state.pth"]
    names += [f"segment_memory_{rank}.pt" for rank in ranks or (0,) if memory]
    return names + [SCALER_NAME] * scaler


def _damage(path: Path) -> str | None:
    """Return what is wrong with a file, None if it was written to its end."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
        elif path.suffix in (".pt", ".pth") and not zipfile.is_zipfile(path):
            return "its end is missing"
    except (ValueError, SafetensorError) as error:
        return str(error)
    return None
