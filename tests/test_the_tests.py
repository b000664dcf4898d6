"""The tests themselves: each of them asserts something."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ASSERTS = ("assert", "raises", "warns", "deprecated_call", "fail")
"""How names of functions begin, or what they are, that fail by themselves: `assert_close`, `assertEqual`, `pytest.raises`."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_in(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def mentions(function: Function) -> set[str]:
    """The names of what a function calls, or hands to something that calls it."""
    names = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    return names | {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


def fails_by_itself(function: Function) -> bool:
    """Whether a function says what must hold."""
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    names = (call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls)
    return any(isinstance(node, ast.Assert) for node in ast.walk(function)) or any(
        name in ASSERTS or name.startswith("assert") for name in names
    )


def silent_tests(sources: dict[str, str]) -> list[str]:
    """The tests among files, by name, that assert nothing, neither themselves nor by a function of these files that they call.

    Functions are known by their names alone, so one that asserts lends its name to all others of that name.
    """
    found = [(file, function) for file, source in sources.items() for function in functions_in(ast.parse(source))]
    speaking, before = {function.name for _, function in found if fails_by_itself(function)}, -1
    while len(speaking) > before:
        before = len(speaking)
        speaking |= {function.name for _, function in found if not speaking.isdisjoint(mentions(function))}
    tests = [
        (file, function)
        for file, function in found
        if function.name.startswith("test_") and Path(file).name.startswith("test_")  # pytest collects no others
    ]
    return [
        f"{file}::{function.name}"
        for file, function in tests
        if not fails_by_itself(function) and speaking.isdisjoint(mentions(function))
    ]


def test_every_test_asserts_something() -> None:
    files = [path for path in sorted(FOLDER.rglob("*.py")) if "fixtures" not in path.parts]
    silent = silent_tests({str(path.relative_to(FOLDER)): path.read_text(encoding="utf-8") for path in files})
    assert not silent, f"these tests can only fail by an error: {silent}"


@pytest.mark.parametrize(
    ("body", "silent"),
    [
        ("model(ids)", True),
        ("assert model(ids)", False),
        ("torch.testing.assert_close(a, b)", False),
        ("with pytest.raises(ValueError): model(ids)", False),
        ("helper()", False),
        ("other()", True),
        ("run(helper)", False),
    ],
)
def test_what_counts_as_asserting(body: str, silent: bool) -> None:
    helpers = "def check():\n    assert 1\ndef helper():\n    check()\ndef other():\n    model()\n"
    assert bool(silent_tests({"test_x.py": f"{helpers}def test_it():\n    {body}\n"})) is silent
