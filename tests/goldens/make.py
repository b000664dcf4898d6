"""Makes the committed goldens: numbers of other implementations, and of the plain references, in float64.

    python tests/goldens/make.py            all folders that the installed packages can make
    python tests/goldens/make.py NAME ...   these

Each folder says in its `meta.json` what made it. `transformers==4.35.2` is the last one with Transformer-XL and with BERT's
relative positions; it needs an environment of its own. What the installed packages cannot make is named and left as it is.
The references need nothing but this repository and what it needs. The layout is that of `golden_reader.py`.
"""

import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
OLD = ("transformers", "4.35.2")
NEW = ("transformers", "5.")
XT = ("x-transformers", "2.")
BATCH, LENGTH = 2, 6
BERT_GRADIENTS = ("encoder.layer.0.attention.self.distance_embedding.weight", "encoder.layer.1.attention.self.query.weight")
XL_GRADIENTS = ("transformer.layers.0.dec_attn.r_net.weight", "transformer.layers.0.dec_attn.r_w_bias")
MAKERS: dict[str, tuple[tuple[tuple[str, str], ...], Callable[[], tuple[dict[str, Any], Any, Any]]]] = {}

Tensors = dict[str, torch.Tensor]


def maker(name: str, *packages: tuple[str, str]) -> Callable[[Any], Any]:
    """Register what makes a folder: its settings, its weights, and its tensors by `<case>/<kind>/<name>`."""

    def register(function: Any) -> Any:
        MAKERS[name] = packages, function
        return function

    return register


def numbers(seed: int) -> Callable[..., torch.Tensor]:
    """Return a source of normal numbers that no version of torch changes."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return lambda *shape: torch.from_numpy(generator.standard_normal(shape)).to(torch.float32)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return tokens from 1 to 49."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).integers(1, 50, shape))


@torch.no_grad()
def prepare(model: torch.nn.Module) -> Any:
    """Give a model weights under which every part matters, rounded to float32, and let it compute in float64."""
    draw = numbers(0)
    for name, weight in sorted(model.named_parameters()):
        noise = draw(*weight.shape)
        if "norm" in name.lower() and name.endswith("weight"):
            weight.copy_(1 + 0.1 * noise)
        else:
            weight.copy_(
                noise * (0.3 if weight.dim() < 2 or "emb" in name.lower() or "bias" in name else weight.shape[-1] ** -0.5)
            )
    return model.double().eval()


def weights_of(model: torch.nn.Module) -> Tensors:
    """Return the weights in float32, those that several names share under the first one."""
    found, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[name] = tensor.to(torch.float32)
    return found


def with_gradients(model: torch.nn.Module, case: str, outputs: Tensors, summed: list[str], wanted: Any) -> Tensors:
    """Return outputs, the weights of a loss over some of them, and the gradients of some parameters."""
    draw = numbers(1)
    loss = {name: draw(*outputs[name].shape) for name in summed}
    total = torch.stack([(outputs[name] * weight.double()).sum() for name, weight in loss.items()]).sum()
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(total, [parameters[name] for name in wanted])
    kinds = {"out64": outputs, "lossw": loss, "grad64": dict(zip(wanted, found, strict=True))}
    return {f"{case}/{kind}/{name}": tensor.detach() for kind, part in kinds.items() for name, tensor in part.items()}


def keep_float64() -> None:
    """Let `.float()` within an implementation leave float64 as it is."""
    narrow = torch.Tensor.float
    torch.Tensor.float = lambda self: self if self.dtype == torch.float64 else narrow(self)  # type: ignore[method-assign]


@maker("bert_relative_key", OLD)
def bert_encoder() -> tuple[dict[str, Any], Any, Any]:
    model, meta = bert("relative_key")
    io: Tensors = {}
    for case, padding in (("encoder_rightpad", slice(5, None)), ("encoder_leftpad", slice(0, 2))):
        ids = tokens(BATCH, LENGTH)
        mask = torch.ones_like(ids)
        mask[0, padding] = 0
        io |= bert_case(model, case, ids, mask)
    return meta, weights_of(model), io


@maker("bert_relative_key_query_causal", OLD)
def bert_decoder() -> tuple[dict[str, Any], Any, Any]:
    model, meta = bert("relative_key_query", is_decoder=True)
    ids = tokens(BATCH, LENGTH)
    io, steps, past = bert_case(model, "causal", ids, torch.ones_like(ids)), [], None
    for step in ids.split(1, 1):
        output = model(step, past_key_values=past, use_cache=True)
        past = output.past_key_values
        steps.append(output.last_hidden_state)
    return (
        meta,
        weights_of(model),
        io
        | {
            "causal_cached_steps/in/input_ids": ids,
            "causal_cached_steps/out64/steps": torch.cat(steps, 1).detach(),
        },
    )


def bert(kind: str, **fields: Any) -> tuple[Any, dict[str, Any]]:
    """Return a BERT without a head, and the folder's settings."""
    from transformers import BertConfig
    from transformers import BertModel

    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, position_embedding_type=kind, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **fields,
    )  # fmt: skip
    return prepare(BertModel(config, add_pooling_layer=False)), {"config": config.to_dict()}


def bert_case(model: Any, case: str, ids: torch.Tensor, mask: torch.Tensor) -> Tensors:
    found = model(ids, mask, output_attentions=True, output_hidden_states=True)
    outputs = {
        "valid_last": found.last_hidden_state * mask[..., None],
        "hidden_states/0": found.hidden_states[0],
        "attentions/0": found.attentions[0],
        "attentions/1": found.attentions[1],
    }
    given = {f"{case}/in/input_ids": ids, f"{case}/in/attention_mask": mask}
    return given | with_gradients(model, case, outputs, ["valid_last"], BERT_GRADIENTS)


@maker("transfoxl_hf_div1", OLD)
def transformer_xl_plain() -> tuple[dict[str, Any], Any, Any]:
    base = {"cutoffs": [], "div_val": 1, "tie_projs": [False]}
    return transformer_xl(base, {
        "mem5_T6": ({"mem_len": 5}, {}),
        "mem8_T6_same": ({"mem_len": 8, "same_length": True}, {}),
        "mem5_T6_clamp3": ({"mem_len": 5, "clamp_len": 3}, {}),
        "mem5_T6_emptymems": ({"mem_len": 5}, {"emptymems": True}),
    })  # fmt: skip


@maker("transfoxl_hf_adaptive_div2", OLD)
def transformer_xl_adaptive() -> tuple[dict[str, Any], Any, Any]:
    base = {"cutoffs": [12, 30], "div_val": 2, "tie_projs": [False, True, True]}
    return transformer_xl(base, {
        "mem5_T6": ({"mem_len": 5}, {}),
        "mem8_T6_same_clamp6": ({"mem_len": 8, "same_length": True, "clamp_len": 6}, {"keep_order": True}),
    })  # fmt: skip


def transformer_xl(base: dict[str, Any], cases: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """Three segments, one after the other, of one set of weights."""
    from transformers import TransfoXLConfig

    sizes = {"vocab_size": 50, "d_model": 32, "d_embed": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "n_layer": 2}
    sizes |= {"dropout": 0.0, "dropatt": 0.0, "mem_len": 5, **base}
    io: Tensors = {}
    model = None
    for case, (fields, extra) in cases.items():
        model = xl_model(TransfoXLConfig(**{**sizes, **fields}), extra)
        io |= xl_case(model, case, extra)
    meta = {"config_base": TransfoXLConfig(**sizes).to_dict()}
    meta["cases"] = {case: {"config": fields, "extra": extra} for case, (fields, extra) in cases.items()}
    return meta, weights_of(model) if model else {}, io


def xl_model(config: Any, extra: dict[str, Any]) -> Any:
    """Return a language model whose frequencies are float64's."""
    from transformers import TransfoXLLMHeadModel

    model = prepare(TransfoXLLMHeadModel(config))
    model.tie_weights()
    model.crit.keep_order = extra.get("keep_order", False)
    exponents = torch.arange(0, config.d_model, 2, dtype=torch.float64) / config.d_model
    model.transformer.pos_emb.inv_freq = 1 / 10000**exponents
    return model


def xl_case(model: Any, case: str, extra: dict[str, Any]) -> Tensors:
    segments = tokens(3, BATCH, LENGTH)
    given = {f"{case}/in/{kind}/{index}": ids for kind in ("input_ids", "labels") for index, ids in enumerate(segments)}
    mems = None
    if extra.get("emptymems"):
        mems = [torch.zeros(0, BATCH, 32, dtype=torch.float64) for _ in range(2)]
        given[f"{case}/in/mems0"] = torch.zeros(0, BATCH, 32)
    outputs: Tensors = {}
    for index, ids in enumerate(segments):
        found = model(ids, mems=mems, output_hidden_states=True, output_attentions=True)
        scored = model(ids, mems=mems, labels=ids)
        part = {"hidden": found.hidden_states[-1], "logprobs": found.prediction_scores.view(BATCH, LENGTH, -1)}
        part |= {"loss": scored.loss, "losses": scored.losses.view(BATCH, LENGTH - 1)}
        if index == 2:
            part |= {"attn0": found.attentions[0], "mems/0": found.mems[0], "mems/1": found.mems[1]}
        outputs |= {f"seg{index}/{name}": tensor for name, tensor in part.items()}
        mems = found.mems
    return given | with_gradients(model, case, outputs, [f"seg{index}/logprobs" for index in range(3)], XL_GRADIENTS)


@maker("transfoxl_tables", OLD)
def transformer_xl_tables() -> tuple[dict[str, Any], Any, Any]:
    """The shift that aligns distances, and the masks behind a memory."""
    from transformers import TransfoXLConfig
    from transformers import TransfoXLModel

    sizes = {"vocab_size": 50, "cutoffs": [], "div_val": 1, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "n_layer": 1}
    products = numbers(2)(5, 8, 1, 1)
    attention = TransfoXLModel(TransfoXLConfig(**sizes)).layers[0].dec_attn
    io = {"rel_shift/in/x": products[..., 0, 0].clone(), "rel_shift/out/shifted": attention._rel_shift(products)[..., 0, 0]}
    kept: list[torch.Tensor] = []
    for same in (False, True):
        for queries, held, limit in ((1, 0, 5), (5, 0, 7), (4, 3, 3), (6, 7, 7), (7, 5, 9), (1, 6, 6)):
            model = TransfoXLModel(TransfoXLConfig(**sizes, mem_len=limit, same_length=same))
            model.layers[0].register_forward_pre_hook(
                lambda _, __, kwargs: kept.append(kwargs["dec_attn_mask"]), with_kwargs=True
            )
            model(tokens(1, queries), mems=[torch.zeros(held, 1, 8)])
            name = f"q{queries}_m{held}_ml{limit}" if same else f"q{queries}_m{held}"
            io[f"xl_{'same_length' if same else 'causal'}_mask/out/{name}"] = kept.pop()[..., 0].to(torch.uint8)
    return {}, {"none": torch.zeros(1)}, io


@maker("distance_tables", NEW, XT)
def distance_tables() -> tuple[dict[str, Any], Any, Any]:
    """Buckets of T5 and DeBERTa-v2 for all distances to 600, and ALiBi's slopes for 1 to 20 heads."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
    from transformers.models.t5.modeling_t5 import T5Attention
    from x_transformers.x_transformers import AlibiPositionalBias
    from x_transformers.x_transformers import RelativePositionBias

    distance = torch.arange(-600, 601)
    io = {"buckets/in/rel_key_minus_query": distance}
    for count, furthest in ((32, 128), (8, 10), (16, 64), (32, 20)):
        for both in (True, False):
            name = f"{'bi' if both else 'causal'}_{count}_{furthest}"
            options = {"num_buckets": count, "max_distance": furthest}
            io[f"buckets/out/t5_{name}"] = T5Attention._relative_position_bucket(distance, bidirectional=both, **options)
            io[f"buckets/out/xt_{name}"] = RelativePositionBias._relative_position_bucket(distance, causal=not both, **options)
    for count, furthest in ((256, 512), (4, 16), (32, 128), (16, 600)):
        io[f"buckets/out/deberta_{count}_{furthest}"] = make_log_bucket_position(distance, count, furthest)
    io = {name: tensor.to(torch.int16) for name, tensor in io.items()}
    for heads in range(1, 21):
        # Each adds slope times a distance of 1: its last key less the one before.
        io[f"slopes/out/bloom_{heads}"] = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32).flatten()[1::2].clone()
        bias = build_mpt_alibi_tensor(heads, 2).flatten(1)
        io[f"slopes/out/mpt_{heads}"] = bias[:, -1] - bias[:, -2]
        io[f"slopes/out/xt_{heads}"] = AlibiPositionalBias(heads, heads).slopes.flatten().clone()
    return {}, {"none": torch.zeros(1)}, io


@maker("xt_rotary", XT)
def x_transformers() -> tuple[dict[str, Any], Any, Any]:
    """Whole decoders: RoPE of all channels and of half, behind a memory over three segments, and xPos."""
    from x_transformers import Decoder
    from x_transformers import TransformerWrapper

    cases: dict[str, dict[str, Any]] = {
        "rotary": {"rotary_pos_emb": True, "rotary_emb_dim": 8},
        "rotary_half": {"rotary_pos_emb": True, "rotary_emb_dim": 4},
        "rotary_xpos": {"rotary_xpos": True, "rotary_emb_dim": 8, "rotary_xpos_scale_base": 16},
        "rotary_xl": {"rotary_pos_emb": True, "rotary_emb_dim": 8},
    }
    weights: Tensors = {}
    io: Tensors = {}
    for case, fields in cases.items():
        memory = 7 if case == "rotary_xl" else 0
        layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, ff_mult=2, **fields)
        model = prepare(
            TransformerWrapper(num_tokens=50, max_seq_len=64, use_abs_pos_emb=False, max_mem_len=memory, attn_layers=layers)
        )
        for module in model.modules():
            if hasattr(module, "attn_fn"):
                module.attn_fn = lambda scores: scores.softmax(-1)
        ids = tokens(3 if memory else 1, BATCH, LENGTH)
        outputs: Tensors = {}
        mems = None
        for index, segment in enumerate(ids):
            logits, mems = model(segment, mems=mems, return_mems=True) if memory else (model(segment), None)
            outputs[f"seg{index}/logits" if memory else "logits"] = logits
            io[f"{case}/in/x/{index}" if memory else f"{case}/in/x"] = segment
        io |= with_gradients(model, case, outputs, [*outputs], ["attn_layers.layers.0.1.to_q.weight"])
        for name, tensor in weights_of(model).items():
            if not torch.equal(weights.setdefault(name, tensor), tensor):
                weights[f"case.{case}.{name}"] = tensor
    return {"cases": cases}, weights, io


@maker("plain_references", NEW)
def plain_references() -> tuple[dict[str, Any], Any, Any]:
    """Every scheme with each of its parameters in the test matrix, by `reference_model.py`, which loops over pairs of tokens."""
    from golden_cases import CASES
    from golden_cases import reference_outputs
    from golden_cases import reference_weights

    weights: Tensors = {}
    io: Tensors = {}
    for name, case in CASES.items():
        given = reference_weights(case)
        weights |= {f"case.{name}.{key}" if "position_schemes" in key else key: tensor for key, tensor in given.items()}
        io |= {f"{name}/out64/{key}": tensor for key, tensor in reference_outputs(case, given).items()}
    return {}, weights, io


def main(names: list[str]) -> None:
    """Make folders, and say which ones the installed packages cannot make."""
    torch.set_default_dtype(torch.float32)
    keep = torch.Tensor.float
    for name in names or MAKERS:
        packages, function = MAKERS[name]
        installed = {package: version_of(package) for package, _ in packages}
        if any(not installed[package].startswith(version) for package, version in packages):
            wanted = ", ".join(f"{package} {version}" for package, version in packages)
            print(f"{name}: left as it is; it needs {wanted}, and there is {installed}")
            continue
        keep_float64()
        meta, weights, io = function()
        torch.Tensor.float = keep  # type: ignore[method-assign]
        (HERE / name).mkdir(exist_ok=True)
        tensors = {key: tensor.detach().contiguous().clone() for key, tensor in io.items()}
        save_file(tensors, HERE / name / "io.safetensors")
        save_file(
            {key: tensor.detach().contiguous().to(torch.float32).clone() for key, tensor in weights.items()},
            HERE / name / "weights.safetensors",
        )
        made = {"made_by": installed or "tests/reference_model.py", "torch": torch.__version__}
        (HERE / name / "meta.json").write_text(json.dumps({**made, **meta}, indent=1) + "\n")
        size = sum(path.stat().st_size for path in (HERE / name).iterdir())
        print(f"{name}: {len(tensors)} tensors, {size / 1000:.0f} kB")


def version_of(package: str) -> str:
    """Return the installed version of a package; "none" where it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    main(sys.argv[1:])
