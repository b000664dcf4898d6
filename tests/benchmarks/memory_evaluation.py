"""How much faster is evaluation with segment memory than computing the context of every token anew?

    python tests/benchmarks/memory_evaluation.py --output_dir runs/memory_evaluation

The comparison of the Transformer-XL paper (arXiv 1901.02860, section 4.5): 4 layers, width 256, segments of 128.
Two arms read the text once: through a cache, as `hf_relpos.evaluation.language_model.evaluate_stream` does, and by plain forward calls
that hand on `memory`, as a loop of one's own does. The other passes over `attention length` tokens for each token it predicts, as
`evaluate_windows(..., stride=1)` does, and is timed on a few of them: each costs the same. Before any number, both ways of streaming must
give the logits of one pass with the sliding window.

Writes results.json and table.md.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM
from hf_relpos import SegmentMemory

SEGMENT = 128
TARGETS = {800: 350, 3800: 1200}


def make_model(scheme: str, mem_len: int) -> RelPosDecoderForCausalLM:
    """The model of the comparison, with the same weights for every memory length."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
    return RelPosDecoderForCausalLM(RelPosDecoderConfig(**sizes, position_scheme=scheme, mem_len=mem_len)).eval()


def stream(model: RelPosDecoderForCausalLM, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Logits of `(1, sequence)` tokens, segment by segment, after what the cache holds."""
    parts = [model(input_ids=part, cache=cache, use_cache=True).logits for part in ids.split(SEGMENT, 1)]
    return torch.cat(parts, 1)


def remember(
    model: RelPosDecoderForCausalLM, ids: torch.Tensor, memory: SegmentMemory | None = None
) -> tuple[torch.Tensor, SegmentMemory]:
    """The same by plain forward calls behind a memory; and the memory after them."""
    parts = []
    for part in ids.split(SEGMENT, 1):
        output = model(input_ids=part, memory=memory)
        memory = output.memory
        parts.append(output.logits)
    assert memory is not None
    return torch.cat(parts, 1), memory


def check(scheme: str, length: int) -> float:
    """The largest difference between streamed logits and those of one pass with the sliding window."""
    model, ids = make_model(scheme, length), torch.randint(259, (1, length + 3 * SEGMENT))
    ways = stream(model, ids, DynamicCache(config=model.config)), remember(model, ids)[0]
    whole = model(input_ids=ids, use_cache=False).logits
    difference = max((streamed - whole).abs().max().item() for streamed in ways)
    if difference > 1e-4:
        raise SystemExit(f"{scheme}, attention length {length}: streamed logits are off by {difference:.2g}")
    return difference


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(scheme: str, length: int, rounds: int) -> dict[str, Any]:
    """Seconds a token of all arms, interleaved, and their ratios."""
    difference = check(scheme, length)
    with_memory, without = make_model(scheme, length), make_model(scheme, 0)
    ids = torch.randint(259, (1, length + SEGMENT))
    cache = DynamicCache(config=with_memory.config)
    stream(with_memory, ids, cache)  # cache and memory are full from here on
    memory = remember(with_memory, ids)[1]

    def streamed() -> None:
        stream(with_memory, ids[:, : 4 * SEGMENT], cache)

    def remembered() -> None:
        remember(with_memory, ids[:, : 4 * SEGMENT], memory)

    def recomputed() -> None:
        without(input_ids=ids[:, :length], use_cache=False, logits_to_keep=1)

    arms = {"cache": (streamed, 4 * SEGMENT), "memory": (remembered, 4 * SEGMENT), "recomputed": (recomputed, 1)}
    recomputed()
    times = [{name: seconds(work) / tokens for name, (work, tokens) in arms.items()} for _ in range(rounds)]
    medians = {name: statistics.median(row[name] for row in times) for name in arms}
    result: dict[str, Any] = {"scheme": scheme, "attention_length": length, "largest_logit_difference": difference}
    result |= {f"{name}_seconds_per_token": median for name, median in medians.items()}
    for name in ("cache", "memory"):
        ratios = [row["recomputed"] / row[name] for row in times]
        result[name] = {
            "speedup": medians["recomputed"] / medians[name],
            "lowest": min(ratios),
            "highest": max(ratios),
        }
    return result


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| scheme | attention length | recomputed, ms a token | cache, ms a token | memory, ms a token | cache, times | memory, times |",
        7 * "|---" + "|",
    ]
    for row in results:
        times = (f"{1000 * row[f'{arm}_seconds_per_token']:.3f}" for arm in ("recomputed", "cache", "memory"))
        faster = (f"{row[arm]['speedup']:.0f}" for arm in ("cache", "memory"))
        lines.append("| " + " | ".join((row["scheme"], str(row["attention_length"]), *times, *faster)) + " |")
    return "\n".join(lines)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--schemes", nargs="+", default=["transformer_xl"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[800, 1800, 3800])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    tasks = [(scheme, length) for scheme in arguments.schemes for length in arguments.lengths]
    results = [measure(*task, arguments.rounds) for task in tasks]
    setting = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
    setting |= {"threads": torch.get_num_threads(), "rounds": arguments.rounds}
    setting |= {"segment": SEGMENT, "layers": 4, "width": 256}
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    report = {"setting": setting, "results": results}
    (arguments.output_dir / "results.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (arguments.output_dir / "table.md").write_text(table(results) + "\n", encoding="utf-8")
    print(table(results))
    for row in results:
        wanted = TARGETS.get(row["attention_length"]) if row["scheme"] == "transformer_xl" else None
        if wanted:
            faster = ", ".join(f"{arm} {row[arm]['speedup']:.0f}x" for arm in ("cache", "memory"))
            print(f"attention length {row['attention_length']}: {faster}, target {wanted}x")


if __name__ == "__main__":
    main()
