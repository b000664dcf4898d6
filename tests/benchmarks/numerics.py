"""How far half precision is from float64 with the same weights, scheme by scheme and length by length, beside no positions at all.

    python tests/benchmarks/numerics.py --output_dir runs/numerics

Each cell is a scheme, a precision and a length. Its model has the weights of the tests, under which every part matters, rounded to the
precision. The reference has the same rounded weights in float64. The limit is what the same model reaches with attention in float64 of
its queries, keys and values in half precision: a scheme near its limit is as exact as it can be. Finished cells are kept in rows.jsonl;
table.md is written from them.
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))
from matrix import Case  # noqa: E402
from matrix import ids_of  # noqa: E402

from hf_relpos import SCHEMES  # noqa: E402
from hf_relpos.model import attention_backends  # noqa: E402
from hf_relpos.model.scheme_registry import scheme_class  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LENGTHS = [512, 2048, 8192, 16384]
CHECKED = 2048
"""The length at which blocks in float64 are compared with plain attention in float64, before they serve as the reference. Up to it,
cells are measured on several texts, and the limit too."""
TEXTS = 3
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TARGET = 2.0
Row = dict[str, Any]
Answer = tuple[torch.Tensor, dict[str, torch.Tensor]]


def case_of(scheme: str) -> Case:
    """A decoder; an encoder where the scheme has no causal form."""
    return Case("encoder" if "causal" in scheme_class(scheme).refuses else "decoder", scheme, {})


def baseline_of(scheme: str) -> str:
    """The scheme of the same family whose positions are free."""
    return "nope" if case_of(scheme).family == "decoder" else "sinusoidal, encoder"


def build(name: str, dtype: torch.dtype, length: int, tables: float = 1.0) -> Any:
    """A model with weights rounded to a precision, and in it; those of the scheme are so many times as large as in the tests."""
    case = Case("encoder", "sinusoidal", {}) if name == "sinusoidal, encoder" else case_of(name)
    fields = {**SIZES, "attn_implementation": "sdpa", "max_position_embeddings": length}
    model = case.model(dtype=torch.float32, **fields)
    with torch.no_grad():
        for weight in model.position_schemes.parameters():
            weight.mul_(tables)
    return model.to(dtype)


def exact(model: Any, name: str, length: int) -> Any:
    """The same weights in float64."""
    twin = build(name, torch.float64, length)
    with torch.no_grad():
        for own, given in zip(twin.parameters(), model.parameters(), strict=True):
            own.copy_(given)
    return twin


def answer(model: Any, length: int, seed: int) -> Answer:
    """Hidden states of a random text, and gradients of their sum in a random direction that every precision holds.

    Without those of the norms: torch sums them up over the tokens in half precision, on a processor, and nothing here decides it.
    """
    states = model(ids_of(1, length, seed)).last_hidden_state
    direction = torch.randint(-2, 3, states.shape, generator=torch.Generator().manual_seed(seed)).to(states) / 8
    named = {name: part for name, part in model.named_parameters() if "norm" not in name.split(".")[-2]}
    gradients = torch.autograd.grad((states * direction).sum(), list(named.values()))
    return states.detach().double(), {name: part.double() for name, part in zip(named, gradients, strict=True)}


def widened(value: Any) -> Any:
    """A tensor, or those of a tuple, in float64."""
    if isinstance(value, tuple):
        return tuple(map(widened, value))
    return value.double() if isinstance(value, torch.Tensor) else value


def attend_exactly(layer: Any, inputs: Any) -> tuple[torch.Tensor, None]:
    """Attend in blocks in float64, with what half precision left of queries, keys, values and tables."""
    terms = replace(inputs.terms, **{name: widened(part) for name, part in vars(inputs.terms).items() if name != "span"})
    positions = replace(inputs.tables.positions, dtype=torch.float64)
    states = [widened(part) for part in inputs.with_all_heads()]
    return attention_backends.blockwise_attention(*states, terms, positions, inputs.scale).to(inputs.query.dtype), None


def apart(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The norm of the difference, relative to the norm of what is wanted."""
    pairs = list(zip(found, wanted, strict=True))
    return (
        float(sum((one - other).square().sum() for one, other in pairs) / sum(other.square().sum() for _, other in pairs))
        ** 0.5
    )


def error_of(found: list[Answer], wanted: list[Answer]) -> Row:
    """The errors of a cell over its texts: of the states, of all gradients together, and of the gradient that is furthest off."""
    states = apart([one[0] for one in found], [one[0] for one in wanted])
    named = {name: [[one[1][name] for one in side] for side in (found, wanted)] for name in found[0][1]}
    each = {name: apart(*pair) for name, pair in named.items() if any(part.any() for part in pair[1])}
    worst = max(each, key=lambda name: each[name])
    gradients = apart(*([part for pair in named.values() for part in pair[side]] for side in (0, 1)))
    return {"states": states, "gradients": gradients, "worst": [worst, each[worst]]}


def measure(name: str, dtype: str, length: int, tables: float) -> Row:
    """Measure one cell."""
    start, model = time.perf_counter(), build(name, DTYPES[dtype], length, tables)
    seeds = range(TEXTS if length <= CHECKED else 1)

    def answers(model: Any, exactly: bool = False) -> list[Answer]:
        patch: Any = mock.patch.dict(attention_backends.BACKENDS, blockwise=attend_exactly) if exactly else nullcontext()
        with patch:
            return [answer(model, length, seed) for seed in seeds]

    reference = exact(model, name, length)
    wanted = answers(reference)
    row: Row = {"scheme": name, "dtype": dtype, "length": length, **error_of(answers(model), wanted)}
    if length <= CHECKED:
        row["limit"] = error_of(answers(model, exactly=True), wanted)
    if length == CHECKED:
        reference.set_attn_implementation("eager")
        plain = error_of([answer(reference, length, 0)], wanted[:1])
        row["reference"] = max(plain["states"], plain["gradients"])
        assert row["reference"] < 1e-9, f"blocks in float64 are no reference for {name}: {plain}"
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def table_of(rows: list[Row]) -> list[str]:
    """The lines of the table: ratios to the baseline, states and then gradients, over the lengths; beyond the target, the limit beside."""
    cells = {(row["scheme"], row["dtype"], row["length"]): row for row in rows}
    lengths = sorted({row["length"] for row in rows})
    dtypes = [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)]
    lines = []
    for part in ("states", "gradients"):
        columns = [(dtype, length) for dtype in dtypes for length in lengths]
        lines += [f"| {part} | " + " | ".join(f"{dtype}, {length:,}" for dtype, length in columns) + " |"]
        lines.append("|---" * (1 + len(columns)) + "|")
        for name in dict.fromkeys(row["scheme"] for row in rows):
            base, said = name if name.endswith(", encoder") else baseline_of(name), []
            for column in columns:
                own, other = cells.get((name, *column)), cells.get((base, *column))
                said.append("" if own is None or other is None else cell_of(part, own, other))
            lines.append(f"| {name} | " + " | ".join(said) + " |")
        lines.append("")
    return lines[:-1]


def cell_of(part: str, own: Row, baseline: Row) -> str:
    """What a cell of the table says: the baseline's error as it is, other errors as ratios to it."""
    if "refused" in own:
        return "refused"
    if own is baseline:
        return f"{own[part]:.1e}"
    ratio = own[part] / baseline[part]
    if ratio <= TARGET:
        return f"{ratio:.2f}"
    limit = f" (limit {own['limit'][part] / baseline[part]:.2f})" if "limit" in own else ""
    return f"**{ratio:.2f}**{limit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16", "fp16"])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--tables", type=float, default=1.0, help="a factor on the weights of the schemes")
    arguments = parser.parse_args()
    names = list(dict.fromkeys([*(baseline_of(name) for name in arguments.schemes), *arguments.schemes]))
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    path = arguments.output_dir / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    done = {(row["scheme"], row["dtype"], row["length"]) for row in rows}
    cells = [(name, dtype, length) for length in arguments.lengths for dtype in arguments.dtypes for name in names]
    for cell in tqdm([cell for cell in cells if cell not in done], desc="cells"):
        try:
            rows.append(measure(*cell, arguments.tables))
        except ValueError as error:  # a scheme may say that a precision does not hold so long a text
            rows.append(dict(zip(("scheme", "dtype", "length"), cell, strict=True)) | {"refused": str(error)})
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    lines = table_of(rows)
    (arguments.output_dir / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
