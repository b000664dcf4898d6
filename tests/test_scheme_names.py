"""A scheme's name stands in the registry and in configurations only: other code reads what it wants to know from the class."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

import hf_relpos
from hf_relpos import SCHEMES
from hf_relpos.model.scheme_registry import scheme_class

PACKAGE = pathlib.Path(hf_relpos.__file__).parent
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "scheme_registry.py"]
OTHER_MEANINGS = {
    ("sources.py", "t5"): "a model_type of transformers",
    ("sources.py", "xlnet"): "a model_type of transformers",
    ("scheme_vectors.py", "sinusoidal"): "what a table of Shaw's scheme holds",
    ("scheme_rotary.py", "learned_bias"): "a parameter of PoPE",
    ("mpt.py", "alibi"): "a field of MPT",
    ("falcon.py", "alibi"): "a field of Falcon",
    ("deberta_v2.py", "deberta"): "the prefix of a checkpoint's weights",
    ("transfo_xl.py", "transformer_xl"): "a part of names of weights",
    ("schemes.py", "rope"): "an example on a page of the documentation",
    ("schemes.py", "alibi"): "an example on a page of the documentation",
}
"""Words that happen to be the names of schemes."""


def literals(tree: ast.AST) -> Iterator[str]:
    """Give the strings of a file but docstrings, names of weights, and what a configuration's `position_scheme` is set to."""
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            left_out |= {id(node.value)}
        if isinstance(node, ast.keyword) and node.arg == "position_scheme":
            left_out |= {id(part) for part in ast.walk(node.value)}
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "position_scheme":
                    left_out |= {id(part) for part in ast.walk(value)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "position_scheme":
            left_out |= {id(node.value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.value


def named(text: str) -> list[str]:
    """Return the schemes that a text names: a bare name or a combination, or a name in quotes or before a verb in a message."""
    if "position_schemes." in text:  # the name of a weight, which is what a configuration makes it
        return []
    parts = text.split("+")
    if set(parts) <= SCHEMES.keys():
        return parts
    unmistakable = "|".join(
        name for name in SCHEMES if name not in ("music", "fire", "cope", "nope", "t5", "sandwich", "sinusoidal")
    )
    return re.findall(rf"(?<![\w-])({unmistakable})(?![\w-])", text)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_name_of_a_scheme_outside_the_registry(path: pathlib.Path) -> None:
    found = [(path.name, name) for text in literals(ast.parse(path.read_text())) for name in named(text)]
    assert [word for word in found if word not in OTHER_MEANINGS] == []


@pytest.mark.parametrize(
    "line",
    [
        'if config.position_scheme == "sinusoidal": pass',
        'kind = SCHEMES["nope"]',
        'scheme_class(f"rope+{name}")',
        'raise ValueError(f"xpos scales {span} positions")',
        "raise ValueError(\"position_scheme 'xlnet' is refused\")",
        'NAMES = {"absolute": "learned_absolute"}',
    ],
)
def test_each_kind_of_name_is_found(line: str) -> None:
    assert [name for text in literals(ast.parse(line)) for name in named(text)]


def test_every_scheme_knows_its_name() -> None:
    assert {name: kind.name for name, kind in SCHEMES.items()} == {name: name for name in SCHEMES}
    assert scheme_class("alibi+rope").name == "rope+alibi"
