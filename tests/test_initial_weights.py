"""What the tables of schemes start as: spread as the source says, in a new model and where a checkpoint lacks them."""

import math
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from typing import NamedTuple

import pytest
import torch
from matrix import LANGUAGE_MODELS
from matrix import Case
from matrix import cases
from torch.nn.functional import softplus

from hf_relpos.model.scheme_base import PositionScheme

STD = 0.05
LARGER = {"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 8, "initializer_range": STD}
"""More heads and layers than elsewhere, so that one spread can be told from another."""

SCHEMES = "position_schemes"


class Law(NamedTuple):
    """What numbers are drawn from: their mean, their standard deviation, and the ends that none passes."""

    mean: float
    std: float
    low: float = -math.inf
    high: float = math.inf


def normal(std: float = STD) -> Law:
    return Law(0.0, std)


def uniform(low: float, high: float) -> Law:
    return Law((low + high) / 2, (high - low) / math.sqrt(12), low, high)


def constant(value: float) -> Law:
    return uniform(value, value)


def linear(inputs: int) -> Law:
    """The law of `nn.Linear` for its weight and its bias."""
    return uniform(-(inputs**-0.5), inputs**-0.5)


def shaw(scheme: Any, name: str) -> Law:
    bound = math.sqrt(6 / sum(scheme.get_parameter(name).shape))
    return uniform(-bound, bound)


def pope(scheme: Any, name: str) -> Law:
    return uniform(-2 * math.pi, 0) if scheme.bias_init == "uniform" else constant(0.0)


def kerple(scheme: Any, name: str) -> Law:
    return uniform(0.01, 0.99) if name.endswith("a") else uniform(0.02, 1.98)


def fire(scheme: Any, name: str) -> Law:
    known = {"slope": constant(scheme.c), "threshold_factor": constant(1.0), "output_weight": linear(scheme.width)}
    return known.get(name, linear(1))


def dynamic_bias(scheme: Any, name: str) -> Law:
    known = {"input_weight": linear(1), "norm_weight": constant(1.0), "norm_bias": constant(0.0)}
    return known.get(name, linear(len(scheme.input_weight)))


def dape(scheme: Any, name: str) -> Law:
    return linear(scheme.width if name == "output_weight" else 2 * scheme.heads)


def gates(scheme: Any, name: str) -> Law:
    return constant(getattr(scheme, "bias_init", 0.0)) if name == "gate_bias" else normal()


LAWS: dict[str, Callable[[Any, str], Law]] = {
    "LearnedAbsolute": lambda scheme, name: normal(),
    "LearnedBias": lambda scheme, name: constant(0.0),
    "Shaw": shaw,
    "T5": lambda scheme, name: normal(),
    "TransformerXL": lambda scheme, name: normal(),
    "XLNet": lambda scheme, name: normal(),
    "Music": lambda scheme, name: normal(scheme.head_dim**-0.5),
    "PoPE": pope,
    "Kerple": kerple,
    "Fire": fire,
    "DynamicBias": dynamic_bias,
    "Deberta": lambda scheme, name: normal(),
    "CoPE": lambda scheme, name: constant(0.0),
    "DAPE": dape,
    "FoX": gates,
    "DataDependentAlibi": gates,
    "Cable": gates,
}
"""By class: the law of a table, given its scheme and its name. ALiBi's slopes are tested as numbers, not as a law."""


def meant(scheme: Any, name: str, table: torch.Tensor) -> torch.Tensor:
    """What a law speaks of: the table, but for KERPLE the positive numbers that the paper draws."""
    if type(scheme).__name__ != "Kerple":
        return table
    return 2 * table.sigmoid() if name.endswith("p") and scheme.kernel == "power" else softplus(table)


def tables(model: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Yield each scheme's own tables, those of all layers together: the scheme of one of them, a name, and all numbers."""
    found: dict[tuple[str, str], list[Any]] = {}
    for module in model.modules():
        if isinstance(module, PositionScheme):
            for name, table in module.named_parameters(recurse=False):
                found.setdefault((type(module).__name__, name), []).append((module, meant(module, name, table.detach())))
    for (_, name), of_layers in found.items():
        yield of_layers[0][0], name, torch.cat([table.flatten() for _, table in of_layers]).double()


def check(model: Any) -> int:
    """Assert that each table is as its law says, within five standard errors; return how many there are."""
    found = list(tables(model))
    for scheme, name, numbers in found:
        kind = type(scheme).__name__
        if kind == "Alibi":
            assert numbers.view(-1, scheme.heads).equal(numbers[: scheme.heads].expand(numbers.numel() // scheme.heads, -1))
            assert numbers[0] == pytest.approx(2**-2) and numbers.min() > 0 and numbers.max() <= 0.5, numbers
            continue
        law = LAWS[kind](scheme, name)
        error = 5 * law.std / math.sqrt(numbers.numel()) + 1e-6
        assert law.low - 1e-6 <= numbers.min() and numbers.max() <= law.high + 1e-6, (kind, name, law, numbers.aminmax())
        assert numbers.mean().item() == pytest.approx(law.mean, abs=error), (kind, name, law)
        assert numbers.std(correction=0).item() == pytest.approx(law.std, abs=error), (kind, name, law)
    return len(found)


@pytest.mark.parametrize("case", cases(variants=True))
def test_a_new_model_and_one_whose_checkpoint_has_no_positions(case: Case, tmp_path: Path) -> None:
    kind, config = LANGUAGE_MODELS[case.family], case.config(**LARGER)
    model = kind(config)
    count = check(model)
    model.save_pretrained(
        tmp_path, state_dict={name: weight for name, weight in model.state_dict().items() if SCHEMES not in name}
    )
    assert check(kind.from_pretrained(tmp_path)) == count


def test_every_scheme_with_tables_has_a_law() -> None:
    models = [LANGUAGE_MODELS[case.family](case.config()) for case in (param.values[0] for param in cases(variants=True))]
    assert {type(scheme).__name__ for model in models for scheme, _, _ in tables(model)} == {*LAWS, "Alibi"}


@pytest.mark.parametrize("family", ["encoder", "decoder"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_output_projections_begin_smaller_by_the_root_of_the_residuals(family: str, norm: str) -> None:
    """In a pre-norm stack, as GPT-2 begins them; all other projections are as wide as the configuration says."""
    model = LANGUAGE_MODELS[family](Case(family, "rope", {}).config(**LARGER, norm_position=norm))
    gain = (2 * LARGER["num_hidden_layers"]) ** -0.5 if norm == "pre" else 1.0
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"):
        weights = [weight for path, weight in model.named_parameters() if path.endswith(f"{name}.weight")]
        assert len(weights) == LARGER["num_hidden_layers"]
        spread = torch.cat([weight.detach().flatten() for weight in weights]).std().item()
        assert spread == pytest.approx(STD * (gain if name in ("o_proj", "down_proj") else 1.0), rel=0.02), name
