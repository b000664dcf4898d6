"""Two schemes in one layer: what is refused and why, and what a combination keeps of its parts. The rows of the matrix do the rest."""

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from matrix import SIZES
from matrix import Case
from matrix import ids_of

from hf_relpos import SCHEMES
from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderModel
from hf_relpos import RelPosEncoderConfig
from hf_relpos import RelPosSeq2SeqConfig
from hf_relpos.commands.compare import choices
from hf_relpos.model.scheme_registry import scheme_class
from hf_relpos.training.optimizer import split_parameters

REFUSED = {
    "rope+xpos": "both turn queries and keys",
    "rope+rope": "both turn queries and keys",
    "alibi+t5": "both add numbers to the scores",
    "sinusoidal+rope": "sinusoidal adds absolute positions to the embeddings",
    "rope+learned_absolute": "learned_absolute adds absolute positions to the embeddings",
    "alibi+sinusoidal": "sinusoidal adds absolute positions to the embeddings",
    "rope+nope": "nope adds nothing to combine",
    "rope+shaw": "the terms of shaw read the query or the key itself",
    "transformer_xl+rope": "the terms of transformer_xl read the query",
    "rope+xlnet": "the terms of xlnet read the query",
    "rope+music": "the terms of music read the query",
    "rope+cope": "the terms of cope read the query",
    "rope+deberta": "the terms of deberta read the query",
    "music+alibi": "neither is rotary",
    "rope+alibi+t5": "it names 3 schemes",
}
PARAMETERS = {
    "of one part alone": ({"slopes": "geometric"}, "map its schemes \\(rope, alibi\\) to dicts: 'slopes'='geometric'"),
    "of another scheme": ({"t5": {}}, "map its schemes \\(rope, alibi\\) to dicts: 't5'="),
    "no dict": ({"alibi": 3}, "map its schemes \\(rope, alibi\\) to dicts: 'alibi'=3"),
    "unknown to a part": ({"alibi": {"slope": 1}}, "unknown parameter 'slope' of Alibi"),
    "not allowed": ({"rope": {"rope_theta": 0.5}}, "rope_theta=0.5 is not allowed"),
}


@pytest.mark.parametrize("name, reason", REFUSED.items(), ids=REFUSED)
def test_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match="refused: " + reason + ".*a combination is one rotary scheme and one that adds"):
        RelPosDecoderConfig(position_scheme=name)
    with pytest.raises(ValueError, match=reason):
        RelPosDecoderConfig(num_hidden_layers=2, position_scheme=["rope", name])


def test_every_scheme_has_a_part_or_none() -> None:
    """A rotary scheme joins every bias scheme and nothing else; a bias scheme reads no query or key but in their product."""
    for first in SCHEMES:
        for second in SCHEMES:
            roles = {SCHEMES[first].combines_as, SCHEMES[second].combines_as}
            if roles == {"rotary", "bias"}:
                assert list(scheme_class(f"{first}+{second}").kinds) == sorted(
                    [first, second], key=lambda name: SCHEMES[name].combines_as == "bias"
                )
            else:
                with pytest.raises(ValueError, match="is refused: "):
                    scheme_class(f"{first}+{second}")


@pytest.mark.parametrize("given, reason", PARAMETERS.values(), ids=PARAMETERS)
def test_parameters_that_do_not_fit(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RelPosDecoderConfig(position_scheme="rope+alibi", position_parameters=given)


def test_unknown_part() -> None:
    with pytest.raises(ValueError, match="unknown position_scheme 'alibx' in 'rope.alibx'; the schemes are: nope"):
        RelPosDecoderConfig(position_scheme="rope+alibx")


def test_the_order_does_not_matter() -> None:
    """The configuration names the rotary scheme first, alone, in a list and on either side of an encoder-decoder."""
    assert RelPosDecoderConfig(position_scheme="alibi+rope").position_scheme == "rope+alibi"
    config = RelPosDecoderConfig(num_hidden_layers=2, position_scheme=["t5 + rope", "nope"])
    assert config.position_scheme == ["rope+t5", "nope"]
    both = RelPosSeq2SeqConfig(position_scheme="alibi+rope", decoder_position_scheme="t5+xpos")
    assert (both.encoder_position_scheme, both.decoder_position_scheme) == ("rope+alibi", "xpos+t5")


def test_what_a_part_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="is refused for a bidirectional model: xpos: what decays"):
        RelPosEncoderConfig(position_scheme="xpos+alibi")
    with pytest.raises(ValueError, match="rope_type='dynamic' is refused for mem_len=4"):
        RelPosDecoderConfig(position_scheme="rope+t5", mem_len=4, position_parameters={"rope": {"rope_type": "dynamic"}})
    with pytest.raises(ValueError, match="max_distance=8 is not allowed: more than 16"):
        RelPosDecoderConfig(position_scheme="rope+t5", position_parameters={"t5": {"max_distance": 8}})


def test_layers_share_the_parameters_of_a_name() -> None:
    """In a list, `rope` is one set of parameters wherever it stands: alone or in a combination."""
    given = {"rope": {"rope_theta": 50.0}, "t5": {"num_buckets": 6}}
    config = RelPosDecoderConfig(**{**SIZES, "position_scheme": ["rope", "t5+rope"], "position_parameters": given})
    first, second = RelPosDecoderModel(config).position_schemes
    assert first.rope_theta == second.rotary.rope_theta == 50.0
    assert second.added.num_buckets == 6
    assert RelPosDecoderConfig.from_dict(json.loads(config.to_json_string())).position_parameters == given


@pytest.mark.parametrize("parameters, scale", [({}, 1.0), ({"t5": {"scale_scores": True}}, 8**-0.5)], ids=str)
def test_the_scale_is_that_of_the_bias_scheme(parameters: dict[str, Any], scale: float) -> None:
    scheme = Case("decoder", "rope+t5", parameters).model().position_schemes[0]
    assert scheme.scale() == scale and scheme.query_gain() == 8**-0.5 / scale


def test_models_are_copied_and_pickled() -> None:
    """Classes of combinations are made while running: what unpickles a model elsewhere makes them again."""
    model, ids = Case("decoder", "rope+t5", {"t5": {"num_buckets": 8}}).model(head=True), ids_of()
    wanted = model(ids).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(ids).logits, wanted)
        assert type(other.model.position_schemes[0]) is type(model.model.position_schemes[0])


def test_tables_of_a_part_are_initialised_and_learn_as_alone() -> None:
    config = Case("decoder", "rope+alibi", {"alibi": {"learned": True}}).config()
    model = RelPosDecoderModel(config)
    slopes = [scheme.added.slope for scheme in model.position_schemes]
    assert all(torch.allclose(slope, torch.tensor([0.0625, 0.00390625, 0.25])) for slope in slopes)
    positions = split_parameters(model)["positions"]
    assert {id(slope) for slope in slopes} == {id(table) for table in positions}


def test_compare_varies_over_combinations() -> None:
    assert [choice.name for choice in choices(["position_scheme=rope,rope+alibi"])] == ["rope", "rope+alibi"]
