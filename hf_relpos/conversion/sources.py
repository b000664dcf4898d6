"""The kinds of checkpoints that can be converted: a new one is a file with a plan and one line here."""

from collections.abc import Callable
from typing import Any

from hf_relpos.conversion import bert
from hf_relpos.conversion import bloom
from hf_relpos.conversion import deberta_v2
from hf_relpos.conversion import electra
from hf_relpos.conversion import falcon
from hf_relpos.conversion import gpt2
from hf_relpos.conversion import gpt_neox
from hf_relpos.conversion import llama
from hf_relpos.conversion import mpt
from hf_relpos.conversion import nezha
from hf_relpos.conversion import roberta
from hf_relpos.conversion import roformer
from hf_relpos.conversion import t5
from hf_relpos.conversion import transfo_xl
from hf_relpos.conversion import xlnet
from hf_relpos.conversion.plan import Plan
from hf_relpos.conversion.rules import Weights
from hf_relpos.conversion.settings import Settings

SOURCES: dict[str, Callable[[Settings, Weights], Plan]] = {
    "llama": llama.plan,
    "mistral": llama.plan,
    "gpt_neox": gpt_neox.plan,
    "gpt2": gpt2.plan,
    "bloom": bloom.plan,
    "mpt": mpt.plan,
    "falcon": falcon.plan,
    "bert": bert.plan,
    "roberta": roberta.plan,
    "electra": electra.plan,
    "nezha": nezha.plan,
    "roformer": roformer.plan,
    "t5": t5.plan,
    "mt5": t5.plan,
    "umt5": t5.plan,
    "deberta-v2": deberta_v2.plan,
    "transfo-xl": transfo_xl.plan,
    "xlnet": xlnet.plan,
}
"""By the `model_type` of transformers."""


REFUSED = {
    "wavlm": "its gates scale the bias by what each query says, which no score term here can say",
}
"""Checkpoints that look as if they could be converted, with the reason why they cannot."""


def source_name(name: Any) -> str:
    """Return the name in `SOURCES`, or raise a ValueError that lists them; dashes and underscores mean the same."""
    for known in SOURCES:
        if known.replace("-", "_") == str(name).lower().replace("-", "_"):
            return known
    why = f": {REFUSED[name]}" if name in REFUSED else ""
    raise ValueError(f"model_type={name!r} cannot be converted{why}; one of {', '.join(SOURCES)} can")
