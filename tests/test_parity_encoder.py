"""BERT as a whole, and the attention layers of Wav2Vec2Bert, loaded weight by weight: same output, same gradients."""

import re
from typing import Any

import torch
import transformers
from matrix import ids_of
from parity import CLOSE
from parity import FLOAT32
from parity import SIZES
from parity import Weights
from parity import assert_same
from parity import left_padding
from parity import randomised
from parity import renamed
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertRelPositionalEmbedding
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosEncoderForMaskedLM
from hf_relpos import RelPosEncoderModel
from hf_relpos.model.position_builder import build_positions
from hf_relpos.model.position_tables import DistanceTables


def test_bert() -> None:
    """An encoder with norms after the sums, token types, and the head for masked tokens."""
    config = transformers.BertConfig(**SIZES, intermediate_size=60, max_position_embeddings=16)
    theirs = randomised(transformers.BertForMaskedLM(config))
    given = {name: weight for name, weight in theirs.state_dict().items() if "position_ids" not in name}
    weights = renamed(
        given,
        (r"bert\.embeddings\.word_embeddings\.weight", "model.embed_tokens.weight"),
        (
            r"bert\.embeddings\.position_embeddings\.weight",
            "model.position_schemes.shared.learned_absolute.position_embeddings",
        ),
        (r"bert\.embeddings\.token_type_embeddings\.weight", "model.embed_types.weight"),
        (r"bert\.embeddings\.LayerNorm\.(\w+)", r"model.embed_norm.\1"),
        (r"bert\.encoder\.layer\.(\d+)\.attention\.self\.(\w)\w+\.(\w+)", r"model.layers.\1.attention.\2_proj.\3"),
        (r"bert\.encoder\.layer\.(\d+)\.attention\.output\.dense\.(\w+)", r"model.layers.\1.attention.o_proj.\2"),
        (r"bert\.encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.(\w+)", r"model.layers.\1.attention_norm.\2"),
        (r"bert\.encoder\.layer\.(\d+)\.intermediate\.dense\.(\w+)", r"model.layers.\1.mlp.up_proj.\2"),
        (r"bert\.encoder\.layer\.(\d+)\.output\.dense\.(\w+)", r"model.layers.\1.mlp.down_proj.\2"),
        (r"bert\.encoder\.layer\.(\d+)\.output\.LayerNorm\.(\w+)", r"model.layers.\1.mlp_norm.\2"),
        (r"cls\.predictions\.transform\.dense\.(\w+)", r"head_dense.\1"),
        (r"cls\.predictions\.transform\.LayerNorm\.(\w+)", r"head_norm.\1"),
        (r"cls\.predictions\.decoder\.(\w+)", r"lm_head.\1"),
        (r"cls\.predictions\.bias", ""),
    )
    fields = {"norm_position": "post", "embedding_norm": True, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
    biases = {"attention_bias": True, "mlp_bias": True, "intermediate_size": 60, "max_position_embeddings": 16}
    config = RelPosEncoderConfig(**SIZES, **fields, **biases, position_scheme="learned_absolute")
    mask = left_padding().flip(1)
    types = (ids_of() % 2).long()
    assert_same(RelPosEncoderForMaskedLM(config), theirs, weights, CLOSE, attention_mask=mask, token_type_ids=types)


def conformer_layer(kind: str) -> tuple[Any, Any]:
    """An attention layer of Wav2Vec2Bert with random weights, and its configuration."""
    config = transformers.Wav2Vec2BertConfig(
        hidden_size=48, num_attention_heads=6, position_embeddings_type=kind, attention_dropout=0.0,
        max_source_positions=32,
        left_max_position_embeddings=5, right_max_position_embeddings=5, attn_implementation="eager",
    )  # fmt: skip
    return randomised(Wav2Vec2BertSelfAttention(config)).float(), config


def assert_same_layer(
    scheme: str, parameters: dict[str, Any], theirs: Any, scheme_weights: Weights, table: Any = None
) -> None:
    """Compare an encoder's attention layer, its output and the gradient of its input, over 11 and 30 tokens."""
    config = RelPosEncoderConfig(**SIZES, attention_bias=True, position_scheme=scheme, position_parameters=parameters)
    model = RelPosEncoderModel(config).eval()
    ours, own = model.layers[0].attention, model.position_schemes[0]
    given = {name.replace("linear_out", "o_proj"): weight for name, weight in theirs.state_dict().items()}
    weights = {re.sub(r"linear_(\w)\.", r"\1_proj.", name): weight for name, weight in given.items()}
    ours.load_state_dict({name: weight for name, weight in weights.items() if "_proj." in name})
    own.load_state_dict(scheme_weights)
    for length in (11, 30):
        states = torch.randn(2, length, 48, requires_grad=True)
        positions = build_positions((2, length), states, causal=False)
        found = ours(states, states, own.call, DistanceTables(positions), own.prepare(positions))[0]
        wanted = theirs(states, relative_position_embeddings=None if table is None else table(states))[0]
        torch.testing.assert_close(found, wanted, **FLOAT32)
        direction = torch.randn_like(found)
        gradients = [torch.autograd.grad((output * direction).sum(), states)[0] for output in (found, wanted)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_wav2vec2_bert_relative_key() -> None:
    """Shaw's vectors on keys alone, both directions clipped."""
    theirs, _ = conformer_layer("relative_key")
    table = theirs.distance_embedding.weight.detach()
    assert_same_layer("shaw", {"max_distance": 5, "values": False}, theirs, {"key_table": table})


def test_wav2vec2_bert_relative() -> None:
    """Transformer-XL's four terms in both directions; its sinusoids alternate, so channels are reordered."""
    theirs, config = conformer_layer("relative")
    projection = theirs.linear_pos.weight.detach()
    weights = {
        "distance_projection.weight": torch.cat([projection[:, 0::2], projection[:, 1::2]], 1),
        "key_offset": theirs.pos_bias_u.detach(),
        "distance_offset": theirs.pos_bias_v.detach(),
    }
    assert_same_layer("transformer_xl", {}, theirs, weights, Wav2Vec2BertRelPositionalEmbedding(config))
