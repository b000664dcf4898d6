"""Which version saved a folder, and which versions of transformers and Python the code runs on: one place says each."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from elsewhere import environment
from transformers import AutoConfig

import hf_relpos
from hf_relpos.model.package_version import OLDEST_TRANSFORMERS
from hf_relpos.model.package_version import VERSION
from hf_relpos.model.package_version import require_transformers

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def saved_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """Save a configuration, change what stands in its file (None takes a field away), and return what stands there then."""
    hf_relpos.RelPosDecoderConfig(vocab_size=8, hidden_size=8, num_attention_heads=2).save_pretrained(folder)
    path = folder / "config.json"
    fields = {name: value for name, value in (json.loads(path.read_text()) | changes).items() if value is not None}
    path.write_text(json.dumps(fields))
    return fields


def test_a_folder_names_the_version_that_saved_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also one that an older version had saved, and a nested configuration does not."""
    assert saved_config(tmp_path, hf_relpos_version="0.0.9")["hf_relpos_version"] == "0.0.9"
    loaded = AutoConfig.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["hf_relpos_version"] == VERSION == hf_relpos.__version__
    assert AutoConfig.from_pretrained(tmp_path) == loaded and not caplog.records


@pytest.mark.parametrize("saved", ["99.0.0", f"{VERSION.split('.')[0]}.{int(VERSION.split('.')[1]) + 1}.0rc1"])
def test_code_older_than_the_folder_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: str) -> None:
    saved_config(tmp_path, hf_relpos_version=saved)
    AutoConfig.from_pretrained(tmp_path)
    AutoConfig.from_pretrained(tmp_path)
    (record,) = caplog.records
    assert f"hf_relpos {saved} saved" in record.message and f"hf_relpos {VERSION} and" in record.message


@pytest.mark.parametrize("saved", [None, "0.0.1", VERSION, f"{VERSION}.post1", VERSION.rsplit(".", 1)[0] + ".99"])
def test_code_that_knows_the_folder_is_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: str | None) -> None:
    """Folders without a version too: they are older than the field."""
    saved_config(tmp_path, hf_relpos_version=saved)
    AutoConfig.from_pretrained(tmp_path)
    assert not caplog.records


def test_transformers_too_old_is_refused() -> None:
    """By the shipped code itself, which no installer checks."""
    with pytest.raises(ImportError, match=r"needs transformers 5\.24 or newer, but 5\.23\.0 is installed"):
        require_transformers("5.23.0")
    for installed in (OLDEST_TRANSFORMERS, f"{OLDEST_TRANSFORMERS}.0.dev0", "5.100.1", "6.0"):
        require_transformers(installed)


def test_the_project_says_the_same() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"] and "version" not in PROJECT["project"]
    assert f'VERSION = "{hf_relpos.__version__}"' in (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text()
    assert f"transformers>={OLDEST_TRANSFORMERS},<6" in PROJECT["project"]["dependencies"]
    python = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert PROJECT["tool"]["pyright"]["pythonVersion"] == python
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{python.replace('.', '')}"


@pytest.mark.slow
def test_a_folder_of_each_family_is_read_by_its_own_code(tmp_path: Path) -> None:
    """What `nox` lets each environment do with the folders of all others."""
    script, home = str(Path(__file__).with_name("across_versions.py")), {"HF_HOME": str(tmp_path / "home")}
    for job in ("save", "load"):
        command = [sys.executable, script, job, str(tmp_path / "saved")]
        done = subprocess.run(command, env=environment() | home, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
    assert "saved: decoder, memory, encoder, seq2seq" in done.stdout
