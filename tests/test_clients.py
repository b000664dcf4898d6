"""What other libraries read of a model without being told: how long its input may be, and which layers to tune."""

import copy
import pathlib
import pickle
import warnings
from dataclasses import is_dataclass
from typing import Any
from typing import get_args
from typing import get_type_hints

import pytest
from matrix import SIZES
from matrix import Case
from matrix import ids_of
from transformers import AutoConfig
from transformers.generation.stopping_criteria import logger as length_logger

import hf_relpos
from hf_relpos.evaluation.language_model import position_bound

BOUND = 16
CONFIGS = {
    "decoder": hf_relpos.RelPosDecoderConfig,
    "encoder": hf_relpos.RelPosEncoderConfig,
    "seq2seq": hf_relpos.RelPosSeq2SeqConfig,
}


def config_of(family: str, scheme: Any, **fields: Any) -> Any:
    return CONFIGS[family](**{**SIZES, "position_scheme": scheme, "max_position_embeddings": BOUND, **fields})


@pytest.mark.parametrize("family", CONFIGS)
def test_a_bound_is_there_to_be_read_where_there_is_one(family: str, tmp_path: pathlib.Path) -> None:
    """Saved, copied and loaded with another scheme too. What the number was stays known."""
    bounded, free = config_of(family, "learned_absolute"), config_of(family, "alibi")
    bounded.save_pretrained(tmp_path / "bounded")
    free.save_pretrained(tmp_path / "free")
    loaded = AutoConfig.from_pretrained(tmp_path / "free")
    for config in (free, loaded, copy.deepcopy(free), pickle.loads(pickle.dumps(free))):
        assert not hasattr(config, "max_position_embeddings") and position_bound(config) is None
        assert config.trained_length == config.to_dict()["max_position_embeddings"] == BOUND
        assert config is loaded or config == free != bounded
        assert "max_position_embeddings" not in list(config) and f'"max_position_embeddings": {BOUND}' in repr(config)
    with pytest.raises(AttributeError, match="position_scheme='alibi' has no bound; .* is config.trained_length"):
        free.max_position_embeddings  # noqa: B018
    for config in (bounded, AutoConfig.from_pretrained(tmp_path / "bounded")):
        assert config.max_position_embeddings == position_bound(config) == config.trained_length == BOUND
    if family != "seq2seq":
        other = AutoConfig.from_pretrained(tmp_path / "free", position_scheme="learned_absolute")
        assert other.max_position_embeddings == BOUND
        assert not hasattr(AutoConfig.from_pretrained(tmp_path / "bounded", position_scheme="rope"), "max_position_embeddings")
    free.max_position_embeddings = 2 * BOUND
    assert free.trained_length == 2 * BOUND


def test_one_bounded_stack_bounds_a_model() -> None:
    pair = {"encoder_position_scheme": "t5", "decoder_position_scheme": "learned_absolute"}
    assert config_of("seq2seq", "t5", **pair).max_position_embeddings == BOUND
    assert not hasattr(config_of("decoder", ["alibi", "rope+t5"]), "max_position_embeddings")


@pytest.mark.parametrize("scheme", ["rope", "alibi", "sinusoidal"])
def test_generation_beyond_the_trained_length_does_not_warn(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nor is it cut there, where no length was asked for."""
    model, warned = Case("decoder", scheme, {}).model(head=True, max_position_embeddings=BOUND), []
    length_logger.addFilter(lambda record: warned.append(record.getMessage()) or True)
    model.generate(ids_of(), max_new_tokens=12, do_sample=False)
    assert not warned
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert model.generate(ids_of(), do_sample=False).shape[1] == 11 + 20
    bounded = Case("decoder", "learned_absolute", {}).model(head=True, max_position_embeddings=BOUND)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert bounded.generate(ids_of(), do_sample=False).shape[1] == BOUND


@pytest.mark.parametrize("family", CONFIGS)
def test_a_forward_says_what_it_returns(family: str) -> None:
    """By outputs with fields, which sentence-transformers looks through for those that it needs."""
    names = {entry.rpartition(".")[2] for entry in CONFIGS[family].family_auto_map.values()}
    for name in sorted(names - {CONFIGS[family].__name__}):
        kinds = get_type_hints(getattr(hf_relpos, name).forward)["return"]
        for kind in get_args(kinds) or [kinds]:
            assert is_dataclass(kind), f"{name}.forward returns {kind}"
