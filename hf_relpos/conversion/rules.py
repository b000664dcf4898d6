"""Turn the weights of one model into those of another: strict rules by name, and a report of each weight."""

import re
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace

import torch

Weights = Mapping[str, torch.Tensor]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Change = Callable[[torch.Tensor], torch.Tensor | Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Rule:
    """A rule for the weights whose whole name fits a pattern.

    Attributes:
        pattern: regular expression of the name, without the prefix of the base model.
        targets: names here, with the groups of the pattern as in `re.sub`; several when a weight is split or repeated.
        change: makes the tensors of all targets out of the weight; by default each target gets the weight.
        reason: why a weight without targets is not needed.
    """

    pattern: str
    targets: tuple[str, ...] = ()
    change: Change | None = None
    reason: str = ""

    def apply(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors that a weight becomes, by name; each has its own memory, unless it is the weight as it was."""
        parts: Sequence[torch.Tensor] = [weight] * len(self.targets)
        if self.change is not None:
            changed = self.change(weight)
            parts = [changed] if isinstance(changed, torch.Tensor) else changed
        if self.change is not None or len(parts) > 1:
            parts = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        names = [re.sub(self.pattern, target, name) for target in self.targets]
        return dict(zip(names, parts, strict=True))


def rename(pattern: str, *targets: str, change: Change | None = None) -> Rule:
    """Return a rule that moves a weight, unchanged by default."""
    return Rule(pattern, targets, change)


def skip(pattern: str, reason: str) -> Rule:
    """Return a rule that leaves a weight out."""
    return Rule(pattern, reason=reason)


def with_prefix(prefix: str, rule: Rule) -> Rule:
    """Return the rule with all of its targets below a prefix."""
    return replace(rule, targets=tuple(prefix + target for target in rule.targets))


@dataclass
class Report:
    """A report of what became of the weights of a checkpoint.

    Attributes:
        source: the kind of checkpoint.
        model: the class that it became.
        used: the names here that each weight became.
        unused: the reason why a weight was left out, by its name.
        missing: weights of the converted model that the checkpoint has none for, with what they hold instead.
        notes: what else is worth knowing.
    """

    source: str
    model: str = ""
    used: dict[str, list[str]] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """Return how many weights were used, and name each one that was not, or that the checkpoint did not have."""
        counts = f"{len(self.used)} weights used, {len(self.unused)} unused, {len(self.missing)} missing"
        lines = [f"{self.source} became {self.model}: {counts}"]
        lines += [f"unused: {name}: {reason}" for name, reason in self.unused.items()]
        lines += [f"missing: {name}: {instead}" for name, instead in self.missing.items()]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def __str__(self) -> str:
        used = [f"used: {name} -> {', '.join(targets)}" for name, targets in self.used.items()]
        return "\n".join([*used, self.summary])


def apply_rules(rules: Sequence[Rule], weights: Weights, prefix: str, report: Report) -> dict[str, torch.Tensor]:
    """Rename and change all weights.

    Args:
        rules: for each weight, the first one whose pattern fits counts.
        weights: by their names in the checkpoint.
        prefix: of the base model's weights in a checkpoint with a head; a name may lack it.
        report: takes down what became of each.

    Raises:
        ValueError: two weights become the same one, but differ; a weight has a shape that cannot be split.
    """
    found: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        bare = re.sub(r"gamma$", "weight", re.sub(r"beta$", "bias", name.removeprefix(prefix)))  # names of old norms
        rule = next((rule for rule in rules if re.fullmatch(rule.pattern, bare)), None)
        if rule is None or not rule.targets:
            report.unused[name] = "unknown" if rule is None else rule.reason
            continue
        try:
            parts = rule.apply(bare, weight)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{report.source}: {name} has the surprising shape {tuple(weight.shape)}: {error}") from error
        for target, part in parts.items():
            if target in found and not torch.equal(found[target], part):
                other = next(key for key, targets in report.used.items() if target in targets)
                raise ValueError(f"{report.source}: {other} and {name} should be the same weight, but differ")
            found.setdefault(target, part)
        report.used[name] = list(parts)
    return found


def resolve_tied(found: dict[str, torch.Tensor], tied: Mapping[str, str], report: Report) -> set[str]:
    """Leave out weights that are tied to others, if they are indeed the same; a head that differs is not tied.

    Args:
        found: the converted weights, changed in place.
        tied: which weights share the memory of which.
        report: takes a note when a head is not tied.

    Returns:
        The names that are tied.
    """
    pairs = {target: source for target, source in tied.items() if target in found or source in found}
    for target, source in pairs.items():
        if source not in found:
            found[source] = found[target]
    head = {target for target in pairs if target.startswith("lm_head.")}
    if all(torch.equal(found.get(name, found[pairs[name]]), found[pairs[name]]) for name in head):
        left_out = set(tied)
    else:
        left_out = set(tied) - head
        report.notes.append("the language-model head differs from the embeddings that it should share: it is not tied")
    for target in left_out & set(pairs):
        if not torch.equal(found.pop(target, found[pairs[target]]), found[pairs[target]]):
            raise ValueError(f"{report.source}: {target} and {pairs[target]} should be the same weight, but differ")
    return left_out


def check_shapes(found: Weights, expected: Mapping[str, torch.Size], report: Report) -> None:
    """Refuse weights that are not those of the converted model.

    Raises:
        ValueError: names each weight that is missing, or has a surprising shape or number format.
    """
    origin = {target: f"{name} became {target}" for name, targets in report.used.items() for target in targets}
    problems = []
    for name, weight in found.items():
        where = f"{origin.get(name, name)} of shape {tuple(weight.shape)}"
        if name not in expected:
            problems.append(f"{where}, which the model does not have")
        elif weight.shape != expected[name]:
            problems.append(f"{where}, expected {tuple(expected[name])}")
        elif weight.dtype not in FLOATS:
            problems.append(f"{where} is of {weight.dtype}: quantised weights cannot be converted")
    absent = [name for name in expected if name not in found]
    problems += [f"no weight for {name} of shape {tuple(expected[name])}" for name in absent]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ValueError(f"{report.source}: the weights do not fit the configuration: {shown}")


def split_heads(heads: int, by_head: bool) -> Change:
    """Split a fused projection into q, k and v; `by_head`: the three parts of each head stand together."""

    def change(weight: torch.Tensor) -> Sequence[torch.Tensor]:
        if by_head:
            return [part.flatten(0, 1) for part in weight.unflatten(0, (heads, 3, -1)).unbind(1)]
        return weight.unflatten(0, (3, -1)).unbind(0)

    return change
