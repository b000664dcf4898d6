"""Does segment memory help? The same model on the same tokens with different memories, several seeds.

    python tests/benchmarks/memory_gain.py stdlib --output_dir runs/memory
    python tests/benchmarks/memory_gain.py tinyshakespeare --output_dir runs/memory_ts --train_file A --validation_file B

`stdlib` varies the length of the memory, `tinyshakespeare` keeps the setting of configs/tinyshakespeare.yaml, in plain lanes and in
groups of lanes that take turns. Both separate what memory gives from what reading the text in order costs: shuffled blocks
(`mem_len 0`), lanes whose memory is emptied at every block, and lanes with memory. Finished runs are kept. Writes table.md and two
plots in memory_gain.png: the bits per byte, and the loss by offset in the segment.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from tqdm import tqdm

import hf_relpos  # noqa: F401  registers the models with the Auto classes
from hf_relpos.training.run import Job
from hf_relpos.training.run import evaluate
from hf_relpos.training.run import prepare

SMALL = "hidden_size=128,num_hidden_layers=4,num_attention_heads=4"
STDLIB = ["configs/default.yaml", "--config_overrides", SMALL, "--block_size", "64", "--per_device_train_batch_size", "32"]
STDLIB += ["--max_steps", "500", "--per_device_eval_batch_size", "32", "--eval_strategy", "no", "--save_strategy", "no"]
SHAKESPEARE = ["configs/tinyshakespeare.yaml", "--position_scheme", "transformer_xl"]
QUIET = ["--report_to", "none", "--disable_tqdm", "true", "--sample_tokens", "0"]


def arms(which: str, mem_lens: list[int]) -> dict[str, list[str]]:
    """The name of each arm and its arguments."""
    if which == "stdlib":
        found = {f"mem_len {length}": [*STDLIB, "--mem_len", str(length)] for length in mem_lens}
        return {"lanes, no memory": [*STDLIB, "--mem_len", "64"]} | found
    found = {"shuffled": [*SHAKESPEARE, "--mem_len", "0"]}
    for name, groups in {"lanes": 1, "8 groups of lanes": 8}.items():
        argv = [*SHAKESPEARE, "--mem_len", "64", "--lane_groups", str(groups)]
        found |= {f"{name}, no memory": argv, f"{name}, memory 64": argv}
    return found


def forget_between_blocks(job: Job) -> None:
    """Make every block a text of its own: the order of the lanes stays, nothing is remembered."""

    def forget(block: dict[str, list[int]]) -> dict[str, list[int]]:
        return {"reset_mask": [1, *block["reset_mask"][1:]]}

    job.trainer.train_dataset = job.trainer.train_dataset.map(forget)
    job.texts = {name: text._replace(blocks=text.blocks.map(forget)) for name, text in job.texts.items()}
    job.trainer.eval_dataset = job.texts["eval"].blocks


@torch.no_grad()
def loss_by_offset(job: Job) -> list[float]:
    """Return the mean loss at each offset of a validation segment, read as the trainer reads it."""
    model = job.trainer.model.eval()
    total: Any = 0
    count: Any = 0
    memory = None
    for batch in job.trainer.get_eval_dataloader():
        targets = batch.pop("shift_labels")
        batch.pop("labels", None)
        carried = {"memory": memory} if model.config.mem_len else {}
        output = model(**batch, **carried)
        memory = output.memory
        nll = F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten(), reduction="none", ignore_index=-100)
        total = total + nll.view_as(targets).double().sum(0)
        count = count + targets.ne(-100).sum(0)
    return (total / count).tolist()


def run_arm(name: str, argv: list[str], seed: int, folder: Path) -> dict[str, Any]:
    """Train and evaluate one arm with one seed, or read what is there."""
    results = folder / "memory_gain.json"
    if not results.is_file():
        job = prepare([*argv, *QUIET, "--seed", str(seed), "--output_dir", str(folder), "--overwrite_output_dir", "true"])
        if name.endswith("no memory"):
            forget_between_blocks(job)
        runtime = job.trainer.train().metrics["train_runtime"]
        metrics = evaluate(job.trainer, {"eval": job.texts["eval"]})
        metrics |= {"by_offset": loss_by_offset(job), "train_runtime": runtime}
        folder.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(metrics), encoding="utf-8")
    return json.loads(results.read_text(encoding="utf-8"))


def write_report(found: dict[str, list[dict[str, Any]]], output: Path) -> None:
    """Table and plots of all arms."""
    lines = ["| arm | seeds | loss | bits per byte | lowest | highest | seconds |", "|---|---|---|---|---|---|---|"]
    for name, runs in found.items():
        bits = [run["eval_bits_per_byte"] for run in runs]
        loss, seconds = (statistics.mean(run[key] for run in runs) for key in ("eval_loss", "train_runtime"))
        row = f"| {name} | {len(runs)} | {loss:.4f} | {statistics.mean(bits):.4f} | {min(bits):.4f} | {max(bits):.4f} | {seconds:.0f} |"
        lines.append(row)
    (output / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for column, (name, runs) in enumerate(found.items()):
        left.plot([column] * len(runs), [run["eval_bits_per_byte"] for run in runs], "o", alpha=0.7)
        curves = torch.tensor([run["by_offset"] for run in runs]).mean(0)
        right.plot(range(1, len(curves) + 1), curves, label=name)
    left.set_xticks(range(len(found)), list(found), rotation=20)
    left.set_ylabel("validation bits per byte")
    right.set_xlabel("offset in the segment")
    right.set_ylabel("loss (nats a token)")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(output / "memory_gain.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("stdlib", "tinyshakespeare"))
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--mem_lens", type=int, nargs="+", default=[0, 64, 256, 1024])
    arguments, rest = parser.parse_known_args()
    found: dict[str, list[dict[str, Any]]] = {}
    tasks = [
        (name, argv, seed) for name, argv in arms(arguments.which, arguments.mem_lens).items() for seed in arguments.seeds
    ]
    for name, argv, seed in tqdm(tasks, desc="runs"):
        folder = arguments.output_dir / f"{name.replace(', ', '-').replace(' ', '_')}-seed{seed}"
        found.setdefault(name, []).append(run_arm(name, [*argv, *rest], seed, folder))
    write_report(found, arguments.output_dir)


if __name__ == "__main__":
    main()
