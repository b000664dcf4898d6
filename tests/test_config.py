"""Configurations: what they refuse, what they default to, and that a file brings back what was saved."""

import json
import pathlib
from typing import Any

import pytest
import torch
import transformers
from matrix import BASES
from matrix import CONFIGS
from matrix import SIZES
from matrix import Case
from matrix import cases
from matrix import ids_of

import hf_relpos
from hf_relpos import SCHEMES
from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosEncoderConfig
from hf_relpos.model import configuration_checks
from hf_relpos.model.scheme_base import LARGEST
from hf_relpos.model.scheme_base import ParameterSpec
from hf_relpos.model.scheme_registry import scheme_parameters

SMALL = {"num_hidden_layers": 2}
LIST = ["rope", "t5"]
REFUSED_BY_BOTH: dict[str, tuple[dict[str, Any], str]] = {
    "unknown scheme": (
        {"position_scheme": "ropee"},
        "unknown position_scheme 'ropee'; the schemes are: nope, sinusoidal, lea",
    ),
    "unknown scheme in a list": ({"position_scheme": ["rope", "xl"], **SMALL}, "unknown position_scheme 'xl'"),
    "length of the list": ({"position_scheme": LIST}, "lists 2 schemes for num_hidden_layers=6"),
    "unknown parameter": (
        {"position_scheme": "t5", "position_parameters": {"buckets": 8}},
        "unknown parameter 'buckets' of T5; its parameters: num_buckets, max_distance, scale_scores",
    ),
    "parameter of a scheme without any": (
        {"position_scheme": "sinusoidal", "position_parameters": {"base": 1}},
        "unknown parameter 'base' of Sinusoidal; its parameters: it has none",
    ),
    "below its minimum": (
        {"position_scheme": "shaw", "position_parameters": {"max_distance": 0}},
        "Shaw parameter max_distance=0 is not allowed: int at least 1",
    ),
    "above its maximum": (
        {"position_scheme": "rope", "position_parameters": {"partial_rotary_factor": 1.5}},
        "RoPE parameter partial_rotary_factor=1.5 is not allowed: float at least 0 and at most 1",
    ),
    "another type": (
        {"position_scheme": "t5", "position_parameters": {"num_buckets": "32"}},
        "T5 parameter num_buckets='32' is not allowed: int at least 4",
    ),
    "not a whole number": (
        {"position_scheme": "t5", "position_parameters": {"num_buckets": 8.5}},
        "num_buckets=8.5 is not",
    ),
    "a boolean for a number": (
        {"position_scheme": "t5", "position_parameters": {"num_buckets": True}},
        "num_buckets=True",
    ),
    "not finite": (
        {"position_parameters": {"rope_theta": float("nan")}},
        "rope_theta=nan is not allowed: float at least 1",
    ),
    "none of the choices": (
        {"position_scheme": "alibi", "position_parameters": {"slopes": "linear"}},
        "Alibi parameter slopes='linear' is not allowed: one of 'released', 'geometric'",
    ),
    "a number for a boolean": (
        {"position_parameters": {"interleaved": 1}},
        "interleaved=1 is not allowed: one of False, True",
    ),
    "optional number": (
        {"position_scheme": "transformer_xl", "position_parameters": {"clamp_len": 0}},
        "clamp_len=0 is not allowed: int at least 1 or None",
    ),
    "buckets without room": (
        {"position_scheme": "t5", "position_parameters": {"num_buckets": 32, "max_distance": 8}},
        "T5 parameter max_distance=8 is not allowed: more than",
    ),
    "no channel turns": (
        {"head_dim": 8, "position_parameters": {"partial_rotary_factor": 0.1}},
        "partial_rotary_factor=0.1 turns",
    ),
    "parameters of a list": (
        {"position_scheme": LIST, "position_parameters": {"num_buckets": 8}, **SMALL},
        r"map scheme names \(rope, t5\) to dicts: 'num_buckets'=8",
    ),
    "parameters of a scheme that is not listed": (
        {"position_scheme": LIST, "position_parameters": {"alibi": {}}, **SMALL},
        r"map scheme names \(rope, t5\) to dicts: 'alibi'=\{\}",
    ),
    "wrong parameter in a list": (
        {"position_scheme": LIST, "position_parameters": {"t5": {"num_buckets": 1}}, **SMALL},
        "T5 parameter num_buckets=1 is not allowed",
    ),
    "absolute scheme of one layer": (
        {"position_scheme": ["sinusoidal", "rope"], **SMALL},
        "'sinusoidal' acts on the embeddings, so it cannot be the scheme of single layers",
    ),
    "two absolute schemes": (
        {"position_scheme": ["learned_absolute", "sinusoidal"], **SMALL},
        "acts on the embeddings",
    ),
    "heads that do not divide": (
        {"hidden_size": 12, "num_attention_heads": 5},
        r"num_attention_heads=5 does not divide hidden_size=12; it may be one of \[1, 2, 3, 4, 6, 12\]",
    ),
    "key heads that do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide 8 heads"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
    "no tokens": ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
    "dropout of one": ({"hidden_dropout": 1.0}, "hidden_dropout=1.0 must be at least 0 and below 1"),
    "negative dropout": ({"attention_dropout": -0.1}, "attention_dropout=-0.1 must be at least 0"),
    "a width that no machine has": ({"hidden_size": 10**12}, "hidden_size=1000000000000 must be at most 16777216"),
    "layers without number": ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000 must be at most 65536"),
    "an odd width without heads": (
        {"hidden_size": 2**24 - 3, "num_attention_heads": 2},
        "does not divide hidden_size=16777213; it may be one of",
    ),
    "no size of a head": ({"head_dim": 0}, "head_dim=0 must be at least 1"),
    "no inner width": ({"intermediate_size": 0}, "intermediate_size=0 must be at least 1"),
    "no narrow embeddings": ({"embedding_size": 0}, "embedding_size=0 must be at least 1"),
    "negative types": ({"type_vocab_size": -1}, "type_vocab_size=-1 must be at least 0"),
    "epsilon of nothing": ({"layer_norm_eps": 0.0}, "layer_norm_eps=0.0 must be at least"),
    "no number": ({"initializer_range": float("nan")}, "initializer_range=nan must be at least 0"),
    "dropout of a classifier": ({"classifier_dropout": 1.5}, "classifier_dropout=1.5 must be at least 0 and below 1"),
    "a distance that no text has": (
        {"position_scheme": "t5", "position_parameters": {"max_distance": 10**12}},
        "T5 parameter max_distance=1000000000000 is not allowed: at most 16777216",
    ),
    "a slope beyond single precision": (
        {"position_scheme": "fire", "position_parameters": {"c": 1e308}},
        r"Fire parameter c=1e\+308 is not allowed: at most 1e\+15",
    ),
    "more than a float": ({"position_parameters": {"rope_theta": 10**400}}, "RoPE parameter rope_theta=1000"),
    "infinite": ({"position_parameters": {"rope_theta": float("inf")}}, "rope_theta=inf is not allowed: at most"),
    "parallel and post": (
        {"parallel_residual": True, "norm_position": "post"},
        "parallel_residual=True needs norm_position='pre'",
    ),
}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a field of encoders": (
        RelPosDecoderConfig,
        {"mem_len": 4, "reuse_len": 2},
        "unknown field 'reuse_len' .* another family",
    ),
    "a field of decoders": (RelPosEncoderConfig, {"sliding_window": 4}, "unknown field 'sliding_window' .* another family"),
    "nope in an encoder": (
        RelPosEncoderConfig,
        {"position_scheme": "nope"},
        "'nope' is refused for a bidirectional model",
    ),
    "nope in a list of an encoder": (
        RelPosEncoderConfig,
        {"position_scheme": ["rope", "nope"], **SMALL},
        "'nope' is refused for a bidirectional model: without positions and without a causal mask the tokens",
    ),
    "music in an encoder": (
        RelPosEncoderConfig,
        {"position_scheme": "music"},
        "'music' is refused for a bidirectional",
    ),
    "sinusoidal with memory": (
        RelPosDecoderConfig,
        {"position_scheme": "sinusoidal", "mem_len": 8},
        "'sinusoidal' is refused for mem_len=8: absolute positions restart in every segment",
    ),
    "learned_absolute with memory": (
        RelPosDecoderConfig,
        {"position_scheme": "learned_absolute", "mem_len": 8},
        "'learned_absolute' is refused for mem_len=8",
    ),
    "negative memory": (RelPosDecoderConfig, {"mem_len": -1}, "mem_len=-1 must be 0"),
    "a decay that is none": (
        RelPosDecoderConfig,
        {"position_scheme": "xpos", "position_parameters": {"gamma": 1e17}},
        r"XPos parameter gamma=1e\+17 is not allowed: at most 1e\+15",
    ),
    "a memory that no machine has": (
        RelPosDecoderConfig,
        {"mem_len": 10**12},
        "mem_len=1000000000000 must be at most 2147483647",
    ),
    "window of one": (RelPosDecoderConfig, {"sliding_window": 1}, "sliding_window=1 must be at least 2"),
}


@pytest.mark.parametrize("kind", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("fields, message", REFUSED_BY_BOTH.values(), ids=REFUSED_BY_BOTH)
def test_refused(kind: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**fields)


@pytest.mark.parametrize("kind, fields, message", REFUSED.values(), ids=REFUSED)
def test_refused_by_one_family(kind: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"position_scheme": 3}, {"norm_position": "middle"}, {"share_positions": "none"}, {"hidden_size": "256"}],
    ids=str,
)
@pytest.mark.parametrize("kind", CONFIGS.values(), ids=CONFIGS)
def test_types_are_checked(kind: Any, fields: dict[str, Any]) -> None:
    """The error of a typed field names it and the value."""
    (name, value), *_ = fields.items()
    with pytest.raises(Exception, match=f"(?s){name}.*{value}"):
        kind(**fields)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_parameter_is_documented_and_bounded(name: str) -> None:
    for key, spec in SCHEMES[name].parameter_specs.items():
        assert isinstance(spec, ParameterSpec) and spec.help and spec.allowed
        assert spec.check(key, spec.default) == spec.default
        with pytest.raises(ValueError, match=f"{key}=.* is not allowed: "):
            spec.check(key, "never allowed")
    assert SCHEMES[name].source, "every scheme names its paper"
    assert set(SCHEMES[name].refuses) <= {"causal", "bidirectional", "memory"}


PAPER_DEFAULTS: dict[str, dict[str, Any]] = {
    "nope": {},
    "sinusoidal": {},
    "learned_absolute": {},
    "learned_bias": {"max_distance": 128},
    "shaw": {"max_distance": 16, "values": True, "table": "learned"},
    "t5": {"num_buckets": 32, "max_distance": 128, "scale_scores": False},
    "transformer_xl": {"clamp_len": None},
    "music": {"max_distance": 512, "share_heads": False},
    "rope": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, "interleaved": False},
    "alibi": {"slopes": "released", "sides": "symmetric"},
}


@pytest.mark.parametrize("name", PAPER_DEFAULTS)
def test_defaults_are_those_of_the_paper(name: str) -> None:
    found = scheme_parameters(RelPosDecoderConfig(position_scheme=name), name)
    assert PAPER_DEFAULTS[name].items() <= found.items()


def test_given_parameters_stay_as_given() -> None:
    """A saved file says what was chosen and no more; numbers take the right type where they are used."""
    config = RelPosDecoderConfig(position_parameters={"rope_theta": 500})
    assert config.position_parameters == {"rope_theta": 500}
    assert str(scheme_parameters(config, "rope")["rope_theta"]) == "500.0"


def test_derived_fields() -> None:
    config = RelPosDecoderConfig(hidden_size=96, num_attention_heads=6)
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (16, 6, 384)
    assert config.sliding_window is None and config.layer_types == ["full_attention"] * 6
    assert RelPosDecoderConfig(mem_len=7).sliding_window == 8
    assert RelPosDecoderConfig(mem_len=7).layer_types == ["sliding_attention"] * 6
    assert RelPosDecoderConfig(mem_len=7, sliding_window=None).sliding_window is None
    assert RelPosDecoderConfig(mem_len=7, sliding_window=7).sliding_window == 7
    assert RelPosEncoderConfig(position_scheme="sinusoidal").scale_embedding
    assert not RelPosEncoderConfig(position_scheme="rope").scale_embedding
    assert RelPosEncoderConfig(hidden_size=90, num_attention_heads=4, head_dim=8).head_dim == 8


ROUND_TRIPS = {
    **{given.id: given.values[0].config() for given in cases(variants=True)},
    "list": Case("decoder", LIST, {"t5": {"num_buckets": 8}}).config(),
    "memory": RelPosDecoderConfig(mem_len=9),
    "memory without window": RelPosDecoderConfig(mem_len=9, sliding_window=None),
    "odd": RelPosEncoderConfig(classifier_pooling="cls", hidden_dropout=0.1, num_labels=5, eos_token_id=[3, 4]),
}


@pytest.mark.parametrize("config", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_round_trip(config: Any, tmp_path: pathlib.Path) -> None:
    """All fields come back with their types, also over the Auto class, and a second file has the same bytes."""
    config.save_pretrained(tmp_path / "first")
    for load in (type(config), transformers.AutoConfig):
        again = load.from_pretrained(tmp_path / "first")
        assert type(again) is type(config)
        ours, theirs = ({**fields.to_dict(), "_name_or_path": ""} for fields in (config, again))
        assert ours == theirs
        assert {key: type(value) for key, value in ours.items()} == {key: type(value) for key, value in theirs.items()}
    again.save_pretrained(tmp_path / "second")
    first, second = ((tmp_path / part / "config.json").read_bytes() for part in ("first", "second"))
    assert first == second


def test_what_was_set_and_saved_loads_again(tmp_path: pathlib.Path) -> None:
    """A name like that of a field is refused as an argument, but a folder that holds it must stay usable."""
    with pytest.raises(ValueError, match="unknown field 'layer_norm_epsilon' .* did you mean 'layer_norm_eps'"):
        RelPosDecoderConfig(layer_norm_epsilon=1.0)
    config = RelPosDecoderConfig()
    config.layer_norm_epsilon = 1.0
    config.save_pretrained(tmp_path)
    again = RelPosDecoderConfig.from_pretrained(tmp_path)
    assert again.layer_norm_epsilon == 1.0
    assert again.layer_norm_eps == config.layer_norm_eps


@pytest.mark.parametrize(
    "given, found",
    [
        ({"mem_len": 16}, (16, 17)),
        ({"mem_len": 0}, (0, None)),
        ({"mem_len": 16, "sliding_window": 9}, (16, 9)),
        ({"sliding_window": None}, (8, None)),
    ],
)
def test_fields_given_beside_a_folder(given: dict[str, Any], found: tuple[Any, Any], tmp_path: pathlib.Path) -> None:
    """The default window follows the memory; what is given is checked as in a new configuration."""
    RelPosDecoderConfig(mem_len=8).save_pretrained(tmp_path)
    config = RelPosDecoderConfig.from_pretrained(tmp_path, **given)
    assert (config.mem_len, config.sliding_window) == found
    assert set(config.layer_types) == {"full_attention" if found[1] is None else "sliding_attention"}
    with pytest.raises(ValueError, match="mem_len=-1 must be"):
        RelPosDecoderConfig.from_pretrained(tmp_path, mem_len=-1)
    with pytest.raises(ValueError, match="'sinusoidal' is refused for mem_len=8"):
        transformers.AutoConfig.from_pretrained(tmp_path, position_scheme="sinusoidal")


@pytest.mark.parametrize("family", CONFIGS)
def test_auto_map_of_a_saved_folder(family: str, tmp_path: pathlib.Path) -> None:
    """Names the configuration, the base model and every head of the family, whichever was saved."""
    config = Case(family, "rope", {}).config()
    BASES[family](config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    title = f"RelPos{family.capitalize()}"
    heads = [name for name in dir(hf_relpos) if name.startswith(f"{title}For")]
    wanted = {"AutoConfig": f"configuration_relpos.{title}Config", "AutoModel": f"modeling_relpos.{title}Model"}
    for head in heads:
        auto = "AutoModel" + head.removeprefix(title).replace("ForPermutationLM", "ForPreTraining")
        wanted[auto] = f"modeling_relpos.{head}"
    assert saved["auto_map"] == wanted
    assert saved["model_type"] == f"relpos_{family}"
    assert all(hasattr(transformers, auto) for auto in wanted)


def test_registration_is_idempotent() -> None:
    """Importing twice, or registering again, changes nothing; the Auto classes know every class."""
    hf_relpos._register()
    for family, kind in CONFIGS.items():
        config = Case(family, "rope", {}).config()
        assert type(transformers.AutoConfig.for_model(kind.model_type)) is kind
        for auto, name in kind.family_auto_map.items():
            if auto != "AutoConfig":
                model = getattr(transformers, auto).from_config(config)
                assert type(model) is getattr(hf_relpos, name.split(".")[1])


@pytest.mark.parametrize("given", cases())
def test_only_used_parameters_exist(given: Case) -> None:
    """No table of absolute positions where distances are used, and nothing for schemes without weights."""
    model = given.model()
    names = {name.split(".", 3)[3] for name, _ in model.named_parameters() if name.startswith("position_schemes.")}
    fixed = {"nope", "sinusoidal", "rope", "alibi"}
    assert ("position_embeddings" in names) == (given.scheme == "learned_absolute")
    assert not (names and given.scheme in fixed)
    assert len(model.layers) == SIZES["num_hidden_layers"]


@pytest.mark.parametrize("kind", CONFIGS.values(), ids=CONFIGS)
def test_what_trainer_sets_is_no_field_of_another_family(
    kind: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer writes `use_cache` into any configuration, whose folder then loads without a warning."""
    warned: list[str] = []
    monkeypatch.setattr(configuration_checks.logger, "warning", warned.append)
    config = kind()
    config.use_cache = True
    config.save_pretrained(tmp_path)
    kind.from_pretrained(tmp_path)
    assert not warned
    config.layer_norm_epsilon = 1.0
    config.save_pretrained(tmp_path)
    kind.from_pretrained(tmp_path)
    assert len(warned) == 1


@pytest.mark.parametrize("name", SCHEMES)
def test_the_largest_numbers_are_computed_with(name: str) -> None:
    """What the bounds allow gives no error and no number that is none."""
    family = "encoder" if "causal" in SCHEMES[name].refuses else "decoder"
    for key, spec in SCHEMES[name].parameter_specs.items():
        if spec.choices is None and spec.kind is float:
            largest = LARGEST[float] if spec.maximum is None else spec.maximum
            try:
                model = Case(family, name, {key: largest}).model(dtype=torch.float32)
            except ValueError:
                continue  # it does not fit the other parameters
            assert torch.isfinite(model(ids_of()).last_hidden_state).all(), key
