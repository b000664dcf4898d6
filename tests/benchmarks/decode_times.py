"""Time of a token behind a dynamic cache, as a ratio to the baseline."""

import copy
from typing import Any

import torch
from contestants import Contestant
from contestants import Scored
from contestants import baselines_of
from measuring import Work
from measuring import interleave
from measuring import place
from measuring import precision
from measuring import summary
from tqdm import tqdm


class Decoder:
    """A model with a filled cache.

    Args:
        contestant: who is built; ValueError if it has no cache.
        setting: the arguments of `speed.py`.
        context: tokens in the cache at first.
    """

    def __init__(self, contestant: Contestant, setting: Any, context: int) -> None:
        torch.manual_seed(setting.seed)
        self.model: Scored = place(contestant.build(setting.sizes, context + setting.new_tokens), setting).eval()
        self.setting = setting
        self.ids = torch.randint(setting.sizes.vocab, (1, context), device=setting.device)
        self.new_tokens = setting.new_tokens
        with torch.no_grad(), precision(setting):
            _, self.full = self.model.decode(self.ids, None)
        self.cache: Any = None

    def reset(self) -> None:
        """Go back to the cache of the context, so that all are timed behind as many tokens."""
        self.cache = copy.deepcopy(self.full)

    @torch.no_grad()
    def run(self) -> None:
        """Decode some tokens, one a call; what they are does not matter."""
        with precision(self.setting):
            for _ in range(self.new_tokens):
                _, self.cache = self.model.decode(self.ids[:, :1], self.cache)


def prepare(contestants: list[Contestant], setting: Any, context: int) -> tuple[dict[str, Decoder], list[dict[str, Any]]]:
    """Filled caches that have decoded some tokens, and the rows of those that cannot."""
    decoders, failed = {}, []
    for contestant in tqdm([*baselines_of(contestants), *contestants], desc=f"filling, context {context}", leave=False):
        try:
            decoder = Decoder(contestant, setting, context)
            decoder.reset()
            decoder.run()
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            if contestant.kind == "baseline":
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            failed.append(contestant.describe() | {"context": context, "failed": reason})
        else:
            decoders[contestant.name] = decoder
    return decoders, failed


def measure(contestants: list[Contestant], setting: Any, context: int) -> list[dict[str, Any]]:
    """One row for each decoder at one context: seconds a token, and ratios to the baseline."""
    causal = [contestant for contestant in contestants if contestant.causal]
    if not causal:
        return []
    decoders, rows = prepare(causal, setting, context)
    alive = [one for one in causal if one.name in decoders]
    found = interleave(
        {name: Work(decoder.run, decoder.reset) for name, decoder in decoders.items()},
        {one.name: one.baseline for one in alive},
        setting.rounds,
        setting.baseline_every,
        setting.least_seconds,
        f"decoding, context {context}",
    )
    for one in [*baselines_of(alive), *alive]:
        for sample in found[one.name]:
            sample.update({clock: sample[clock] / setting.new_tokens for clock in ("wall", "cpu")})
        row = one.describe() | {"context": context, "new_tokens": setting.new_tokens}
        rows.append(row | summary(found[one.name]) | {"rounds": found[one.name]})
    return rows
