"""Who is measured: the baselines, the schemes of hf_relpos on their paths, and what all of them have in common.

Every contestant is a base model whose logits come from its own embeddings (`Scored`), so that heads cost all of them the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModel

from hf_relpos import SCHEMES
from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosEncoderConfig

PATHS = ("auto", "blockwise", "dense", "eager", "triton")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"shaw, no values": ("shaw", {"values": False})}
"""Settings of a scheme that are rows of their own beside its defaults: label, scheme, parameters."""
BASELINES = {True: "baseline, causal", False: "baseline, bidirectional"}


@dataclass(frozen=True)
class Sizes:
    """The sizes that all models have in common."""

    layers: int = 4
    width: int = 256
    heads: int = 8
    vocab: int = 1024


class Scored(nn.Module):
    """A base model of transformers' conventions, and logits by its embeddings.

    Args:
        model: the base model; its first output is `(batch, sequence, width)`.
        options: keyword arguments of every full pass.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.model = model
        self.options = options or {}

    def _score(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, self.model.get_input_embeddings().weight)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `(batch, sequence, vocab)` of `ids (batch, sequence)`; the mask is 1 for tokens, 0 for padding."""
        return self._score(self.model(input_ids=ids, attention_mask=mask, **self.options)[0])

    def decode(self, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Logits of `ids` behind a cache, None at first, and the cache."""
        output = self.model(input_ids=ids, cache=cache, use_cache=True)
        return self._score(output[0]), output.cache

    def describe(self) -> dict[str, Any]:
        """What the results record of a model."""
        config = getattr(self.model, "config", None)
        return {
            "attention": getattr(config, "_attn_implementation", "own"),
            "tied_embeddings": True,
            "parameters": sum(parameter.numel() for parameter in self.parameters()),
        }


@dataclass(frozen=True)
class Contestant:
    """One row of the tables.

    Attributes:
        name: unique.
        scheme: the scheme of hf_relpos that it is, or implements.
        kind: baseline, ours or peer.
        causal: decoder or encoder; decides the baseline.
        build: makes the model for the largest length that it will see.
        note: what makes a comparison with it less than exact.
        path: of `PATHS`; `eager` is what the others are checked against.
        variant: label among the rows of its scheme.
        parameters: of the scheme, where they are not the defaults.
    """

    name: str
    scheme: str
    kind: str
    causal: bool
    build: Callable[[Sizes, int], Scored] = field(compare=False)
    note: str = ""
    path: str = "auto"
    variant: str = ""
    parameters: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def baseline(self) -> str:
        """The name of what it is compared with."""
        return BASELINES[self.causal]

    def describe(self) -> dict[str, Any]:
        """All fields that JSON can hold."""
        chosen = {key: value for key, value in self.__dict__.items() if key != "build"}
        return chosen | {"baseline": self.baseline}


def own_config(scheme: str, causal: bool, sizes: Sizes, length: int, **fields: Any) -> Any:
    """A configuration of hf_relpos; ValueError where the scheme has no meaning in this family."""
    shape = {"hidden_size": sizes.width, "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads}
    shape |= {"vocab_size": sizes.vocab, "max_position_embeddings": length, "position_scheme": scheme}
    return (RelPosDecoderConfig if causal else RelPosEncoderConfig)(**shape, **fields)


def own(scheme: str, causal: bool, path: str = "auto", parameters: dict[str, Any] | None = None) -> Callable[..., Scored]:
    """A function that builds a model of hf_relpos with one scheme on one path."""

    def build(sizes: Sizes, length: int) -> Scored:
        fields = {"position_parameters": parameters} if parameters else {}
        fields |= {"attention_path": path} if path in ("blockwise", "dense") else {}
        config = own_config(scheme, causal, sizes, length, **fields)
        chosen = {"attn_implementation": path} if path in ("eager", "triton") else {}
        return Scored(AutoModel.from_config(config, **chosen), {"use_cache": False} if causal else {})

    return build


def baselines() -> list[Contestant]:
    """What a step costs when positions are free: no scheme, fused attention; sinusoids where an encoder needs some."""
    plain = Contestant(BASELINES[True], "nope", "baseline", True, own("nope", True))
    note = "an encoder without positions is refused; sinusoids cost one addition a pass"
    return [plain, Contestant(BASELINES[False], "sinusoidal", "baseline", False, own("sinusoidal", False), note)]


def has_meaning(scheme: str, causal: bool) -> bool:
    """Whether the family takes the scheme."""
    try:
        own_config(scheme, causal, Sizes(), 128)
    except ValueError:
        return False
    return True


def ours(schemes: list[str], families: str, paths: tuple[str, ...] | list[str]) -> list[Contestant]:
    """The schemes and their variants on every path.

    Args:
        schemes: names, or "all".
        families: "native" for decoders, and encoders where there is no decoder; "decoder", "encoder" or "both".
        paths: of `PATHS`.
    """
    names = list(SCHEMES) if "all" in schemes else schemes
    labels = {name: (name, {}) for name in names} | {label: row for label, row in VARIANTS.items() if row[0] in names}
    found = []
    for label in sorted(labels, key=lambda label: (names.index(labels[label][0]), label)):
        scheme, parameters = labels[label]
        kinds = [causal for causal in (True, False) if has_meaning(scheme, causal)]
        wanted = {"native": kinds[:1], "decoder": [True], "encoder": [False], "both": [True, False]}[families]
        for causal in (kind for kind in kinds if kind in wanted):
            for path in paths:
                name = label + ("" if causal else " (encoder)") + ("" if path == "auto" else f" [{path}]")
                build = own(scheme, causal, path, parameters)
                row = Contestant(name, scheme, "ours", causal, build, path=path, variant=label, parameters=parameters)
                found.append(row)
    return found


def baselines_of(contestants: list[Contestant]) -> list[Contestant]:
    """The baselines that these are compared with."""
    needed = {contestant.baseline for contestant in contestants}
    return [baseline for baseline in baselines() if baseline.name in needed]
