"""The reference of the schemes is generated from the code: a scheme without a page, or a stale page, fails here."""

import pathlib
import shutil

import pytest
import torch

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderModel
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderModel
from hf_relpos.__main__ import main
from hf_relpos.commands import schemes
from hf_relpos.commands.scheme_results import MEASUREMENTS
from hf_relpos.commands.scheme_results import read_column
from hf_relpos.commands.scheme_results import results_table
from hf_relpos.model.scheme_registry import SCHEMES

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "schemes"
REMEDY = "run: python -m hf_relpos schemes docs/schemes --table README.md"


@pytest.mark.parametrize("name", SCHEMES)
def test_the_page_says_what_the_code_says(name: str) -> None:
    path = PAGES / f"{name}.md"
    assert path.is_file(), REMEDY
    assert path.read_text(encoding="utf-8") == schemes.page(name, PAGES), REMEDY


@pytest.mark.parametrize("name", SCHEMES)
def test_the_picture_shows_what_the_code_computes(name: str) -> None:
    distance, scores = schemes.kernel(name)
    assert scores.shape == (4, len(distance)) and bool(scores.isfinite().all())
    shown = schemes.shown_scores(PAGES / f"{name}.png")
    assert shown is not None, REMEDY
    torch.testing.assert_close(shown, scores, rtol=0, atol=schemes.SHOWN_ALIKE, msg=lambda text: f"{REMEDY}\n{text}")


def test_the_tables_list_every_scheme() -> None:
    assert schemes.table() in (ROOT / "README.md").read_text(encoding="utf-8"), REMEDY
    assert (PAGES / "index.md").read_text(encoding="utf-8") == schemes.index(), REMEDY


@pytest.mark.parametrize("name", SCHEMES)
def test_parameters_are_those_of_the_default_model(name: str) -> None:
    family, kind = (
        (RelPosEncoderConfig, RelPosEncoderModel)
        if "causal" in SCHEMES[name].refuses
        else (RelPosDecoderConfig, RelPosDecoderModel)
    )
    with torch.device("meta"):
        model = kind(family(position_scheme=name))
    own = sum(parameter.numel() for scheme in model.position_schemes for parameter in scheme.parameters())
    assert schemes.facts(name)["parameters"] == f"{own:,}"


def test_the_page_of_combinations_says_what_the_code_says() -> None:
    assert (PAGES / "combinations.md").read_text(encoding="utf-8") == schemes.combinations(), REMEDY
    for name, kind in SCHEMES.items():
        assert (f"+{name}`" in schemes.combinations() or f"`{name}+" in schemes.combinations()) == bool(kind.combines_as)


def test_the_table_is_replaced_where_it_stands(tmp_path: pathlib.Path) -> None:
    """What stands around the table stays, and a table that is up to date stays as it is."""
    path, current = tmp_path / "README.md", f"before\n\n{schemes.table()}\nafter | it\n\nend\n"
    path.write_text(current.replace(schemes.table(), "| scheme | acts on |\n|---|---|\n| old | all |\n"), encoding="utf-8")
    for _ in range(2):
        schemes.replace_table(path)
        assert path.read_text(encoding="utf-8") == current


@pytest.fixture
def two_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of two schemes, so that pictures are drawn quickly."""
    monkeypatch.setattr(schemes, "SCHEMES", {name: SCHEMES[name] for name in ("nope", "alibi")})
    monkeypatch.setattr(schemes, "combinations", lambda: "")


def test_only_what_changed_is_written_anew(two_schemes: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are the same byte for byte, also where the last digits of their curves differ, and words under WHEN are kept."""
    shutil.copytree(ROOT / "docs" / "benchmarks", tmp_path / "benchmarks")
    pages = tmp_path / "schemes"
    main(["schemes", str(pages)])
    page = pages / "alibi.md"
    page.write_text(page.read_text().replace(schemes.NOT_COMPARED, "Take it on Sundays.\n\nNot on Mondays."))
    before = {path.name: path.read_bytes() for path in pages.iterdir()}
    kernel = schemes.kernel
    monkeypatch.setattr(schemes, "kernel", lambda name: (kernel(name)[0], kernel(name)[1] + 1e-4))
    main(["schemes", str(pages)])
    assert {path.name: path.read_bytes() for path in pages.iterdir()} == before
    assert b"Not on Mondays." in before["alibi.md"] and len(before) == 6
    monkeypatch.setattr(schemes, "kernel", lambda name: (kernel(name)[0], kernel(name)[1] * 2))
    main(["schemes", str(pages)])
    changed = {path.name for path in pages.iterdir() if path.read_bytes() != before[path.name]}
    assert changed == {"alibi.png"}  # nope's curve is 0 everywhere


def test_the_same_curves_give_the_same_picture(tmp_path: pathlib.Path) -> None:
    for name in ("a.png", "b.png"):
        schemes.draw("alibi", tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_results_come_from_the_tables_of_the_benchmarks(tmp_path: pathlib.Path) -> None:
    """Every measurement names a column that exists, rows are found by name or as encoders, and no page is no error."""
    benchmarks = ROOT / "docs" / "benchmarks"
    for measurement in MEASUREMENTS:
        assert "t5" in read_column(benchmarks, measurement), measurement
    assert "| 1.642 | best `transformer_xl` 1.627, worst `nope` 1.939 |" in results_table("t5", benchmarks)
    assert "| 1.79 (1.74-1.88) | baseline 0.99 (0.97-1.04) |" in results_table("deberta", benchmarks)
    assert results_table("unheard_of", benchmarks) == results_table("t5", tmp_path) == ""
