"""The reference of all schemes, generated from the code: one page and one picture a scheme, and the table of the README.

python -m hf_relpos schemes docs/schemes --table README.md
"""

import argparse
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_relpos.model.attention import RelPosAttention
from hf_relpos.model.configuration_relpos import RelPosConfig
from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.configuration_relpos import RelPosEncoderConfig
from hf_relpos.model.position_builder import build_positions
from hf_relpos.model.scheme_base import PositionScheme
from hf_relpos.model.scheme_registry import SCHEMES
from hf_relpos.model.scheme_registry import build_scheme
from hf_relpos.model.scheme_registry import scheme_class
from hf_relpos.model.scheme_terms import dense_bias

USES = ("causal", "bidirectional", "memory")
SIZES: dict[str, Any] = {"vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
# Tokens on each side of the query in the pictures.
REACH = 64


def reference_config(name: str) -> RelPosConfig:
    """A small configuration of a scheme, causal where it is defined so."""
    family = RelPosEncoderConfig if "causal" in SCHEMES[name].refuses else RelPosDecoderConfig
    return family(**SIZES, position_scheme=name)


def reference_scheme(name: str) -> PositionScheme:
    """A small scheme with its initial tables."""
    torch.manual_seed(0)
    scheme = build_scheme(reference_config(name), name).eval()
    for module in scheme.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    scheme.initialize(0.02)
    return scheme


@torch.no_grad()
def kernel(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the position alone adds to or makes of a score: the same token everywhere, the score over the distance.

    Returns:
        Distances `(distances,)`, key minus query, and scores `(heads, distances)`, less the score of the query itself.
    """
    scheme = reference_scheme(name)
    length = REACH + 1 if scheme.causal else 2 * REACH + 1
    query_row = REACH
    token = torch.randn(1, scheme.heads, 1, scheme.head_dim, generator=torch.Generator().manual_seed(1))
    states = token.expand(-1, -1, length, -1)
    positions = build_positions((1, length), states, causal=scheme.causal)
    prepared = scheme.for_layer(scheme.prepare(positions), RelPosAttention(reference_config(name), 0))
    query, key = scheme.encode_query(states, prepared), scheme.encode_key(states, prepared)
    scores = scheme.scale() * query @ key.transpose(-1, -2)
    terms = scheme.score_terms(positions, prepared, query, key)
    bias = None if terms is None else dense_bias(terms, positions, query, key, scheme.scale())
    scores = scores if bias is None else scores + bias
    row = scores[0, :, query_row]
    return torch.arange(length) - query_row, row - row[:, query_row, None]


def facts(name: str) -> dict[str, Any]:
    """What the table of all schemes says of one."""
    kind = SCHEMES[name]
    scheme = reference_scheme(name)
    size = sum(parameter.numel() for parameter in scheme.parameters())
    acts = "embeddings" if kind.acts_on_embeddings else "queries and keys" if kind.encodes() else "scores"
    if kind is SCHEMES["nope"]:
        acts = "nothing"
    return {
        "acts on": acts,
        **{use: "no" if use in kind.refuses else "yes" for use in USES},
        "backends": _backends(kind),
        "parameters": size,
        "source": kind.source,
    }


def _backends(kind: type[PositionScheme]) -> str:
    return "eager, sdpa" if kind.needs_probabilities(kind.complete({})) else "all"


def page(name: str) -> str:
    """The Markdown page of a scheme."""
    kind, known = SCHEMES[name], facts(name)
    lines = [f"# {name}", "", inspect.cleandoc(kind.__doc__ or ""), "", f"Source: {kind.source}.", ""]
    lines += [f"![Score over distance, one line a head]({name}.png)", "", "## Where it is defined", ""]
    for use in USES:
        reason = kind.refuses.get(use)
        lines.append(f"- {use}: {'yes' if reason is None else f'no: {reason}'}")
    needs = kind.needs_probabilities(kind.complete({}))
    lines.append(f"- beside another scheme: {_beside(name)}")
    lines.append("- cross-attention: none is added there")
    lines.append(f"- backends: {f'`eager` and `sdpa`; not `flex_attention`: {needs}' if needs else 'all'}")
    lines += ["", "## What it costs", ""]
    owner = "the model" if kind.acts_on_embeddings else "each layer, or once for the model with `share_positions: model`"
    lines.append(f"{known['parameters']:,} parameters for {owner} (4 heads of 16, default parameters).")
    lines += ["", "## Parameters", ""]
    if not kind.parameter_specs:
        lines.append("None.")
    else:
        lines += ["| name | default | allowed | meaning |", "|---|---|---|---|"]
        for key, spec in kind.parameter_specs.items():
            lines.append(f"| `{key}` | `{spec.default!r}` | {spec.allowed} | {spec.help} |")
    return "\n".join(lines) + "\n"


def _beside(name: str) -> str:
    """What a scheme joins in one layer, or why none."""
    own = SCHEMES[name].combines_as
    others = [other for other, kind in SCHEMES.items() if own and kind.combines_as and kind.combines_as != own]
    if others:
        return ", ".join(f"`{other}`" for other in others) + " ([combinations](combinations.md))"
    try:
        scheme_class(f"rope+{name}")
    except ValueError as refusal:
        return "no: " + str(refusal).split("refused: ")[1].split(";")[0]
    return "no"


def combinations() -> str:
    """The Markdown page of schemes that share a layer."""
    roles = {role: [name for name, kind in SCHEMES.items() if kind.combines_as == role] for role in ("rotary", "bias")}
    lines = [
        "# Two schemes in one layer",
        "",
        "`position_scheme: rope+alibi`: queries and keys are turned by the one, and the other's number per head and distance is",
        "added to the scores of what was turned. Names may stand in any order, and in a list with one name a layer,",
        "`[rope+t5, nope, ...]`. `position_parameters` map each scheme's name to its own, `{t5: {num_buckets: 16}}`.",
        "",
        "The scale of the scores is that of the scheme that adds to them: beside `t5` they are not scaled, and the first queries are",
        "smaller instead, unless its `scale_scores` is true. Each part keeps its parameters, refusals and backends.",
        "",
        "| scheme | causal | bidirectional | memory | backends |",
        "|---|---|---|---|---|",
    ]
    for rotary in roles["rotary"]:
        for added in roles["bias"]:
            kind = scheme_class(f"{rotary}+{added}")
            uses = " | ".join("no" if use in kind.refuses else "yes" for use in USES)
            lines.append(f"| `{rotary}+{added}` | {uses} | {_backends(kind)} |")
    lines += [
        "",
        "## What does not combine",
        "",
        "Two rotary schemes, two that add numbers, three schemes of any kind, and:",
        "",
    ]
    lines += [f"- `{name}`: {_beside(name).removeprefix('no: ')}" for name, kind in SCHEMES.items() if not kind.combines_as]
    return "\n".join(lines) + "\n"


def replace_table(path: Path) -> None:
    """Write the table in the place of the one in a Markdown file."""
    text = path.read_text(encoding="utf-8")
    head, rest = text.split("| scheme | acts on |", 1)
    path.write_text(head + table() + "\n" + rest.split("\n\n", 1)[1], encoding="utf-8")


def table(link: str = "docs/schemes") -> str:
    """All schemes in one Markdown table, each name linked to its page."""
    rows = {name: facts(name) for name in SCHEMES}
    columns = list(next(iter(rows.values())))
    lines = ["| scheme | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, known in rows.items():
        lines.append(f"| [`{name}`]({link}/{name}.md) | " + " | ".join(str(known[column]) for column in columns) + " |")
    return "\n".join(lines) + "\n"


def draw(name: str, path: Path) -> None:
    """The picture of a scheme: the score of one and the same token over the distance, one line a head."""
    from matplotlib.figure import Figure

    distance, scores = kernel(name)
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot()
    for head, line in enumerate(scores):
        axes.plot(distance, line, label=f"head {head}")
    axes.set_xlabel("key minus query (tokens)")
    axes.set_ylabel("score, less that of distance 0")
    axes.set_title(f"{name}: one token everywhere, initial parameters", fontsize=10)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def add_schemes(commands: Any) -> None:
    """`schemes`: write the reference of all schemes."""
    parser = commands.add_parser("schemes", help="write the reference of all schemes: pages, pictures and their table")
    parser.add_argument("folder", type=Path, help="folder for the pages")
    parser.add_argument("--table", type=Path, metavar="FILE", help="Markdown file whose table of schemes is replaced")
    parser.set_defaults(run=run_schemes)


def run_schemes(arguments: argparse.Namespace) -> None:
    """Write a page and a picture of each scheme, and print the table."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in SCHEMES:
        (arguments.folder / f"{name}.md").write_text(page(name), encoding="utf-8")
        draw(name, arguments.folder / f"{name}.png")
    (arguments.folder / "combinations.md").write_text(combinations(), encoding="utf-8")
    if arguments.table is None:
        print(table())
    else:
        replace_table(arguments.table)
