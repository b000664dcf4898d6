"""What a training step costs: parameters, operations, memory, and processor time beside a baseline in the same process."""

import os
import statistics
import time
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

# Timed steps of each model; the two take turns, so that both meet the same machine.
ROUNDS = 5


def step_cost(model: PreTrainedModel, baseline: PreTrainedModel | None, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Measure a forward and backward pass.

    Args:
        model: the model.
        baseline: the model whose time is 1; None where the family has none.
        batch: arguments of the model, with labels.

    Returns:
        `parameters`; `flops`: operations of the matrix products, counted where every query meets every key; `peak_memory`: bytes
        above the weights; `process_seconds` of a step, the median; `ratio_to_baseline` of these.
    """
    own = _stepper(model, batch)
    found: dict[str, Any] = {"parameters": sum(weight.numel() for weight in model.parameters())}
    backend = str(model.config._attn_implementation)
    model.set_attn_implementation("eager")
    try:
        with FlopCounterMode(display=False) as counter:
            own()
    finally:
        model.set_attn_implementation(backend)
    found["flops"] = counter.get_total_flops()
    found["peak_memory"] = peak_memory(own, model.device)
    other = None if baseline is None else _stepper(baseline, batch)
    times: list[tuple[float, float]] = []
    for _ in range(ROUNDS + 1):
        times.append((_seconds(own), _seconds(other) if other else 0.0))
    mine, theirs = (statistics.median(column) for column in zip(*times[1:], strict=True))  # the first warms up
    found["process_seconds"] = mine
    if other:
        found["ratio_to_baseline"] = statistics.median(one / two for one, two in times[1:])
        found["baseline_process_seconds"] = theirs
    model.zero_grad(set_to_none=True)
    return found


def _stepper(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Return a training step without its optimizer; a model with memory has a full one."""
    config: Any = model.config
    carried: dict[str, Any] = {}
    inputs = {name: values.to(model.device) for name, values in batch.items()}
    while config.mem_len and ("memory" not in carried or (carried["memory"].length < config.mem_len).any()):
        with torch.no_grad():
            carried["memory"] = model(input_ids=inputs["input_ids"], memory=carried.get("memory")).memory

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**inputs, **carried).loss.backward()

    return step


def _seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def peak_memory(work: Callable[[], None], device: torch.device) -> int:
    """Return the bytes that a call holds at its peak above what was held before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with (
        _stderr_off(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        work()
    events: Any = profile.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    held = highest = 0
    for event in sorted((one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


@contextmanager
def _stderr_off() -> Iterator[None]:
    """Keep the profiler's own messages, which are written by C++, off the terminal."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
