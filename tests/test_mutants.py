"""The table of `make mutants` fits the code that it breaks."""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))

from table import MUTANTS  # noqa: E402
from table import TESTS  # noqa: E402


def test_every_mutant_replaces_one_piece_by_code() -> None:
    for mutant in MUTANTS:
        text = (ROOT / "hf_relpos" / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.name}: {mutant.old!r} in {mutant.file}"
        changed = text.replace(mutant.old, mutant.new)
        assert changed != text
        compile(changed, mutant.file, "exec")


def test_mutants_are_many_and_have_names_of_their_own() -> None:
    assert len(MUTANTS) >= 120
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1


def test_the_tests_that_are_asked_exist() -> None:
    asked = {name for names in (*TESTS.values(), *(mutant.tests for mutant in MUTANTS)) for name in names}
    assert not [name for name in asked if not (ROOT / "tests" / f"test_{name}.py").is_file()]
    assert {mutant.file for mutant in MUTANTS} == set(TESTS)
