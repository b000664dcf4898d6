"""The test matrix: one row a scheme, and the small models that the tests run over.

A scheme that joins `SCHEMES` joins all tests by its row here, and fails one without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import references as paper
import references_bias as biases
import references_gates as gates
import torch
from reference_model import SchemeUse
from reference_model import reference_model
from reference_model import who_sees_whom

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM
from hf_relpos import RelPosDecoderModel
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderForMaskedLM
from hf_relpos import RelPosEncoderModel
from hf_relpos.model.scheme_registry import scheme_class


@dataclass(frozen=True)
class Row:
    """A scheme and its float64 reference.

    Attributes:
        scheme: its name.
        score: the score of one query and one key, `references.content` for a scheme that adds nothing to scores.
        variants: parameters worth a test of their own beside the defaults; the first is used wherever one must do.
        value: the vector that is added to the value, for schemes that have one.
        embed: what is added to the embeddings, for absolute schemes.
    """

    scheme: str
    score: Callable[..., torch.Tensor]
    variants: tuple[dict[str, Any], ...] = ({},)
    value: Callable[..., torch.Tensor | None] | None = None
    embed: Callable[..., torch.Tensor] | None = None


SHAW = (
    {"max_distance": 4},
    {"values": False},
    {"table": "sinusoidal"},
    {"max_distance": 4, "table": "sinusoidal_rows"},
    {"max_distance": 3, "outside": "zero", "values": "shared"},
    {"max_distance": 3, "outside": "zero", "values": False, "meets": "both"},
)
DEBERTA = (
    {"max_distance": 4},
    {"max_distance": 4, "p2c_index": "paper", "terms": "p2c"},
    {"max_distance": 4, "terms": "c2p", "normalise": True},
    {"max_distance": 9, "num_buckets": 4, "projections": "layer", "normalise": True},
    {"max_distance": 4, "p2c_index": "paper", "projections": "layer"},
)
DYNAMIC_BIAS = (
    {"width": 8, "log_distance": True},
    {"depth": 1},
    {"width": 5, "depth": 3, "norm": True, "log_distance": True},
)
FOX = ({}, {"gate": "bias_only"}, {"gate": "fixed", "decay_time_min": 2.0, "decay_time_max": 50.0})
ROPE_T5 = (
    {"t5": {"num_buckets": 8, "max_distance": 10}},
    {"rope": {"interleaved": True}, "t5": {"scale_scores": True}},
)
XPOS_KERPLE = (
    {"xpos": {"scale_base": 8}},
    {"xpos": {"gamma": 1.0}, "kerple": {"kernel": "power", "acts_as": "both"}},
)

MATRIX = [
    Row("nope", paper.content),
    Row("sinusoidal", paper.content, embed=paper.sinusoidal),
    Row("learned_absolute", paper.content, embed=paper.learned_absolute),
    Row("learned_bias", biases.learned_bias, ({"max_distance": 4}, {})),
    Row("shaw", paper.shaw, SHAW, value=paper.shaw_value),
    Row("t5", biases.t5, ({"num_buckets": 8, "max_distance": 10}, {}, {"num_buckets": 4, "scale_scores": True})),
    Row("transformer_xl", paper.transformer_xl, ({}, {"clamp_len": 4}, {"max_distance": 5})),
    Row("xlnet", paper.transformer_xl, ({}, {"clamp_len": 4})),
    Row("music", paper.music, ({"max_distance": 6}, {"share_heads": True})),
    Row("rope", paper.rope, ({}, {"interleaved": True}, {"partial_rotary_factor": 0.5, "rope_theta": 100.0})),
    Row("xpos", paper.xpos, ({"scale_base": 8}, {"interleaved": False, "partial_rotary_factor": 0.5, "gamma": 1.0}, {})),
    Row("pope", paper.pope, ({}, {"bias_init": "uniform", "rope_theta": 100.0}, {"learned_bias": False})),
    Row("alibi", biases.alibi, ({}, {"slopes": "geometric"}, {"sides": "split"}, {"learned": True})),
    Row("kerple", biases.kerple, ({}, {"kernel": "power"}, {"kernel": "power", "acts_as": "both"})),
    Row("fire", biases.fire, ({"threshold": 1400.0, "width": 6}, {})),
    Row("sandwich", biases.sandwich, ({"size": 16}, {})),
    Row("dynamic_bias", biases.dynamic_bias, DYNAMIC_BIAS),
    Row("deberta", paper.deberta, DEBERTA),
    Row("cope", paper.cope, ({"positions": 4}, {"positions": 12, "divide": True})),
    Row("dape", biases.dape, ({}, {"prior": "alibi", "width": 5}, {"prior": "fire"})),
    Row("fox", gates.fox, FOX),
    Row("data_dependent_alibi", gates.data_dependent_alibi, ({}, {"post_log_scale": 2.0, "bias_init": -1.0})),
    Row("cable", gates.cable, ({}, {"scale_scores": False})),
    Row("rope+fox", paper.together(paper.rope_product, gates.fox), ({}, {"fox": {"gate": "bias_only"}})),
    Row("rope+alibi", paper.together(paper.rope_product, biases.alibi), ({}, {"alibi": {"learned": True}})),
    Row("rope+t5", paper.together(paper.rope_product, biases.t5), ROPE_T5),
    Row("xpos+kerple", paper.together(paper.xpos_product, biases.kerple), XPOS_KERPLE),
]
ROWS = {row.scheme: row for row in MATRIX}

CONFIGS = {"decoder": RelPosDecoderConfig, "encoder": RelPosEncoderConfig}
BASES = {"decoder": RelPosDecoderModel, "encoder": RelPosEncoderModel}
LANGUAGE_MODELS = {"decoder": RelPosDecoderForCausalLM, "encoder": RelPosEncoderForMaskedLM}
DIRECTION = {"decoder": "causal", "encoder": "bidirectional"}
SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 28,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
BATCH, LENGTH = 2, 11


@dataclass(frozen=True)
class Case:
    """A scheme with parameters in a family: what every test of the matrix runs over."""

    family: str
    scheme: str
    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        return "-".join([self.family, self.scheme, *(f"{key}={value}" for key, value in self.parameters.items())])

    @property
    def adds_to_scores(self) -> bool:
        """Whether blocks have something to do: the scheme adds to the scores, instead of acting before they are made."""
        kind = scheme_class(self.scheme)
        return kind.adds_terms() or kind.gates()

    def config(self, **fields: Any) -> Any:
        """A tiny configuration; three heads, because no power of two should be needed."""
        scheme = {"position_scheme": self.scheme, "position_parameters": self.parameters}
        return CONFIGS[self.family](**{**SIZES, **scheme, **fields})

    def model(self, head: bool = False, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
        """A tiny model, with a language-model head or without, whose weights make positions matter."""
        kind = LANGUAGE_MODELS if head else BASES
        return sharpen(kind[self.family](self.config(**fields))).to(dtype).eval()


def cases(family: str | None = None, memory: bool = False, variants: bool = False) -> list[Any]:
    """Cases of a test: schemes of one family or both, perhaps only those with memory, with all variants or one."""
    found = []
    for row in MATRIX:
        refused = scheme_class(row.scheme).refuses
        for kind in CONFIGS if family is None else (family,):
            if DIRECTION[kind] not in refused and not (memory and "memory" in refused):
                found += [Case(kind, row.scheme, given) for given in (row.variants if variants else row.variants[:1])]
    return [pytest.param(case, id=case.name) for case in found]


@torch.no_grad()
def sharpen(model: Any, seed: int = 0) -> Any:
    """Give a model weights under which every part matters: the usual ones give even attention and zero tables."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if "position_schemes" in name and weight.dim() < 2 or name.endswith("bias") and "position_schemes" not in name:
            weight.copy_(0.3 * noise)
        elif "norm" in name:
            weight.copy_(1 + 0.1 * noise)
        elif "embed_tokens" in name or "position_embeddings" in name:
            weight.copy_(noise)
        elif "position_schemes" in name:
            weight.copy_(0.5 * noise)
        else:
            weight.copy_(noise * weight.shape[-1] ** -0.5)
    return model


def ids_of(batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    """Random tokens without padding or special ones."""
    return torch.randint(3, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def visibility(
    config: Any, batch: int, length: int, hidden: Callable[[int, int, int], bool] = lambda b, i, j: False
) -> torch.Tensor:
    """Who sees whom without memory, `(batch, query, key)`: the direction, the window, and nothing that is `hidden`."""
    window = getattr(config, "sliding_window", None) or length

    def rule(b: int, i: int, j: int) -> bool:
        return (j <= i or not config.causal) and abs(i - j) < window and not hidden(b, i, j)

    return who_sees_whom(batch, length, rule)


def scheme_uses(config: Any) -> list[SchemeUse]:
    """For each layer the row of its scheme, its parameters and what names its weights."""
    names = config.position_scheme
    single = isinstance(names, str)
    names = [names] * config.num_hidden_layers if single else names

    def is_shared(name: str) -> bool:
        return config.share_positions == "model" or ROWS[name].embed is not None or scheme_class(name).serves_all_layers

    uses = []
    for index, name in enumerate(names):
        given = config.position_parameters
        if not single:
            parts = name.split("+")
            given = {part: given.get(part, {}) for part in parts} if len(parts) > 1 else given.get(name, {})
        owner = "shared" if is_shared(name) else index
        uses.append(SchemeUse(ROWS[name], scheme_class(name).complete(given), f"{owner}.{name}"))
    return uses


def expected(
    model: Any,
    ids: torch.Tensor,
    sees: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
    weights: Any = None,
) -> torch.Tensor:
    """The reference of the last hidden states of a model without a head, `(batch, length, hidden_size)`."""
    batch, length = ids.shape
    sees = visibility(model.config, batch, length) if sees is None else sees
    position = torch.arange(length).expand(batch, length) if position is None else position.expand(batch, length)
    weights = dict(model.named_parameters()) if weights is None else weights
    return reference_model(weights, model.config, scheme_uses(model.config), ids, sees, position)
