"""Trainer that stops when numbers are no longer finite, and that writes and takes whole checkpoints only.

The stock Trainer logs 0.0 for a loss that is not a number, trains to the end, and rotates the good checkpoints away meanwhile. It
begins anew whatever a checkpoint lacks, without a word.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from typing import NoReturn

import numpy as np
import torch
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import PushInProgress

from hf_relpos.training.best_model import refuse_wrong_direction
from hf_relpos.training.checkpoints import last_checkpoint
from hf_relpos.training.checkpoints import list_checkpoints
from hf_relpos.training.checkpoints import require_whole
from hf_relpos.training.checkpoints import was_completed
from hf_relpos.training.checkpoints import write_digests
from hf_relpos.training.publishing import publish
from hf_relpos.training.publishing import require_token

logger = logging.getLogger(__name__)

# Private methods of Trainer that are overridden or called here; a test checks that they exist.
TRAINER_INTERNALS = ("_finish_current_push", "_get_output_dir", "_issue_warnings_after_load", "_load_from_checkpoint")
TRAINER_INTERNALS += ("_load_rng_state", "_prepare_inputs", "_push_from_checkpoint", "_save_checkpoint")
# How torch, safetensors and the system report a disk that is full or read-only.
NOT_WRITTEN = (OSError, RuntimeError, SafetensorError)


class Diverged(ValueError):
    """A run whose loss, gradients or weights are no longer finite numbers."""


class CheckedTrainer(Trainer):
    """The stock Trainer that stops a diverged run and names the step, the layer and the last good checkpoint.

    Every checkpoint is tried on the last batch before it is written, so that those on the disk are good. Resuming takes whole
    checkpoints, and `resume_from_checkpoint=True` the newest of them.
    """

    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_wrong_direction(self.args)
        self._last_batch: dict[str, Any] | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the stock Trainer does.

        Raises:
            Diverged: the loss, the gradients or the weights are no longer finite.
            ValueError: the checkpoint to go on from is not whole; the message names the file and the one to use instead.
            ChildProcessError: a process that reads batches died.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(str(self.args.output_dir), **self._checkpoint_parts())
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"{self.args.output_dir} holds no checkpoint that was written to its end: train without resuming"
                )
        elif resume_from_checkpoint:
            require_whole(resume_from_checkpoint, **self._checkpoint_parts())
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
        except (RuntimeError, ConnectionError, EOFError) as error:  # as the loss of a process is met
            lost_pipe = self.args.dataloader_num_workers and isinstance(error, ConnectionError | EOFError)
            if not lost_pipe and "DataLoader worker" not in str(error):
                raise
            raise ChildProcessError(
                f"a process that reads batches died, or the system killed it for its memory ({error}): a run goes on from its last "
                f"checkpoint, with fewer than dataloader_num_workers={self.args.dataloader_num_workers} if memory was short"
            ) from error
        self._try_weights()
        return result

    def _checkpoint_parts(self) -> dict[str, bool]:
        """Say what a whole checkpoint holds beside weights, optimizer, schedule and random state."""
        return {"scaler": getattr(self.accelerator, "scaler", None) is not None}

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take a step of the stock Trainer, and stop if its loss or its gradients are not finite."""
        self._last_batch = inputs
        loss = super().training_step(model, inputs, *args, **kwargs)
        step = self.state.global_step + 1
        if not loss.isfinite().all():
            self._diverge(step, f"the loss is {loss.item()}", find_not_finite(self.model, self._prepare_inputs(inputs)))
        # A scaler of losses (fp16) meets gradients that are not finite, and leaves out their steps.
        if self.accelerator.sync_gradients and not self._checkpoint_parts()["scaler"]:
            gradients = {name: part.grad for name, part in self.model.named_parameters() if part.grad is not None}
            if gradients and not torch.nn.utils.get_total_norm(gradients.values()).isfinite():
                # Backward runs from the last layer to the first, and what is not finite spreads to all before it.
                broken = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
                self._diverge(step, "the gradients are not finite", (broken or list(gradients))[-1])
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as the stock Trainer does; a loss that is not finite ends a training that goes on around it."""
        metrics = super().evaluate(*args, **kwargs)
        broken = [name for name, value in metrics.items() if name.endswith("_loss") and not np.isfinite(value)]
        if broken and self.is_in_train:
            self._diverge(self.state.global_step, f"{broken[0]} is {metrics[broken[0]]}", self._where())
        return metrics

    def _try_weights(self) -> None:
        """Stop if the model no longer computes finite numbers on the last batch."""
        if where := self._where():
            self._diverge(self.state.global_step, "the weights after it give numbers that are not finite", where)

    def _where(self) -> str | None:
        return None if self._last_batch is None else find_not_finite(self.model, self._prepare_inputs(self._last_batch))

    def _diverge(self, step: int, what: str, where: str | None) -> NoReturn:
        good = next((path for path in list_checkpoints(str(self.args.output_dir)) if was_completed(path)), None)
        layer = f", first in {where}" if where else ""
        go_on = f" with model_name_or_path={str(good)!r}" if good else ""
        raise Diverged(
            f"training diverged at step {step}: {what}{layer}. "
            + (f"The last good checkpoint is {good}. " if good else "No checkpoint was saved before it. ")
            + f"Lower the learning rate (learning_rate={self.args.learning_rate}) and start a run in another output_dir{go_on}"
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._try_weights()
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        try:
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                write_digests(folder)
        except NOT_WRITTEN as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise OSError(f"{folder} could not be written and was removed: {error}") from error

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as the stock Trainer does; an OSError names the folder that could not be written."""
        try:
            super().save_model(output_dir, _internal_call)
        except NOT_WRITTEN as error:
            raise OSError(f"the model could not be written to {output_dir or self.args.output_dir}: {error}") from error

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository as the stock Trainer does, before it trains; an error says what to do.

        Raises:
            ValueError: there is no token, or the Hub does not take it, or does not answer.
        """
        require_token(token or self.args.hub_token)
        try:
            super().init_hf_repo(token=token, private=private)
        except (HTTPError, OSError) as error:
            name = self.args.hub_model_id or Path(str(self.args.output_dir)).name
            raise ValueError(
                f"the Hub does not let hub_model_id={name!r} be written to: {error}. Nothing was trained or uploaded. Check the name, the "
                "connection, and that the token may write there (hf auth whoami), or leave push_to_hub out and publish later"
            ) from error

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Publish the model, its tokenizer, its code and its card, and nothing else; arguments and result are the stock Trainer's."""
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(model_name=str(self.hub_model_id).split("/")[-1], **kwargs)
        self._finish_current_push()
        options = {"token": token or self.args.hub_token, "revision": revision or self.args.hub_revision}
        return publish(
            str(self.args.output_dir), str(self.hub_model_id), commit_message, in_background=not blocking, **options
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.args.hub_strategy != HubStrategy.EVERY_SAVE:  # "checkpoint" and "all_checkpoints" ask for all there is
            return super()._push_from_checkpoint(checkpoint_folder)
        if self.is_world_process_zero():
            self._finish_current_push()
            options = {"token": self.args.hub_token, "revision": self.args.hub_revision}
            message = f"Step {self.state.global_step}"
            job = publish(checkpoint_folder, str(self.hub_model_id), message, in_background=True, **options)
            self.push_in_progress = PushInProgress([job])  # pyright: ignore[reportArgumentType]

    def load_weights(self, folder: str) -> None:
        """Load the weights of a checkpoint or model folder, and nothing else of it."""
        self._load_from_checkpoint(folder)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}  # saved once, under the other name
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        name = "rng_state.pth" if self.args.world_size <= 1 else f"rng_state_{self.args.process_index}.pth"
        if checkpoint is not None and not Path(checkpoint, name).is_file():
            logger.warning(
                "%s was written by another number of processes: dropout draws other numbers from here on", checkpoint
            )


@torch.no_grad()
def find_not_finite(model: nn.Module, inputs: dict[str, Any]) -> str | None:
    """Return the name of the first module of a model whose output is not finite, None if all are.

    Args:
        model: the model; it computes as in evaluation, which draws no random numbers.
        inputs: the arguments of its forward pass.
    """
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if not found and not _is_finite(output):
                found.append(name or "the loss")

        return look

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    was_training = model.training
    try:
        model.eval()(**inputs)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _is_finite(output: Any) -> bool:
    """Return whether an output holds neither NaN nor plus infinity; minus infinity hides scores from the softmax."""
    if isinstance(output, torch.Tensor):
        return not output.is_floating_point() or not (output.isnan() | output.isposinf()).any()
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return all(_is_finite(value) for value in values)
