"""Is anything slower than it was? `make speed-check` times a few schemes beside the baseline, and compares with the committed report.

    python tests/benchmarks/speed_check.py --schemes alibi t5 transformer_xl rope --lengths 512

Both numbers are ratios to a baseline that was measured beside them, by processor time on one thread, so that they travel between
machines. A cell that is more than 15 % above its committed ratio fails, once it is so in a second measurement too.
"""

import argparse
import re
import sys
from pathlib import Path

import speed
import step_times
import torch
from contestants import ours

REPORT = Path(__file__).parents[2] / "docs" / "benchmarks" / "reports" / "steps.md"
ALLOWED = 1.15
SCHEMES = ("rope", "alibi", "t5", "transformer_xl", "shaw")


def committed(text: str) -> dict[tuple[str, int], float]:
    """The ratios of train steps in a report, by scheme and length."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| model | train"))
    heads = [cell.strip() for cell in lines[start].strip("| ").split("|")]
    columns = {number: int(found[1]) for number, head in enumerate(heads) if (found := re.match(r"train (\d+): ratio", head))}
    ratios = {}
    for line in lines[start + 2 :]:
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if not line.startswith("|"):
            break
        for number, length in columns.items():
            if number < len(cells) and (found := re.match(r"[\d.]+", cells[number])):
                ratios[cells[0], length] = float(found[0])
    return ratios


def measured(schemes: list[str], length: int, rounds: int) -> dict[tuple[str, int], float]:
    """The ratios of train steps now, each the median of some rounds, interleaved in one process."""
    words = ["steps", "--output_dir", "unused", "--phases", "train", "--rounds", str(rounds), "--schemes", *schemes]
    rows = step_times.measure(ours(schemes, "native", ["auto"]), speed.parse(words), length)
    return {(row["name"], length): row["cpu_ratio"]["median"] for row in rows if row["kind"] == "ours" and "failed" not in row}


def slower(now: dict[tuple[str, int], float], before: dict[tuple[str, int], float]) -> list[tuple[str, int]]:
    """The cells that are further above the report than is allowed."""
    return [cell for cell, ratio in now.items() if cell in before and ratio > ALLOWED * before[cell]]


def main(argv: list[str] | None = None) -> int:
    """Measure, print a line a cell, and return 1 if a cell is slower than it was."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    before, bad = committed(REPORT.read_text(encoding="utf-8")), []
    for length in given.lengths:
        now = measured(given.schemes, length, given.rounds)
        again = slower(now, before)
        if again:  # a neighbour on the machine may have been at work
            second = measured(sorted({name for name, _ in again}), length, given.rounds)
            now |= {cell: min(now[cell], ratio) for cell, ratio in second.items()}
        bad += slower(now, before)
        for (name, _), ratio in now.items():
            known = before.get((name, length))
            print(f"{name}, {length} tokens: {ratio:.2f}, report {'has none' if known is None else f'{known:.2f}'}")
    for name, length in bad:
        print(f"slower than it was: {name} at {length} tokens")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
