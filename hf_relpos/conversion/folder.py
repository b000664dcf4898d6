"""Writes a converted checkpoint: a folder like any other here, complete or not at all."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import ModelCard
from huggingface_hub import ModelCardData
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase

from hf_relpos.conversion.checkpoint import find_file
from hf_relpos.conversion.checkpoint import read_json
from hf_relpos.conversion.rules import Report
from hf_relpos.evaluation.page import code_block
from hf_relpos.evaluation.page import code_span
from hf_relpos.evaluation.page import plain

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
CARD = """---
{metadata}
---

# {title}

Converted from {source} (`{kind}`) to `{model_type}` of hf_relpos, with position scheme {schemes}:
the same function of the same weights.
The licence of the original and what its model card says hold for this folder too.

```python
from transformers import {auto}

model = {auto}.from_pretrained(".", trust_remote_code=True)
```

{summary}
"""


def check_output(output: Path) -> None:
    """Refuse a path that holds something.

    Raises:
        ValueError: the output is a file, or a folder that is not empty.
    """
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ValueError(f"{output} is there already: choose another output folder")


def build_model(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """Give a model without memory the weights, which are not copied."""
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    return model.eval()


def write_folder(
    output: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: str, report: Report
) -> None:
    """Write model, code, tokenizer and card into a folder beside, which takes its name once it is complete.

    Args:
        output: the folder; it may exist, if it is empty.
        model: with its weights.
        tokenizer: the checkpoint's, if it has one.
        source: the folder or name that was converted.
        report: what became of each weight.
    """
    check_output(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        if model.can_generate():
            _take_over_tokens(model, source)
        model.save_pretrained(scratch)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        (scratch / "README.md").write_text(_card(output.name, model, source, report), encoding="utf-8")
        mask = os.umask(0)
        os.umask(mask)  # a temporary folder is closed to others
        scratch.chmod(0o777 & ~mask)
        scratch.replace(output)
    except BaseException as stop:
        shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(stop, OSError | SafetensorError):  # a disk that is full, or a folder that is there meanwhile
            raise OSError(f"{output} could not be written: {stop}") from stop
        raise


def _take_over_tokens(model: PreTrainedModel, source: str) -> None:
    """Let generation begin and end with the tokens that the source's `generation_config.json` names."""
    if (path := find_file(source, "generation_config.json")) is not None:
        fields = read_json(path)
        model.generation_config.update(**{name: fields[name] for name in TOKENS if name in fields})


def _card(title: str, model: PreTrainedModel, source: str, report: Report) -> str:
    """Write the model card: what the model was converted from, and what became of the weights."""
    config = model.config
    name = type(model).__name__
    auto = next(auto for auto, entry in config.auto_map.items() if entry.endswith(f".{name}"))
    named = None if Path(source).is_dir() else source
    data = ModelCardData(library_name="transformers", tags=["hf_relpos", config.model_type], base_model=named)
    schemes = [config.position_scheme] if isinstance(config.position_scheme, str) else sorted(set(config.position_scheme))
    origin = source if named else Path(source).resolve().name
    text = CARD.format(
        metadata=data.to_yaml(),
        title=plain(title),
        source=code_span(origin),
        kind=report.source,
        model_type=config.model_type,
        schemes=", ".join(f"`{scheme}`" for scheme in schemes),
        auto=auto,
        summary=code_block(report.summary, "text"),
    )
    return str(ModelCard(text))
