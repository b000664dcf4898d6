"""Runs of SegmentTrainer in processes of their own, which tests start with torchrun, or kill.

`python segment_script.py RUNS.json`: a list of runs, each `{"folder", "fields", "resume", "kill"}`. Among the fields, `shards` asks
for a stream of so many shards instead of a table. A run leaves
`rank_R.json` with what its process read and what it cost. `kill` ends the process like a power cut, at
`["training_step", n]` in the nth batch or at `["_save_scaler" or "_save_rng_state", n]` in the nth checkpoint.
"""

import json
import os
import signal
import sys
from pathlib import Path

from segments import WatchedTrainer
from segments import logged
from segments import make_documents
from segments import make_model
from segments import make_table
from segments import make_trainer

TRAINING = make_documents(9, 200, 70, 300)
EVALUATION = make_documents(50, 3, 17, 40, 9, 1, 30)


def run(folder, fields, resume=None, kill=None):
    fields = dict(fields)
    text = make_table(TRAINING)
    if shards := fields.pop("shards", 0):
        text = text.to_iterable_dataset(num_shards=shards)
    trainer = make_trainer(
        folder,
        text,
        make_table(EVALUATION, padding=0),
        make_model(hidden_dropout=0.1 if fields.pop("dropout", False) else 0.0),
        trainer=Doomed if kill else WatchedTrainer,
        **fields,
    )
    trainer.doom = kill
    trainer.train(resume_from_checkpoint=resume)
    result = {"ids": trainer.ids, "costs": trainer.costs, "losses": logged(trainer), "evaluation": trainer.evaluate()}
    Path(folder, f"rank_{trainer.args.process_index}.json").write_text(json.dumps(result))
    return trainer


class Doomed(WatchedTrainer):
    """Writes down each cost at once, and is killed where its doom says."""

    def _meet(self, place):
        if self.doom[0] == place:
            self.doom[1] -= 1
            if not self.doom[1]:
                os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, *args, **kwargs):
        self._meet("training_step")
        loss = super().training_step(*args, **kwargs)
        with Path(self.args.output_dir, "costs.txt").open("a") as file:
            file.write(f"{self.costs[-1]}\n")
        return loss

    def _save_scaler(self, output_dir):  # the model and the optimizer are saved, the memory is not
        self._meet("_save_scaler")
        super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        self._meet("_save_rng_state")  # all but the state of the trainer is saved


if __name__ == "__main__":
    for description in json.loads(Path(sys.argv[1]).read_text()):
        run(**description)
