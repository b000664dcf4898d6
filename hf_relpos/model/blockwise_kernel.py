"""torch's fused attention on processors, which blocks call with a mask of what is added to the scores.

Its public way, `scaled_dot_product_attention`, gives no log-sum-exp, so blocks call the private operator itself. What the public way
checks is therefore checked here. Another torch may remove the operator or change it: it is tried once, and where its numbers are not
those of the formula, blocks do without it.
"""

from functools import cache
from typing import Any

import torch
from transformers.utils import logging

from .toeplitz import with_unit_stride

NAME = "_scaled_dot_product_flash_attention_for_cpu"
"""The operator; that of its gradients ends with `_backward`."""

logger = logging.get_logger(__name__)


def fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend without a scale of its own.

    Args:
        query: `(outer, inner, rows, head_dim)`, scaled; the first two dimensions are heads and batch in any order.
        key, value: `(outer, inner, columns, head_dim)`.
        mask: `(outer|1, inner|1, rows, columns)` added to the scores.

    Returns:
        The output `(outer, inner, rows, head_dim)` and the log-sum-exp `(outer, inner, rows)`.
    """
    forward: Any = getattr(torch.ops.aten, NAME)
    states = (with_unit_stride(part) for part in (query, key, value))
    return forward(*states, 0.0, False, attn_mask=_whole_mask(mask, query), scale=1.0)


def fused_gradients(
    grad: torch.Tensor,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value.

    Args:
        grad: gradient of the output.
        states: the query, key and value that `fused_attention` was given.
        results: what it returned.
        mask: what it was given.
    """
    backward: Any = getattr(torch.ops.aten, f"{NAME}_backward")
    output, lse = results
    given = (with_unit_stride(part) for part in (grad, *states, output))
    return backward(*given, lse, 0.0, False, attn_mask=_whole_mask(mask, states[0]), scale=1.0)


def _whole_mask(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return with_unit_stride(mask).expand(*query.shape[:2], -1, -1)


def kernel_works() -> bool:
    """Return whether this torch has the kernel as it is known here."""
    operators = (getattr(torch.ops.aten, name, None) for name in (NAME, f"{NAME}_backward"))
    return _gives_the_formula(*operators)


@cache
def _gives_the_formula(*operators: Any) -> bool:
    """Try the kernel and its gradients on a few numbers; the operators tell whether an earlier trial still counts."""
    numbers = torch.arange(48, dtype=torch.float64, device="cpu").sin().view(4, 1, 2, 2, 3)
    query, key, value, grad = numbers
    mask = torch.tensor([[0.5, float("-inf")], [0.0, 0.25]], dtype=torch.float64, device="cpu").view(1, 1, 2, 2)
    weights = (query @ key.transpose(-1, -2) + mask).softmax(-1)
    inward = grad @ value.transpose(-1, -2)
    score_grad = weights * (inward - (weights * inward).sum(-1, keepdim=True))
    wanted = [score_grad @ key, score_grad.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad, weights @ value]
    try:
        output, lse = fused_attention(query, key, value, mask)
        found = [*fused_gradients(grad, (query, key, value), (output, lse), mask), output]
        good = all(torch.allclose(mine, other) for mine, other in zip(found, wanted, strict=True))
    except Exception:
        good = False
    if not good:
        logger.warning(
            f"torch {torch.__version__} has no operator aten::{NAME} that gives what is known of it: attention with position terms "
            "computes in plain products, which is slower and equally exact"
        )
    return good
