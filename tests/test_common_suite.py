"""Four rows of transformers' common model tests, and the gates that keep a skip from hiding a fault; `make suite` runs all rows."""

import os
import pathlib
import subprocess
import sys

import pytest

COMMON = pathlib.Path(__file__).parent / "common_suite"
sys.path.append(str(COMMON))

from build_suite import NoSourceDistribution  # noqa: E402
from build_suite import suite_folder  # noqa: E402
from run_suite import run_rows  # noqa: E402
from skip_gates import ALLOWED  # noqa: E402
from skip_gates import allowed  # noqa: E402


@pytest.mark.parametrize("row", ["Decoder_rope", "Decoder_transformer_xl_memory", "Encoder_t5", "Seq2Seq_t5"])
def test_row(row: str) -> None:
    try:
        suite = suite_folder()
    except NoSourceDistribution as error:
        pytest.skip(str(error))
    done = run_rows(suite, [row], [], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"| {row} |" in done.stdout


def test_a_skip_without_a_reason_fails_the_run(tmp_path: pathlib.Path) -> None:
    """A skipped test, a skipped subtest and a failed subtest count, each in its row; an allowed skip and a passed test do not."""
    (tmp_path / "test_rows.py").write_text(
        "import unittest\n"
        "class TestFine(unittest.TestCase):\n"
        "    def test_passes(self): pass\n"
        "    def test_vision_axial_rope(self): self.skipTest('has no axial RoPE layer defined.')\n"
        "class TestHidden(unittest.TestCase):\n"
        "    def test_embeds(self): self.skipTest('does not use inputs_embeds')\n"
        "    def test_parts(self):\n"
        "        with self.subTest('first'): self.skipTest('not today')\n"
    )
    wanted = {"TestFine": 0, "TestHidden": 1}
    for row, code in wanted.items():
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "skip_gates", "-c", os.devnull, f"{tmp_path}/test_rows.py::{row}"],
            env=os.environ | {"PYTHONPATH": str(COMMON)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout
    assert "Hidden::test_embeds: does not use inputs_embeds" in done.stdout
    assert "Hidden::test_parts [first]: not today" in done.stdout


@pytest.mark.parametrize(
    "name, reason",
    [
        ("Seq2Seq_t5::test_bc_cache_name_forward [RelPosSeq2SeqModel]", "Do not take a cache as input to forward"),
        ("Decoder_rope::test_bc_cache_name_forward [RelPosDecoderForCausalLM]", "Do not take a cache as input to forward"),
        ("Decoder_rope::test_causal_lm_loss_honors_shift_labels", "No decoder-only language modeling head to check"),
        ("Seq2Seq_t5::test_encoder_decoder_loss_no_double_shift", "No sequence-to-sequence language modeling head to check"),
        ("Decoder_rope::test_tp_plan_matches_params", "Model does not have a TP plan."),
        ("Decoder_rope::test_can_init_all_missing_weights", "Not a prioritized model for now."),
        ("Decoder_rope::test_torch_compile_for_training", "TestX doesn't have the attribute `_torch_compile_train_cls`."),
    ],
)
def test_a_closed_gate_is_no_allowed_skip(name: str, reason: str) -> None:
    assert not allowed(name, reason)


def test_the_page_names_the_reason_of_every_allowed_skip() -> None:
    page = (pathlib.Path(__file__).parents[1] / "docs/reference/common-suite.md").read_text()
    assert [skip.why for skip in ALLOWED if f"| {skip.why} |" not in page] == []
