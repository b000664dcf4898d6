"""Refuse numbers that no run can use, before anything is written."""

import math
from typing import Any

# Names and the least value that they may have.
AT_LEAST = {
    1: "max_train_samples max_eval_samples per_device_train_batch_size per_device_eval_batch_size lane_groups "
    "gradient_accumulation_steps eval_accumulation_steps preprocessing_num_workers save_total_limit",
    0: "learning_rate muon_learning_rate position_learning_rate weight_decay adam_epsilon max_grad_norm warmup_steps "
    "sample_tokens dataloader_num_workers eval_delay adam_beta1 adam_beta2 label_smoothing_factor",
}
BELOW_ONE = {"adam_beta1", "adam_beta2", "label_smoothing_factor"}
ABOVE_ZERO = ("num_train_epochs", "logging_steps", "save_steps", "eval_steps", "mlm_probability")


def refuse_numbers(*groups: Any) -> None:
    """Raise a ValueError for the first number that is out of its range.

    Args:
        groups: the dataclasses of arguments.
    """
    values = {name: value for group in groups for name, value in vars(group).items() if isinstance(value, int | float)}
    for least, names in AT_LEAST.items():
        for name in names.split():
            below = 1 if name in BELOW_ONE else math.inf
            if name in values and not least <= values[name] < below:
                raise ValueError(f"{name}={values[name]} must be at least {least}" + " and below 1" * (below == 1))
    for name in ABOVE_ZERO:
        if name in values and not 0 < values[name] < math.inf:
            raise ValueError(f"{name}={values[name]} must be above 0")
    if not values["mlm_probability"] < 1:
        raise ValueError(f"mlm_probability={values['mlm_probability']} must be above 0 and below 1")
    if not (values["max_steps"] >= 1 or values["max_steps"] == -1):
        raise ValueError(f"max_steps={values['max_steps']} must be at least 1, or -1 for num_train_epochs instead")
    for name in ("seed", "data_seed"):
        if name in values and not 0 <= values[name] < 2**32:
            raise ValueError(f"{name}={values[name]} must be at least 0 and below 2**32")
