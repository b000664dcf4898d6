"""Continuous batching: a refusal that says why before anything is allocated, in each of its entries."""

from typing import Any

import pytest
import torch
from client_models import DECODERS
from client_models import LLAMA
from client_models import SEQ2SEQS
from client_models import Kind
from client_models import asks_of
from client_models import params
from matrix import ids_of
from transformers import ContinuousBatchingConfig
from transformers import GenerationConfig

asks = asks_of("transformers: continuous batching", package="transformers")


@asks("generate_batch, init_continuous_batching, cache_implementation='paged'")
@pytest.mark.parametrize("kind", params(*DECODERS.values(), *SEQ2SEQS.values()))
def test_continuous_batching_is_refused(kind: Kind, record_property: Any) -> None:
    model: Any = kind.model()
    entries = [
        lambda: model.generate_batch(ids_of().tolist()),
        lambda: model.init_continuous_batching(),
        lambda: model.generate(ids_of(), cache_implementation="paged"),
    ]
    for enter in entries:
        with pytest.raises(ValueError, match=r"continuous batching .* is refused: .*; use model.generate\("):
            enter()
    record_property("says", "refused: pages of keys come without positions; `generate` with a padded batch")


@pytest.mark.clients
@asks("generate_batch, init_continuous_batching, cache_implementation='paged'")
@pytest.mark.parametrize("kind", params(LLAMA))
def test_continuous_batching_of_the_peer(kind: Kind) -> None:
    model = kind.model(dtype=torch.float32)
    settings = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = ids_of()
    found = model.generate_batch(ids.tolist(), config, settings)
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False)[:, ids.shape[1] :]
    assert sorted(list(one.generated_tokens) for one in found.values()) == sorted(wanted.tolist())
