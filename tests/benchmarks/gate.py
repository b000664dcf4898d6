"""Correctness before speed: what a benchmarked path computes is compared with the eager path of the same weights.

Small models with heads of the size that is measured, whose parameters are all random, tables that begin at zero among them, and a
length that `auto` cuts into several blocks, the last of them not full.
"""

import torch
import torch.nn.functional as F
from contestants import Contestant
from contestants import Scored
from contestants import Sizes
from contestants import own

SIZES = Sizes(layers=2, width=128, heads=4, vocab=64)
BATCH, LENGTH, DECODED = 2, 600, 3
TOLERANCE = {"float32": 5e-5, "float64": 1e-9}
"""Relative to the largest entry; rounding gives 5e-6 and 1e-13 at most."""
ROUNDED = {"cope": 2e-2, "dynamic_bias": 2e-4}
"""Tolerance of float32 gradients where rounding counts for more; in float64 these schemes are held to what all are.

In `cope` it decides which piece of a function of pieces is differentiated. The network of `dynamic_bias` reads the distance itself,
which multiplies the rounding of far keys' gradients by hundreds; with `log_distance` it is off by 5e-6.
"""


class Refused(ValueError):
    """A path that computes something else is not measured."""


def randomised(contestant: Contestant, path: str, dtype: str) -> Scored:
    """A small model on a path, in which nothing is zero."""
    torch.manual_seed(0)
    model = own(contestant.scheme, contestant.causal, path, contestant.parameters)(SIZES, LENGTH)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.to(getattr(torch, dtype))


def outcome(model: Scored, ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, zero at padding, and the gradient of every parameter."""
    logits = model(ids, mask)
    targets = ids.roll(-1, 1) if mask is None else ids.roll(-1, 1).masked_fill(mask == 0, -100)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return (logits if mask is None else logits * mask[..., None]).detach(), gradients


def off_by(found: torch.Tensor, wanted: torch.Tensor, least: float = 0.0) -> float:
    """The largest difference, relative to the largest entry that is wanted."""
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=least)).item()


def compare(contestant: Contestant, mask: torch.Tensor | None = None, dtype: str = "float32") -> dict[str, float]:
    """How far the contestant is from the eager path: logits, gradients and, for decoders, logits of cached tokens."""
    ids = torch.randint(SIZES.vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    tested, eager = (randomised(contestant, path, dtype) for path in (contestant.path, "eager"))
    logits, gradients = outcome(tested, ids, mask)
    wanted, references = outcome(eager, ids, mask)
    if gradients.keys() != references.keys():
        raise Refused(f"{contestant.name}: other parameters get gradients: {gradients.keys() ^ references.keys()}")
    least = 1e-3 * max(gradient.abs().max().item() for gradient in references.values())
    errors = {
        "logits": off_by(logits, wanted),
        "gradients": max(off_by(gradients[name], gradient, least) for name, gradient in references.items()),
    }
    if contestant.causal and mask is None:
        errors["decoding"] = off_by(decoded(tested, ids), wanted[:, -DECODED:])
    return errors


@torch.no_grad()
def decoded(model: Scored, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the last tokens, one by one behind a cache of the others."""
    _, cache = model.eval().decode(ids[:, :-DECODED], None)
    parts = []
    for index in range(ids.shape[1] - DECODED, ids.shape[1]):
        logits, cache = model.decode(ids[:, index : index + 1], cache)
        parts.append(logits)
    return torch.cat(parts, 1)


def check(contestant: Contestant, mask: torch.Tensor | None = None) -> dict[str, dict[str, float]]:
    """The errors of `compare` in both types, or Refused when one is beyond its tolerance."""
    found = {}
    for dtype, tolerance in TOLERANCE.items():
        found[dtype] = compare(contestant, mask, dtype)
        for name, error in found[dtype].items():
            rounded = ROUNDED.get(contestant.scheme, 0.0) if (dtype, name) == ("float32", "gradients") else 0.0
            if not error <= max(tolerance, rounded):
                raise Refused(f"{contestant.name}: {name} are off by {error:.1e} from the eager path, in {dtype}")
    return found
