"""How the weights of a model are divided among processes, in the terms of transformers' `DistributedConfig`."""

from typing import Any

from torch import nn
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

CUT = {"embed_tokens", "lm_head", "position_schemes"}
"""Parts of a model, beside its layers, whose matrices tensor parallelism cuts."""
STYLES = {nn.Linear: "colwise_gather_output", nn.Embedding: "embedding_rowwise"}


def cut_layers(gated_mlp: bool) -> dict[str, str]:
    """Return how tensor parallelism cuts the layers of a stack: the style of each matrix.

    Weights, gradients and the products with them are cut, and each process attends with all heads: so nothing that a scheme has of
    its own is cut, and one plan serves all schemes.
    """
    plan = {f"attention.{name}_proj": "colwise_gather_output" for name in "qkv"} | {"attention.o_proj": "rowwise_split_input"}
    plan |= {f"mlp.{name}_proj": "colwise" for name in (("up", "gate") if gated_mlp else ("up",))}
    return {f"layers.*.{name}": style for name, style in (plan | {"mlp.down_proj": "rowwise"}).items()}


class ParallelPlans:
    """Lets transformers and torch divide a model."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Name a class that torch makes of a model, as FSDP2 does, like the model's own: it is saved by its name and its file."""
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("torch."):
            own = next(base for base in cls.__mro__[1:] if not base.__module__.startswith("torch."))
            cls.__module__, cls.__name__ = own.__module__, own.__name__

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        """Divide a model as transformers does.

        Raises:
            ValueError: sharding would cut tied embeddings into unequal parts, of which transformers 5.24 and torch 2.13 train
                one and compute with another (tried with Llama too).
        """
        size = getattr(distributed_config, "fsdp_size", 1) if mesh_manager is not None else 1
        tied = {name: model.get_parameter(name).shape[0] for name in (model.all_tied_weights_keys or {}).values()}
        if uneven := [f"{rows} rows of {name}" for name, rows in tied.items() if rows % size]:
            raise ValueError(
                f"fsdp_size={size} does not divide the {', '.join(uneven)}, which is tied and would not be trained whole: save the "
                f"model after resize_token_embeddings(pad_to_multiple_of={size}), or with tie_word_embeddings=False, and load that"
            )
        divide: Any = super().maybe_distribute_model  # pyright: ignore[reportAttributeAccessIssue]
        return divide(model, distributed_config, mesh_manager)

    def init_parallel_plans(self) -> None:
        """Make the plans: the configuration's for layers, and the matrices of embeddings, head and schemes."""
        model: Any = self
        super().init_parallel_plans()  # pyright: ignore[reportAttributeAccessIssue]
        for name, module in model.named_modules():
            if type(module) in STYLES and not CUT.isdisjoint(name.split(".")):
                model._tp_plan[replace_layer_number_by_wildcard(name)] = STYLES[type(module)]
