"""Muon and AdamW behind one face: who gets what, schedules reach both, and a saved state resumes bit for bit."""

import copy

import pytest
import torch

from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM
from hf_relpos.training.optimizer import OptimizerFactory


def small_model() -> RelPosDecoderForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return RelPosDecoderForCausalLM(RelPosDecoderConfig(**sizes, position_scheme="transformer_xl"))


def take_steps(model, optimizer, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(0, 32, (2, 8), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_every_parameter_has_exactly_one_optimizer() -> None:
    model = small_model()
    optimizer = OptimizerFactory()(model, muon_learning_rate=0.02, learning_rate=1e-3, weight_decay=0.1)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    by_muon = {id(parameter) for group in optimizer.muon.param_groups for parameter in group["params"]}
    assert id(model.model.layers[0].attention.q_proj.weight) in by_muon
    assert id(model.model.embed_tokens.weight) not in by_muon


def test_a_schedule_reaches_both() -> None:
    optimizer = OptimizerFactory()(small_model(), muon_learning_rate=0.02, learning_rate=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert optimizer.muon.param_groups[0]["lr"] == pytest.approx(0.01)
    assert optimizer.adamw.param_groups[0]["lr"] == pytest.approx(5e-4)


def test_a_saved_state_resumes_bit_for_bit() -> None:
    model = small_model()
    optimizer = OptimizerFactory()(model, muon_learning_rate=0.02, learning_rate=1e-3)
    take_steps(model, optimizer, 3, seed=1)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    take_steps(model, optimizer, 2, seed=2)
    resumed = small_model()
    resumed.load_state_dict(weights)
    other = OptimizerFactory()(resumed, muon_learning_rate=0.02, learning_rate=1e-3)
    other.load_state_dict(state)
    take_steps(resumed, other, 2, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_position_tables_have_a_rate_of_their_own() -> None:
    model = small_model()
    optimizer = OptimizerFactory()(model, learning_rate=1e-3, position_learning_rate=1e-2, weight_decay=0.1)
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    scheme = model.model.position_schemes[0]
    assert rates[id(scheme.key_offset)] == (1e-2, 0.0)
    assert rates[id(scheme.distance_projection.weight)] == (1e-3, 0.1)
    assert len(rates) == len(list(model.parameters()))


@pytest.mark.parametrize("muon", [None, 0.02])
def test_weight_decay_holds_for_matrices_only(muon: float | None) -> None:
    model = small_model()
    optimizer = OptimizerFactory()(model, learning_rate=1e-3, muon_learning_rate=muon, weight_decay=0.1)
    decay = {id(parameter): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert {decay[id(p)] for p in model.parameters() if p.dim() == 1} == {0.0}
    assert decay[id(model.model.embed_tokens.weight)] == decay[id(model.model.layers[0].attention.q_proj.weight)] == 0.1


def test_position_tables_may_stay_as_they_are() -> None:
    optimizer = OptimizerFactory()(small_model(), learning_rate=1e-3, position_learning_rate=0.0)
    assert 0.0 in [group["lr"] for group in optimizer.param_groups]


def test_a_closure_computes_gradients() -> None:
    found = []
    for by_closure in (False, True):
        model = small_model()
        optimizer = OptimizerFactory()(model, muon_learning_rate=0.02, learning_rate=1e-3)
        ids = torch.arange(16).view(2, 8)

        def closure(model=model, ids=ids):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss

        loss = closure() if not by_closure else None
        found.append((optimizer.step(closure if by_closure else None) or loss, model.lm_head.weight))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="no matrices in layers"):
        OptimizerFactory()(torch.nn.Linear(4, 4), muon_learning_rate=0.02, learning_rate=1e-3)
