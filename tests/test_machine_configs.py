"""The example configurations for several machines, and the numbers of the plan in docs/how-to/scale.md."""

from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils.deepspeed import HfDeepSpeedConfig

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM

ROOT = Path(__file__).parents[1]
PLAN = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "intermediate_size": 8192,
    "position_scheme": "transformer_xl",
    "mem_len": 1024,
}
"""The decoder of the page."""


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_accelerate_reads_its_examples(name: str) -> None:
    config = load_config_from_file(str(ROOT / "configs/accelerate" / f"{name}.yaml"))
    assert (config.num_processes, config.mixed_precision) == (64, "bf16")
    assert config.distributed_type == {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}[name]
    assert name == "ddp" or config.fsdp_config["fsdp_version"] == 2


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_reads_the_examples_for_deepspeed(stage: int) -> None:
    """DeepSpeed itself is not installed: only its file is read."""
    config = HfDeepSpeedConfig(str(ROOT / "configs/deepspeed" / f"zero{stage}.json"))
    assert config.config["zero_optimization"]["stage"] == stage and config.is_zero3() == (stage == 3)


def test_the_page_counts_the_plan() -> None:
    """Parameters, memory and checkpoints of the plan, in the numbers of the page."""
    with torch.device("meta"):
        model = RelPosDecoderForCausalLM(RelPosDecoderConfig(**PLAN))
    count = sum(weight.numel() for weight in model.parameters())
    memory = 8 * PLAN["num_hidden_layers"] * PLAN["mem_len"] * PLAN["hidden_size"] * 4  # 8 lanes a device in float32
    page = (ROOT / "docs/how-to/scale.md").read_text()
    for number in (
        f"{count:,}",
        f"{count * 16 / 2**30:.1f} GiB",
        f"{count * 16 / 64 / 2**30:.2f} GiB",
        f"{memory / 2**30:.2f} GiB",
    ):
        assert number in page, number
    assert f"{count * 4 / 2**30:.1f} GiB" in page and f"{count * 12 / 2**30:.1f} GiB" in page
