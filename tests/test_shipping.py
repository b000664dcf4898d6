"""The files that travel with a model: what they may import, how the copier reads them, and how long they are.

The copier of transformers reads text, not syntax: it copies the modeling file and each sibling that a line
`from .sibling import name` mentions, flat. Whatever it cannot follow breaks a saved folder.
"""

import ast
import pathlib
import re
import sys
import tokenize

import pytest
from transformers.dynamic_module_utils import get_imports
from transformers.dynamic_module_utils import get_relative_import_files

import hf_relpos
from hf_relpos.model import modeling_relpos
from hf_relpos.model import modeling_relpos_seq2seq

PACKAGE = pathlib.Path(hf_relpos.__file__).parent
MODEL = PACKAGE / "model"
"""What ships, and nothing else."""
MODELING = modeling_relpos_seq2seq.__file__
"""It imports all that any family ships."""
SHIPPED = sorted({pathlib.Path(path) for path in [MODELING, *get_relative_import_files(MODELING)]})
ALLOWED = {"torch", "transformers", "huggingface_hub"}
"""`huggingface_hub` is a part of every transformers installation; `strict` lives there."""
LONG_FILE = {
    "attention.py": 320,
    "configuration_relpos.py": 350,
    "modeling_relpos.py": 700,
    "modeling_relpos_seq2seq.py": 500,
    "transformer_stack.py": 350,
}
LONG_FUNCTION = 70


def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def problems_of(text: str) -> list[str]:
    """What the copier or a bare machine would stumble over in a shipped file."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [f"import {alias.name}" for alias in node.names if not is_allowed(alias.name)]
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 0 and not is_allowed(module):
                found.append(f"from {module} import")
            if node.level > 1:
                found.append("import from a parent folder")
            if node.level == 1 and not module:
                found.append("from . import: names no sibling")
            if node.level == 1 and "." in module:
                found.append(f"from .{module}: not flat")
            if node.level == 1 and any(alias.name == "*" for alias in node.names):
                found.append(f"from .{module} import *")
    real = {node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)}
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r"\s*(from\s+\.|import\s+\.|from\s+\S+\s+import\s|import\s+\w+\s*$)", line) and number not in real:
            found.append(f"line {number} is text that looks like an import: {line.strip()}")
    return found


def is_allowed(module: str) -> bool:
    top = module.split(".")[0]
    return top in sys.stdlib_module_names or top in ALLOWED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_imports_of_shipped_files(path: pathlib.Path) -> None:
    assert problems_of(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "from . import positions",
        "from .sub.positions import Positions",
        "from ..positions import Positions",
        "from .positions import *",
        "from hf_relpos.model.positions import Positions",
        "import hf_relpos",
        "import einops",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from datasets import Dataset",
        "try:\n    import flash_attn\nexcept ImportError:\n    pass",
        '"""Use it so:\n\nfrom .positions import Positions\n"""',
        '"""Use it so:\n\n    from transformers import AutoModel\n"""',
    ],
)
def test_each_problem_is_found(line: str) -> None:
    assert problems_of(line)


def test_what_is_fine_is_left_alone() -> None:
    assert problems_of("from .positions import Positions\nimport math\nfrom torch import nn\nfrom .a import b, c") == []


def test_the_copier_finds_exactly_the_siblings() -> None:
    """What the text search finds is what the syntax says, every file exists, and nothing unshipped is pulled along."""
    names = {path.name for path in SHIPPED}
    for path in SHIPPED:
        nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom) and node.level]
        assert {f"{node.module}.py" for node in nodes} <= names
    assert set(SHIPPED) == {path for path in MODEL.iterdir() if path.suffix == ".py"}


def test_the_folder_of_what_ships_is_what_save_pretrained_writes(tmp_path: pathlib.Path) -> None:
    """A saved encoder-decoder carries all files of `hf_relpos/model`, under their names."""
    config = hf_relpos.RelPosSeq2SeqConfig(
        vocab_size=8, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, pad_token_id=0
    )
    hf_relpos.RelPosSeq2SeqForConditionalGeneration(config).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == {path.name for path in MODEL.glob("*.py")}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_the_import_scanner_asks_for_nothing_else(path: pathlib.Path) -> None:
    """What transformers demands before it loads remote code."""
    assert {name for name in get_imports(str(path)) if not is_allowed(name)} == set()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_lengths(path: pathlib.Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= LONG_FILE.get(path.name, 300), f"{path.name} has {lines} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= LONG_FUNCTION, f"{path.name}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_public_things_are_documented_and_typed(path: pathlib.Path) -> None:
    """Docstrings on public modules, classes and functions; annotations on every argument and result."""
    assert ast.get_docstring(tree_of(path))
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [argument.arg for argument in arguments if not argument.annotation and argument.arg not in ("self", "cls")]
            assert not bare and node.returns, f"{path.name}: {node.name} lacks annotations {bare}"
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_nothing_is_left_unfinished(path: pathlib.Path) -> None:
    with path.open("rb") as file:
        comments = [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    assert not [text for text in comments if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)]


def test_names_of_the_package() -> None:
    """Every class of the modeling files that a user may want is a public name, and `__all__` is true."""
    names = {*vars(modeling_relpos), *vars(modeling_relpos_seq2seq)}
    classes = {name for name in names if re.fullmatch(r"RelPos(Encoder|Decoder|Seq2Seq)(Model|For\w+)", name)}
    assert classes <= set(hf_relpos.__all__)
    assert all(hasattr(hf_relpos, name) for name in hf_relpos.__all__)
