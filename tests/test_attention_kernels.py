"""What asks for the Triton kernels, and what refuses it; the kernels themselves are tested by `test_triton_kernels.py`."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from elsewhere import environment
from matrix import Case
from matrix import ids_of
from transformers.dynamic_module_utils import get_imports

from hf_relpos import RelPosSeq2SeqConfig
from hf_relpos import RelPosSeq2SeqForConditionalGeneration
from hf_relpos.model import attention_kernels
from hf_relpos.model.blockwise_attention import blockwise_attention
from hf_relpos.model.scheme_terms import ScoreTerms

XL = Case("decoder", "transformer_xl", {})
SMALL = {"num_hidden_layers": 1}


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch) -> list[ScoreTerms]:
    """Kernels that are blocks in truth, as if Triton were here; what they were asked for."""
    asked: list[ScoreTerms] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Any, *others: Any) -> torch.Tensor:
        asked.append(terms)
        return blockwise_attention(query, key, value, terms, *others)

    def found(name: str) -> Any:
        return SimpleNamespace(kernel_attention=attend)

    monkeypatch.setattr(attention_kernels, "import_module", found)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return asked


@pytest.mark.parametrize("scheme", ["rope", "t5", "cope", ["alibi", "fox", "nope"]])
def test_schemes_without_a_kernel_are_refused(scheme: Any, at_hand: list[ScoreTerms]) -> None:
    fields = {"num_hidden_layers": 3} if isinstance(scheme, list) else SMALL
    with pytest.raises(
        ValueError, match="'triton' has no kernel for .*it has one for shaw, transformer_xl, xlnet, music, deb"
    ):
        Case("decoder", scheme, {}).model(attn_implementation="triton", **fields)


def test_a_machine_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match=r"hf_relpos\[gpu\].*cannot be imported.*use 'sdpa', 'eager' or 'flex_attention'"):
        XL.model(attn_implementation="triton", **SMALL)


def test_a_machine_without_a_gpu_is_refused(at_hand: list[ScoreTerms], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU, and torch .* finds none"):
        XL.model(attn_implementation="triton", **SMALL)


def test_nobody_gets_kernels_unasked(at_hand: list[ScoreTerms]) -> None:
    XL.model(**SMALL)(ids_of())
    assert not at_hand


def test_passes_that_kernels_serve(at_hand: list[ScoreTerms]) -> None:
    """What they cannot read goes the ways of `sdpa`: layers of other schemes, single tokens, gaps, double precision."""
    mixed = Case("decoder", ["transformer_xl", "rope", "fox"], {})
    model = mixed.model(dtype=torch.float32, attn_implementation="triton", num_hidden_layers=3)
    assert [layer["path"] for layer in model.attention_plan(300)] == ["triton", "fused", "blockwise"]
    model(ids_of())
    assert len(at_hand) == 1 and at_hand[0].query_vectors is not None
    output = model(ids_of(), use_cache=True)
    at_hand.clear()
    model(ids_of()[:, :1], cache=output.cache)
    between = torch.ones_like(ids_of())
    between[0, 2:4] = 0
    model(ids_of(), attention_mask=between)
    model(ids_of(), position_ids=2 * torch.arange(ids_of().shape[1])[None])
    model.double()(ids_of())
    assert not at_hand


def test_models_that_ask_later(at_hand: list[ScoreTerms]) -> None:
    model = XL.model(dtype=torch.float32, **SMALL)
    wanted = model(ids_of()).last_hidden_state
    model.set_attn_implementation("triton")
    torch.testing.assert_close(model(ids_of()).last_hidden_state, wanted)
    assert len(at_hand) == 1


def test_encoder_decoders(at_hand: list[ScoreTerms]) -> None:
    sizes = {"hidden_size": 12, "num_attention_heads": 2, "vocab_size": 20, "num_hidden_layers": 1, "pad_token_id": 0}
    config = RelPosSeq2SeqConfig(
        **sizes, encoder_position_scheme="deberta", decoder_position_scheme="transformer_xl", attn_implementation="triton"
    )
    model = RelPosSeq2SeqForConditionalGeneration(config).eval()
    model(input_ids=torch.ones(1, 5, dtype=torch.long), decoder_input_ids=torch.ones(1, 4, dtype=torch.long))
    assert [terms.key_vectors is not None for terms in at_hand] == [True, False]


ELSEWHERE = """
import sys

sys.modules["hf_relpos"] = sys.modules["triton"] = None  # as if they were not installed
from transformers import AutoModel

AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
try:
    AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True, attn_implementation="triton")
except ValueError as error:
    print(error)
"""


def test_remote_code_demands_neither_package(tmp_path: Path) -> None:
    path = Path(attention_kernels.__file__)
    assert not {"triton", "hf_relpos"} & set(get_imports(str(path)))
    XL.model(**SMALL).save_pretrained(tmp_path)
    assert (tmp_path / path.name).is_file()
    command, variables = [sys.executable, "-c", ELSEWHERE, str(tmp_path)], environment() | {"HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables)
    assert done.returncode == 0, done.stderr
    assert "attn_implementation='triton' needs the package hf_relpos and Triton" in done.stdout
