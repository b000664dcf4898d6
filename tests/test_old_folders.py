"""Folders that were saved before the shipped files had a folder of their own, and before weights were named by their scheme.

`fixtures/old_folders.tar.xz` holds them with the answers of the code that saved them (`fixtures/make_old_folders.py`).
"""

import pathlib
import tarfile
from typing import Any

import pytest
import torch
import transformers
from elsewhere import answer_by_remote_code
from safetensors import safe_open
from safetensors.torch import load_file

import hf_relpos

ARCHIVE = pathlib.Path(__file__).parent / "fixtures" / "old_folders.tar.xz"
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
WITH_CODE = ["decoder", "encoder", "seq2seq"]


def names_of_folders() -> list[str]:
    with tarfile.open(ARCHIVE) as archive:
        return sorted(name.removeprefix("./").removesuffix("/model") for name in archive.getnames() if name.endswith("/model"))


FOLDERS = names_of_folders()


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The unpacked folders."""
    root = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    return root


@pytest.mark.parametrize("name", FOLDERS)
def test_the_installed_package_loads_it(old: pathlib.Path, name: str) -> None:
    """Without remote code, with every weight found, and the answers of then, also behind a memory."""
    with safe_open(old / name / "document.safetensors", "pt") as opened:
        auto = getattr(transformers, opened.metadata()["auto"])
    model, report = auto.from_pretrained(old / name / "model", output_loading_info=True)
    assert isinstance(model, getattr(hf_relpos, type(model).__name__))
    assert not any(report.values()), report
    document, wanted = (load_file(old / name / f"{part}.safetensors") for part in ("document", "wanted"))
    with torch.no_grad():
        output: Any = model(**document)
        found = {"logits": output.logits}
        if "next logits" in wanted:
            found["next logits"] = model(**document, memory=output.memory).logits
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("name", FOLDERS)
def test_loaded_and_saved_again(old: pathlib.Path, name: str, tmp_path: pathlib.Path) -> None:
    """A second load finds every weight under the name of today."""
    with safe_open(old / name / "document.safetensors", "pt") as opened:
        auto = getattr(transformers, opened.metadata()["auto"])
    model: Any = auto.from_pretrained(old / name / "model")
    model.save_pretrained(tmp_path)
    again, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_base_model_loads_it(old: pathlib.Path, name: str) -> None:
    """Under names without the head's prefix."""
    with safe_open(old / name / "document.safetensors", "pt") as opened:
        auto = getattr(transformers, opened.metadata()["auto"])
    base, report = transformers.AutoModel.from_pretrained(old / name / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"], report
    wanted = auto.from_pretrained(old / name / "model").model.state_dict()
    torch.testing.assert_close(base.state_dict(), wanted, rtol=0, atol=0)


def test_its_own_code_loads_it(old: pathlib.Path) -> None:
    """In a process without this package, as from the Hub."""
    answer_by_remote_code(old / "with_code")
    for name in WITH_CODE:
        found, wanted = (load_file(old / "with_code" / name / f"{part}.safetensors") for part in ("found", "wanted"))
        torch.testing.assert_close(found, wanted, **CLOSE)
