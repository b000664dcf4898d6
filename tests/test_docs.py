"""The README and the pages of docs: their Python runs, their commands are understood, their links lead somewhere.

Nothing is built here: `make docs` does that, strictly.
"""

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from transformers import Seq2SeqTrainingArguments

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderForMaskedLM
from hf_relpos import RelPosSeq2SeqConfig
from hf_relpos.__main__ import build_parser
from hf_relpos.data.tokenizers import build_byte_tokenizer
from hf_relpos.evaluation.plan import read_comparison
from hf_relpos.model.scheme_registry import SCHEMES
from hf_relpos.training.arguments import DataArguments
from hf_relpos.training.arguments import RunArguments
from hf_relpos.training.arguments import parse_arguments
from hf_relpos.training.tasks import TaskArguments
from hf_relpos.training.tasks import parse_task

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
README_ORDER = (
    "Install",
    "Train and load in ten lines",
    "Choose a scheme",
    "Your own text",
    "Fine-tune, with metrics",
    "Segment memory",
    "Checkpoints of other models",
    "The Hub",
    "Results and cost",
    "What others do better",
    "Where to read on",
)
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
EXTRA = {"peft", "trl", "onnxruntime"}
"""Packages that a page may use, but the tests do without."""
NAMED: dict[str, dict[str, Any]] = {
    "README.md": {
        "segment": torch.tensor([[5, 6, 7]]),
        "memory": None,
        "long_text_ids": torch.arange(200)[None],
        "question_ids": torch.tensor([[1, 2]]),
    },
    "docs/how-to/permutation.md": {
        "segment": torch.tensor([[5, 6]]),
        "memory": None,
        "perm_mask": torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]),
        "target_mapping": torch.tensor([[[0.0, 1.0]]]),
        "labels": torch.tensor([[6]]),
    },
}
"""What the text around a block speaks of, but does not make."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def prose_of(page: Path) -> str:
    """Return a page without its code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def test_the_readme_is_short_and_in_order() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 200 and len(text.split()) <= 1800
    assert tuple(re.findall(r"^## (.*)", text, flags=re.MULTILINE)) == README_ORDER


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "python")], ids=name_of)
def test_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks run one after another, as they stand there, with one step of training, on tiny folders."""
    blocks = blocks_of(page, "python")
    imported = {name.split(".")[0] for block in blocks for name in imports_of(block)}
    for package in sorted(EXTRA & imported):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "README.md", tmp_path)
    complete = transformers.TrainingArguments.__post_init__

    def one_step(arguments: Any) -> None:
        arguments.max_steps, arguments.report_to = 1, []
        complete(arguments)

    monkeypatch.setattr(transformers.TrainingArguments, "__post_init__", one_step)
    pushed = []
    for kind in (transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase):
        monkeypatch.setattr(kind, "push_to_hub", lambda self, name: pushed.append(name))
    known = dict(SCHEMES)
    make_folders()
    space = dict(NAMED.get(name_of(page), {}))
    try:
        for block in blocks:
            exec(compile(block, name_of(page), "exec"), space)
    finally:
        SCHEMES.clear()
        SCHEMES.update(known)
    assert len(pushed) == sum(block.count("push_to_hub(") for block in blocks)


def imports_of(code: str) -> list[str]:
    """Return the modules that a piece of Python imports."""
    nodes = list(ast.walk(ast.parse(code)))
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return named + [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]


def make_folders() -> None:
    """Save tiny models under the names of the folders that pages load."""
    tokenizer = build_byte_tokenizer()
    tokens = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    sizes = {"vocab_size": len(tokenizer), **tokens, **TINY}
    for folder, model in (
        ("runs/first", RelPosDecoderForCausalLM(RelPosDecoderConfig(**sizes))),
        ("runs/base_encoder", RelPosEncoderForMaskedLM(RelPosEncoderConfig(**sizes))),
    ):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    Path("texts.csv").write_text("text,label\n" + '"def f(x): return x",0\n"Once upon a time",1\n' * 8, encoding="utf-8")


def commands() -> list[Any]:
    """Collect the commands of all pages: what stands on a line of a bash block, without its comment."""
    found: dict[str, str] = {}
    for page in PAGES:
        for line in "".join(blocks_of(page, "bash")).splitlines():
            for command in line.split("  #")[0].split(";"):
                found.setdefault(command.strip(), name_of(page))
    return [pytest.param(command, id=f"{page}: {command}") for command, page in found.items() if command]


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_pages_are_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments exist and have such values; files of the repository exist. Nothing is trained."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(command, comments=True)
    if words[0] == "torchrun":
        words = ["python", *words[words.index("train_lm.py") :]]
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert all(word in targets for word in words[1:] if "=" not in word)
    elif words[:2] == ["python", "train_lm.py"]:
        parse_arguments(words[2:])
    elif words[:3] == ["python", "-m", "hf_relpos"]:
        cut = words.index("--") if "--" in words else len(words)
        understood = build_parser().parse_args(words[3:cut], argparse.Namespace(rest=words[cut + 1 :]))
        if understood.command == "compare" and not understood.vary:
            read_comparison(understood.config)
        elif understood.command == "compare":
            parse_arguments([understood.config, *understood.rest])
    elif words[0] == "python" and words[1].startswith("examples/"):
        assert Path(words[1]).is_file()
        parse_task(words[2:], Seq2SeqTrainingArguments, output_dir="runs")
    elif words[0] == "python" and words[1].endswith(".py"):
        script = (ROOT / words[1]).read_text(encoding="utf-8")
        assert all(word in script for word in words[2:] if word.startswith("--"))
    else:
        assert words[0] in ("python", "source", "pip", "head", "tail", "pre-commit"), "a command that no test knows"


def test_the_comparison_of_the_tutorial_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, labelled = blocks_of(DOCS / "tutorials" / "compare.md", "yaml")
    monkeypatch.chdir(tmp_path)
    Path("my_texts").mkdir()
    Path("my_texts/a.txt").write_text("Once upon a time there was a king.\n" * 40, encoding="utf-8")
    for folder, name, row in (
        ("wordnet", "glosses.tsv", "noun.animal\tcat\ta small animal {0}\nverb.motion\trun\tto move {0} miles\n"),
        (
            "ud_english_ewt",
            "en_ewt-ud-dev.conllu",
            "1\tDogs\tdog\tNOUN\t_\t_\t0\troot\t_\t_\n2\tbark\tbark\tVERB\t_\t_\t0\troot\t_\t_\n\n",
        ),
    ):
        Path(folder).mkdir()
        Path(folder, name).write_text("".join(map(row.format, range(40))), encoding="utf-8")
    shutil.copy("ud_english_ewt/en_ewt-ud-dev.conllu", "ud_english_ewt/en_ewt-ud-test.conllu")
    Path("my_comparison.yaml").write_text(block + labelled, encoding="utf-8")
    comparison = read_comparison("my_comparison.yaml")
    assert comparison.tasks == ["text", "text_memory", "recall", "part_of_speech", "tags"] and len(comparison.cells) == 60


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_arguments_in_the_text_exist(page: Path) -> None:
    """Those of `train_lm.py` and of the commands, wherever a sentence names one."""
    parsers = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)).choices
    known = {option for parser in parsers.values() for action in parser._actions for option in action.option_strings}
    known |= {f"--{field.name}" for group in (TaskArguments, DataArguments, RunArguments) for field in fields(group)}
    assert {*re.findall(r"`(--\w[\w-]*)", page.read_text(encoding="utf-8"))} <= known


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that headings make, as GitHub and MkDocs name them."""
    headings = re.findall(
        r"^#+ (.*)", re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S), flags=re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), target
        assert DOCS not in page.parents or DOCS in file.parents, f"{target} is outside of the site"
        assert not anchor or anchor in anchors_of(file), target


def hooks() -> Any:
    """Import the module that MkDocs asks."""
    spec: Any = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_once() -> None:
    nav = hooks().expand(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"], DOCS)

    def leaves(entry: Any) -> list[str]:
        below = entry.values() if isinstance(entry, dict) else entry
        return [entry] if isinstance(entry, str) else [leaf for part in below for leaf in leaves(part)]

    assert sorted(leaves(nav)) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_the_reference_names_what_exists() -> None:
    names = re.findall(r"^::: (\S+)", "".join(path.read_text() for path in DOCS.rglob("*.md")), flags=re.MULTILINE)
    assert len(names) > 10
    for given in names:
        name = given if given.startswith("hf_relpos.") else f"hf_relpos.model.{given}"  # `paths` of mkdocs.yml
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name


def test_the_config_fields_are_written_from_the_code() -> None:
    """Every field that a family adds to those of transformers has a row."""
    text = hooks().on_page_markdown((DOCS / "reference" / "config.md").read_text(encoding="utf-8"))
    usual = {field.name for field in fields(transformers.PreTrainedConfig)} | {"layer_types", "is_encoder_decoder"}
    tokens = {"pad_token_id", "bos_token_id", "eos_token_id"}
    for family in (RelPosDecoderConfig, RelPosEncoderConfig, RelPosSeq2SeqConfig):
        for name in {field.name for field in fields(family)} - usual - tokens:
            assert f"| `{name}` | " in text, name
    assert "<!--" not in text


def test_the_command_line_is_written_from_the_code() -> None:
    text = hooks().on_page_markdown((DOCS / "reference" / "command-line.md").read_text(encoding="utf-8"))
    for words in ("| `--mem_len` |", "| `--train_file` |", "| `--lane_groups` |", "### compare", "--vary"):
        assert words in text
    assert "<!--" not in text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_use_the_terms_of_the_field(page: Path) -> None:
    """Baseline and target, not this project's old words for them."""
    assert not re.findall(r"\bfloors?\b|\baims?\b", prose_of(page), flags=re.IGNORECASE)


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """As far as words tell: none begins with what a description begins with."""
    other = {
        "A",
        "All",
        "An",
        "As",
        "Each",
        "Every",
        "How",
        "Its",
        "No",
        "The",
        "This",
        "What",
        "Where",
        "Whether",
        "Which",
        "Who",
    }
    wrong = []
    for path in sorted((ROOT / "hf_relpos").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                first = re.match(r"[A-Z][a-z]+(?=[ ,;:.])", text)
                if first is None or first[0] in other:
                    wrong.append(f"{path.name}, {node.name}: {text.splitlines()[0]}")
    assert not wrong
