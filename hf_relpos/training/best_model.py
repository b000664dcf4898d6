"""Decide which of two evaluations is the better one, for every metric that this package reports."""

from typing import Any

# Better when greater; transformers takes every metric for one whose name does not end in "loss".
GREATER_IS_BETTER = {"loss": False, "perplexity": False, "bits_per_byte": False, "accuracy": True}


def greater_is_better(metric: str) -> bool | None:
    """Return whether a greater value of a metric is better; None for a metric that is not of this package.

    Args:
        metric: its name, with or without the prefix of a text ("eval_perplexity").
    """
    return next((better for name, better in GREATER_IS_BETTER.items() if f"_{metric}".endswith(f"_{name}")), None)


def refuse_wrong_direction(args: Any) -> None:
    """Raise a ValueError if the arguments of a Trainer would keep the worst model by a metric of this package."""
    metric = args.metric_for_best_model
    better = greater_is_better(metric) if metric else None
    if better is not None and args.greater_is_better is not better:
        raise ValueError(
            f"metric_for_best_model={metric!r} with greater_is_better={args.greater_is_better} would keep the worst model: "
            f"give greater_is_better={better}"
        )


def refuse_unknown_metric(args: Any, masked: bool) -> None:
    """Raise a ValueError if the best model is to be chosen by a metric that no evaluation of a run reports.

    Args:
        args: the arguments of the run.
        masked: whether its model is a masked one, for which bits per byte have no meaning.
    """
    refuse_wrong_direction(args)
    allowed = [name for name in GREATER_IS_BETTER if not (masked and name == "bits_per_byte")]
    if args.metric_for_best_model and args.metric_for_best_model.removeprefix("eval_") not in allowed:
        raise ValueError(f"metric_for_best_model={args.metric_for_best_model!r} is not reported; one of {allowed}")
