"""Comparisons from a file: their cells, claims, failures and tables, and that a stopped one ends like any other."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml

from hf_relpos.__main__ import main
from hf_relpos.commands import compare as compare_command
from hf_relpos.data.probes import PROBES
from hf_relpos.evaluation import cells as cells_module
from hf_relpos.evaluation.cells import CellFolder
from hf_relpos.evaluation.comparison import cells_root
from hf_relpos.evaluation.comparison import estimate_seconds
from hf_relpos.evaluation.comparison import format_plan
from hf_relpos.evaluation.comparison import run_cells
from hf_relpos.evaluation.cost_findings import equal_cost
from hf_relpos.evaluation.findings import mean_curves
from hf_relpos.evaluation.findings import peers
from hf_relpos.evaluation.matching import count_parameters
from hf_relpos.evaluation.plan import OPTIONS
from hf_relpos.evaluation.plan import read_comparison
from hf_relpos.evaluation.plots import line_plot
from hf_relpos.evaluation.report import write_results
from hf_relpos.evaluation.table import result_rows
from hf_relpos.evaluation.tasks import RUNS
from hf_relpos.evaluation.tasks import run_cell
from hf_relpos.model.scheme_registry import SCHEMES

ROOT = Path(__file__).parent.parent
TEXT = "".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(80))
SETTINGS = {
    "config_overrides": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.01,
    "use_cpu": True,
    "logging_steps": 1,
}
TASKS = {
    "text": {"kind": "language_modelling", "lengths": [1, 2], "tokens": 128, "settings": {"block_size": 16}},
    "copy": {"kind": "probe", "probe": "copy", "examples": 4, "sizes": 2},
}


def write_comparison(folder, tasks=None, **given):
    text = folder / "text.txt"
    if not text.is_file():
        text.write_text(TEXT)
    settings = SETTINGS | {"train_file": [str(text)], "validation_split_percentage": 40} | given.pop("settings", {})
    whole = {"schemes": ["nope", "learned_absolute"], "seeds": [0, 1], "settings": settings, "tasks": tasks or TASKS} | given
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(whole, sort_keys=False))
    return path


def fake(cell):
    """What a cell gives, without training."""
    value = cell.seed + len(cell.scheme) / 10
    rows = [{"length": length, "metric": "loss", "value": value * length} for length in (1, 2)]
    result = {"rows": rows, "curves": {"training": []}, "notes": [], "data": "0"}
    return result, {
        "seconds": 2.0,
        "train_seconds": 1.0,
        "parameters": 5,
        "flops": 7,
        "process_seconds": 0.5,
        "peak_memory": 9,
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A comparison of real cells that ran without a stop; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("whole")
    main(["compare", str(write_comparison(folder)), "--output_dir", str(folder / "out")])
    return folder


def test_a_comparison_gives_one_row_for_each_number(whole):
    rows = pq.read_table(whole / "out" / "table.parquet").to_pylist()
    assert {(row["task"], row["scheme"], row["seed"]) for row in rows} == {
        (task, scheme, seed) for task in TASKS for scheme in ("nope", "learned_absolute") for seed in (0, 1)
    }
    bits = {(row["scheme"], row["length"]): row for row in rows if row["metric"] == "bits_per_byte" and row["seed"] == 0}
    assert 0 < bits["nope", 32]["value"] < 12 and bits["nope", 32]["reason"] is None
    assert (
        bits["learned_absolute", 32]["value"] is None and "32 positions are needed" in bits["learned_absolute", 32]["reason"]
    )
    costs = pq.read_table(whole / "out" / "cost.parquet").to_pylist()
    assert len(costs) == 8 and all(
        row["flops"] > 0 and row["peak_memory"] > 0 and row["ratio_to_baseline"] > 0 for row in costs
    )
    curves = json.loads((whole / "out" / "curves.json").read_text())
    assert [point["step"] for point in curves[0]["curves"]["training"]] == [1, 2]
    order = {(one["task"], one["seed"]): set() for one in curves}
    for one in curves:
        order[one["task"], one["seed"]].add(one["data"])
    assert all(len(digests) == 1 for digests in order.values())  # every scheme reads the same


def test_a_stopped_comparison_ends_with_the_same_table(whole, tmp_path):
    """Stopped in the middle of the third cell, whose claim stays behind as that of a dead process."""
    comparison = read_comparison(whole / "tiny.yaml", str(tmp_path))
    began = []

    def stopping(cell):
        began.append(cell)
        if len(began) == 3:
            raise KeyboardInterrupt
        return run_cell(cell)

    with pytest.raises(KeyboardInterrupt):
        run_cells(comparison, stopping)
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    claim = CellFolder(cells_root(comparison), began[2]).path / "claim-0"
    claim.write_text(json.dumps({"host": socket.gethostname(), "pid": int(dead.stdout), "started": 0.0}))
    write_results(comparison)
    assert "not finished" in {row["reason"] for row in result_rows(comparison)}
    run_cells(comparison, run_cell)
    write_results(comparison)
    assert not claim.exists()
    assert (tmp_path / "table.parquet").read_bytes() == (whole / "out" / "table.parquet").read_bytes()
    assert len(list((tmp_path / "cells").iterdir())) == 8


@pytest.mark.slow
def test_a_killed_comparison_ends_with_the_same_table(whole, tmp_path):
    """Two processes that share the work, killed together at three random moments: in a cell, between cells, while they write."""
    command = [sys.executable, "-m", "hf_relpos", "compare", str(whole / "tiny.yaml"), "--jobs", "2"]
    command += ["--output_dir", str(tmp_path)]
    chance = random.Random(0)
    for wanted in sorted(chance.sample(range(1, 7), 3)):
        process = subprocess.Popen(command, start_new_session=True)
        while process.poll() is None and len(list(tmp_path.glob("cells/*/log.txt"))) < wanted:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.3))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "table.parquet").exists()
    subprocess.run(command, check=True)
    assert (tmp_path / "table.parquet").read_bytes() == (whole / "out" / "table.parquet").read_bytes()


def test_finished_cells_are_not_run_again_and_other_settings_are_not_mixed_in(tmp_path):
    made = []

    def counting(cell):
        made.append(cell.name)
        return fake(cell)

    first = read_comparison(write_comparison(tmp_path), str(tmp_path / "out"))
    run_cells(first, counting)
    run_cells(first, counting)
    assert len(made) == len(set(made)) == 8
    for change in ({"settings": {"learning_rate": 0.02}}, {"schemes": {"nope": {"max_steps": 3}}, "seeds": [0]}):
        other = read_comparison(write_comparison(tmp_path, **change), str(tmp_path / "out"))
        assert not {cell.name for cell in other.cells} & set(made)
        assert {row["reason"] for row in result_rows(other)} == {"not finished"}
    (tmp_path / "text.txt").write_text(TEXT + "and another line\n")
    changed = {cell.name for cell in read_comparison(write_comparison(tmp_path), str(tmp_path / "out")).cells}
    assert changed & set(made) == {name for name in made if name.startswith("copy")}


def test_another_code_is_another_cell(tmp_path, monkeypatch):
    comparison = read_comparison(write_comparison(tmp_path))
    names = [cell.name for cell in comparison.cells]
    monkeypatch.setattr(cells_module, "code_digest", lambda: "another")
    assert not set(names) & {cell.name for cell in comparison.cells}


def test_a_failed_cell_is_reported_and_stops_no_other(tmp_path, capsys):
    comparison = read_comparison(write_comparison(tmp_path), str(tmp_path / "out"))

    def failing(cell):
        if cell.scheme == "nope" and cell.seed == 1:
            raise RuntimeError("out of <memory> | really")
        return fake(cell)

    run_cells(comparison, failing)
    assert "failed: RuntimeError: out of <memory>" in capsys.readouterr().err
    summary = write_results(comparison)
    assert "2 cells failed" in summary
    failed = [row for row in result_rows(comparison) if row["value"] is None]
    assert {(row["task"], row["reason"]) for row in failed} == {
        (task, "failed: RuntimeError: out of <memory> | really") for task in TASKS
    }
    page = (tmp_path / "out" / "report.html").read_text()
    assert "out of &lt;memory&gt; | really" in page and "<memory>" not in page
    assert r"out of \<memory\> \| really" in (tmp_path / "out" / "report.md").read_text()
    run_cells(comparison, fake)  # tried once more
    assert all(row["reason"] is None for row in result_rows(comparison))


@pytest.mark.parametrize("fails", [True, False])
def test_the_command_fails_if_a_cell_did(tmp_path, monkeypatch, fails):
    """So a script does not take half a table for a whole one. The report is written all the same."""

    def run(cell):
        if fails and cell.seed == 1:
            raise RuntimeError("no memory left")
        return fake(cell)

    monkeypatch.setattr(compare_command, "run_cells", lambda comparison: run_cells(comparison, run))
    words = ["compare", str(write_comparison(tmp_path)), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="4 cells failed, such as .*error.json") if fails else nullcontext():
        main(words)
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_baseline_that_is_not_run_is_named(tmp_path):
    given = {"schemes": ["nope", "learned_absolute"], "baseline": "t5", "seeds": [0]}
    comparison = read_comparison(write_comparison(tmp_path, {"text": TASKS["text"]}, **given), str(tmp_path / "out"))
    run_cells(comparison, fake)
    write_results(comparison)
    assert "The baseline t5 is none of the schemes: only costs are" in (tmp_path / "out" / "report.md").read_text()


def test_a_cell_is_claimed_once(tmp_path):
    cell = read_comparison(write_comparison(tmp_path), str(tmp_path / "out")).cells[0]
    mine, other = CellFolder(tmp_path, cell), CellFolder(tmp_path, cell)
    assert mine.claim() and not other.claim() and f"process {os.getpid()}" in str(other.holder())
    claim = mine.path / "claim-0"
    owner = json.loads(claim.read_text())
    claim.write_text(json.dumps(owner | {"host": "elsewhere"}))
    assert not other.claim()  # nobody knows whether a process of another machine lives
    claim.write_text(json.dumps(owner | {"started": owner["started"] - 100}))  # its number went to this process
    assert other.claim() and (mine.path / "claim-1").is_file() and not mine.claim()
    mine.release()
    claim.write_text("")
    assert not other.claim()
    os.utime(claim, (0, 0))
    assert other.claim()
    other.write(*fake(cell))
    other.release()
    assert not mine.claim() and mine.result == fake(cell)[0]


def test_what_a_scheme_cannot_do_is_not_applicable(tmp_path):
    tasks = {
        "memory": {"kind": "language_modelling", "mem_len": 8, "settings": {"block_size": 16}},
        "masked": {"kind": "masked_lm", "settings": {"block_size": 16}},
        "permuted": {"kind": "permutation_lm", "settings": {"block_size": 16}},
    }
    given = {"schemes": ["nope", "learned_absolute", "rope"], "seeds": [0], "encoder_baseline": "learned_absolute"}
    path = write_comparison(tmp_path, tasks, **given)
    comparison = read_comparison(path, str(tmp_path / "out"))
    reasons = {(cell.task, cell.scheme): cell.not_applicable for cell in comparison.cells}
    assert reasons["memory", "learned_absolute"].startswith("refused for memory: absolute positions")
    assert reasons["masked", "nope"].startswith("refused for bidirectional")
    assert [key for key, reason in reasons.items() if reason is None] == [
        ("memory", "nope"),
        ("memory", "rope"),
        ("masked", "learned_absolute"),
        ("masked", "rope"),
        ("permuted", "rope"),
    ]
    assert reasons["permuted", "learned_absolute"].startswith("refused for two streams")
    run_cells(comparison, fake)
    write_results(comparison)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "refused for bidirectional" in page and "<tr><td>nope</td><td>n/a</td>" in page
    assert comparison.baselines == {"memory": "nope", "masked": "learned_absolute", "permuted": "rope"}


def test_tasks_of_encoders_give_the_same_numbers_again(tmp_path):
    (tmp_path / "labels.csv").write_text("text,label\n" + "".join(f"a cat {i},noun\nto run {i},verb\n" for i in range(20)))
    word = "# newdoc id = {0}\n1\tDogs\tdog\tNOUN\t_\t_\t0\troot\t_\t_\n2\trun\trun\tVERB\t_\t_\t0\troot\t_\t_\n\n"
    (tmp_path / "words.conllu").write_text("".join(map(word.format, range(40))))
    settings = {"settings": {"block_size": 16}}
    tasks = {
        "permuted": {"kind": "permutation_lm", "lengths": [1, 2], "tokens": 64} | settings,
        "classes": {"kind": "classification", "train_file": str(tmp_path / "labels.csv")} | settings,
        "tags": {"kind": "tagging", "train_file": str(tmp_path / "words.conllu")} | settings,
    }
    comparison = read_comparison(write_comparison(tmp_path, tasks, schemes=["rope"], seeds=[0]), str(tmp_path / "out"))
    assert all("train_file" not in cell.settings for cell in comparison.cells[1:])  # the text of other tasks
    run_cells(comparison)
    write_results(comparison)
    found = {(row["task"], row["length"], row["metric"]): row["value"] for row in result_rows(comparison)}
    for task in ("classes", "tags"):
        assert all(0 <= found[task, 16, name] <= 1 for name in ("accuracy", "macro_f1"))
        assert 0 < found[task, 16, "chance_accuracy"] < 1
    assert all(0 < found["permuted", length, "loss"] < 8 for length in (16, 32))
    assert (
        json.loads(json.dumps(run_cell(comparison.cells[2])[0]))
        == CellFolder(cells_root(comparison), comparison.cells[2]).result
    )


def test_models_are_matched_in_parameters_by_a_wider_feed_forward(tmp_path):
    given = {"schemes": ["nope", "learned_bias", "shaw"], "seeds": [0], "settings": {"block_size": 16}}
    shapes = read_comparison(write_comparison(tmp_path, **given), str(tmp_path / "out")).cells
    comparison = read_comparison(write_comparison(tmp_path, match="parameters", **given), str(tmp_path / "out"))
    for task in TASKS:
        before, after = (
            [count_parameters(cell) for cell in cells if cell.task == task] for cells in (shapes, comparison.cells)
        )
        largest = max(count for count, _ in before)
        assert min(count for count, _ in before) < 0.95 * largest
        assert all(abs(count - largest) <= 0.01 * largest for count, _ in after)
    wide = [cell.settings["config_overrides"]["intermediate_size"] for cell in comparison.cells[:3]]
    assert wide[0] > wide[1] >= wide[2] and comparison.cells[2].options["baseline"]["intermediate_size"] == wide[0]
    assert not {cell.name for cell in shapes} & {cell.name for cell in comparison.cells}
    run_cells(comparison, fake)
    write_results(comparison)
    assert "same number of parameters" in (tmp_path / "out" / "report.md").read_text()


def test_a_loss_at_equal_cost_is_read_off_the_curve():
    curves = [
        {"scheme": name, "seed": 0, "curves": {"validation": [{"step": 10 * i, "eval_loss": top - i} for i in range(1, 5)]}}
        for name, top in (("cheap", 8), ("dear", 6))
    ]
    found = mean_curves(curves, "validation", "step", "eval_loss")
    assert equal_cost(found, {"cheap": 2.0, "dear": 5.0}) == {"cheap": (40.0, 4.0), "dear": (16.0, pytest.approx(4.4))}
    assert set(equal_cost(found, {"cheap": 1.0, "dear": 9.0})) == {"cheap"}  # before the first evaluation nothing is known


def test_a_plan_says_what_is_to_run_and_how_long_it_takes(tmp_path):
    comparison = read_comparison(
        write_comparison(tmp_path, seeds=[0, 1, 2], settings={"max_steps": 20}), str(tmp_path / "out")
    )
    assert estimate_seconds(comparison, fake) == {"text": 11.0, "copy": 11.0}  # 2 s for 2 steps, of which 1 s for the steps
    assert not (tmp_path / "out").exists()
    run_cells(comparison, lambda cell: fake(cell) if cell.task == "copy" else 1 / 0)
    seconds = estimate_seconds(comparison, fake)
    assert seconds == {"text": 11.0, "copy": 2.0}
    text = format_plan(comparison, seconds)
    assert "| text | 6 | 0 | 0 | 6 | 11.0 | 1.1 |" in text and "| copy | 6 | 0 | 6 | 0 | 2.0 | 0.0 |" in text


def _permuted(**settings):
    return {"tasks": {"permuted": {"kind": "permutation_lm", "settings": settings}}, "schemes": ["rope"]}


def _labelled(**task):
    labelled = {"kind": "classification", "train_file": "labels.csv", "settings": {"block_size": 16}}
    return {"tasks": {"labelled": labelled | task}, "schemes": ["rope"]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tasks": {"text": {"kind": "translation"}}}, "tasks: text: .* needs a `kind`, one of language_modelling"),
        ({"tasks": {"text": {"kind": "probe", "probe": "copi"}}}, "'copi' is none of .*copy"),
        (
            {"tasks": {"text": {"kind": "language_modelling", "length": [1]}}},
            "unknown argument 'length'; did you mean 'lengths'",
        ),
        ({"tasks": {"text": {"kind": "language_modelling", "lengths": [0]}}}, "lengths: .0. must be a list of multiples"),
        ({"tasks": {"text": {"kind": "language_modelling", "schemes": ["t5"]}}}, "schemes: 't5' is none of nope"),
        ({"schemes": ["alibx"]}, "unknown position_scheme 'alibx'"),
        ({"baseline": "alibx"}, "unknown position_scheme 'alibx'"),
        ({"seeds": [0, 0]}, "seeds: .0, 0. must be a list of different whole numbers"),
        ({"seed": [0]}, "unknown argument 'seed'; did you mean 'seeds'"),
        ({"settings": {"max_stepz": 3}}, "task text, scheme nope: unknown argument 'max_stepz'"),
        ({"settings": {"max_steps": -1}}, "max_steps is missing"),
        ({"schemes": {"nope": {"position_parameters": {"slopes": 1}}}}, "task text, scheme nope: "),
        ({"tasks": {"tags": {"kind": "tagging"}}}, "tasks: tags: train_file: None must name the file of labelled rows"),
        ({"match": "flops"}, "match: 'flops' is none of parameters"),
        (_permuted(block_size=15), "task permuted, scheme rope: block_size=15 must be even"),
        (_permuted(), "task permuted, scheme rope: block_size is missing"),
        (_labelled(train_file="absent.tsv"), "task labelled: there is no labelled file absent.tsv"),
        (_labelled(label_column="class"), "task labelled: .*labels.csv has no column 'class'; .*'text', 'label'"),
        (
            {"tasks": {"a": {"kind": "classification", "train_file": "labels.csv", "examples": 0}}},
            "examples: 0 must be a whole",
        ),
        ({"tasks": {"a": {"kind": "tagging", "train_file": "labels.csv"}}}, "tagging reads .conllu files"),
        ({"match": "parameters", "baseline": "alibi"}, "the baseline 'alibi' of task text must be one of the schemes"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_run(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.csv").write_text("text,label\n" + "a cat,noun\nto run,verb\n" * 9)
    given.setdefault("tasks", {"text": TASKS["text"] | {"settings": {"block_size": 16}}})
    with pytest.raises(SystemExit, match=message):
        main(["compare", str(write_comparison(tmp_path, **given)), "--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_arguments_of_the_two_forms_are_not_mixed(tmp_path):
    path = str(write_comparison(tmp_path))
    for words, message in [
        (["--seeds", "0"], "belong to --vary"),
        (["--jobs", "0"], "at least 1"),
        (["--vary", "mem_len=0"], "needs --output_dir"),
    ]:
        with pytest.raises(SystemExit, match=message):
            main(["compare", path, *words])


def test_a_memory_connects_the_segments_of_a_probe(tmp_path):
    """With memory of the whole past, rows read in segments give the answers of rows read at once."""
    import torch

    from hf_relpos.evaluation.probe_trainer import read_in_segments
    from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
    from hf_relpos.model.modeling_relpos import RelPosDecoderForCausalLM

    fields = {**SETTINGS["config_overrides"], "vocab_size": 20, "position_scheme": "alibi"}
    model = RelPosDecoderForCausalLM(RelPosDecoderConfig(**fields, mem_len=32, sliding_window=None)).eval()
    ids = torch.randint(20, (2, 30))
    torch.testing.assert_close(read_in_segments(model, ids, 8), read_in_segments(model, ids, None))


def test_a_report_stands_alone_and_escapes_names(tmp_path):
    name = "<b>$x_1$</b> | `t`"
    schemes = {"nope": {}, name: {"position_scheme": "rope"}}
    comparison = read_comparison(write_comparison(tmp_path, schemes=schemes, seeds=[0, 1, 2]), str(tmp_path / "out"))
    run_cells(comparison, fake)
    write_results(comparison)
    page, plain = ((tmp_path / "out" / f"report.{kind}").read_text() for kind in ("html", "md"))
    assert "<b>" not in page and "&lt;b&gt;$x_1$&lt;/b&gt;" in page
    assert r"\<b\>$x_1$\</b\> \| \`t\`" in plain
    assert page.index("What to conclude") < page.index("Task: text") < page.index("How it was made")
    assert not re.search(r"(src|href)=.(http|file|figures)|@import|<script|<link", page)  # nothing else is loaded
    assert page.count("<svg") + page.count("<table") == page.count("<figcaption>") > page.count("<svg") > 0
    assert 'name="viewport"' in page and "@media print" in page
    for word in ("seed", "torch", "SHA-256", "--output_dir", "Holm"):
        assert word in page and word in plain
    for figure in re.findall(r"\]\((figures/.*?)\)", plain):
        assert (tmp_path / "out" / figure).read_text().startswith("<svg")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}
    write_results(comparison)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}


def test_conclusions_name_no_winner_inside_the_noise(tmp_path):
    def noisy(gap):
        def run(cell):
            value = 2.0 + cell.seed + (gap if cell.scheme == "rope" else 0) + 0.01 * (cell.seed * len(cell.scheme) % 3)
            rows = [{"length": 8, "metric": "loss", "value": value}]
            return fake(cell)[0] | {"rows": rows}, fake(cell)[1]

        return run

    for gap, sentence in [(0.0, "no winner; 2 of 2 schemes share"), (-1.0, "rope is better than every other scheme")]:
        path = write_comparison(tmp_path, {"text": TASKS["text"]}, schemes=["nope", "rope"], seeds=[0, 1, 2])
        comparison = read_comparison(path, str(tmp_path / f"out{gap}"))
        run_cells(comparison, noisy(gap))
        assert sentence in write_results(comparison)


def test_another_checkpoint_stands_in_the_same_plot(whole, tmp_path):
    text = read_comparison(whole / "tiny.yaml").cells[0].text["validation"]["sha256"]
    rows = [{"length": 16, "bits_per_byte": 3.0}, {"length": 32, "not_applicable": "too long"}]
    path = tmp_path / "peer.json"
    settings = {"train_file": [str(whole / "text.txt")]}
    path.write_text(json.dumps({"lengths": rows, "text": text}))
    file = write_comparison(tmp_path, {"text": TASKS["text"]}, also={"a peer": str(path)}, settings=settings)
    comparison = read_comparison(file, str(tmp_path / "out"))
    assert peers(comparison, "text", "bits_per_byte") == {"a peer": [(16, 3.0, None, None)]}


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("a peer", "absent.json", "also: there is no file .*absent.json"),
        ("nope", "peer.json", "also: 'nope' is a scheme of this comparison"),
        ("a peer", "peer.json", "another text, which is none of the validation texts"),
    ],
)
def test_another_checkpoint_that_would_stand_in_no_plot_is_refused(whole, tmp_path, name, file, message):
    (tmp_path / "peer.json").write_text(json.dumps({"lengths": [], "text": "another text"}))
    settings = {"train_file": [str(whole / "text.txt")]}
    with pytest.raises(ValueError, match=message):
        read_comparison(
            write_comparison(tmp_path, {"text": TASKS["text"]}, also={name: str(tmp_path / file)}, settings=settings)
        )


def test_another_checkpoint_stands_in_the_plot_of_one_length(whole, tmp_path):
    """It is a point at that length; one that was measured at other lengths only is named under the plot."""
    text = read_comparison(whole / "tiny.yaml").cells[0].text["validation"]["sha256"]
    for name, length in [("near", 16), ("far", 32)]:
        lengths = [{"length": length, "loss": 3.0}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"lengths": lengths, "text": text}))
    also = {name: str(tmp_path / f"{name}.json") for name in ("near", "far")}
    settings = {"train_file": [str(whole / "text.txt")]}
    tasks = {"text": TASKS["text"] | {"lengths": [1]}}
    comparison = read_comparison(write_comparison(tmp_path, tasks, also=also, settings=settings), str(tmp_path / "out"))
    rows = [{"length": 16, "metric": "loss", "value": 2.0}]
    run_cells(comparison, lambda cell: (fake(cell)[0] | {"rows": rows}, fake(cell)[1]))
    write_results(comparison)
    plot = (tmp_path / "out" / "figures" / "text-values.svg").read_text()
    assert "near" in plot and "far" not in plot
    assert "Not measured at length 16: far." in (tmp_path / "out" / "report.md").read_text()


def test_modules_that_only_read_results_exist():
    """A name that is left out of the digest of the code by mistake would let results of other code be taken."""
    folder = Path(cells_module.__file__).parent
    assert all((folder / f"{name}.py").is_file() for name in cells_module.READERS)


def test_a_scheme_may_have_its_own_memory_and_learning_rate(tmp_path):
    """So memory, or a grid of learning rates, is compared within one task."""
    schemes = {"rope": {}, "rope, memory": {"position_scheme": "rope", "mem_len": 8, "learning_rate": 0.5}}
    cells = read_comparison(write_comparison(tmp_path, {"text": TASKS["text"]}, schemes=schemes, seeds=[0])).cells
    assert [(cell.settings["mem_len"], cell.settings["learning_rate"]) for cell in cells] == [(0, 0.01), (8, 0.5)]
    schemes = {"rope": {}, "absolute": {"position_scheme": "learned_absolute", "mem_len": 8}}
    cells = read_comparison(write_comparison(tmp_path, {"text": TASKS["text"]}, schemes=schemes, seeds=[0])).cells
    assert cells[0].not_applicable is None and str(cells[1].not_applicable).startswith("refused for memory")


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/compare/*.yaml")), ids=lambda path: path.stem)
def test_committed_comparisons_can_be_run(path, monkeypatch):
    monkeypatch.setattr("hf_relpos.evaluation.plan._with_text", lambda cell, texts: cell)
    comparison = read_comparison(path)
    assert all(any(cell.not_applicable is None for cell in comparison.cells if cell.task == task) for task in comparison.tasks)
    if path.stem == "quick":
        assert {cell.kind for cell in comparison.cells} == set(OPTIONS)
        assert set(comparison.schemes) == set(SCHEMES)
        assert {cell.options["probe"] for cell in comparison.cells if cell.kind == "probe"} == set(PROBES)


def test_other_processes_take_part_and_the_table_is_the_same(whole, tmp_path):
    """A process that shares the folder takes what this one has not claimed."""
    comparison = read_comparison(whole / "tiny.yaml", str(tmp_path))
    cells = [CellFolder(cells_root(comparison), cell) for cell in comparison.cells]
    cells_root(comparison).mkdir(parents=True)
    mine = cells[::2]
    assert all(folder.claim() for folder in mine)
    run_cells(comparison)  # as the other process would
    assert [folder.finished for folder in cells] == [False, True] * 4
    for folder in mine:
        folder.write(*run_cell(folder.cell))
        folder.release()
    write_results(comparison)
    assert (tmp_path / "table.parquet").read_bytes() == (whole / "out" / "table.parquet").read_bytes()


def test_a_cell_computes_on_one_thread(tmp_path, monkeypatch):
    """Its numbers are then the same on every number of cores, and cells side by side do not slow each other down."""
    used = []
    monkeypatch.setitem(RUNS, "probe", lambda cell, file: (used.append(torch.get_num_threads()), ({}, {}))[1])
    cell = read_comparison(write_comparison(tmp_path, {"copy": TASKS["copy"]})).cells[0]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run_cell(cell)
        assert used == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_nothing_is_concluded_from_a_probe_at_chance(tmp_path):
    def run(accuracies, apart):
        def one(cell):
            row = {"length": 20, "metric": "accuracy", "value": accuracies[cell.scheme] + cell.seed * apart}
            return fake(cell)[0] | {"rows": [row], "chance": [row | {"value": 0.02}]}, fake(cell)[1]

        return one

    nothing = "nothing was learned: no scheme is above chance (0.02)"
    for learned, apart, sentence in [(0.03, 0.01, nothing), (0.03, 0.0, nothing), (0.5, 0.01, "examples: 1 of 2")]:
        comparison = read_comparison(
            write_comparison(tmp_path, {"copy": TASKS["copy"]}, schemes=["nope", "rope"], seeds=[0, 1, 2]),
            str(tmp_path / f"out{learned}{apart}"),
        )
        run_cells(comparison, run({"nope": 0.01, "rope": learned}, apart))
        assert sentence in write_results(comparison)


def test_a_task_of_one_length_is_drawn_by_scheme(tmp_path):
    def run(cell):
        rows = [{"length": 16, "metric": "macro_f1", "value": 0.5 + cell.seed / 10 + (cell.scheme == "rope") / 5}]
        return fake(cell)[0] | {"rows": rows, "chance": [rows[0] | {"value": 0.3}]}, fake(cell)[1]

    comparison = read_comparison(
        write_comparison(tmp_path, {"copy": TASKS["copy"]}, schemes=["nope", "rope"]), str(tmp_path / "out")
    )
    run_cells(comparison, run)
    assert "macro-F1 at the trained length (16)" in write_results(comparison)
    drawn = (tmp_path / "out" / "figures" / "copy-values.svg").read_text()
    assert drawn.index(">rope<") < drawn.index(">nope<") and ">chance<" in drawn and "macro-F1" in drawn


def test_a_scheme_looks_the_same_in_every_plot():
    point = [(1.0, 2.0, None, None), (2.0, 3.0, None, None)]
    names = ["nope", "rope", "t5"]
    few = line_plot({"t5": point}, "x", "y", order=names)
    all_of_them = line_plot(dict.fromkeys(names, point), "x", "y", order=names)
    colour = next(style for style in re.findall(r"stroke: (#\w+)", few) if style not in ("#000000", "#b0b0b0"))
    assert colour == "#2ca02c" and colour in all_of_them and "#1f77b4" not in few
