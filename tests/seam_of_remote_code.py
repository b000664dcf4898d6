"""Loads each saved folder by its own code, in a process where this package cannot be imported, and writes what it answers."""

import pathlib
import sys

sys.modules["hf_relpos"] = None  # type: ignore[assignment]

import torch  # noqa: E402
import transformers  # noqa: E402
from reload_folders import read_code_once  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

NAMES = ("logits", "start_logits", "end_logits", "last_hidden_state")

if __name__ == "__main__":
    torch.set_num_threads(1)
    read_code_once()
    for document in sorted(pathlib.Path(sys.argv[1]).glob("*/document.safetensors")):
        with safe_open(document, "pt") as opened:
            auto = getattr(transformers, opened.metadata()["auto"])
        model = auto.from_pretrained(document.parent / "model", trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules.")
        with torch.no_grad():
            output = model(**load_file(document))
            found = {name: output[name].contiguous() for name in NAMES if output.get(name) is not None}
            if output.get("memory") is not None:
                found["next logits"] = model(**load_file(document), memory=output.memory).logits
        save_file(found, document.parent / "found.safetensors")
