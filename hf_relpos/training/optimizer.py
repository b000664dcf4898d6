"""Learning rates by kind of parameter: Muon for the matrices of the layers, a rate of their own for position tables, AdamW for the rest.

`Trainer` schedules, saves and resumes what `OptimizerFactory` makes.
"""

from typing import Any

import torch
from torch import nn


def split_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Split the trainable parameters of a model by kind.

    Returns:
        "matrices": the projections inside the layers; "positions": tables and numbers that position schemes own themselves;
        "decayed": all other matrices; "plain": what weight decay does not touch.
    """
    kinds: dict[str, list[nn.Parameter]] = {"matrices": [], "positions": [], "decayed": [], "plain": []}
    # By attribute, not by class: a model may have brought its code along.
    schemes = [module for module in model.modules() if getattr(module, "acts_on_embeddings", None) is False]
    tables = {table for scheme in schemes for table in scheme.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter in tables:
            kinds["positions"].append(parameter)
        elif "layers." in name and parameter.dim() == 2:
            kinds["matrices"].append(parameter)
        else:
            kinds["decayed" if parameter.dim() > 1 else "plain"].append(parameter)
    return kinds


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers of torch behind one face.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) orthogonalises the momentum of each matrix, which suits
    the projections inside the layers.

    Args:
        muon: the optimizer of the matrices.
        adamw: the optimizer of everything else.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self.muon, self.adamw = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {"lr": adamw.defaults["lr"]})
        self._share_groups()

    def _share_groups(self) -> None:
        """Let both optimizers work on the very groups that a scheduler changes."""
        first = len(self.muon.param_groups)
        self.muon.param_groups[:] = self.param_groups[:first]
        self.adamw.param_groups[:] = self.param_groups[first:]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step of both; a closure computes the loss and its gradients first."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self.muon.step()
        self.adamw.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of both."""
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self.param_groups[:] = [*self.muon.param_groups, *self.adamw.param_groups]


class OptimizerFactory:
    """Makes the optimizer of `Trainer(optimizer_cls_and_kwargs=(OptimizerFactory, {...}))` from the model and the keywords."""

    def __call__(
        self,
        model: nn.Module,
        learning_rate: float,
        muon_learning_rate: float | None = None,
        position_learning_rate: float | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> torch.optim.Optimizer:
        """Build the optimizer of a model.

        Args:
            model: the model.
            learning_rate, weight_decay, betas, eps: AdamW's; the weight decay holds for all matrices.
            muon_learning_rate: Muon's, for the matrices of the layers; None leaves them to AdamW.
            position_learning_rate: of position tables, which start near 0 and must grow to the size of scores; by default as all.
        """
        kinds = split_parameters(model)
        if muon_learning_rate is not None and not kinds["matrices"]:
            raise ValueError(f"muon_learning_rate={muon_learning_rate}: the model has no matrices in layers")
        decayed = kinds["decayed"] + (kinds["matrices"] if muon_learning_rate is None else [])
        position_rate = learning_rate if position_learning_rate is None else position_learning_rate
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": kinds["plain"], "weight_decay": 0.0},
            {"params": kinds["positions"], "weight_decay": 0.0, "lr": position_rate},
        ]
        groups = [group for group in groups if group["params"]]
        adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)
        if muon_learning_rate is None:
            return adamw
        return MuonWithAdamW(torch.optim.Muon(kinds["matrices"], lr=muon_learning_rate, weight_decay=weight_decay), adamw)


def optimizer_by_kind(args: Any) -> tuple[Any, dict[str, Any]] | None:
    """Build an optimizer with learning rates by kind of parameter, when one is given; else return None, and Trainer makes `--optim`."""
    if args.muon_learning_rate is None and args.position_learning_rate is None:
        return None
    return OptimizerFactory, {
        "muon_learning_rate": args.muon_learning_rate,
        "position_learning_rate": args.position_learning_rate,
        "learning_rate": args.learning_rate,
        "weight_decay": args.weight_decay,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
