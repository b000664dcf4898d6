"""Run the tests of clients and write the table `docs/reference/clients.md`:

    python tests/clients/report.py                          all of them, heavy ones too
    python tests/clients/report.py tests/clients/test_x.py -k lora     some; other rows of the page stay as they are

The tests run in the interpreter that this is started with. Rows of a client that is not installed there keep what another
interpreter found, which `docs/reference/clients.json` holds, and are `not at hand` without that.

A test names its row by a mark, and the kind of its model by its parameter `kind` (a `client_models.Kind`), or in the mark:

    @pytest.mark.clients                                     only for what takes more than a few seconds
    @pytest.mark.row("peft", "LoRA with default targets")    the client as its package is called, and what is asked
    @pytest.mark.row("pipelines", "fill-mask", package="transformers", kind="encoder rotary")
    @pytest.mark.parametrize("kind", DECODERS_AND_LLAMA)

A test that passes says `works`, one that is red `FAILS`, one with `xfail(reason=...)` `fails: reason`. A test that checks a clear
refusal, or a peer that does something else, says so by pytest's own fixture: `record_property("says", "refused: ...")`.
"""

import json
import sys
from datetime import date
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "clients.md"
LAST = PAGE.with_suffix(".json")
ABSENT = "not at hand"
HEAD = """# Clients

What other software does with the models of this package as they are, and what it does with Llama, BERT or T5. Each line is a
test in `tests/clients/`; `python tests/clients/report.py` runs them all and writes this page.
"""
Results = dict[tuple[str, str, str], dict[str, Any]]
"""By client, what is asked and the kind of model: what came out, whether it is a peer, versions and the date."""


class Recorder:
    """A plugin of pytest that collects what the tests of rows say."""

    def __init__(self) -> None:
        self.results: Results = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        mark = item.get_closest_marker("row")
        if mark is not None and (report.when == "call" or not report.passed):
            self.add(mark, getattr(item, "callspec", None), says(report))
        return report

    def add(self, mark: Any, callspec: Any, result: str) -> None:
        """Add what one test says. Of several for one cell, a failure counts, then the longest word."""
        kind = callspec.params.get("kind") if callspec else None
        client, asked = mark.args
        name = getattr(kind, "name", mark.kwargs.get("kind", "all"))
        known = self.results.get((client, asked, name), {}).get("result", "")
        found = max(known, result, key=lambda words: (words == "FAILS", len(words)))
        cell = {"result": found, "peer": getattr(kind, "peer", mark.kwargs.get("peer", False))}
        if result != ABSENT:
            package = mark.kwargs.get("package", client)
            cell |= {"version": f"{package} {version(package)}", "date": date.today().isoformat()}
        self.results[client, asked, name] = cell


def says(report: Any) -> str:
    """Return in words what a test's report says."""
    words = dict(report.user_properties).get("says")
    if hasattr(report, "wasxfail"):
        return f"fails: {report.wasxfail}"
    if report.skipped:
        reason = report.longrepr[2].removeprefix("Skipped: ")
        return ABSENT if ABSENT in reason or "could not import" in reason else f"not tried: {reason}"
    return (words or "works") if report.passed else "FAILS"


def read_last(path: Path = LAST) -> Results:
    """Return what was found before."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return {(row.pop("client"), row.pop("asked"), row.pop("kind")): row for row in rows}


def write_last(results: Results, path: Path = LAST) -> None:
    """Write one line for each result, in order."""
    keys = ("client", "asked", "kind")
    lines = [json.dumps(dict(zip(keys, key, strict=True)) | cell, ensure_ascii=False) for key, cell in sorted(results.items())]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def merge(last: Results, new: Results, whole: bool) -> Results:
    """Return what was found before, renewed. After a run of all tests, rows without one are left out."""
    kept = {key: cell for key, cell in last.items() if key in new or not whole}
    found = {key: cell for key, cell in new.items() if cell["result"] != ABSENT or key not in kept}
    return kept | found


def in_words(cells: list[tuple[str, str]]) -> str:
    """Return kinds and results as `works (decoder bias, gates)`, one line for each result."""
    groups: dict[str, dict[str, list[str]]] = {}
    for kind, result in cells:
        family, _, scheme = kind.partition(" ")
        groups.setdefault(result, {}).setdefault(family, []).append(scheme)
    parts = []
    for result, families in groups.items():
        names = [f"{family} {', '.join(schemes)}".strip() for family, schemes in families.items()]
        parts.append(f"{result} ({'; '.join(names)})")
    return "<br>".join(parts).replace("|", "\\|")


def page_of(results: Results) -> str:
    """Return the page: a table for each client."""
    lines = [HEAD]
    for client, of_client in groupby(sorted(results.items()), key=lambda item: item[0][0]):
        lines += [f"## {client}", "", "| What is asked | Ours | Peer | Version | Date |", "|---|---|---|---|---|"]
        for asked, row in groupby(of_client, key=lambda item: item[0][1]):
            cells = list(row)
            sides = [
                in_words([(key[2], cell["result"]) for key, cell in cells if cell["peer"] == peer]) for peer in (False, True)
            ]
            known = [", ".join(sorted({cell[name] for _, cell in cells if name in cell})) for name in ("version", "date")]
            lines.append(f"| {' | '.join([asked.replace('|', chr(92) + '|'), *sides, *known])} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run the tests, write the page and the results; return pytest's exit code."""
    recorder = Recorder()
    options = [
        "-q",
        "-n0",
        "-m",
        "not gpu",
        "-p",
        "no:cacheprovider",
        f"--ignore={Path(__file__).with_name('test_report.py')}",
    ]
    code = pytest.main([*options, *(arguments or [str(Path(__file__).parent)])], plugins=[recorder])
    results = merge(read_last(), recorder.results, whole=not arguments)
    write_last(results)
    PAGE.write_text(page_of(results), encoding="utf-8")
    print(f"{len(recorder.results)} results of this run, {len(results)} in {PAGE.relative_to(ROOT)}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
