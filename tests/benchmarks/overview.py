"""Draw the plots of docs/benchmarks whose numbers stand in its tables: the loss of each scheme, and its train steps.

    python tests/benchmarks/overview.py docs/benchmarks

It measures nothing. Run it after a table has changed.
"""

import argparse
import re
from pathlib import Path

from matplotlib.figure import Figure

from hf_relpos.commands.scheme_results import STEP_512
from hf_relpos.commands.scheme_results import STEP_2048
from hf_relpos.commands.scheme_results import read_column
from hf_relpos.commands.scheme_results import read_table


def numbers(cell: str) -> list[float]:
    """Return the decimal fractions in a cell; version numbers and the like have none of three digits."""
    return [float(number) for number in re.findall(r"\b\d\.\d{3}\b", cell)]


def losses(benchmarks: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Read the losses of each scheme, one a seed, and those of its peers."""
    rows = read_table(benchmarks / "scheme_losses.md", "scheme")
    return {
        name: (numbers(f"{row['validation loss']} {row['seeds 1, 2']}"), numbers(row["peer in this setting"]))
        for name, row in rows.items()
    }


def steps(benchmarks: Path) -> dict[str, tuple[float, float]]:
    """Read the ratios of a train step at 512 and at 2,048 tokens, baselines left out, the cheapest first."""
    short, long = (read_column(benchmarks, column) for column in (STEP_512, STEP_2048))
    found = {name: (float(short[name].split()[0]), float(long[name].split()[0])) for name in short}
    schemes = {name: ratios for name, ratios in found.items() if not name.startswith("baseline")}
    return dict(sorted(schemes.items(), key=lambda item: item[1][1]))


def draw_losses(benchmarks: Path) -> Figure:
    """Draw one line a scheme, a dot a seed, and the peers as crosses."""
    found = losses(benchmarks)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for row, (own, peers) in enumerate(found.values()):
        axes.plot(own, [row] * len(own), "o", color="tab:blue", label=None if row else "hf_relpos, one dot a seed")
        axes.plot(peers, [row] * len(peers), "x", color="tab:red", label=None if row else "peers in this setting")
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("validation loss (nats a character), tinyshakespeare")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def draw_steps(benchmarks: Path) -> Figure:
    """Draw two bars a scheme."""
    found = steps(benchmarks)
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.add_subplot()
    for bar, (label, shift) in enumerate({"512 tokens": -0.2, "2,048 tokens": 0.2}.items()):
        ratios = [pair[bar] for pair in found.values()]
        axes.barh([row + shift for row in range(len(found))], ratios, 0.4, label=label, color=f"C{bar}")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("train step, ratio to the baseline (1: what no positions cost)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", type=Path, help="the folder docs/benchmarks")
    folder = parser.parse_args().benchmarks
    for name, draw in {"scheme_losses": draw_losses, "step_cost": draw_steps}.items():
        draw(folder).savefig(folder / f"{name}.png", dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
