"""The page of clients: what tests say, merged over interpreters, and written as a table."""

from report import LAST
from report import PAGE
from report import Results
from report import merge
from report import page_of
from report import read_last

WORKS = {"result": "works", "peer": False, "version": "peft 1", "date": "2026-01-01"}
ABSENT = {"result": "not at hand", "peer": False}


def test_the_page_is_what_was_found_last() -> None:
    """Not edited by hand, and nothing is red."""
    last = read_last(LAST)
    assert PAGE.read_text(encoding="utf-8") == page_of(last)
    assert not [key for key, cell in last.items() if cell["result"] == "FAILS"]


def test_a_client_that_is_not_installed_keeps_what_another_interpreter_found() -> None:
    lora, ia3, gone = ("peft", "LoRA", "a"), ("peft", "IA3", "a"), ("peft", "gone", "a")
    last: Results = {lora: WORKS, gone: WORKS}
    new: Results = {lora: ABSENT, ia3: ABSENT}
    assert merge(last, new, whole=True) == {lora: WORKS, ia3: ABSENT}
    assert merge(last, new, whole=False) == {lora: WORKS, ia3: ABSENT, gone: WORKS}


def test_a_line_of_the_table() -> None:
    refuses = WORKS | {"result": "refused: a|b"}
    results: Results = {("peft", "LoRA", f"decoder {scheme}"): WORKS for scheme in ("bias", "rotary")}
    results |= {("peft", "LoRA", "memory"): refuses}
    results["peft", "LoRA", "Llama"] = WORKS | {"peer": True, "date": "2026-01-02"}
    line = page_of(results).splitlines()[-1]
    words = "works (decoder bias, rotary)<br>refused: a\\|b (memory) | works (Llama) | peft 1 | 2026-01-01, 2026-01-02"
    assert line == f"| LoRA | {words} |"
