"""Save a folder of each family with its answers, or load folders that other versions saved, each by its own code.

python tests/across_versions.py save FOLDER
python tests/across_versions.py load FOLDER ...
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from safetensors.torch import save_file

CLOSE = {"rtol": 0, "atol": 1e-5}
SIZES = {"vocab_size": 37, "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "pad_token_id": 0}
MODELS = {
    "decoder": ("AutoModelForCausalLM", "RelPosDecoderConfig", {"position_scheme": "rope+alibi"}),
    "memory": ("AutoModelForCausalLM", "RelPosDecoderConfig", {"position_scheme": "transformer_xl", "mem_len": 8}),
    "encoder": ("AutoModelForMaskedLM", "RelPosEncoderConfig", {"position_scheme": "deberta"}),
    "seq2seq": ("AutoModelForSeq2SeqLM", "RelPosSeq2SeqConfig", {"position_scheme": "t5"}),
}
"""The Auto class, the configuration and its fields, by the name of the folder."""


@torch.no_grad()
def answers(model: Any) -> dict[str, torch.Tensor]:
    """Return logits, those behind a memory, and the tokens of a greedy continuation."""
    ids = torch.arange(1, 25).reshape(2, 12)
    output = model(ids, **({"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {}))
    found = {"logits": output.logits}
    if output.get("memory") is not None:
        found["next logits"] = model(ids, memory=output.memory).logits
    if model.can_generate():
        found["tokens"] = model.generate(ids, max_new_tokens=6, num_beams=2, do_sample=False)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def save(root: Path) -> None:
    """Save each model with its answers and with the versions that made them."""
    import hf_relpos

    for name, (auto, config, fields) in MODELS.items():
        torch.manual_seed(0)
        kind = getattr(transformers, auto)
        model = kind.from_config(getattr(hf_relpos, config)(**SIZES, **fields, initializer_range=0.3)).eval()
        model.save_pretrained(root / name)
        save_file(answers(model), root / name / "answers.bin")
    root.joinpath("versions.json").write_text(json.dumps(versions()))


def load(root: Path) -> None:
    """Load each model by the code in its folder, and compare its answers with those of the version that saved it."""
    for name, (auto, _, _) in MODELS.items():
        model = getattr(transformers, auto).from_pretrained(root / name, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
        torch.testing.assert_close(answers(model), load_file(root / name / "answers.bin"), **CLOSE)
    print(f"{versions()} computes what {root.joinpath('versions.json').read_text()} saved: {', '.join(MODELS)}")


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and transformers."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python, "torch": torch.__version__, "transformers": transformers.__version__}


if __name__ == "__main__":
    torch.set_num_threads(1)
    job, *folders = sys.argv[1:]
    if job == "load":
        sys.modules["hf_relpos"] = None  # type: ignore[assignment]
    for folder in folders:
        {"save": save, "load": load}[job](Path(folder))
