"""Two processes (gloo) that train every head with every kind of scheme by Trainer, and write the updates of their weights.

One process imports everything and then splits into two, since the imports cost more than the training.
"""

import gc
import os
import pathlib
import sys

import seams
import torch
from safetensors.torch import save_file
from torch import distributed
from torch import multiprocessing


def train(rank: int, folder: pathlib.Path) -> None:
    """Train all models as one of the two."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    for cell in seams.CELLS:
        for name, model, data in seams.losses(cell):
            two = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
            update = seams.update_by_trainer(model, data, str(folder), **two)
            if rank == 0:
                save_file(update, folder / f"{cell.name}-{name}.safetensors")
    distributed.destroy_process_group()


if __name__ == "__main__":
    gc.freeze()  # each training collects garbage, which takes longer than the training
    multiprocessing.start_processes(train, (pathlib.Path(sys.argv[1]),), nprocs=2, start_method="fork")
