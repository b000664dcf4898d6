"""The model card of a run, written from what stands in its folder: arguments, text, numbers and sample."""

import json
from pathlib import Path
from string import Template
from typing import Any

import yaml
from huggingface_hub import EvalResult
from huggingface_hub import ModelCard
from huggingface_hub import ModelCardData
from safetensors import safe_open
from transformers import AutoConfig
from transformers import PreTrainedConfig

from hf_relpos.evaluation.language_model import position_bound
from hf_relpos.evaluation.page import code_block
from hf_relpos.evaluation.page import code_span
from hf_relpos.evaluation.page import plain
from hf_relpos.training.arguments import DataArguments
from hf_relpos.training.arguments import ModelArguments
from hf_relpos.training.arguments import RunArguments
from hf_relpos.training.model_setup import is_masked
from hf_relpos.training.run_folder import SAMPLE
from hf_relpos.training.run_folder import WATCHED
from hf_relpos.training.run_folder import describe_run
from hf_relpos.training.run_folder import read_record

# In an installed package the template lies beside this file, in the repository in its own folder.
TEMPLATES = (
    Path(__file__).parent / "model_card_template.md",
    Path(__file__).parents[2] / "model_cards" / "template.md",
)

# Settings that say how a run was watched and published, not how the model came about.
LEFT_OUT = (*WATCHED, "eval_", "save_", "load_")

METRICS = {
    "loss": "loss (nats a token)",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "gzip_bits_per_byte": "bits per byte of `gzip -9`",
    "xz_bits_per_byte": "bits per byte of `xz -9`",
    "accuracy": "token accuracy",
}


def write_model_card(folder: str | Path) -> Path:
    """Write `README.md` of a run's folder.

    Args:
        folder: holds the model, `run_arguments.json` and, once it was evaluated, `all_results.json`.

    Returns:
        The path of the card.
    """
    folder = Path(folder)
    record, config = read_record(folder), AutoConfig.from_pretrained(folder)
    results = folder / "all_results.json"
    numbers = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else {}
    name = folder.resolve().name
    template = Template(next(path for path in TEMPLATES if path.is_file()).read_text(encoding="utf-8"))
    body = template.substitute(
        title=plain(name),
        introduction=_introduction(folder, config),
        usage=_usage(config, record.get("prompt", "import ")),
        text=_text(record["text"]),
        results=_results(numbers),
        sample=_sample(folder),
        arguments=_arguments(record),
        limits=_limits(record, config),
    )
    path = folder / "README.md"
    ModelCard(f"---\n{_metadata(name, config, record, numbers).to_yaml()}\n---\n\n{body}").save(path)
    return path


def _metadata(name: str, config: PreTrainedConfig, record: dict[str, Any], numbers: dict[str, Any]) -> ModelCardData:
    task = "fill-mask" if is_masked(config) else "text-generation"
    source = record["text"]["source"]
    values = {metric: numbers.get(f"eval_{metric}") for metric in ("loss", "perplexity", "bits_per_byte", "accuracy")}
    results = [
        EvalResult(
            task_type=task,
            dataset_type=record["data"]["dataset_name"] or "text",
            dataset_name=f"validation part of {source}",
            metric_type=metric,
            metric_value=round(value, 5),
        )
        for metric, value in values.items()
        if value is not None
    ]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        tags=["hf_relpos", config.model_type, *_schemes(config)],
        model_name=name,
        eval_results=results or None,
        base_model=_base_model(record),
    )


def _base_model(record: dict[str, Any]) -> Any:
    """Return the model of the Hub that a run goes on from, perhaps by way of a folder; None for a model of its own."""
    name = record["model"]["model_name_or_path"]
    if not name or not Path(name).is_dir():
        return None if "model_sha256" in record.get("start", {}) else name  # a folder that is gone is no name of the Hub
    card = Path(name, "README.md")
    return ModelCard.load(card, ignore_metadata_errors=True).data.to_dict().get("base_model") if card.is_file() else None


def _schemes(config: PreTrainedConfig) -> list[str]:
    schemes = getattr(config, "position_scheme", [])
    return [schemes] if isinstance(schemes, str) else sorted(set(schemes))


def _introduction(folder: Path, config: PreTrainedConfig) -> str:
    kind = "masked" if is_masked(config) else "causal"
    schemes = " and ".join(f"`{scheme}`" for scheme in _schemes(config))
    shape = f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads"
    memory = f" It carries {config.mem_len} tokens of segment memory." if getattr(config, "mem_len", 0) else ""
    positions = f" Its position scheme is {schemes}." if schemes else ""
    return (
        f"A {kind} language model (`{config.model_type}`) of {_count_parameters(folder):,} parameters: {shape}, "
        f"{config.vocab_size:,} tokens.{positions}{memory}"
    )


def _count_parameters(folder: Path) -> int:
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  not a dict
                size = 1
                for length in weights.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def _usage(config: PreTrainedConfig, prompt: str) -> str:
    auto = "AutoModelForMaskedLM" if is_masked(config) else "AutoModelForCausalLM"
    lines = [
        f"from transformers import AutoTokenizer, {auto}",
        "",
        'folder = "."  # this folder, or its name on the Hub',
        "tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)",
        f"model = {auto}.from_pretrained(folder, trust_remote_code=True)",
    ]
    if is_masked(config):
        lines += [
            f'inputs = tokenizer({prompt!r} + tokenizer.mask_token, return_tensors="pt")',
            "print(tokenizer.decode(model(**inputs).logits.argmax(-1)[0]))",
        ]
    else:
        lines += [
            f'inputs = tokenizer(tokenizer.bos_token + {prompt!r}, return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**inputs, do_sample=True)[0]))",
        ]
    return "\n".join(lines)


def _text(text: dict[str, Any]) -> str:
    lines = [f"Source: {plain(text['source'])}.", "", "| split | documents | bytes | SHA-256 |", "|---|---:|---:|---|"]
    splits = {split: found for split, found in text.items() if split != "source"}
    for split, found in splits.items():
        count = f"{found['documents']:,}" if "documents" in found else f"in {found['files']:,} files, streamed"
        lines.append(f"| {split} | {count} | {found['bytes']:,} | `{found['sha256']}` |")
    for split, found in splits.items():
        if left_out := found.get("left_out"):
            lines += ["", f"Left out of the {split} text: {', '.join(f'{count:,} {why}' for why, count in left_out.items())}."]
        if shared := found.get("also_in_training"):
            lines += ["", f"Of the {split} text, {shared['bytes']:,} bytes stand in the training text, too."]
    return "\n".join(lines)


def _results(numbers: dict[str, Any]) -> str:
    found = {name: prefix for name, prefix in (("validation", "eval"), ("test", "test")) if f"{prefix}_loss" in numbers}
    if not found:
        return "Not evaluated."
    lines = ["| | " + " | ".join(found) + " |", "|---|" + "---:|" * len(found)]
    for metric, label in METRICS.items():
        values = [numbers.get(f"{prefix}_{metric}") for prefix in found.values()]
        cells = ["" if value is None else f"{value:.4f}" for value in values]
        if any(cells):
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    for name, prefix in found.items():
        if reason := numbers.get(f"{prefix}_no_bits_per_byte"):
            lines += ["", f"No bits per byte of the {name} text: {reason}."]
    lines += ["", "Every token counts once and weighs the same; documents are read in consecutive blocks."]
    return "\n".join(lines)


def _sample(folder: Path) -> str:
    path = folder / SAMPLE
    if not path.is_file():
        return ""
    text = path.read_text(encoding="utf-8")
    return f"A sample, not selected; its first characters are given:\n\n{code_block(text, 'text')}\n"


def _arguments(record: dict[str, Any]) -> str:
    usual = describe_run(ModelArguments(), DataArguments(), RunArguments(), {})
    settings = {
        name: value
        for group in ("model", "data", "training")
        for name, value in record[group].items()
        if value != usual[group].get(name) and not name.startswith(LEFT_OUT)
    }
    for name in ("config_overrides", "position_parameters"):
        if name in settings:
            settings[name] = json.loads(settings[name])
    lines = yaml.safe_dump(settings, sort_keys=True, allow_unicode=True)
    text = f"With `train_lm.py` of hf_relpos and these settings; the rest has its defaults:\n\n{code_block(lines, 'yaml')}"
    resumed = (
        f"\n\nAt step {entry['step']} it was resumed with other settings: {_changes(entry['changed'])}."
        for entry in record.get("resumed", [])
    )
    return _parent(record) + text + "".join(resumed)


def _changes(changed: dict[str, Any]) -> str:
    return ", ".join(f"`{name}` from {plain(repr(old))} to {plain(repr(new))}" for name, (old, new) in changed.items())


def _parent(record: dict[str, Any]) -> str:
    """Say which model the run goes on from, and what it changed of it."""
    name, start = record["model"]["model_name_or_path"], record.get("start", {})
    if not name:
        return ""
    digest = start.get("model_sha256")
    shown = f"{code_span(Path(name).name)} (a folder, SHA-256 `{digest}`)" if digest else code_span(name)
    text = f"It was trained further from {shown}."
    if changed := start.get("changed"):
        text += f" Changed: {_changes(changed)}. All weights were kept but those of positions that are new."
    return f"{text}\n\n"


def _limits(record: dict[str, Any], config: PreTrainedConfig) -> str:
    block = record["data"]["block_size"]
    lines = [
        f"- It knows only the text above. It was trained on blocks of {block} tokens; how well it uses more context "
        "was not measured here.",
        "- It is a small model for research on position schemes: what it writes may be wrong, or copied from its "
        "text, and was checked by nobody.",
        "- The numbers hold for this text, this tokenizer and one seed. Of models with different tokenizers only the "
        "bits per byte compare.",
        "- The licence of the training text may bear on the weights.",
    ]
    bound = position_bound(config)
    if bound:
        lines.insert(1, f"- Its positions are learned: it takes at most {bound} tokens at once and refuses more.")
    return "\n".join(lines)
