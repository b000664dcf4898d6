"""The peers: models of other packages, as near to the baseline's sizes as they allow, and the scheme that each implements.

All have the layers, width, heads, vocabulary and tied embeddings of the baseline, no dropout, and its feed-forward width and
activation where these can be chosen; `note` says what remains different. A package that is not installed is reported, not missed.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from contestants import Contestant
from contestants import Scored
from contestants import Sizes

NO_CACHE = {"use_cache": False}


def t5(causal: bool) -> Callable[[Sizes, int], Scored]:
    """One stack of T5; as a decoder it has no encoder to attend to, and its cross-attention takes no part."""

    def build(sizes: Sizes, length: int) -> Scored:
        from transformers.models.t5.modeling_t5 import T5Stack

        config = transformers.T5Config(
            vocab_size=sizes.vocab, d_model=sizes.width, d_kv=sizes.width // sizes.heads, d_ff=4 * sizes.width,
            num_layers=sizes.layers, num_heads=sizes.heads, dropout_rate=0.0, feed_forward_proj="gelu",
            is_decoder=causal, is_encoder_decoder=False, use_cache=causal,
        )  # fmt: skip
        stack = T5Stack(config)
        for block in stack.block if causal else []:
            del block.layer[1].EncDecAttention  # never called without an encoder's output
        return Scored(stack, NO_CACHE if causal else {})

    return build


class NoCache(Scored):
    """A model that cannot go on from a cache."""

    def decode(self, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        raise ValueError(f"{type(self.model).__name__} has no key/value cache")


def xlnet(sizes: Sizes, length: int) -> Scored:
    config = transformers.XLNetConfig(
        vocab_size=sizes.vocab, d_model=sizes.width, n_layer=sizes.layers, n_head=sizes.heads, d_inner=4 * sizes.width,
        attn_type="uni", dropout=0.0, mem_len=None,
    )  # fmt: skip
    return NoCache(transformers.XLNetModel(config))


def deberta(sizes: Sizes, length: int) -> Scored:
    config = transformers.DebertaV2Config(
        vocab_size=sizes.vocab, hidden_size=sizes.width, num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads,
        intermediate_size=4 * sizes.width, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        max_position_embeddings=length, relative_attention=True, max_relative_positions=512, pos_att_type=["c2p", "p2c"],
        position_biased_input=False,
    )  # fmt: skip
    return Scored(transformers.DebertaV2Model(config))


def bloom(sizes: Sizes, length: int) -> Scored:
    config = transformers.BloomConfig(
        vocab_size=sizes.vocab, hidden_size=sizes.width, n_layer=sizes.layers, n_head=sizes.heads
    )
    return Scored(transformers.BloomModel(config), NO_CACHE)


def mpt(sizes: Sizes, length: int) -> Scored:
    config = transformers.MptConfig(
        vocab_size=sizes.vocab, d_model=sizes.width, n_layers=sizes.layers, n_heads=sizes.heads, max_seq_len=length
    )
    return Scored(transformers.MptModel(config), NO_CACHE)


def gpt_neox(sizes: Sizes, length: int) -> Scored:
    config = transformers.GPTNeoXConfig(
        vocab_size=sizes.vocab, hidden_size=sizes.width, num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads,
        intermediate_size=4 * sizes.width, max_position_embeddings=length, attention_bias=False, use_parallel_residual=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    )  # fmt: skip
    return Scored(transformers.GPTNeoXModel(config), NO_CACHE)


def llama(sizes: Sizes, length: int) -> Scored:
    """Its feed-forward has three matrices: two thirds of the width make as many parameters."""
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocab, hidden_size=sizes.width, num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads,
        intermediate_size=round(8 * sizes.width / 3), max_position_embeddings=length,
    )  # fmt: skip
    return Scored(transformers.LlamaModel(config), NO_CACHE)


def gpt2(sizes: Sizes, length: int) -> Scored:
    config = transformers.GPT2Config(
        vocab_size=sizes.vocab, n_embd=sizes.width, n_layer=sizes.layers, n_head=sizes.heads, n_positions=length,
        activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Scored(transformers.GPT2Model(config), NO_CACHE)


class OwnScores(Scored):
    """A model of x-transformers, which scores by its embeddings itself and has a cache of its own kind."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(ids, mask=None if mask is None else mask.bool())

    def decode(self, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        return self.model(ids, cache=cache, return_intermediates=True, input_not_include_cache=cache is not None)


def x_transformers(flash: bool, **options: Any) -> Callable[[Sizes, int], Scored]:
    """A decoder of x-transformers with options of its attention layers."""

    def build(sizes: Sizes, length: int) -> Scored:
        from x_transformers import Decoder
        from x_transformers import TransformerWrapper

        layers = Decoder(
            dim=sizes.width, depth=sizes.layers, heads=sizes.heads, attn_dim_head=sizes.width // sizes.heads,
            attn_flash=flash, ff_mult=4, ff_no_bias=True, verbose=False, **options,
        )  # fmt: skip
        wrapper = TransformerWrapper(
            num_tokens=sizes.vocab, max_seq_len=length, attn_layers=layers, use_abs_pos_emb=False, tie_embedding=True
        )
        return OwnScores(wrapper)

    return build


BIASES = "biases in its linear layers"
POST_NORM = "normalises after each sub-layer"
X = "no biases in its norms"
PEERS: dict[str, Contestant] = {
    key: Contestant(name, scheme, "peer", causal, build, note)
    for key, name, scheme, causal, build, note in [
        ("t5", "transformers T5 (decoder stack)", "t5", True, t5(True), "RMS norm; one bias table for all layers"),
        ("t5-encoder", "transformers T5 (encoder)", "t5", False, t5(False), "RMS norm; one bias table for all layers"),
        ("xlnet", "transformers XLNet (causal)", "xlnet", True, xlnet, f"{POST_NORM}; biases in its feed-forward"),
        ("deberta-v2", "transformers DeBERTa-v2", "deberta", False, deberta, f"{POST_NORM}; {BIASES}"),
        ("bloom", "transformers BLOOM", "alibi", True, bloom, f"{BIASES}; norm of the embeddings; tanh GELU"),
        ("mpt", "transformers MPT", "alibi", True, mpt, ""),
        ("gpt-neox", "transformers GPT-NeoX", "rope", True, gpt_neox, "biases in its feed-forward"),
        ("llama", "transformers Llama", "rope", True, llama, "RMS norm; gated feed-forward of as many parameters"),
        ("gpt2", "transformers GPT-2", "learned_absolute", True, gpt2, BIASES),
        ("x-rel-pos-bias", "x-transformers rel_pos_bias", "t5", True, x_transformers(False, rel_pos_bias=True), X),
        ("x-alibi", "x-transformers alibi flash", "alibi", True, x_transformers(True, alibi_pos_bias=True), X),
        ("x-dynamic", "x-transformers dynamic_pos_bias", "dynamic_bias", True, x_transformers(False, dynamic_pos_bias=True), X),
        ("x-data-dependent-alibi", "x-transformers data_dependent_alibi", "data_dependent_alibi", True,
         x_transformers(False, attn_data_dependent_alibi=True), X),
        ("x-polar", "x-transformers polar_pos_emb flash", "pope", True, x_transformers(True, polar_pos_emb=True), X),
        ("x-cope", "x-transformers CoPE", "cope", True, x_transformers(False, attn_use_cope=True, attn_cope_max_pos=64), X),
        ("x-rotary", "x-transformers rotary flash", "rope", True, x_transformers(True, rotary_pos_emb=True), X),
        ("x-xpos", "x-transformers rotary_xpos flash", "xpos", True, x_transformers(True, rotary_xpos=True), X),
    ]
}  # fmt: skip


def peers(keys: list[str]) -> tuple[list[Contestant], dict[str, str]]:
    """The peers of these keys ("all", "none") that can be built, and why the others cannot."""
    wanted = PEERS if "all" in keys else {key: PEERS[key] for key in keys if key != "none"}
    found, missing = [], {}
    for contestant in wanted.values():
        try:
            contestant.build(Sizes(layers=1, width=32, heads=2, vocab=16), 16)
        except Exception as error:  # whatever stops a peer is a result to report
            missing[contestant.name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            found.append(contestant)
    return found, missing
