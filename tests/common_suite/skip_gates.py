"""Count the common tests by row, and fail a run for every skip that has no reason here: a plugin of pytest.

A failed subtest fails its test. A skip is no failure to pytest, so it can hide one: a tester that lacks an attribute, a class
that is registered nowhere.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest


class Allowed(NamedTuple):
    """A skip that hides nothing: the tests, what they say when they skip, and why that is right."""

    tests: str
    says: str
    why: str


ALLOWED = [
    Allowed(
        "",
        "test requires (multiple )?(accelerator|Flash Attention|the kernels library|MPS|deepspeed)|requires a Nvidia or AMD GPU",
        "the machine has no such device or package",
    ),
    Allowed(
        "test_generation_tester_mixin_inheritance",
        "GenerationTesterMixin",
        "the mixin is not in the source distribution; tests/test_decoding.py and tests/test_generate.py test `generate`",
    ),
    Allowed(
        "composite|test_internal_model_config_and_subconfig",
        "not a composite model|not composite|No subconfigs|does not support SDPA",
        "no model is made of models with configurations of their own",
    ),
    Allowed(
        "grouped_inference|router_logits",
        "does not support grouped_mm|no sparse experts|no `output_router_logits`",
        "no model has experts",
    ),
    Allowed(
        "test_reverse_loading_mapping|test_can_load_from_already_mapped_keys",
        "No conversion found",
        "saved names are the model's own; other checkpoints come by `python -m hf_relpos convert`",
    ),
    Allowed("test_keep_in_fp32_modules", "_keep_in_fp32_modules", "no weights stay in float32; formulas are computed in it"),
    Allowed(
        r"test_bc_cache_name_forward \[RelPos(Encoder|.*For(Sequence|Token)Classification|.*ForQuestionAnswering)",
        "Do not take a cache",
        "encoders and heads that do not generate keep none",
    ),
    Allowed("^(Encoder|Decoder).*no_double_shift", "No sequence-to-sequence", "only encoder-decoders have such a head"),
    Allowed("^(Encoder|Seq2Seq).*honors_shift_labels", "No decoder-only", "only decoders have such a head"),
    Allowed(
        "test_model_rope",
        "does not support RoPE scaling|does not have RoPE",
        "`position_parameters` says what `rope_parameters` says elsewhere; tests/test_parity_schemes.py compares all types with Llama",
    ),
    Allowed("test_vision_axial_rope", "no axial RoPE", "no model sees images"),
    Allowed(
        "test_resize_position_vector_embeddings",
        "does not have position embeddings",
        "learned positions are not resized, nor are they in BERT and GPT-2",
    ),
    Allowed(
        "test_sliding_window_mask",
        "sliding window mask",
        "there is no `use_sliding_window`: `sliding_window=None` turns it off; tests/test_backends.py tests windows",
    ),
    Allowed(
        r"^Seq2Seq.*specific_layers_hidden_states \[",
        "uses another name",
        "encoder-decoders name them `encoder_hidden_states` and `decoder_hidden_states`, as T5 does",
    ),
    Allowed(
        "^Encoder_permutation.*test_torch_compile_for_training",
        "_torch_compile_train_cls",
        "the test gives labels without targets; tests/test_permutation.py compiles this head",
    ),
]
"""All skips that are allowed. Both patterns are searched for; a test is named `Row::test_name`, a subtest `... [its name]`."""


def name_of(report: pytest.TestReport) -> str:
    """Return the row and the name of a test, and of the subtest."""
    context = getattr(report, "context", None)
    subtest = "" if context is None else f" [{context.msg or ', '.join(map(str, context.kwargs.values()))}]"
    return report.nodeid.split("::Test", 1)[-1] + subtest


def reason_of(report: pytest.TestReport) -> str:
    """Return what a skipped test says."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def allowed(name: str, reason: str) -> bool:
    """Return whether a skip is in the list."""
    return any(re.search(skip.tests, name) and re.search(skip.says, reason) for skip in ALLOWED)


class Gates:
    """Collect the results of the tests, from all workers."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.forbidden: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        subtest = hasattr(report, "context")
        if report.passed and (report.when != "call") or not subtest and report.when == "teardown" and not report.failed:
            return
        row = report.nodeid.split("::")[1].removeprefix("Test")
        self.counts.setdefault(row, Counter())[("subtests " if subtest else "") + report.outcome] += 1
        if report.skipped and not allowed(name_of(report), reason_of(report)):
            self.forbidden.append(f"{name_of(report)}: {reason_of(report)}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        if self.forbidden and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        yield

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        names = ["passed", "skipped", "failed", "subtests passed", "subtests skipped", "subtests failed"]
        terminalreporter.section("rows")
        terminalreporter.line(f"| row | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
        for row, counts in sorted(self.counts.items()):
            terminalreporter.line(f"| {row} | {' | '.join(str(counts[name]) for name in names)} |")
        if self.forbidden:
            terminalreporter.section("skips without a reason in skip_gates.py", red=True)
            for line in self.forbidden:
                terminalreporter.line(line)


def pytest_configure(config: pytest.Config) -> None:
    """Collect where the results come together."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Gates())
