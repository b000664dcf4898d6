"""The names of all schemes. A new one is a class, one line in `SCHEMES`, one row in the test matrix and one config file.

A name may also join two schemes, as in `rope+alibi` (`scheme_combined.py`).
"""

from typing import Any

from .scheme_absolute import LearnedAbsolute
from .scheme_absolute import NoPE
from .scheme_absolute import Sinusoidal
from .scheme_base import PositionScheme
from .scheme_bias import T5
from .scheme_bias import Alibi
from .scheme_bias import DynamicBias
from .scheme_bias import Kerple
from .scheme_bias import LearnedBias
from .scheme_bias import Sandwich
from .scheme_combined import Combined
from .scheme_combined import combine
from .scheme_deberta import Deberta
from .scheme_dense import DAPE
from .scheme_dense import CoPE
from .scheme_dense import Fire
from .scheme_gates import Cable
from .scheme_gates import DataDependentAlibi
from .scheme_gates import FoX
from .scheme_rotary import PoPE
from .scheme_rotary import RoPE
from .scheme_rotary import XPos
from .scheme_vectors import Music
from .scheme_vectors import Shaw
from .scheme_vectors import TransformerXL
from .scheme_vectors import XLNet

SCHEMES: dict[str, type[PositionScheme]] = {
    "nope": NoPE,
    "sinusoidal": Sinusoidal,
    "learned_absolute": LearnedAbsolute,
    "learned_bias": LearnedBias,
    "shaw": Shaw,
    "t5": T5,
    "transformer_xl": TransformerXL,
    "xlnet": XLNet,
    "music": Music,
    "rope": RoPE,
    "xpos": XPos,
    "pope": PoPE,
    "alibi": Alibi,
    "kerple": Kerple,
    "fire": Fire,
    "sandwich": Sandwich,
    "dynamic_bias": DynamicBias,
    "cope": CoPE,
    "dape": DAPE,
    "fox": FoX,
    "data_dependent_alibi": DataDependentAlibi,
    "cable": Cable,
    "deberta": Deberta,
}
for _name, _kind in SCHEMES.items():
    _kind.name = _name


def parts_of(name: str) -> list[str]:
    """Return the schemes that a name stands for: both of a combination such as `rope+alibi`, else the one."""
    return [part.strip() for part in name.split("+")]


def scheme_class(name: str) -> type[PositionScheme]:
    """Return the class of a scheme name, or of two joined by `+`; a ValueError lists the names, or says why two do not combine."""
    parts = parts_of(name)
    for part in parts:
        if part not in SCHEMES:
            of = f" in {name!r}" if len(parts) > 1 else ""
            raise ValueError(f"unknown position_scheme {part!r}{of}; the schemes are: {', '.join(SCHEMES)}")
    return SCHEMES[name] if name in SCHEMES else combine(*((part, SCHEMES[part]) for part in parts))


def in_order(given: str | list[str]) -> str | list[str]:
    """Return a position_scheme whose combinations name the rotary scheme first."""
    if not isinstance(given, str):
        return [str(in_order(name)) for name in given]
    kind = scheme_class(given)
    return "+".join(kind.kinds) if issubclass(kind, Combined) else given


def layer_schemes(config: Any) -> list[str]:
    """Return the scheme name of each layer."""
    given = config.position_scheme
    return [given] * config.num_hidden_layers if isinstance(given, str) else list(given)


def scheme_parameters(config: Any, name: str) -> dict[str, Any]:
    """Return all parameters of one scheme of a configuration: what was given, completed by the paper's defaults."""
    given = config.position_parameters
    if not isinstance(config.position_scheme, str):
        parts = parts_of(name)
        given = given.get(name, {}) if len(parts) == 1 else {part: given[part] for part in parts if part in given}
    return scheme_class(name).complete(given)


def carry_parameters(before: str | list[str], parameters: dict[str, Any], after: str | list[str]) -> dict[str, Any]:
    """Return the `position_parameters` of a changed `position_scheme`: those of the schemes that it has kept.

    Args:
        before: the position_scheme of `parameters`.
        parameters: its position_parameters.
        after: the position_scheme in its place.
    """

    def alone(scheme: str | list[str]) -> str | None:
        """Return the name of a scheme whose parameters are not mapped from names, if it is one."""
        return scheme if isinstance(scheme, str) and len(parts_of(scheme)) == 1 else None

    by_name = parameters if (single := alone(before)) is None else {single: parameters}
    names = [part for name in ([after] if isinstance(after, str) else after) for part in parts_of(name)]
    kept = {name: by_name[name] for name in dict.fromkeys(names) if name in by_name}
    return kept if (single := alone(after)) is None else kept.get(single, {})


def check_schemes(config: Any) -> None:
    """Refuse scheme names, parameters and combinations without meaning.

    Raises:
        ValueError: names the offending value, the reason, and what is allowed.
    """
    names = layer_schemes(config)
    if len(names) != config.num_hidden_layers:
        raise ValueError(f"position_scheme lists {len(names)} schemes for num_hidden_layers={config.num_hidden_layers}")
    if not isinstance(config.position_scheme, str):
        known = dict.fromkeys(part for name in names for part in parts_of(name))
        for key, value in config.position_parameters.items():
            if key not in known or not isinstance(value, dict):
                allowed = ", ".join(known)
                raise ValueError(
                    f"position_parameters of a list of schemes map scheme names ({allowed}) to dicts: {key!r}={value!r}"
                )
    uses = {"causal" if config.causal else "bidirectional": True, "memory": getattr(config, "mem_len", 0) > 0}
    for name in dict.fromkeys(names):
        kind = scheme_class(name)
        kind.check(config, scheme_parameters(config, name))
        for use, wanted in uses.items():
            if wanted and use in kind.refuses:
                field = f"mem_len={config.mem_len}" if use == "memory" else f"a {use} model"
                raise ValueError(f"position_scheme {name!r} is refused for {field}: {kind.refuses[use]}")
        if kind.acts_on_embeddings and set(names) != {name}:
            raise ValueError(
                f"position_scheme {name!r} acts on the embeddings, so it cannot be the scheme of single layers: {names}"
            )


def build_scheme(config: Any, name: str) -> PositionScheme:
    """Return one scheme module of a configuration."""
    return scheme_class(name)(config, **scheme_parameters(config, name))


def probabilities_reason(config: Any) -> str | None:
    """Return why the schemes of a configuration need attention probabilities, or None when fused kernels can serve them."""
    reasons = (scheme_class(name).needs_probabilities(scheme_parameters(config, name)) for name in layer_schemes(config))
    return next((reason for reason in reasons if reason is not None), None)
