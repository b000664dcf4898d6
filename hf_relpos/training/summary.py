"""Format what a run prints at its end: its numbers beside those of general-purpose compressors, and a sample."""

import gzip
import lzma
import shlex
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase
from transformers import set_seed

from hf_relpos.data.tables import read_rows
from hf_relpos.data.tokenizers import start_token_id
from hf_relpos.evaluation.language_model import position_bound
from hf_relpos.training.texts import EvaluationText

# Characters of a text that the commands and the card of a run take as their example of a prompt.
OPENING = 40
# Beyond this size the compressors would take longer than the comparison is worth.
COMPRESSED_AT_MOST = 32 << 20

ROWS = {
    "loss": "{:.4f}",
    "perplexity": "{:.3f}",
    "bits_per_byte": "{:.4f}",
    "gzip_bits_per_byte": "{:.3f}",
    "xz_bits_per_byte": "{:.3f}",
    "accuracy": "{:.4f}",
}


def compressed_bits_per_byte(documents: Dataset) -> dict[str, float]:
    """Return the bits per byte of `gzip -9` and `xz -9` for the same text; nothing for a text of more than 32 MiB."""
    text = bytearray()
    for row in read_rows(documents):
        text += row["text"].encode()
        if len(text) > COMPRESSED_AT_MOST:
            return {}
    sizes = {"gzip": len(gzip.compress(text, 9)), "xz": len(lzma.compress(text, preset=9))}
    return {name: 8 * size / len(text) for name, size in sizes.items()}


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, length: int, seed: int) -> str:
    """Continue a text.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        prompt: the text; of a model with a bound, at most half of it is read.
        length: tokens to sample.
        seed: the same one gives the same text.

    Returns:
        The prompt as far as it was read, and its continuation.
    """
    tokens = [start_token_id(tokenizer), *tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]]
    bound = position_bound(model.config)
    if bound:
        tokens = tokens[: max(1, bound // 2)]
        length = min(length, bound - len(tokens))
    set_seed(seed)
    ids = torch.tensor([tokens], device=model.device)
    was_training = model.training
    model.eval()
    found = model.generate(  # pyright: ignore[reportCallIssue]
        ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=length
    )
    model.train(was_training)
    return str(tokenizer.decode(found[0, 1:], skip_special_tokens=True))


def format_summary(metrics: dict[str, Any], continuation: str | None = None) -> str:
    """Format the metrics of the texts "eval" and "test" as a table, and the sampled text below it."""
    found = {name: prefix for name, prefix in (("validation", "eval"), ("test", "test")) if f"{prefix}_loss" in metrics}
    lines = ["", " " * 22 + "".join(f"{name:>14}" for name in found)]
    for row, style in ROWS.items():
        values = [metrics.get(f"{prefix}_{row}") for prefix in found.values()]
        cells = ["" if value is None else style.format(value) for value in values]
        if any(cells):
            lines.append(f"{row.replace('_', ' '):<22}" + "".join(f"{cell:>14}" for cell in cells))
    if continuation is not None:
        lines += ["", "A sample (the first characters are given):", "", continuation]
    return "\n".join(lines)


def opening(text: str) -> str:
    """Return the first words of a text, from its first line that is not blank, as an example of a prompt."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    cut = line[:OPENING].rpartition(" ")[0] if len(line) > OPENING else line
    return cut or line[:OPENING]


def format_end(folder: str, prompt: str, generates: bool) -> str:
    """Say where a run is, and which command comes next.

    Args:
        folder: the folder of the run.
        prompt: an example for a model that generates.
        generates: whether it does; else it is evaluated.
    """
    place = shlex.quote(folder)
    following = f"generate {place} --prompt {shlex.quote(prompt)}" if generates else f"evaluate {place} FILE"
    return "\n".join(
        [
            "",
            f"The run is in {folder}: model, tokenizer and code, README.md about them, all_results.json with the numbers.",
            f"Next: python -m hf_relpos {following}",
        ]
    )


def describe_validation(text: dict[str, Any], evaluated: EvaluationText | None, documents: Dataset | None) -> dict[str, Any]:
    """Describe the scale on which to read the numbers of the validation text.

    Args:
        text: the description of a run's text, as its record has it.
        evaluated: the blocks that were evaluated, if any were.
        documents: the validation text.
    """
    if evaluated is None or documents is None:
        return {}
    whole = text["validation"]
    found = {"eval_source": text["source"], "eval_sha256": whole["sha256"]}
    if evaluated.byte_count == whole["bytes"]:  # else only its first blocks were evaluated
        references = compressed_bits_per_byte(documents)
        found |= {f"eval_{name}_bits_per_byte": value for name, value in references.items()}
    return found
