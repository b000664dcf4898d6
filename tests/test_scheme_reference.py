"""The reference of the schemes is generated from the code: a scheme without a page, or a stale page, fails here."""

import pathlib

import pytest

from hf_relpos.commands.schemes import combinations
from hf_relpos.commands.schemes import kernel
from hf_relpos.commands.schemes import page
from hf_relpos.commands.schemes import replace_table
from hf_relpos.commands.schemes import table
from hf_relpos.model.scheme_registry import SCHEMES

ROOT = pathlib.Path(__file__).resolve().parents[1]
REMEDY = "run: python -m hf_relpos schemes docs/schemes --table README.md"


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


def test_the_page_of_combinations_says_what_the_code_says() -> None:
    assert (ROOT / "docs" / "schemes" / "combinations.md").read_text(encoding="utf-8") == combinations(), REMEDY
    for name, kind in SCHEMES.items():
        assert (f"+{name}`" in combinations() or f"`{name}+" in combinations()) == bool(kind.combines_as)


def test_the_table_is_replaced_where_it_stands(tmp_path: pathlib.Path) -> None:
    """What stands around the table stays, and a table that is up to date stays as it is."""
    path, current = tmp_path / "README.md", f"before\n\n{table()}\nafter | it\n\nend\n"
    path.write_text(current.replace(table(), "| scheme | acts on |\n|---|---|\n| old | all |\n"), encoding="utf-8")
    for _ in range(2):
        replace_table(path)
        assert path.read_text(encoding="utf-8") == current
