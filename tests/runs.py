"""Tiny runs of `train_lm.py` in this process, for the tests of runs and their folders."""

import json
from pathlib import Path
from typing import Any

import yaml

TEXT = "".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(60))
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SETTINGS: dict[str, Any] = {
    "config_overrides": SMALL,
    "block_size": 32,
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 3,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "sample_tokens": 5,
}


def write_config(folder: Path, **settings: Any) -> str:
    """Write a text and the YAML file of a tiny run over it, and return the path of the file."""
    text = folder / "text.txt"
    if not text.is_file():
        text.write_text(TEXT, encoding="utf-8")
    usual = {"train_file": str(text), "output_dir": str(folder / "out")}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | usual | settings), encoding="utf-8")
    return str(path)


def results(folder: Path) -> dict[str, Any]:
    """Return the metrics that a run left; JSON has no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((folder / "all_results.json").read_text(encoding="utf-8"), parse_constant=refuse)
