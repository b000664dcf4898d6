"""The Python of the README and of docs/permutation.md runs as it stands there, for one step of training."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderForMaskedLM
from hf_relpos import RelPosEncoderForPermutationLM
from hf_relpos.data.tokenizers import build_byte_tokenizer

ROOT = Path(__file__).parent.parent
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def snippets(page: str) -> dict[str, list[str]]:
    """The Python blocks of a page by the heading that they stand under."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^#+ ", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE):
        if blocks := re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL):
            found[section.partition("\n")[0]] = blocks
    return found


NAMED: dict[str, dict[str, Any]] = {
    "Segment memory": {
        "segment": torch.tensor([[5, 6, 7]]),
        "first_tokens_of_documents": torch.tensor([[0, 1, 0]]),
        "memory": None,
        "long_text_ids": torch.arange(200)[None],
        "question_ids": torch.tensor([[1, 2]]),
    },
    "Memory of an encoder": {
        "RelPosEncoderConfig": RelPosEncoderConfig,
        "RelPosEncoderForPermutationLM": RelPosEncoderForPermutationLM,
        "segment": torch.tensor([[5, 6]]),
        "memory": None,
        "perm_mask": torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]),
        "target_mapping": torch.tensor([[[0.0, 1.0]]]),
        "labels": torch.tensor([[6]]),
    },
}
"""What the text around a block speaks of, but does not make."""
PAGES = [
    pytest.param(page, heading, id=heading)
    for page in ("README.md", "docs/permutation.md")
    for heading in snippets(page)
    if heading != "Push to the Hub"
]


@pytest.mark.parametrize("page, heading", PAGES)
def test_python_of_a_page_runs(page: str, heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "README.md", tmp_path)
    complete = transformers.TrainingArguments.__post_init__

    def one_step(arguments: Any) -> None:
        arguments.max_steps, arguments.report_to = 1, []
        complete(arguments)

    monkeypatch.setattr(transformers.TrainingArguments, "__post_init__", one_step)
    tokenizer = build_byte_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **TINY}
    for folder, model in (
        ("runs/default", RelPosDecoderForCausalLM(RelPosDecoderConfig(**sizes))),
        ("runs/base_encoder", RelPosEncoderForMaskedLM(RelPosEncoderConfig(**sizes))),
    ):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    space = dict(NAMED.get(heading, {}))
    for block in snippets(page)[heading]:
        exec(block, space)
