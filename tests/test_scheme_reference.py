"""The reference of the schemes is generated from the code: a scheme without a page, or a stale page, fails here."""

import pathlib

import pytest

from hf_relpos.scheme_reference import kernel
from hf_relpos.scheme_reference import page
from hf_relpos.scheme_reference import table
from hf_relpos.schemes import SCHEMES

ROOT = pathlib.Path(__file__).resolve().parents[1]
REMEDY = "run: python -m hf_relpos schemes docs/schemes"


@pytest.mark.parametrize("name", SCHEMES)
def test_the_page_says_what_the_code_says(name: str) -> None:
    path = ROOT / "docs" / "schemes" / f"{name}.md"
    assert path.is_file(), REMEDY
    assert path.read_text(encoding="utf-8") == page(name), REMEDY
    assert path.with_suffix(".png").stat().st_size > 1000


@pytest.mark.parametrize("name", SCHEMES)
def test_the_picture_is_finite(name: str) -> None:
    distance, scores = kernel(name)
    assert scores.shape == (4, len(distance)) and bool(scores.isfinite().all())


def test_the_table_of_the_readme_lists_every_scheme() -> None:
    assert table() in (ROOT / "README.md").read_text(encoding="utf-8"), REMEDY
