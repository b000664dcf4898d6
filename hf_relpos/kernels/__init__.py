"""Attention in Triton for schemes whose vectors of distances meet queries or keys; needs the extra `gpu`.

Nothing here ships with weights: the models ask for it by `attn_implementation="triton"` (`model/attention_kernels.py`).
"""

from .attention import kernel_attention

__all__ = ["kernel_attention"]
