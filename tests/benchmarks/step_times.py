"""Time of a train step and of a forward pass, as ratios to the baseline."""

from typing import Any

from contestants import Contestant
from contestants import baselines_of
from measuring import Trainer
from measuring import Work
from measuring import interleave
from measuring import summary
from tqdm import tqdm


def prepare(
    contestants: list[Contestant], setting: Any, batch: int, length: int
) -> tuple[dict[str, Trainer], list[dict[str, Any]]]:
    """Models that have made one call of each phase, baselines among them, and the rows of those that failed."""
    trainers, failed = {}, []
    for contestant in tqdm([*baselines_of(contestants), *contestants], desc=f"warming up, length {length}", leave=False):
        try:
            trainer = Trainer(contestant, setting, batch, length)
            trainer.warm_up(setting.phases)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            if contestant.kind == "baseline":
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            failed.append(contestant.describe() | {"length": length, "batch": batch, "failed": reason})
        else:
            trainers[contestant.name] = trainer
    return trainers, failed


def measure(contestants: list[Contestant], setting: Any, length: int) -> list[dict[str, Any]]:
    """One row for each contestant and phase at one length.

    Args:
        contestants: without baselines.
        setting: the arguments of `speed.py`.
        length: tokens in a sequence; the batch keeps `setting.tokens` tokens in a step.
    """
    batch = max(1, setting.tokens // length)
    chosen = [one for one in contestants if one.kind != "peer" or length <= setting.longest_peer]
    trainers, rows = prepare(chosen, setting, batch, length)
    rows += [
        one.describe() | {"length": length, "batch": batch, "failed": f"left out: longer than {setting.longest_peer}"}
        for one in contestants
        if one not in chosen
    ]
    alive = [one for one in chosen if one.name in trainers]
    for phase in setting.phases:
        found = interleave(
            {name: Work(getattr(trainer, phase)) for name, trainer in trainers.items()},
            {one.name: one.baseline for one in alive},
            setting.rounds,
            setting.baseline_every,
            setting.least_seconds,
            f"{phase}, length {length}",
        )
        for one in [*baselines_of(alive), *alive]:
            row = one.describe() | {"phase": phase, "length": length, "batch": batch}
            row |= {"model": trainers[one.name].describe()}
            rows.append(row | summary(found[one.name]) | {"rounds": found[one.name]})
    return rows
