"""The benchmark runner: that it runs, what it writes, and that it refuses a path which computes something else. No times."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_relpos.model import attention_backends

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "tests" / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a module of the benchmarks by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def run(*arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / "speed.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_quick_run_writes_a_whole_report(tmp_path: Path) -> None:
    run("all", "--quick", "--schemes", "t5", "alibi", "--peers", "bloom", "--output_dir", str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert list(results) == ["steps", "memory", "decode"]
    names = {"baseline, causal", "t5", "alibi", "transformers BLOOM"}
    for part in results.values():
        assert part["setting"]["versions"]["torch"] == torch.__version__ and part["setting"]["threads"] == 1
        assert set(part["gate"]["errors"]) == {"baseline, causal", "baseline, bidirectional", "t5", "alibi"}
        assert not part["gate"]["refused"] and {row["name"] for row in part["rows"]} == names
        assert not [row for row in part["rows"] if "failed" in row]
    steps = results["steps"]["rows"]
    assert {(row["phase"], row["length"], row["batch"]) for row in steps} == {
        (phase, *shape) for phase in ("train", "forward") for shape in ((128, 2), (256, 1))
    }
    for row in [*steps, *results["decode"]["rows"]]:
        assert 0 < row["cpu_ratio"]["min"] <= row["cpu_ratio"]["median"] <= row["cpu_ratio"]["max"]
        assert len(row["rounds"]) == 2 or row["kind"] == "baseline"
    models = {row["name"]: row["model"] for row in steps}
    assert models["t5"]["parameters_with_gradient"] - models["alibi"]["parameters_with_gradient"] == 2 * 2 * 32  # the tables
    assert all(set(row["peaks_mib"]) == {"128", "256"} and row["exponent"] > 0 for row in results["memory"]["rows"])
    check_tables(tmp_path)


def test_the_command_for_a_gpu_runs_on_a_processor(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = module("gpu")
    words = ["--device", "cpu", "--quick", "--schemes", "alibi", "--output_dir", str(tmp_path), "--part"]
    assert gpu.main([*words, "correctness", "memory"]) == 0
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "Nothing failed." in report and report.count("| alibi | ") == 3  # a decoder, an encoder, and its memory
    kept = (tmp_path / "results.json").read_text(encoding="utf-8")
    monkeypatch.setattr(gpu.gpu_correctness, "measure", None)  # what is known is not measured again
    assert gpu.main([*words, "correctness"]) == 0 and (tmp_path / "results.json").read_text(encoding="utf-8") == kept


def test_a_wrong_path_fails_the_command_for_a_gpu(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = module("gpu")
    right = attention_backends.blockwise_attention
    monkeypatch.setattr(attention_backends, "blockwise_attention", lambda *args: 1.01 * right(*args))
    words = ["--device", "cpu", "--quick", "--schemes", "alibi", "--output_dir", str(tmp_path), "--part", "correctness"]
    assert gpu.main(words) == 1
    assert "alibi, decoder, blocks, float32: plain" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_speed_is_compared_with_the_committed_report(module: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    check = module("speed_check")
    known = check.committed(check.REPORT.read_text(encoding="utf-8"))
    assert all((scheme, length) in known for scheme in check.SCHEMES for length in (512, 2048))
    factors = iter((1.2, 1.2, 1.2, 1.1))  # slow twice; then slow once, because of something else on the machine

    def measured(schemes: list[str], length: int, rounds: int) -> dict[tuple[str, int], float]:
        factor = next(factors)
        return {(name, length): factor * known[name, length] for name in schemes}

    monkeypatch.setattr(check, "measured", measured)
    assert check.main(["--schemes", "t5"]) == 1 and "slower than it was: t5 at 512" in capsys.readouterr().out
    assert check.main(["--schemes", "t5"]) == 0


def check_tables(folder: Path) -> None:
    """Every model has a row, our row meets its peer, and there is a plot for each part."""
    for part in ("steps", "memory", "decode"):
        text = (folder / f"{part}.md").read_text(encoding="utf-8")
        assert (folder / f"{part}.png").stat().st_size > 10_000
        assert text.count("| transformers BLOOM |") >= 2 and text.count("| alibi | transformers BLOOM |") == 1
        assert "| t5 | transformers BLOOM |" not in text and "Not measured" not in text
        assert text.startswith("# ") and "ratio to the baseline" in text


@pytest.mark.parametrize("path", ["auto", "blockwise"])
def test_gate_refuses_a_wrong_output(module: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    contestants, gate = module("contestants"), module("gate")
    (one,) = contestants.ours(["t5"], "native", [path])
    assert set(gate.check(one)) == {"float32", "float64"}
    right = attention_backends.blockwise_attention
    monkeypatch.setattr(attention_backends, "blockwise_attention", lambda *args: 1.001 * right(*args))
    with pytest.raises(gate.Refused, match="t5.*logits are off by"):
        gate.check(one)


def test_gate_refuses_a_wrong_gradient(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contestants, gate = module("contestants"), module("gate")
    (one,) = contestants.ours(["learned_bias"], "native", ["auto"])
    right = attention_backends.blockwise_attention

    def forgets(query: Any, key: Any, value: Any, terms: Any, *rest: Any) -> Any:
        halved = terms.bias.detach() + 0.5 * (terms.bias - terms.bias.detach())
        return right(query, key, value, type(terms)(bias=halved), *rest)

    monkeypatch.setattr(attention_backends, "blockwise_attention", forgets)
    with pytest.raises(gate.Refused, match="gradients are off by"):
        gate.check(one)


def test_ratios_are_to_the_baselines_beside(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that slows down all the time, contestants that cost twice the baseline still come out at twice."""
    measuring = module("measuring")
    cost, now = {"baseline": 1.0, "a": 2.0, "b": 2.0, "c": 4.0}, [0.0]

    def read(work: Any, calls: int = 1) -> dict[str, float]:
        now[0] += 1
        seconds = cost[work.run()] * (1 + 0.1 * now[0])
        return {"wall": seconds, "cpu": seconds}

    monkeypatch.setattr(measuring, "read_clocks", read)
    works = {name: measuring.Work(lambda name=name: name) for name in cost}
    found = measuring.interleave(works, dict.fromkeys("abc", "baseline"), rounds=6, every=1)
    assert [len(found[name]) for name in "abc"] == [6, 6, 6]
    ratios = {name: [sample["wall_ratio"] for sample in found[name]] for name in "abc"}
    assert ratios == {name: pytest.approx([cost[name]] * 6) for name in "abc"}


def test_everyone_is_first_and_last_in_turn(module: Any) -> None:
    orders = [sum(module("measuring").in_turn(list("abcd"), turn, 4, 3), []) for turn in range(4)]
    assert ["".join(order) for order in orders] == ["abcd", "bcda", "cdab", "dabc"]


def test_growth_of_memory(module: Any) -> None:
    growth = module("peak_memory").growth
    assert growth({1024: 10.0, 2048: 40.0, 4096: 160.0})["exponent"] == pytest.approx(2)
    line = growth({1024: 15.0, 2048: 25.0, 4096: 45.0})
    assert line["mib_per_1024"] == pytest.approx(10) and line["largest_residual_of_linear_fit"] == pytest.approx(0, abs=1e-12)
    assert growth({1024: 10.0}) == {}


def test_lengths_beyond_a_failure_are_left_out(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contestants, peak_memory = module("contestants"), module("peak_memory")
    asked = []

    def peak(context: Any, name: str, length: int, setting: Any) -> dict[str, Any]:
        asked.append(length)
        return {"failed": "more than 1 GiB"} if length > 256 else {"peak_mib": 1.0 * length, "seconds": 1.0, "model": {}}

    monkeypatch.setattr(peak_memory, "peak", peak)
    bar = SimpleNamespace(update=lambda: None, set_postfix_str=lambda text: None)
    setting = SimpleNamespace(memory_lengths=[1024, 128, 256, 512])
    row = peak_memory.measure(contestants.baselines()[0], setting, None, bar)
    assert asked == [128, 256, 512] and row["failed_at"] == 512 and row["peaks_mib"] == {"128": 128.0, "256": 256.0}


def test_a_missing_peer_is_reported(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = module("peers")
    for name in [name for name in sys.modules if name.split(".")[0] == "x_transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "x_transformers", None)  # its import fails
    found, missing = peers.peers(["mpt", "x-alibi"])
    assert [one.name for one in found] == ["transformers MPT"]
    assert list(missing) == ["x-transformers alibi flash"] and "x_transformers" in missing["x-transformers alibi flash"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of transformers' DeBERTa
def test_peers_are_of_the_baselines_size(module: Any) -> None:
    """All of a peer's parameters but biases, norms and position tables are those of the baseline."""
    contestants = module("contestants")
    sizes = contestants.Sizes()
    count = {name: one.build(sizes, 128).describe()["parameters"] for name, one in module("peers").PEERS.items()}
    baseline = contestants.baselines()[0].build(sizes, 128).describe()["parameters"]
    square = sizes.layers * sizes.width**2
    own_positions = {"xlnet": square, "deberta-v2": 2 * square + 1024 * sizes.width, "gpt2": 128 * sizes.width}
    for name, parameters in count.items():
        assert parameters - own_positions.get(name, 0) == pytest.approx(baseline, rel=0.01), name


def test_a_report_says_which_targets_are_missed(module: Any) -> None:
    """Ratios count as they are printed, other phases and paths have no target, and the conclusion stands above the tables."""
    report = module("speed_report")
    ours = {"kind": "ours", "path": "auto", "phase": "train", "length": 512}
    rows = [
        {**ours, "name": "t5", "variant": "t5", "cpu_ratio": {"median": 1.204}},  # 1.20, as its target
        {**ours, "name": "alibi", "variant": "alibi", "cpu_ratio": {"median": 1.06}},
        {**ours, "name": "alibi [dense]", "variant": "alibi", "path": "dense", "cpu_ratio": {"median": 9.0}},
        {**ours, "name": "t5", "variant": "t5", "phase": "forward", "cpu_ratio": {"median": 9.0}},
        {**ours, "name": "nope", "variant": "nope", "cpu_ratio": {"median": 9.0}},
    ]
    part = {"setting": {"threads": 1, "device": "cpu"}, "rows": rows}
    assert report.conclusion(part, "steps") == "**1 of 2 targets are met.** Missed: `alibi` at 512 (1.06, target 1.05).\n"
    assert report.conclusion(part | {"rows": rows[-1:]}, "steps") == ""


@pytest.mark.parametrize(
    "part, kind", [("steps", "steps"), ("steps-padded", "steps"), ("decode", "decode"), ("memory", "memory")]
)
def test_the_committed_reports_are_in_the_words_of_the_script(module: Any, part: str, kind: str) -> None:
    text = (ROOT / "docs" / "benchmarks" / "reports" / f"{part}.md").read_text(encoding="utf-8")
    report = module("speed_report")
    assert text.startswith(f"# {report.TITLES[kind]}") and "targets are met.**" in text
    assert "ratio to the baseline" in text and "| baseline, causal |" in text
    met, judged = map(int, re.search(r"\*\*(\d+) of (\d+) targets are met", text).groups())
    missed = text.split("\n\n")[1].count(", target ")
    assert met + missed == judged == text.count(", target ") - missed


def test_plots_of_the_overview_show_the_tables(module: Any) -> None:
    overview = module("overview")
    folder = ROOT / "docs" / "benchmarks"
    losses, steps = overview.losses(folder), overview.steps(folder)
    assert losses["learned_absolute"] == ([1.753], [1.886, 1.816]) and losses["t5"] == ([1.642, 1.641, 1.651], [1.714])
    assert losses["transformer_xl"][1] == [1.729]  # not the version of transformers
    assert steps["t5"] == (1.01, 1.12) and not [name for name in steps if name.startswith("baseline")]
    for draw in (overview.draw_losses, overview.draw_steps):
        labels = [label.get_text() for label in draw(folder).axes[0].get_yticklabels()]
        assert labels == list(losses if draw is overview.draw_losses else steps)
