"""`compare`: which runs it makes, what it does with their results, and that finished runs are kept."""

import json
import shutil
import subprocess

import pytest
from runs import SMALL
from runs import write_config

from hf_relpos.__main__ import main
from hf_relpos.commands import compare
from hf_relpos.commands.compare import as_markdown
from hf_relpos.commands.compare import choices
from hf_relpos.commands.compare import summarise
from hf_relpos.model.scheme_registry import SCHEMES
from hf_relpos.training.run import main as train


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
    first, second, third = choices(["position_scheme=t5,rope,alibi"])
    losses = {first: [2.0, 1.8, 1.9], second: [1.7, 1.5, 1.61], third: [1.71, 1.5, 1.6]}
    rows = summarise({choice: [{"eval_loss": loss} for loss in values] for choice, values in losses.items()}, [0, 1, 2])
    assert [(row["position_scheme"], row["rank"]) for row in rows] == [("rope", "1-2"), ("alibi", "1-2"), ("t5", "3")]
    assert rows[2]["eval_loss"] == pytest.approx(1.9)
    assert rows[2]["interval"] == pytest.approx(0.1 / 3**0.5 * 4.302653, rel=1e-5)  # Student's t, two degrees of freedom
    assert "| t5 | 3 | 1.9000 | 3 | 0.2484 |" in as_markdown(rows)


def test_one_seed_has_no_rank() -> None:
    first, second = choices(["position_scheme=t5,rope"])
    rows = summarise({first: [{"eval_loss": 2.0}], second: [{"eval_loss": 1.7}]}, [0])
    assert all(row["rank"] is None for row in rows) and "rank" not in as_markdown(rows)


def make_comparing(folder, monkeypatch):
    """Return what compares tiny runs in this process, and returns the rows of the table and how many runs were made."""
    made = []

    def run_here(command, **kwargs):
        made.append(command)
        train(command[3:])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(compare.subprocess, "run", run_here)

    def compare_runs(*rest, vary="position_scheme=rope", seeds=("0",), output=folder / "runs", **settings):
        made.clear()
        config = write_config(folder, **{"max_steps": 2, "save_strategy": "steps", "save_steps": 1} | settings)
        main(["compare", config, "--vary", vary, "--seeds", *seeds, "--output_dir", str(output), "--", *rest])
        return json.loads((output / "comparison.json").read_text()), len(made)

    return compare_runs


@pytest.fixture
def comparing(tmp_path, monkeypatch):
    return make_comparing(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder of a comparison that was made; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "new.txt").write_text("zyxw 1234 " * 40)
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_comparing(folder, monkeypatch)()
    return folder


def test_finished_runs_are_read_and_not_repeated(tmp_path, comparing, capsys) -> None:
    rows, made = comparing(vary="position_scheme=t5,rope")
    assert made == 2 and {row["position_scheme"] for row in rows} == {"t5", "rope"}
    assert comparing("--logging_steps", "2", vary="position_scheme=t5,rope,alibi", per_device_eval_batch_size=2)[1] == 1
    assert "rope" in capsys.readouterr().out
    assert (tmp_path / "runs" / "comparison.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("rest", "settings", "change"),
    [
        ([], {"learning_rate": 0.05}, "learning_rate: 0.01 there, 0.05 here"),
        (["--learning_rate", "0.05"], {}, "learning_rate: 0.01 there, 0.05 here"),
        ([], {"max_steps": 3}, "max_steps: 2 there, 3 here"),
        (["--eval_strategy", "steps"], {}, "eval_strategy: 'no' there, 'steps' here"),
        ([], {"config_overrides": SMALL | {"hidden_size": 32}}, "config_overrides: .* there, .* here"),
        ([], {"validation_file": "NEW"}, "validation_file: None there"),
        ([], {"validation_split_percentage": 20}, "validation_split_percentage: 5.0 there, 20.0 here"),
    ],
)
def test_results_of_other_settings_are_not_taken(compared, monkeypatch, rest, settings, change) -> None:
    settings = {name: str(compared / "new.txt") if value == "NEW" else value for name, value in settings.items()}
    before = (compared / "runs" / "comparison.json").read_bytes()
    with pytest.raises(SystemExit, match=rf"rope-seed0 holds a run of other settings \(.*{change}.*\): choose another"):
        make_comparing(compared, monkeypatch)(*rest, **settings)
    assert (compared / "runs" / "comparison.json").read_bytes() == before


def test_what_lies_in_files_counts_too(tmp_path, comparing) -> None:
    """The text, and the model that runs start from, under the same names."""
    comparing(output=tmp_path / "first")
    start = ["--model_name_or_path", str(tmp_path / "first" / "rope-seed0")]
    comparing(*start)
    comparing(output=tmp_path / "second", learning_rate=0.05)
    shutil.copy(tmp_path / "second" / "rope-seed0" / "model.safetensors", start[1])
    with pytest.raises(SystemExit, match="other settings .model_sha256: "):
        comparing(*start)
    (tmp_path / "text.txt").write_text("another text, long enough for a block or two " * 30)
    with pytest.raises(SystemExit, match="other settings .train: .* validation: "):
        comparing(output=tmp_path / "second", learning_rate=0.05)


def test_a_run_that_was_stopped_is_gone_on_with(tmp_path, comparing) -> None:
    rows, _ = comparing()
    folder = tmp_path / "runs" / "rope-seed0"
    for name in ("all_results.json", "trainer_state.json", "model.safetensors"):
        (folder / name).unlink()
    shutil.rmtree(folder / "checkpoint-2")
    again, made = comparing()
    assert made == 1 and again[0]["eval_loss"] == rows[0]["eval_loss"]
    train([write_config(tmp_path, max_steps=4), "--position_scheme", "rope", "--seed", "0", "--output_dir", str(folder)]
          + ["--resume_from_checkpoint", "auto"])  # fmt: skip
    with pytest.raises(SystemExit, match="save_strategy.*its settings were changed at step 2"):
        comparing(max_steps=4)


def test_results_without_a_record_are_not_taken(tmp_path, comparing) -> None:
    comparing()
    (tmp_path / "runs" / "rope-seed0" / "run_arguments.json").unlink()
    with pytest.raises(SystemExit, match="holds results whose settings are not known"):
        comparing()


def test_two_runs_in_one_folder_are_refused(tmp_path, comparing) -> None:
    with pytest.raises(SystemExit, match="two runs would share the folder .*rope-seed0"):
        comparing(seeds=("0", "0"))


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


def test_ctrl_c_ends_a_command_with_one_line(monkeypatch, tmp_path, capsys):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "read_comparison", stop)
    with pytest.raises(SystemExit) as ended:
        main(["compare", "some.yaml"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
