"""Two processes (gloo) that take one step with every row of `machines.py` by every engine, and save what comes of it.

One process imports everything and then splits into two, since the imports cost more than the steps.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import machines
import torch
from machines import ENGINES
from machines import ROWS
from safetensors.torch import save_file
from segments import logged
from torch import distributed
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from hf_relpos import RelPosDecoderForCausalLM


def share(rank: int, engine: str, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this process's half of a batch; all of it where both compute all rows."""
    return values if engine == "tp" else {name: value[2 * rank : 2 * rank + 2] for name, value in values.items()}


def step(rank: int, root: Path, row: machines.Row, engine: str) -> None:
    """Take one step, and save loss and memory of this process, and the model in whole files and in sharded ones."""
    options: dict[str, Any] = {"distributed_config": DistributedConfig(**ENGINES[engine])} if ENGINES[engine] else {}
    before, after = machines.folder_of(root, row), machines.folder_of(root, row, engine)
    model = row.head.kind.from_pretrained(before, dtype=torch.float64, **options).train()
    runs = model if options else DistributedDataParallel(model)
    segments = row.segments()
    # Engines that divide the rows take the mean over processes of gradients, not the sum.
    targets = row.targets(segments[1]) / (1 if engine == "tp" else 2)
    own = [share(rank, engine, segment) for segment in segments]
    loss, memory = machines.run_segments(runs, row, own, targets)
    machines.take_step(model, loss)
    with torch.no_grad():  # with the new weights
        after_step = machines.run_segments(runs, row, own, targets)[0]
    found = {"loss": loss.detach(), "after_step": after_step} | (
        {} if memory is None else {"memory": memory.hidden.contiguous(), "length": memory.length}
    )
    model.save_pretrained(after, is_main_process=rank == 0)
    if options and row.shards:
        model.save_pretrained(f"{after}-sharded", distributed_checkpoint=True)
    distributed.barrier()
    save_file(found, after / f"found_{rank}.safetensors")


def train_lanes(rank: int, root: Path) -> None:
    """Let `SegmentTrainer` train a model that is sharded, and keep what it logged; and why a vocabulary of 37 cannot be."""
    sharded = {"distributed_config": DistributedConfig(fsdp_size=2)}
    trainer = machines.lane_trainer(
        root / "lanes", RelPosDecoderForCausalLM.from_pretrained(root / "lanes", **sharded), 4, ddp_backend="gloo"
    )
    trainer.train()
    found = {"losses": logged(trainer), "evaluation": trainer.evaluate()["eval_loss"]}
    try:
        RelPosDecoderForCausalLM.from_pretrained(root / "uneven", **sharded)
    except ValueError as error:
        found["refused"] = str(error)
    (root / f"lanes_{rank}.json").write_text(json.dumps(found))


def work(rank: int, root: Path) -> None:
    """Take all steps as one of the two."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost")
    torch.set_num_threads(1)
    disable_progress_bar()
    distributed.init_process_group("gloo", f"file://{root}/meeting", rank=rank, world_size=2)
    for row in ROWS:
        for engine in row.engines:
            step(rank, root, row, engine)
    train_lanes(rank, root)
    distributed.destroy_process_group()


if __name__ == "__main__":
    gc.freeze()
    multiprocessing.start_processes(work, (Path(sys.argv[1]),), nprocs=2, start_method="fork")
