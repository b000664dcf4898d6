"""Write the reference of all schemes from the code: one page and one picture a scheme, and the tables of all.

    python -m hf_relpos schemes docs/schemes --table README.md

What a page says under `## When to use it` is written by hand and kept. A picture stays as it is while its curves do.
"""

import argparse
import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_relpos.commands.scheme_results import results_table
from hf_relpos.model.attention import RelPosAttention
from hf_relpos.model.configuration_relpos import RelPosConfig
from hf_relpos.model.configuration_relpos import RelPosDecoderConfig
from hf_relpos.model.configuration_relpos import RelPosEncoderConfig
from hf_relpos.model.position_builder import build_positions
from hf_relpos.model.position_tables import DistanceTables
from hf_relpos.model.scheme_base import PositionScheme
from hf_relpos.model.scheme_modules import PositionSchemes
from hf_relpos.model.scheme_registry import SCHEMES
from hf_relpos.model.scheme_registry import build_scheme
from hf_relpos.model.scheme_registry import scheme_class
from hf_relpos.model.scheme_terms import dense_bias

USES = {"decoder": "causal", "encoder": "bidirectional", "memory": "memory"}
"""What a table calls each use, and what a scheme calls it that refuses it."""
BRIEF = ("acts on", *USES, "parameters")
"""The columns of the table in the README."""
SIZES: dict[str, Any] = {"vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
"""Of the models in the pictures; parameters are counted in the default model."""
REACH = 64
"""Tokens on each side of the query in the pictures."""
SHOWN_ALIKE = 1e-3
"""A picture is drawn anew if a point of its curves moves by more than this."""
WHEN = "## When to use it"
NOT_COMPARED = "It was not compared with the other schemes yet."


def reference_config(name: str, **sizes: Any) -> RelPosConfig:
    """Build a configuration of a scheme, of a decoder where one is defined; the default sizes if none are given."""
    family = RelPosEncoderConfig if "causal" in SCHEMES[name].refuses else RelPosDecoderConfig
    return family(**sizes, position_scheme=name)


def reference_scheme(name: str) -> PositionScheme:
    """Build a small scheme with its initial tables."""
    torch.manual_seed(0)
    scheme = build_scheme(reference_config(name, **SIZES), name).eval()
    for module in scheme.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    for module in scheme.modules():
        if isinstance(module, PositionScheme):
            module.initialize(0.02)
    return scheme


@torch.no_grad()
def kernel(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what positions alone make of a score: the same token stands everywhere, so that scores differ by distance only.

    Returns:
        Distances `(distances,)`, key minus query, and scores `(heads, distances)`, less the score of the query itself.
    """
    scheme = reference_scheme(name)
    length = REACH + 1 if scheme.causal else 2 * REACH + 1
    query_row = REACH
    token = torch.randn(1, scheme.heads, 1, scheme.head_dim, generator=torch.Generator().manual_seed(1))
    states = token.expand(-1, -1, length, -1)
    positions = build_positions((1, length), states, causal=scheme.causal)
    tables, prepared = DistanceTables(positions), scheme.prepare(positions)
    query, key = scheme.encode_query(states, prepared), scheme.encode_key(states, prepared)
    scores = scheme.scale() * query @ key.transpose(-1, -2)
    config = reference_config(name, **SIZES)
    gates = scheme.gate_tokens(
        torch.randn(config.hidden_size, generator=torch.Generator().manual_seed(2)).expand(1, length, -1)
    )
    terms = RelPosAttention(config, 0).score_terms(scheme.call, tables, gates)
    bias = None if terms is None else dense_bias(terms, tables, query, key, scheme.scale())
    scores = scores if bias is None else scores + bias
    row = scores[0, :, query_row]
    return torch.arange(length) - query_row, row - row[:, query_row, None]


def count_parameters(name: str) -> int:
    """Count the parameters of positions in the default model of a scheme."""
    with torch.device("meta"):
        schemes = PositionSchemes(reference_config(name))
    return sum(parameter.numel() for parameter in schemes.parameters())


def facts(name: str) -> dict[str, Any]:
    """Collect what the table of all schemes says of one."""
    kind = SCHEMES[name]
    adds = kind.adds_terms() or kind.gates()
    acts = "embeddings" if kind.acts_on_embeddings else "queries, keys" if kind.encodes() else "scores" if adds else "nothing"
    return {
        "acts on": acts,
        **{use: "no" if refusal in kind.refuses else "yes" for use, refusal in USES.items()},
        "parameters": f"{count_parameters(name):,}",
        "backends": _backends(kind),
        "source": kind.source,
    }


def _backends(kind: type[PositionScheme]) -> str:
    """Return the backends that compute a scheme, `flex_attention` where nothing has to be known of single probabilities."""
    flex = [] if kind.needs_probabilities(kind.complete({})) else ["flex_attention"]
    return ", ".join(["eager", "sdpa", *flex, *(["triton"] if kind.has_kernel else [])])


def page(name: str, folder: Path) -> str:
    """Return the Markdown page of a scheme.

    Args:
        name: the scheme.
        folder: where the page stands; what it says under `WHEN` is kept, and results are read from `benchmarks` beside the folder.
    """
    kind = SCHEMES[name]
    lines = [f"# {name}", "", inspect.cleandoc(kind.__doc__ or ""), "", f"Source: {kind.source}.", ""]
    lines += [f"![Score over distance, one line a head]({name}.png)", "", WHEN, "", kept_advice(folder / f"{name}.md"), ""]
    lines += filter(None, [results_table(name, folder.parent / "benchmarks")])
    lines += ["## Where it is defined", ""]
    for use, refusal in USES.items():
        reason = kind.refuses.get(refusal)
        lines.append(f"- {use}: {'yes' if reason is None else f'no: {reason}'}")
    needs = kind.needs_probabilities(kind.complete({}))
    lines.append(f"- with another scheme in one layer: {_beside(name)}")
    lines.append("- cross-attention: none is added there")
    backends = ", ".join(f"`{backend}`" for backend in _backends(kind).split(", "))
    lines.append(f"- backends: {backends}{f'; not `flex_attention`: {needs}' if needs else ''}")
    lines += ["", "## What it costs", "", _size(name), "", "## Parameters", ""]
    if not kind.parameter_specs:
        lines.append("None.")
    else:
        lines += ["| name | default | allowed | meaning |", "|---|---|---|---|"]
        for key, spec in kind.parameter_specs.items():
            lines.append(f"| `{key}` | `{spec.default!r}` | {spec.allowed} | {spec.help} |")
    return "\n".join(lines) + "\n"


def kept_advice(path: Path) -> str:
    """Return what a page says under `WHEN`, or that there is nothing to say yet."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = re.search(rf"^{WHEN}\n\n(.*?)\n\n(?=## |\| measured)", text, flags=re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else NOT_COMPARED


def _size(name: str) -> str:
    """Say how many parameters the positions of the default model have, and who owns them."""
    kind, config = SCHEMES[name], reference_config(name)
    count, layers = count_parameters(name), config.num_hidden_layers
    sizes = f"the default model ({layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads)"
    if not count:
        return f"No parameters in {sizes}."
    shared = kind.acts_on_embeddings or kind.serves_all_layers
    each = "" if shared else f", {count // layers:,} a layer; `share_positions: model` gives all layers one set"
    return f"{count:,} parameters in {sizes}{each}."


def _beside(name: str) -> str:
    """Name the schemes that share a layer with this one, or say why none does."""
    own = SCHEMES[name].combines_as
    others = [other for other, kind in SCHEMES.items() if own and kind.combines_as and kind.combines_as != own]
    if others:
        return ", ".join(f"`{other}`" for other in others) + " ([combinations](combinations.md))"
    rotary = next((other for other, kind in SCHEMES.items() if kind.combines_as == "rotary"), name)
    try:
        scheme_class(f"{rotary}+{name}")
    except ValueError as refusal:
        return "no: " + str(refusal).split("refused: ")[1].split(";")[0]
    return "no"


def combinations() -> str:
    """Return the Markdown page of schemes that share a layer."""
    roles = {role: [name for name, kind in SCHEMES.items() if kind.combines_as == role] for role in ("rotary", "bias")}
    lines = [
        "# Two schemes in one layer",
        "",
        "`position_scheme: rope+alibi`: queries and keys are turned by the one, and the other's number per head and distance or token is",
        "added to the scores of what was turned. Names may stand in any order, and in a list with one name a layer,",
        "`[rope+t5, nope, ...]`. `position_parameters` map each scheme's name to its own, `{t5: {num_buckets: 16}}`.",
        "",
        "The scale of the scores is that of the scheme that adds to them: beside `t5` they are not scaled, and the first queries are",
        "smaller instead, unless its `scale_scores` is true. Each part keeps its parameters, refusals and backends.",
        "",
        f"| scheme | {' | '.join(USES)} | backends |",
        "|---|---|---|---|---|",
    ]
    for rotary in roles["rotary"]:
        for added in roles["bias"]:
            kind = scheme_class(f"{rotary}+{added}")
            uses = " | ".join("no" if refusal in kind.refuses else "yes" for refusal in USES.values())
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
    """Write the table over the one in a Markdown file."""
    text = path.read_text(encoding="utf-8")
    head, rest = text.split("| scheme | acts on |", 1)
    path.write_text(head + table() + "\n" + rest.split("\n\n", 1)[1], encoding="utf-8")


def table(link: str = "docs/schemes/", columns: tuple[str, ...] = BRIEF) -> str:
    """Return all schemes in one Markdown table, each name linked to its page."""
    lines = ["| scheme | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in SCHEMES:
        known = facts(name)
        lines.append(f"| [`{name}`]({link}{name}.md) | " + " | ".join(known[column] for column in columns) + " |")
    return "\n".join(lines) + "\n"


def index() -> str:
    """Return the Markdown page of all schemes: the table with all its columns."""
    config = RelPosDecoderConfig()
    return f"""# Position schemes

`position_scheme` takes one of these names, a list with one name a layer, or two names joined by `+`
([combinations](combinations.md)). A scheme's own parameters go into `position_parameters`. Parameters are counted in the
default model: {config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads.

The picture of a scheme shows its scores over the distance before any training, in a small model in which the same token stands
everywhere. `python -m hf_relpos schemes FOLDER` writes all pages and pictures anew, from the code.

{table("", tuple(facts(next(iter(SCHEMES)))))}"""


def draw(name: str, path: Path) -> None:
    """Draw the score of one and the same token over the distance, one line a head, unless the picture shows that already."""
    from matplotlib.figure import Figure

    distance, scores = kernel(name)
    shown = shown_scores(path)
    if shown is not None and shown.shape == scores.shape and torch.allclose(shown, scores, rtol=0, atol=SHOWN_ALIKE):
        return
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot()
    for head, line in enumerate(scores):
        axes.plot(distance, line, label=f"head {head}")
    axes.set_xlabel("key minus query (tokens)")
    axes.set_ylabel("score minus that at distance 0")
    axes.set_title(f"{name}: one token everywhere, initial parameters", fontsize=10)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    curves = json.dumps([[round(score, 4) for score in line] for line in scores.tolist()])
    figure.savefig(path, dpi=100, metadata={"Software": None, "Comment": curves})


def shown_scores(path: Path) -> torch.Tensor | None:
    """Read the curves of a picture, `(heads, distances)`, which stand in its text; None where there are none."""
    if not path.is_file():
        return None
    from PIL import Image

    with Image.open(path) as picture:
        curves = picture.info.get("Comment")
    return None if curves is None else torch.tensor(json.loads(curves))


def add_schemes(commands: Any) -> None:
    """Add `schemes`, which writes the reference of all schemes."""
    parser = commands.add_parser("schemes", help="write the reference of all schemes: pages, pictures and their table")
    parser.add_argument("folder", type=Path, help="folder for the pages")
    parser.add_argument("--table", type=Path, metavar="FILE", help="Markdown file whose table of schemes is replaced")
    parser.set_defaults(run=run_schemes)


def run_schemes(arguments: argparse.Namespace) -> None:
    """Write a page and a picture of each scheme, the pages of all, and print the table."""
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCHEMES:
        (folder / f"{name}.md").write_text(page(name, folder), encoding="utf-8")
        draw(name, folder / f"{name}.png")
    (folder / "combinations.md").write_text(combinations(), encoding="utf-8")
    (folder / "index.md").write_text(index(), encoding="utf-8")
    if arguments.table is None:
        print(table())
    else:
        replace_table(arguments.table)
