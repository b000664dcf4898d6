"""How things are timed: interleaved in one process, each next to a baseline, and summed up as medians of ratios."""

import gc
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from typing import NamedTuple

import torch
import torch.nn.functional as F
from contestants import Contestant
from contestants import Scored
from torch import nn
from tqdm import tqdm

CLOCKS = ("wall", "cpu")


class Work(NamedTuple):
    """What is timed, and what puts things back before that, untimed."""

    run: Callable[[], Any]
    reset: Callable[[], Any] | None = None


def read_clocks(work: Work, calls: int = 1) -> dict[str, float]:
    """Seconds of wall clock and of processor time of all threads that one call takes, the mean of some."""
    total = dict.fromkeys(CLOCKS, 0.0)
    for _ in range(calls):
        if work.reset is not None:
            work.reset()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        work.run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        total["cpu"] += time.process_time() - cpu
        total["wall"] += time.perf_counter() - wall
    return {clock: seconds / calls for clock, seconds in total.items()}


def in_turn(names: list[str], turn: int, turns: int, size: int) -> list[list[str]]:
    """The names in chunks of one size, beginning further along in each of the turns."""
    start = turn * max(1, len(names) // max(1, turns)) % len(names)
    order = names[start:] + names[:start]
    return [order[first : first + size] for first in range(0, len(order), size)]


def interleave(
    works: dict[str, Work], baseline_of: dict[str, str], rounds: int, every: int = 4, least: float = 0.0, label: str = ""
) -> dict[str, list[dict[str, float]]]:
    """Time all works in every round, each ratio to the mean of the baseline before it and the baseline after it.

    Args:
        works: what to time, baselines among them.
        baseline_of: the name of each contestant's baseline; baselines are not named here.
        rounds: how often each is timed.
        every: contestants between one measurement of the baseline and the next.
        least: seconds that a measurement takes at least, by calls enough.
        label: for the progress bar.

    Returns:
        For each contestant one dict a round: seconds and ratios to the baseline by both clocks.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    groups: dict[str, list[str]] = {}
    for name, baseline in baseline_of.items():
        groups.setdefault(baseline, []).append(name)
    calls = {name: max(1, math.ceil(least / read_clocks(work)["wall"])) for name, work in works.items()}
    bar = tqdm(total=rounds * len(baseline_of), desc=label, leave=False)
    gc.collect()
    gc.disable()  # a collection would fall on whoever is being timed
    try:
        for turn in range(rounds):
            for baseline, names in groups.items():
                works[baseline].run()  # what follows a pause finds cold caches
                before = read_clocks(works[baseline], calls[baseline])
                for chunk in in_turn(names, turn, rounds, every):
                    readings = {name: _timed(works[name], calls[name], bar) for name in chunk}
                    after = read_clocks(works[baseline], calls[baseline])
                    beside = {clock: (before[clock] + after[clock]) / 2 for clock in CLOCKS}
                    for name, reading in readings.items():
                        ratios = {f"{clock}_ratio": reading[clock] / beside[clock] for clock in CLOCKS}
                        found[name].append(reading | ratios)
                    found[baseline].append(after | {f"{clock}_ratio": after[clock] / before[clock] for clock in CLOCKS})
                    before = after
            gc.collect()
    finally:
        gc.enable()
        bar.close()
    return found


def _timed(work: Work, calls: int, bar: Any) -> dict[str, float]:
    reading = read_clocks(work, calls)
    bar.update()
    return reading


def summary(samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, lowest and highest of every column of the samples."""
    columns = {key: [sample[key] for sample in samples] for key in samples[0]}
    return {
        key: {"median": statistics.median(column), "min": min(column), "max": max(column)} for key, column in columns.items()
    }


def place(model: Scored, setting: Any) -> Scored:
    """The model on the device, its weights in the type of the setting; under autocast they stay in float32."""
    return model.to(setting.device, torch.float32 if setting.dtype == "autocast" else getattr(torch, setting.dtype))


def precision(setting: Any) -> Any:
    """The context of every pass: autocast to bfloat16, as the stock trainer does it, or nothing."""
    return torch.autocast(torch.device(setting.device).type, torch.bfloat16, enabled=setting.dtype == "autocast")


class Trainer:
    """A model with AdamW and a batch, and one train step or forward pass of it.

    Args:
        contestant: who is built.
        setting: `sizes`, `dtype`, `device`, `padded` and `seed`.
        batch, length: shape of the ids, which are random, as are their targets.
    """

    def __init__(self, contestant: Contestant, setting: Any, batch: int, length: int) -> None:
        torch.manual_seed(setting.seed)
        self.model: Scored = place(contestant.build(setting.sizes, length), setting)
        self.setting = setting
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.loss = 0.0
        self.vocab = setting.sizes.vocab
        self.load(batch, length, setting)

    def load(self, batch: int, length: int, setting: Any) -> None:
        """Put other random ids in the place of the batch."""
        self.ids = torch.randint(self.vocab, (batch, length), device=setting.device)
        self.mask = right_padding(batch, length).to(setting.device) if setting.padded else None
        self.targets = torch.randint(self.vocab, (batch, length), device=setting.device)
        if self.mask is not None:
            self.targets = self.targets.masked_fill(self.mask == 0, -100)

    def train(self) -> None:
        """Forward, backward and AdamW."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        with precision(self.setting):
            logits = self.model(self.ids, self.mask)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        """Logits, without a graph."""
        with precision(self.setting):
            return self.model.eval()(self.ids, self.mask)

    def warm_up(self, phases: list[str]) -> None:
        """One call of each phase; every parameter that counts has a gradient after a train step."""
        for phase in phases:
            getattr(self, phase)()
        if "train" in phases and not torch.isfinite(torch.as_tensor(self.loss)):
            raise ValueError(f"the loss is {float(self.loss)}")

    def describe(self) -> dict[str, Any]:
        """What the results record of the model, after `warm_up`."""
        given: list[nn.Parameter] = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        trained = sum(parameter.numel() for parameter in given)
        return self.model.describe() | ({"parameters_with_gradient": trained} if given else {})


def right_padding(batch: int, length: int) -> torch.Tensor:
    """A mask `(batch, length)` whose rows keep from half of the tokens to all; one row alone keeps three quarters."""
    kept = torch.linspace(0.5, 1.0, batch) if batch > 1 else torch.tensor([0.75])
    return (torch.arange(length) < (kept * length).round()[:, None]).long()


def version(package: str) -> str | None:
    """The installed version of a package, None if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Versions and the machine, for the results."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "versions": {name: version(name) for name in ("torch", "transformers", "x-transformers")},
        "python": sys.version.split()[0],
        "commit": commit or None,
        "machine": platform.machine(),
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_before": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }
