"""Tables and plots of what `speed.py` found."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from matplotlib.ticker import NullFormatter
from matplotlib.ticker import NullLocator

TARGETS = {
    "alibi": (1.05, 1.10, 1.2, 1.08), "rope": (1.12, 1.10, 1.15, 1.10), "xpos": (1.12, 1.10, 1.15, 1.10),
    "learned_bias": (1.20, 1.25, 1.25, 1.10), "t5": (1.20, 1.25, 1.25, 1.10), "kerple": (1.20, 1.25, 1.25, 1.10),
    "sandwich": (1.20, 1.25, 1.25, 1.10), "fire": (1.20, 1.25, 1.25, 1.10), "transformer_xl": (1.45, 1.8, 1.3, 1.4),
    "xlnet": (1.45, 1.8, 1.3, 1.4), "music": (1.45, 1.8, 1.3, 1.4), "shaw, no values": (1.45, 1.8, 1.3, 1.4),
    "shaw": (1.7, 2.2, 1.5, 1.3), "deberta": (1.7, 2.4, 1.6, 1.6), "cope": (2.0, None, 2.0, None),
}  # fmt: skip
"""Targets, as ratios to the baseline: a train step at 512 and at 2048, peak memory at 2048, a token at context 4096."""
TARGET_AT = {("train", 512): 0, ("train", 2048): 1, ("memory", 2048): 2, ("decode", 4096): 3}
TITLES = {"steps": "Train steps and forward passes", "memory": "Peak memory of a train step", "decode": "Decoded tokens"}
Rows = list[dict[str, Any]]
Cells = list[Any]


def clock_of(part: dict[str, Any]) -> str:
    """One thread is judged by processor time, more of them and accelerators by the clock on the wall."""
    setting = part["setting"]
    return "cpu" if setting["threads"] == 1 and setting["device"] == "cpu" else "wall"


def table(head: Cells, rows: list[Cells]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def spread(found: dict[str, float] | None) -> str:
    """Median, and lowest to highest."""
    return "" if found is None else f"{found['median']:.2f} ({found['min']:.2f}-{found['max']:.2f})"


def target(row: dict[str, Any], *at: Any) -> float | None:
    """Return the target for a row of ours on its default path; None where there is none."""
    index = TARGET_AT.get(tuple(at))
    targets = TARGETS.get(row["variant"]) if row["kind"] == "ours" and row["path"] == "auto" else None
    return None if targets is None or index is None else targets[index]


def noted(row: dict[str, Any], *at: Any) -> str:
    """Return the target as an addition to a cell."""
    wanted = target(row, *at)
    return "" if wanted is None else f", target {wanted:g}"


def conclusion(part: dict[str, Any], kind: str) -> str:
    """Count the targets that are met, and name those that are missed; ratios count as they are printed."""
    clock, judged = clock_of(part), []
    peaks = {row["name"]: row["peaks_mib"] for row in part["rows"] if "peaks_mib" in row}
    for row in part["rows"]:
        if kind == "memory":
            own, base = row["peaks_mib"], peaks.get(row["baseline"], {})
            found = {int(length): own[length] / base[length] for length in own if base.get(length)}
        else:
            size = row.get("context" if kind == "decode" else "length")
            found = {} if "failed" in row else {size: row[f"{clock}_ratio"]["median"]}
        phase = row.get("phase", kind)
        judged += [(row["name"], size, round(ratio, 2), target(row, phase, size)) for size, ratio in found.items()]
    judged = [one for one in judged if one[-1] is not None]
    missed = [
        f"`{name}` at {size:,} ({ratio:.2f}, target {wanted:g})" for name, size, ratio, wanted in judged if ratio > wanted
    ]
    met = f"**{len(judged) - len(missed)} of {len(judged)} targets are met.**"
    return "" if not judged else met + (f" Missed: {', '.join(missed)}." if missed else "") + "\n"


def by_name(rows: Rows) -> dict[str, Rows]:
    """The rows of each contestant, in order: baselines, ours, peers."""
    order = {"baseline": 0, "ours": 1, "peer": 2}
    found: dict[str, Rows] = {}
    for row in sorted(rows, key=lambda row: order[row["kind"]]):
        found.setdefault(row["name"], []).append(row)
    return found


def cell(rows: Rows, **wanted: Any) -> dict[str, Any] | None:
    """The row with these values, if it was measured."""
    chosen = (row for row in rows if "failed" not in row and all(row.get(key) == value for key, value in wanted.items()))
    return next(chosen, None)


def timed_tables(part: dict[str, Any], columns: list[tuple[Any, ...]], keys: tuple[str, ...], unit: str) -> list[str]:
    """Ratios by the clock that counts, and seconds and ratios by the other.

    Args:
        part: one part of the results.
        columns: the values of `keys` of each column.
        keys: fields that tell the measurements of one contestant apart.
        unit: what the milliseconds are for.
    """
    counted = clock_of(part)
    tables = []
    for clock in (counted, "wall" if counted == "cpu" else "cpu"):
        lines = []
        for name, rows in by_name(part["rows"]).items():
            line: Cells = [name]
            for column in columns:
                row = cell(rows, **dict(zip(keys, column, strict=True)))
                note = noted(rows[0], *(column if len(column) > 1 else ("decode", *column))) if clock == counted else ""
                line += (
                    ["", ""] if row is None else [spread(row[f"{clock}_ratio"]) + note, f"{1000 * row[clock]['median']:.2f}"]
                )
            lines.append(line)
        heads = [" ".join(map(str, column)) for column in columns]
        head = ["model", *(text for name in heads for text in (f"{name}: ratio to the baseline", f"ms a {unit}"))]
        title = {"cpu": "processor time of all threads", "wall": "wall-clock time"}[clock]
        rounds = f"Median (lowest-highest) of {part['setting']['rounds']} rounds."
        tables.append(f"## By {title}\n\n{rounds}\n\n" + table(head, lines))
    return tables


def versus(part: dict[str, Any], columns: list[tuple[Any, ...]], keys: tuple[str, ...]) -> str:
    """Our time over the peer's, round by round, for every peer and each of our rows of the scheme that it implements."""
    clock, grouped, lines = f"{clock_of(part)}_ratio", by_name(part["rows"]), []
    for peer_rows in grouped.values():
        peer = peer_rows[0]
        for own_rows in grouped.values():
            own = own_rows[0]
            if (
                peer["kind"] != "peer"
                or own["kind"] != "ours"
                or own["variant"] != peer["scheme"]
                or own["baseline"] != peer["baseline"]
            ):
                continue
            line: Cells = [own["name"], peer["name"]]
            for column in columns:
                wanted = dict(zip(keys, column, strict=True))
                pair = [cell(rows, **wanted) for rows in (own_rows, peer_rows)]
                line.append("" if None in pair else f"{paired(pair, clock):.2f}")
            lines.append([*line, peer["note"]])
    heads = [" ".join(map(str, column)) for column in columns]
    head = table(["ours", "peer", *heads, "what differs in the peer"], lines)
    return "## Ours / peer\n\nMedian over rounds; below 1, ours is faster.\n\n" + head if lines else ""


def paired(pair: list[Any], clock: str) -> float:
    """Median over rounds of the quotient of two rows' ratios to the baseline."""
    ours, theirs = ([sample[clock] for sample in row["rounds"]] for row in pair)
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def failures(part: dict[str, Any]) -> str:
    """What was not measured, and why."""
    found = {f"{name} (not installed or not built)": reason for name, reason in part["missing_peers"].items()}
    found |= {f"{name} (refused: not what eager gives)": reason for name, reason in part["gate"]["refused"].items()}
    for row in part["rows"]:
        if "failed" in row:
            found[f"{row['name']}, {row.get('length', row.get('context', row.get('failed_at')))}"] = row["failed"]
    return "## Not measured\n\n" + "\n".join(f"- {name}: {reason}" for name, reason in found.items()) + "\n" if found else ""


def steps_report(part: dict[str, Any]) -> list[str]:
    """Tables of train steps and forward passes."""
    phases, lengths = (list(dict.fromkeys(row.get(key) for row in part["rows"])) for key in ("phase", "length"))
    columns = [(phase, length) for phase in filter(None, phases) for length in sorted(filter(None, lengths))]
    keys = ("phase", "length")
    return [*timed_tables(part, columns, keys, "step"), versus(part, columns, keys), parameter_table(part)]


def decode_report(part: dict[str, Any]) -> list[str]:
    """Tables of decoding."""
    columns = [(context,) for context in sorted({row["context"] for row in part["rows"]})]
    return [*timed_tables(part, columns, ("context",), "token"), versus(part, columns, ("context",))]


def parameter_table(part: dict[str, Any]) -> str:
    """Parameters and attention of every model, at the last length."""
    lines = [
        [name, chosen["model"]["attention"], chosen["model"].get("parameters_with_gradient", ""), chosen["note"]]
        for name, rows in by_name(part["rows"]).items()
        if (chosen := next((row for row in reversed(rows) if "model" in row), None)) is not None
    ]
    return "## Models\n\n" + table(["model", "attention", "parameters with a gradient", "note"], lines)


def memory_report(part: dict[str, Any]) -> list[str]:
    """Peaks of a train step of one sequence, how they grow, and ours over the peers'."""
    rows, lengths = part["rows"], sorted(part["setting"]["memory_lengths"])
    peaks = {row["name"]: row["peaks_mib"] for row in rows}
    lines = []
    for row in (rows[0] for rows in by_name(rows).values()):
        line: Cells = [row["name"]]
        for length in lengths:
            value, baseline = row["peaks_mib"].get(str(length)), peaks.get(row["baseline"], {}).get(str(length))
            failed = row["failed"] if row.get("failed_at") == length else ""
            ratio = f" ({value / baseline:.2f}{noted(row, 'memory', length)})" if value and baseline else ""
            line.append(failed if value is None else f"{value:.0f}{ratio}")
        grown = [f"{row[key]:.2f}" if key in row else "" for key in ("exponent", "mib_per_1024")]
        lines.append([*line, *grown])
    head = ["model", *(f"{length}: MiB (ratio to the baseline)" for length in lengths), "exponent", "MiB for 1024 tokens more"]
    pairs = [
        [own["name"], peer["name"], *(_quotient(own["peaks_mib"], peer["peaks_mib"], str(length)) for length in lengths)]
        for peer in rows
        for own in rows
        if peer["kind"] == "peer"
        and own["kind"] == "ours"
        and own["variant"] == peer["scheme"]
        and own["baseline"] == peer["baseline"]
    ]
    text = "## Ours / peer\n\nBelow 1, ours takes less.\n\n" + table(["ours", "peer", *lengths], pairs)
    return ["## Peaks\n\n" + table(head, lines), text if pairs else ""]


def _quotient(ours: dict[str, float], theirs: dict[str, float], length: str) -> str:
    return f"{ours[length] / theirs[length]:.2f}" if ours.get(length) and theirs.get(length) else ""


def curves(part: dict[str, Any], kind: str) -> dict[str, tuple[dict[str, Any], list[tuple[int, float]]]]:
    """For each contestant a row and the points of its line."""
    found: dict[str, Any] = {}
    for name, rows in by_name(part["rows"]).items():
        if kind == "memory":
            points = [(int(length), value) for length, value in rows[0]["peaks_mib"].items()]
        else:
            x, ratio = ("context" if kind == "decode" else "length"), f"{clock_of(part)}_ratio"
            chosen = [row for row in rows if "failed" not in row and row.get("phase", kind) in ("train", "decode")]
            points = sorted((row[x], row[ratio]["median"]) for row in chosen)
        if points:
            found[name] = (rows[0], points)
    return found


def plot(part: dict[str, Any], kind: str, file: Path) -> None:
    """Lines over the length, both axes logarithmic: ours on their default path on the left, peers on the right, baselines on both.

    A scheme and the peers that implement it have one colour; lines of encoders are broken.
    """
    figure = Figure(figsize=(15, 6), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    schemes = list(dict.fromkeys(row["variant"] or row["scheme"] for row in part["rows"]))
    drawn: dict[tuple[str, str], int] = {}
    for name, (row, points) in curves(part, kind).items():
        scheme = row["variant"] or row["scheme"]
        number = drawn[row["kind"], scheme] = drawn.get((row["kind"], scheme), -1) + 1
        place = number if row["kind"] == "peer" else schemes.index(scheme) // 10
        color = "black" if row["kind"] == "baseline" else f"C{schemes.index(scheme) % 10}"
        style = {"color": color, "linestyle": "-" if row["causal"] else "--", "marker": "osv^D*"[place % 6]}
        for axes, shown in zip(panels, ("ours", "peer"), strict=True):
            if row["kind"] in (shown, "baseline") and row["path"] == "auto":
                axes.plot(*zip(*points, strict=True), label=name, linewidth=2 if color == "black" else 1, **style)
    labels = {
        "steps": "train step, ratio to the baseline",
        "decode": "token, ratio to the baseline",
        "memory": "peak of a train step, MiB",
    }
    ticks = sorted({x for _, points in curves(part, kind).values() for x, _ in points})
    for axes, title in zip(panels, ("hf_relpos", "peers"), strict=True):
        axes.set(xscale="log", yscale="log", title=title, xlabel="context" if kind == "decode" else "tokens")
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    panels[0].set_ylabel(labels[kind])
    figure.savefig(file, dpi=150)


def caption(part: dict[str, Any]) -> str:
    """On what, with which versions and sizes."""
    setting = part["setting"]
    versions = ", ".join(f"{name} {number}" for name, number in setting["versions"].items() if number)
    sizes = ", ".join(f"{name} {number}" for name, number in setting["sizes"].items())
    machine = setting["accelerator"] if setting["device"] != "cpu" else setting["processor"]
    return f"{machine}, {setting['threads']} of {setting['cores']} cores, {setting['dtype']}; {versions}; {sizes}; {setting['started']}.\n"


def write_report(parts: dict[str, Any], folder: Path) -> None:
    """One Markdown file and one plot for every part of the results; tables are printed too."""
    reports: dict[str, Callable[[dict[str, Any]], list[str]]] = {
        "steps": steps_report,
        "memory": memory_report,
        "decode": decode_report,
    }
    for key, part in parts.items():
        kind = key.split("-")[0]
        title = "# " + ", ".join(filter(None, [TITLES[kind], key.partition("-")[2].replace("-", " ")])) + "\n"
        text = "\n".join(filter(None, [title, conclusion(part, kind), caption(part), *reports[kind](part), failures(part)]))
        (folder / f"{key}.md").write_text(text, encoding="utf-8")
        plot(part, kind, folder / f"{key}.png")
        print(f"{key}\n\n{text}")
