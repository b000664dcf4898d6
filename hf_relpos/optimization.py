"""Muon for the matrices of the layers and AdamW for the rest, as one optimizer that `Trainer` can schedule, save and resume."""

from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers of torch behind one face.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) orthogonalises the momentum of each matrix, which suits
    the projections inside the layers; embeddings, norms, biases and position tables are AdamW's.

    Args:
        model: the model; the two-dimensional parameters of its `layers` go to Muon.
        muon_learning_rate: Muon's learning rate.
        learning_rate, weight_decay, betas, eps: AdamW's; the weight decay holds for Muon and for AdamW's matrices.
    """

    def __init__(
        self,
        model: nn.Module,
        muon_learning_rate: float,
        learning_rate: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        matrices = [parameter for name, parameter in named if "layers." in name and parameter.dim() == 2]
        taken = {id(parameter) for parameter in matrices}
        others = [parameter for _, parameter in named if id(parameter) not in taken]
        if not matrices or not others:
            raise ValueError(f"Muon finds {len(matrices)} matrices in layers and {len(others)} other parameters: it needs both")
        self.muon = torch.optim.Muon(matrices, lr=muon_learning_rate, weight_decay=weight_decay)
        decayed = {"params": [p for p in others if p.dim() > 1], "weight_decay": weight_decay}
        plain = {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0}
        groups = [group for group in (decayed, plain) if group["params"]]
        self.adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """Both optimizers work on the very groups that a scheduler changes."""
        first = len(self.muon.param_groups)
        self.muon.param_groups[:] = self.param_groups[:first]
        self.adamw.param_groups[:] = self.param_groups[first:]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of both."""
        loss = closure() if closure is not None else None
        self.muon.step()
        self.adamw.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of both."""
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self.param_groups[:] = [*self.muon.param_groups, *self.adamw.param_groups]


class MuonFactory:
    """What `Trainer(optimizer_cls_and_kwargs=(MuonFactory, {...}))` calls with the model and the keyword arguments."""

    def __call__(self, model: nn.Module, **kwargs: Any) -> MuonWithAdamW:
        return MuonWithAdamW(model, **kwargs)
