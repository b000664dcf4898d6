"""How far every scheme's paths on a device are from plain attention in float64: states and gradients, in float32 and bfloat16."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from contestants import Sizes
from contestants import has_meaning
from contestants import own_config
from gate import off_by
from transformers import AutoModel

from hf_relpos import SCHEMES

SIZES = Sizes(layers=2, width=64, heads=4, vocab=64)
BATCH, LENGTH = 2, 160
PATHS = {
    "blocks": {"attn_implementation": "sdpa", "attention_path": "auto"},
    "one bias": {"attn_implementation": "sdpa", "attention_path": "dense"},
    "flex": {"attn_implementation": "flex_attention"},
    "kernels": {"attn_implementation": "triton"},
}
KERNELS = (("transformer_xl", True), ("shaw", True), ("deberta", False))
"""Schemes and families that need all that the kernels can do: compiling them takes longer than all else."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""The largest difference that is allowed, relative to the largest entry."""
KINKS = ("cope", "fire", "dape")
"""Schemes of pieces, for whose gradients rounding decides which piece is met: ten times the tolerance."""


def inputs_of(causal: bool) -> dict[str, dict[str, Any]]:
    """Calls and settings that differ in who sees whom, by name; settings are what the configuration has."""
    padded, reset = torch.ones(BATCH, LENGTH), torch.zeros(BATCH, LENGTH)
    padded[0, : LENGTH // 4] = 0
    reset[-1, LENGTH // 3] = 1
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "padding": {"attention_mask": padded}, "documents": {"reset_mask": reset}}
    if causal:
        kinds |= {"window": {"fields": {"sliding_window": LENGTH // 4}}, "memory": {"fields": {"mem_len": LENGTH // 2}}}
    return kinds


def cells(quick: bool) -> Iterator[tuple[str, bool, str, str]]:
    """Every scheme, family, path and precision."""
    for causal in (True, False):
        for scheme in SCHEMES:
            for path in ("blocks", "one bias", "flex") if has_meaning(scheme, causal) else ():
                for dtype in ("float32", "bfloat16"):
                    if not quick or (path == "blocks" and dtype == "float32"):
                        yield scheme, causal, path, dtype


def kernel_cells(quick: bool) -> list[tuple[str, bool, str, str]]:
    """The schemes of `KERNELS` by the kernels, in bfloat16: in float32 Triton's interpreter compared them."""
    return [(scheme, causal, "kernels", "bfloat16") for scheme, causal in KERNELS[: 1 if quick else None]]


def answer(
    scheme: str, causal: bool, kind: str, device: str, dtype: str, how: dict[str, Any], backward: bool
) -> dict[str, torch.Tensor]:
    """Hidden states of the tokens, and the gradients of their sum in a direction, of a model with random weights everywhere."""
    given = inputs_of(causal)[kind]
    torch.manual_seed(0)
    config = own_config(scheme, causal, SIZES, 512, **given.get("fields", {}), **how)
    model = AutoModel.from_config(config, attn_implementation=how.get("attn_implementation"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    model.to(device, getattr(torch, dtype)).eval()
    ids = torch.randint(SIZES.vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2)).to(device)
    call = {name: value.to(device) for name, value in given.items() if name != "fields"}
    if getattr(model.config, "mem_len", 0):
        with torch.no_grad():
            call["memory"] = model(ids.flip(-1)).memory
    with torch.set_grad_enabled(backward):
        states = model(ids, **call).last_hidden_state
        states = states * call.get("attention_mask", torch.ones_like(ids))[..., None]
        found = {"states": states.detach().double()}
        if backward:
            direction = torch.randn(states.shape, generator=torch.Generator().manual_seed(3)).to(states)
            (states * direction).sum().backward()
            found |= {name: part.grad.double() for name, part in model.named_parameters() if part.grad is not None}
    return found


@lru_cache(maxsize=10)  # the kinds of input of a scheme in a family: its paths and precisions follow each other
def reference(scheme: str, causal: bool, kind: str, device: str) -> dict[str, torch.Tensor]:
    """What plain attention in float64 answers."""
    return answer(scheme, causal, kind, device, "float64", {"attn_implementation": "eager"}, backward=True)


def largest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of any part that was found; small gradients count beside the largest of all."""
    least = 1e-3 * max(float(part.abs().max()) for part in wanted.values())
    return max(off_by(part, wanted[name], least) for name, part in found.items())


def measure(scheme: str, causal: bool, path: str, dtype: str, device: str) -> dict[str, Any]:
    """The errors of one cell by kind of input; `failed` says what was refused or is beyond the tolerance."""
    row: dict[str, Any] = {"scheme": scheme, "causal": causal, "path": path, "dtype": dtype, "errors": {}}
    backward = path != "flex" or device != "cpu"  # FlexAttention has no backward pass on a processor
    for kind in inputs_of(causal):
        try:
            wanted = reference(scheme, causal, kind, device)
            found = answer(scheme, causal, kind, device, dtype, PATHS[path], backward)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            row["errors"][kind] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        row["errors"][kind] = largest(found, wanted) if not backward or found.keys() == wanted.keys() else math.nan
    limit = TOLERANCE[dtype] * (10 if scheme in KINKS else 1)
    wrong = {kind: error for kind, error in row["errors"].items() if isinstance(error, str) or not error <= limit}
    refused = {kind for kind, error in wrong.items() if isinstance(error, str) and error.startswith("ValueError")}
    if wrong.keys() - refused:
        row["failed"] = "; ".join(f"{kind}: {error}" for kind, error in wrong.items() if kind not in refused)
    return row


def table_of(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a table: the largest error of each scheme, family and path in each precision."""
    columns = list(dict.fromkeys((row["path"], row["dtype"]) for row in rows))
    lines: dict[tuple[str, bool], dict[tuple[str, str], str]] = {}
    for row in rows:
        numbers = [error for error in row["errors"].values() if isinstance(error, float) and not math.isnan(error)]
        said = f"{max(numbers):.0e}" if numbers else "refused"
        lines.setdefault((row["scheme"], row["causal"]), {})[row["path"], row["dtype"]] = (
            f"**{said}**" if "failed" in row else said
        )
    head = ["scheme", "family", *(f"{path}, {dtype}" for path, dtype in columns)]
    names = {True: "decoder", False: "encoder"}
    return head, [
        [scheme, names[causal], *(found.get(column, "") for column in columns)] for (scheme, causal), found in lines.items()
    ]
