"""Long runs of tiny models: does memory stay flat, and do the numbers stay those of a short one?

python tests/long_runs.py                # make long: the whole of it, which writes the page
python tests/long_runs.py --scale 0.01   # a short trial, as in test_long_runs.py
"""

import argparse
import json
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any
from typing import NamedTuple

import psutil
import torch
import transformers
from segments import make_arguments
from segments import make_documents
from segments import make_table
from tqdm import tqdm
from transformers import DynamicCache
from transformers import PrinterCallback
from transformers import TrainerCallback

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM
from hf_relpos import SegmentTrainer

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "long_runs.md"
KEPT = PAGE.parents[2] / "runs" / "long_runs.json"
SAMPLES = 100
GROWTH = 8 << 20
"""Bytes that resident memory may differ between the first and the last tenth of a run: the allocator's, not the run's."""
SLOWER = 2.0
"""How many times as much a turn of the last tenth of a chat may compute as one of the first."""


class Sample(NamedTuple):
    """What the process holds at one moment, when that was, and what it had computed by then, in seconds of a processor."""

    bytes: int
    files: int
    seconds: float
    computed: float = 0.0


class Finding(NamedTuple):
    """What came out of a long run: how long it was, its first and last tenth, and what else was compared."""

    what: str
    count: int
    first: Sample
    last: Sample
    seconds: float
    same: str

    @property
    def flat(self) -> bool:
        return self.last.bytes - self.first.bytes <= GROWTH and self.last.files <= self.first.files

    @property
    def row(self) -> str:
        size = f"{self.first.bytes / 2**20:.1f} | {self.last.bytes / 2**20:.1f} | {self.first.files} | {self.last.files}"
        return f"| {self.what} | {self.count:,} | {self.seconds:.0f} | {size} | {self.same} |"


def sample() -> Sample:
    process = psutil.Process()
    return Sample(
        process.memory_info().rss,
        process.num_fds() if hasattr(process, "num_fds") else 0,
        time.perf_counter(),
        time.process_time(),
    )


def finding(what: str, count: int, samples: list[Sample], same: str) -> Finding:
    """Average the first and the last tenth of what was sampled at equal distances."""
    tenth = max(1, len(samples) // 10)

    def mean(part: list[Sample]) -> Sample:
        return Sample(*(round(sum(values) / len(part)) for values in zip(*part, strict=True)))

    return Finding(what, count, mean(samples[:tenth]), mean(samples[-tenth:]), samples[-1].seconds - samples[0].seconds, same)


def tiny(scheme: str = "transformer_xl", **fields: Any) -> RelPosDecoderForCausalLM:
    """Build a model of one layer and width 8."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "mem_len": 8}
    return RelPosDecoderForCausalLM(RelPosDecoderConfig(**sizes | {"position_scheme": scheme} | fields))


class Watch(TrainerCallback):
    """Samples the process at equal distances of a training."""

    def __init__(self, every: int) -> None:
        self.every, self.samples = every, []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self.samples.append(sample())


def train_long(count: int, folder: Path) -> Finding:
    """Train with memory, in a Trainer that logs and evaluates now and then."""
    watch = Watch(max(1, count // SAMPLES))
    arguments = make_arguments(folder, max_steps=count, logging_steps=max(1, count // 50), learning_rate=1e-3)
    table = make_table(make_documents(400, 300))
    trainer = SegmentTrainer(tiny(), arguments, train_dataset=table, eval_dataset=table, callbacks=[watch])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(torch.tensor(losses).isfinite()) and losses[-1] < losses[0], f"losses {losses[0]} to {losses[-1]}"
    return finding("steps of SegmentTrainer with memory", count, watch.samples, f"loss {losses[0]:.2f} to {losses[-1]:.2f}")


def save_often(count: int, folder: Path) -> Finding:
    """Save a model and load what was saved, which is saved next."""
    model, samples = tiny(), []
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for _ in tqdm(range(count), "Saves"):
        model.save_pretrained(folder)
        model = RelPosDecoderForCausalLM.from_pretrained(folder)
        samples.append(sample())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items()), "other weights"
    return finding("saves and loads", count, samples, "same bits")


def steps_of(scheme: str, model: RelPosDecoderForCausalLM, count: int, out: dict[str, Any]) -> None:
    """Train a model in a plain loop, with memory, and decode with it; leave its weights and tokens under its scheme."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ids, memory = torch.arange(64).view(2, 32) % 37, None
    for _ in range(count):
        result = model(input_ids=ids, labels=ids, memory=memory)
        memory = result.memory.detach()
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tokens = model.eval().generate(ids[:, :4], max_new_tokens=16, do_sample=False)
    out[scheme] = {"tokens": tokens, **model.state_dict()}


def two_threads(count: int, _: Path) -> Finding:
    """Train two models at once in two threads; each gives the bits that it gives alone."""
    schemes, alone, together, samples = ("transformer_xl", "t5"), {}, {}, []
    for scheme in schemes:
        steps_of(scheme, tiny(scheme), count, alone)
    # The models are drawn here: torch has one generator for all threads.
    threads = [threading.Thread(target=steps_of, args=(scheme, tiny(scheme), count, together)) for scheme in schemes]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        samples.append(sample())
        time.sleep(0.02)
    for scheme in schemes:
        assert all(torch.equal(value, together[scheme][name]) for name, value in alone[scheme].items()), f"{scheme} differs"
    return finding("steps of each of two models in two threads", count, samples, "same bits as alone")


@torch.no_grad()
def chat_in_a_cache(count: int, _: Path) -> Finding:
    """Answer turn after turn through one sliding cache; the last answer is that of a pass over what the window shows."""
    model, window = tiny("rope", mem_len=0, sliding_window=32).eval(), 32
    cache: Any = DynamicCache(config=model.config)
    turns, samples, said = torch.Generator().manual_seed(0), [], []
    for _ in tqdm(range(count), "Turns"):
        ids = torch.randint(37, (1, 4), generator=turns)
        for _ in range(4):
            logits = model(ids, cache=cache, use_cache=True).logits[:, -1]
            said.append(ids)
            ids = logits.argmax(-1, keepdim=True)
        samples.append(sample())
    assert cache.layers[0].keys.shape[-2] < window, "the cache grew"
    recent = torch.cat(said[-window:], 1)[:, -window:]
    torch.testing.assert_close(model(recent).logits[:, -1], logits, rtol=1e-4, atol=1e-5)
    return _of_a_chat("turns of a chat through one sliding cache", samples)


@torch.no_grad()
def chat_in_a_memory(count: int, _: Path) -> Finding:
    """Answer turn after turn by `generate` from one memory, which then reads the turn."""
    model, memory = tiny("transformer_xl", mem_len=32).eval(), None
    turns, samples = torch.Generator().manual_seed(0), []
    memory = model.empty_memory(1)
    for _ in tqdm(range(count), "Turns"):
        ids = torch.randint(37, (1, 4), generator=turns)
        answer = model.generate(ids, memory=memory, max_new_tokens=4, do_sample=False, pad_token_id=0)
        memory = model.read(answer, memory)
        samples.append(sample())
    assert memory.hidden.shape[2] == 32 and int(memory.length) == min(32, 8 * count)
    return _of_a_chat("turns of a chat through one memory", samples)


def _of_a_chat(what: str, samples: list[Sample]) -> Finding:
    tenth = max(2, len(samples) // 10)
    first, last = (part[-1].computed - part[0].computed for part in (samples[:tenth], samples[-tenth:]))
    assert last < SLOWER * first + 0.5, f"{what}: {last:.2f} s for the last tenth, {first:.2f} s for the first"
    return finding(
        what, len(samples), samples, f"a turn at the end computes {last / first:.2f} times as long as one at the beginning"
    )


RUNS: dict[str, tuple[Callable[[int, Path], Finding], int]] = {
    "steps": (train_long, 100_000),
    "saves": (save_often, 1_000),
    "threads": (two_threads, 2_000),
    "chat_cache": (chat_in_a_cache, 10_000),
    "chat_memory": (chat_in_a_memory, 10_000),
}
"""Each long run and how many steps, saves or turns it has."""


def run(name: str, scale: float) -> Finding:
    """Run one of them, at a scale."""
    work, count = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        return work(max(10, int(count * scale)), Path(folder))


def main() -> int:
    """Run them, write the page if all were run at a twentieth of their length or more, and return 1 if memory grew in any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="how much of each run; 1 is all of it")
    parser.add_argument("--only", choices=RUNS, nargs="+", default=list(RUNS), help="which runs")
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = []
    for name in given.only:
        found.append(run(name, given.scale))
        print(found[-1].row, flush=True)
        if given.scale >= 0.05:
            keep(name, found[-1])
    grown = [one.what for one in found if not one.flat]
    print(json.dumps({"grown": grown}))
    return bool(grown)


def keep(name: str, found: Finding) -> None:
    """Keep what came out of a run, and write the page once all of them were run."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    kept[name] = found._asdict()
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    if kept.keys() >= RUNS.keys():
        rows = [Finding(**one | {"first": Sample(*one["first"]), "last": Sample(*one["last"])}) for one in map(kept.get, RUNS)]
        PAGE.write_text(page(rows), encoding="utf-8")
        print(f"written: {PAGE.name}")


def page(found: list[Finding]) -> str:
    """Return the page of documentation."""
    grown = [one.what for one in found if not one.flat]
    lines = [
        "# What long runs take",
        "",
        "**Conclusion: "
        + (f"memory grows in {', '.join(grown)}.**" if grown else "resident memory and open files are flat in all of them.**"),
        "",
        "Models of one layer and width 8, on one thread. Resident memory (MiB) and open files are means over the first and the last tenth "
        f"of each run; {GROWTH >> 20} MiB more count as growth. `make long` does it again, `make long ARGS='--scale 0.01'` is a short trial.",
        "",
        f"Measured on {date.today()} with Python {platform.python_version()}, torch {torch.__version__} and transformers "
        f"{transformers.__version__}, on a machine that other programs shared.",
        "",
        "| run | count | seconds | MiB, first tenth | MiB, last tenth | files, first | files, last | what was compared |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
        *(one.row for one in found),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
