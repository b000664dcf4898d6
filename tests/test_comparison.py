"""`compare`: which runs it makes, what it does with their results, and that finished runs are kept."""

import json

import pytest

from hf_relpos.__main__ import main
from hf_relpos.commands.compare import as_markdown
from hf_relpos.commands.compare import choices
from hf_relpos.commands.compare import summarise
from hf_relpos.model.scheme_registry import SCHEMES


def test_choices_are_all_combinations() -> None:
    found = choices(["position_scheme=t5,rope", "mem_len=0,64"])
    assert [choice.name for choice in found] == ["t5-0", "t5-64", "rope-0", "rope-64"]
    assert found[1].argv == ["--position_scheme", "t5", "--mem_len", "64"]


def test_all_means_every_causal_scheme() -> None:
    assert {choice.name for choice in choices(["position_scheme=all"])} == {
        name for name, kind in SCHEMES.items() if "causal" not in kind.refuses
    }


def test_a_malformed_choice_is_named() -> None:
    with pytest.raises(ValueError, match="'position_scheme' is not of the form"):
        choices(["position_scheme"])


def test_rows_hold_means_and_the_best_comes_first() -> None:
    first, second = choices(["position_scheme=t5,rope"])
    rows = summarise({first: [{"eval_loss": 2.0}, {"eval_loss": 1.8}], second: [{"eval_loss": 1.7}, {"eval_loss": 1.7}]})
    assert [row["position_scheme"] for row in rows] == ["rope", "t5"]
    assert rows[1]["eval_loss"] == pytest.approx(1.9) and rows[1]["spread"] == pytest.approx(0.2)
    assert "| t5 | 2 | 1.9000 | 0.2000 |" in as_markdown(rows)


def test_finished_runs_are_read_and_not_repeated(tmp_path, capsys) -> None:
    for scheme, loss in (("t5", 1.5), ("rope", 1.4)):
        folder = tmp_path / f"{scheme}-seed3"
        folder.mkdir()
        (folder / "all_results.json").write_text(json.dumps({"eval_loss": loss}))
    config = tmp_path / "tiny.yaml"
    config.write_text("block_size: 8\n")
    main(["compare", str(config), "--vary", "position_scheme=t5,rope", "--seeds", "3", "--output_dir", str(tmp_path)])
    assert "rope" in capsys.readouterr().out
    assert [row["position_scheme"] for row in json.loads((tmp_path / "comparison.json").read_text())] == ["rope", "t5"]
    assert (tmp_path / "comparison.png").stat().st_size > 1000


def test_a_failed_run_says_why(tmp_path) -> None:
    with pytest.raises(SystemExit, match="absent.yaml"):
        main(["compare", "absent.yaml", "--vary", "mem_len=0", "--output_dir", str(tmp_path)])


def test_a_misspelled_choice_is_refused_before_any_run(tmp_path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text("block_size: 8\n")
    argv = ["compare", str(config), "--output_dir", str(tmp_path / "runs"), "--vary"]
    with pytest.raises(SystemExit, match="unknown position_scheme 'alibx'"):
        main([*argv, "position_scheme=rope,alibx"])
    with pytest.raises(SystemExit, match="position_schem"):
        main([*argv, "position_schem=rope"])
    assert not (tmp_path / "runs").exists()
