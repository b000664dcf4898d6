"""Transformer-XL's embeddings, head and vocabulary in all shapes that its code makes, against loops over tokens."""

import collections
import json
import math
import pathlib
import re
from typing import Any

import pytest
import torch
import transformers
from matrix import ids_of
from originals import converted
from safetensors.torch import save_file

from hf_relpos.conversion.api import convert_folder

Weights = dict[str, torch.Tensor]
SIZES = {
    "n_layer": 2,
    "n_head": 2,
    "d_model": 16,
    "d_head": 6,
    "d_inner": 20,
    "mem_len": 5,
    "dropout": 0.0,
    "dropatt": 0.0,
}
CUTOFFS = [9, 20, 30]
SHAPES = {
    "plain": {"d_embed": 16, "div_val": 1, "cutoffs": []},
    "narrow": {"d_embed": 8, "div_val": 1, "cutoffs": []},
    "clusters": {"d_embed": 16, "div_val": 1, "cutoffs": CUTOFFS},
    "narrow-clusters": {"d_embed": 8, "div_val": 1, "cutoffs": CUTOFFS},
    "divided": {"d_embed": 16, "div_val": 2, "cutoffs": CUTOFFS},
    "narrow-divided": {"d_embed": 8, "div_val": 2, "cutoffs": CUTOFFS[:2]},
}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64) * 0.3


def checkpoint(shape: str, original: bool, tie: bool = True) -> tuple[dict[str, Any], Weights]:
    """A configuration and random weights by the names of the paper's code or of transformers."""
    settings = {**SIZES, **SHAPES[shape], "clamp_len": -1, "same_length": False, "pre_lnorm": False, "attn_type": 0}
    settings |= {"n_token": 37, "tie_weight": tie} if original else {"vocab_size": 37, "tie_word_embeddings": tie}
    edges = [0, *settings["cutoffs"], 37]
    clusters = range(len(edges) - 1)
    width, div_val = settings["d_embed"], settings["div_val"]
    sizes = [(37, width)] if div_val == 1 else [(edges[i + 1] - edges[i], width // 2**i) for i in clusters]
    body, head = {"r_w_bias": random(2, 6), "r_r_bias": random(2, 6)}, {}
    for index, (rows, columns) in enumerate(sizes):
        body[f"word_emb.emb_layers.{index}.weight"] = random(rows, columns)
        head[f"out_layers.{index}.weight"] = body[f"word_emb.emb_layers.{index}.weight"] if tie else random(rows, columns)
        head[f"out_layers.{index}.bias"] = random(rows)
        if div_val > 1 or width != 16:
            body[f"word_emb.emb_projs.{index}"] = random(16, columns)
    if div_val > 1 or width != 16:
        head |= {f"out_projs.{i}": random(16, sizes[i if div_val > 1 else 0][1]) for i in clusters}
    if len(clusters) > 1:
        head |= {"cluster_weight": random(len(clusters) - 1, width), "cluster_bias": random(len(clusters) - 1)}
    for layer in ("layers.0.", "layers.1."):
        body |= {layer + name: random(*size) for name, size in LAYER.items()}
    names = {"" if original else "transformer.": body, "crit.": head}
    return settings, {prefix + name: weight for prefix, part in names.items() for name, weight in part.items()}


LAYER = {
    "dec_attn.qkv_net.weight": (36, 16), "dec_attn.o_net.weight": (16, 12), "dec_attn.r_net.weight": (12, 16),
    "dec_attn.layer_norm.weight": (16,), "dec_attn.layer_norm.bias": (16,), "pos_ff.CoreNet.0.weight": (20, 16),
    "pos_ff.CoreNet.0.bias": (20,), "pos_ff.CoreNet.3.weight": (16, 20), "pos_ff.CoreNet.3.bias": (16,),
    "pos_ff.layer_norm.weight": (16,), "pos_ff.layer_norm.bias": (16,),
}  # fmt: skip


def cluster_of(settings: dict[str, Any], token: int) -> tuple[int, int, int]:
    """Number, first token and end of a token's cluster."""
    edges = [0, *settings["cutoffs"], 37]
    index = sum(token >= edge for edge in edges[1:-1])
    return index, edges[index], edges[index + 1]


def embedded(settings: dict[str, Any], weights: Weights, token: int) -> torch.Tensor:
    """What enters the first layer for a token."""
    index, start, _ = cluster_of(settings, token)
    index, start = (index, start) if settings["div_val"] > 1 else (0, 0)
    vector = weights[f"word_emb.emb_layers.{index}.weight"][token - start]
    if f"word_emb.emb_projs.{index}" in weights:
        vector = weights[f"word_emb.emb_projs.{index}"] @ vector
    return vector * 16**0.5


def log_probability(
    settings: dict[str, Any], weights: Weights, hidden: torch.Tensor, token: int, original: bool
) -> torch.Tensor:
    """Of one token after one hidden state; the paper's code finds cluster i in the column -i of its head."""

    def scores(index: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        table, rows = (index, slice(None)) if settings["div_val"] > 1 else (0, slice(start, end))
        projection = weights.get(f"crit.out_projs.{index}", torch.eye(16, dtype=torch.float64))
        narrow = projection.T @ hidden
        weight, bias = (weights[f"crit.out_layers.{table}.{kind}"][rows] for kind in ("weight", "bias"))
        return weight @ narrow + bias, narrow

    shortlist = ([*settings["cutoffs"], 37])[0]
    first, narrow = scores(0, 0, shortlist)
    if settings["cutoffs"]:
        first = torch.cat([first, weights["crit.cluster_weight"] @ narrow + weights["crit.cluster_bias"]])
    first = first.log_softmax(0)
    index, start, end = cluster_of(settings, token)
    if index == 0:
        return first[token]
    column = -index if original else shortlist + index - 1
    return first[column] + scores(index, start, end)[0].log_softmax(0)[token - start]


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("original", [True, False], ids=["original", "transformers"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_embeddings_and_head(shape: str, original: bool, tie: bool) -> None:
    """What enters the first layer and the log-probabilities of all tokens, also as training computes them."""
    settings, weights = checkpoint(shape, original, tie)
    model, report = converted("transfo-xl", settings, weights)
    assert report.model == "RelPosDecoderForCausalLM" and not report.unused and model.config.tie_word_embeddings == tie
    output = model(ids_of(), output_hidden_states=True)
    plain = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    wanted = torch.stack([torch.stack([embedded(settings, plain, int(token)) for token in row]) for row in ids_of()])
    torch.testing.assert_close(output.hidden_states[0], wanted, rtol=1e-12, atol=1e-12)
    place = output.hidden_states[-1][1, 4]
    wanted = torch.stack([log_probability(settings, plain, place, token, original) for token in range(37)])
    torch.testing.assert_close(output.logits[1, 4].log_softmax(-1), wanted, rtol=1e-11, atol=1e-11)
    labels = ids_of().masked_fill(ids_of() % 5 == 0, -100)
    kept = labels[:, 1:] >= 0
    chosen = output.logits[:, :-1].log_softmax(-1)[kept].gather(-1, labels[:, 1:][kept][:, None])
    for training in (False, True):  # transformers computes losses of logits in float32
        loss = model.train(training)(ids_of(), labels=labels).loss
        exact = training and settings["cutoffs"]
        torch.testing.assert_close(loss.double(), -chosen.mean(), rtol=1e-12 if exact else 1e-6, atol=0)


@pytest.mark.parametrize("shape", ["narrow", "narrow-clusters", "divided"])
def test_projections_that_are_stored_once(shape: str) -> None:
    """Safetensors of old transformers leave out what is tied: tables and projections of the head."""
    settings, weights = checkpoint(shape, original=False)
    count = len(settings["cutoffs"]) + 1
    for index in range(count):
        source = index if settings["div_val"] > 1 else 0
        weights[f"crit.out_projs.{index}"] = weights[f"transformer.word_emb.emb_projs.{source}"]
    settings["tie_projs"] = [True] * count
    whole, _ = converted("transfo-xl", settings, weights)
    stored = {name: weight for name, weight in weights.items() if "out_projs" not in name}
    stored = {name: weight for name, weight in stored.items() if not re.search(r"out_layers\.\d\.weight", name)}
    found, report = converted("transfo-xl", settings, stored)
    torch.testing.assert_close(found.state_dict(), whole.state_dict(), rtol=0, atol=0)
    assert report.used.keys() == stored.keys()


def normed(weights: Weights, name: str, states: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(states, (16,), weights[f"{name}.weight"], weights[f"{name}.bias"])


def pre_norm_states(settings: dict[str, Any], weights: Weights, ids: torch.Tensor) -> torch.Tensor:
    """The last hidden states of one text, `(length, 16)`: norms before the sub-layers, and none after the last."""
    length, hidden = len(ids), torch.stack([embedded(settings, weights, int(token)) for token in ids])
    angles = [[back / 10000 ** (2 * t / 16) for t in range(8)] for back in range(length)]
    sinusoids = torch.tensor([[*map(math.sin, row), *map(math.cos, row)] for row in angles], dtype=torch.float64)
    back = torch.arange(length)[:, None] - torch.arange(length)
    for own in ("layers.0.", "layers.1."):
        entering = normed(weights, f"{own}dec_attn.layer_norm", hidden)
        q, k, v = (entering @ weights[f"{own}dec_attn.qkv_net.weight"].T).unflatten(-1, (3, 2, 6)).unbind(1)
        placed = (sinusoids @ weights[f"{own}dec_attn.r_net.weight"].T).unflatten(-1, (2, 6))[back.clamp(min=0)]
        scores = ((q + weights["r_w_bias"])[:, None] * k).sum(-1) + ((q + weights["r_r_bias"])[:, None] * placed).sum(-1)
        shares = (scores / math.sqrt(6)).masked_fill(back[..., None] < 0, -math.inf).softmax(1)
        mixed = torch.einsum("ijh,jhd->ihd", shares, v).flatten(1)
        hidden = hidden + mixed @ weights[f"{own}dec_attn.o_net.weight"].T
        entering = normed(weights, f"{own}pos_ff.layer_norm", hidden)
        inner = entering @ weights[f"{own}pos_ff.CoreNet.0.weight"].T + weights[f"{own}pos_ff.CoreNet.0.bias"]
        hidden = hidden + inner.relu() @ weights[f"{own}pos_ff.CoreNet.3.weight"].T + weights[f"{own}pos_ff.CoreNet.3.bias"]
    return hidden


@pytest.mark.parametrize("original", [True, False], ids=["original", "transformers"])
@torch.no_grad()
def test_norms_before_the_sub_layers(original: bool) -> None:
    """`pre_lnorm`: two segments with a memory between them, up to the log-probabilities; there is no last norm."""
    settings, weights = checkpoint("plain", original)
    model, report = converted("transfo-xl", settings | {"pre_lnorm": True}, weights)
    assert not report.unused and not report.missing and model.model.norm is None
    plain, ids = {name.removeprefix("transformer."): weight for name, weight in weights.items()}, ids_of(length=10)
    first = model(ids[:, :5])
    second = model(ids[:, 5:], memory=first.memory, output_hidden_states=True)
    wanted = torch.stack([pre_norm_states(settings, plain, row) for row in ids])
    torch.testing.assert_close(second.hidden_states[-1], wanted[:, 5:], rtol=1e-11, atol=1e-11)
    place = torch.stack([log_probability(settings, plain, wanted[1, 9], token, original) for token in range(37)])
    torch.testing.assert_close(second.logits[1, 4].log_softmax(-1), place, rtol=1e-11, atol=1e-11)


def written(folder: pathlib.Path, **settings: Any) -> pathlib.Path:
    """A folder with a checkpoint of the paper's code, in float32."""
    folder.mkdir()
    given, weights = checkpoint("divided", original=True, tie=False)
    (folder / "config.json").write_text(json.dumps(given | settings))
    save_file({name: weight.float().contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def test_words_become_a_tokenizer(tmp_path: pathlib.Path) -> None:
    """From `vocab.txt`, or from the `vocab.bin` of old transformers when pickles are allowed."""
    words = ["<eos>", "<unk>", "The", "cat", ","]
    first = written(tmp_path / "first")
    (first / "vocab.txt").write_text("".join(f"{word} 17\n" for word in words))
    second = written(tmp_path / "second")
    fields = {"idx2sym": words, "sym2idx": collections.OrderedDict(), "counter": collections.Counter("a")}
    torch.save(fields | {"lower_case": False}, second / "vocab.bin")
    for source, allow_pickle in ((first, False), (second, True), (second, False)):
        output = tmp_path / f"{source.name}-{allow_pickle}"
        report = convert_folder(str(source), output, allow_pickle)
        if source == second and not allow_pickle:
            assert any("no tokenizer" in note for note in report.notes) and not (output / "tokenizer.json").exists()
            continue
        tokenizer = transformers.AutoTokenizer.from_pretrained(output)
        assert tokenizer("The dog , The <eos>").input_ids == [2, 1, 4, 2, 0]
        assert (tokenizer.decode([2, 3, 4]), tokenizer.eos_token, tokenizer.unk_token) == (
            "The cat ,",
            "<eos>",
            "<unk>",
        )
        assert any("spaces only" in note for note in report.notes)


@pytest.mark.parametrize("content", [{"idx2sym": pathlib.PurePosixPath("x")}, [1], {"words": []}])
def test_a_vocabulary_that_is_none(tmp_path: pathlib.Path, content: Any) -> None:
    source = written(tmp_path / "source")
    torch.save(content, source / "vocab.bin")
    with pytest.raises(ValueError, match=r"vocab\.bin is damaged or holds more than a vocabulary"):
        convert_folder(str(source), tmp_path / "output", allow_pickle=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"attn_type": 1}, "attn_type=1 cannot be converted"),
        ({"ext_len": 4}, "ext_len=4 cannot be converted"),
        ({"sample_softmax": 100}, "sample_softmax=100 cannot be converted"),
        ({"same_length": True, "mem_len": 0}, "same_length=True cannot be converted with mem_len=0"),
        ({"cutoffs": [20, 9, 30]}, r"cutoffs=\[20, 9, 30\] must rise"),
        ({"n_layer": None}, "the configuration has no n_layer"),
        ({"n_layer": "two"}, "a field of the configuration is not what it should be"),
        ({"cutoffs": 9}, "a field of the configuration is not what it should be"),
    ],
)
def test_refused_settings(settings: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    source = written(tmp_path / "source", **settings)
    with pytest.raises(ValueError, match=message):
        convert_folder(str(source), tmp_path / "output")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
