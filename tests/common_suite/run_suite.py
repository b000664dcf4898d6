"""Run transformers' common model tests: `python tests/common_suite/run_suite.py [--row ROW ...] [arguments of pytest]`."""

import argparse
import os
import pathlib
import subprocess
import sys
from typing import Any

from build_suite import ROOT
from build_suite import NoSourceDistribution
from build_suite import suite_folder

HERE = pathlib.Path(__file__).parent


def run_rows(suite: pathlib.Path, rows: list[str], arguments: list[str], **how: Any) -> subprocess.CompletedProcess:
    """Run pytest in a process of its own, where `tests` is the package in `suite`, over some rows or, for none, all.

    Args:
        suite: what `suite_folder` returned.
        rows: names of rows.
        arguments: more arguments of pytest.
        how: more arguments of `subprocess.run`.
    """
    path = os.pathsep.join(filter(None, [str(suite), str(HERE), str(ROOT), os.environ.get("PYTHONPATH")]))
    files = [f"{HERE / 'rows.py'}::Test{row}" for row in rows] or [f"{HERE / 'rows.py'}"]
    settings = [
        "-q",
        "--disable-warnings",
        "-o",
        "verbosity_subtests=0",
        "-p",
        "skip_gates",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "--tb=short",
    ]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *settings, *arguments, *files],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        **how,
    )


def main() -> int:
    """Return the exit code of pytest over the rows that the command line names, by default all."""
    parser = argparse.ArgumentParser(description="Run transformers' common model tests on the rows of rows.py.")
    parser.add_argument(
        "--row", action="append", default=[], help="a row such as Decoder_rope; may be repeated; by default all"
    )
    chosen, arguments = parser.parse_known_args()
    try:
        suite = suite_folder()
    except NoSourceDistribution as error:
        print(error, file=sys.stderr)
        return 2
    return run_rows(suite, chosen.row, arguments).returncode


if __name__ == "__main__":
    sys.exit(main())
