"""sentence-transformers: embeddings and scores of pairs as by plain passes, also of texts longer than any in training."""

import pathlib
from typing import Any

import pytest
import torch
from client_models import ENCODERS_AND_BERT
from client_models import Kind
from client_models import asks_of
from matrix import SIZES
from matrix import Case

from hf_relpos.data.tokenizers import build_byte_tokenizer

asks = asks_of("sentence-transformers")
pytestmark = pytest.mark.clients
BOUND = 16
TOKENIZER = build_byte_tokenizer()
FIELDS = {"vocab_size": len(TOKENIZER), "pad_token_id": TOKENIZER.pad_token_id}
TEXTS = ["short", "a text that is longer than the length of training", "another text"]
PAIRS = [("a question", "its answer"), ("why?", "a longer answer, which makes the other row one with padding")]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def save(kind: Kind, auto: str, folder: pathlib.Path, **fields: Any) -> Any:
    """Save a tiny model with the tokenizer of bytes, and return it."""
    model = kind.model(auto, dtype=torch.float32, **FIELDS, **fields)
    model.save_pretrained(folder)
    tokenizer = build_byte_tokenizer()
    if kind.peer:
        tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    return model


def trusting() -> dict[str, Any]:
    return {"device": "cpu", "trust_remote_code": True}


@torch.no_grad()
def mean_of(model: Any, text: str) -> torch.Tensor:
    return model(torch.tensor([TOKENIZER(text).input_ids])).last_hidden_state[0].mean(0)


@pytest.mark.parametrize("kind", ENCODERS_AND_BERT)
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(
            {}, id="within", marks=asks("SentenceTransformer of a folder: mean of the last states, in a padded batch")
        ),
        pytest.param(
            {"max_position_embeddings": BOUND}, id="longer", marks=asks("texts longer than trained are embedded whole")
        ),
    ],
)
def test_embeddings(kind: Kind, fields: dict[str, int], tmp_path: pathlib.Path, record_property: Any) -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    model = save(kind, "AutoModel", tmp_path, **fields)
    found = torch.tensor(SentenceTransformer(str(tmp_path), **trusting()).encode(TEXTS))
    wanted = torch.stack([mean_of(model, text if not (kind.peer and fields) else text[:BOUND]) for text in TEXTS])
    torch.testing.assert_close(found, wanted, **CLOSE)
    if kind.peer and fields:
        record_property("says", f"cut at its max_position_embeddings, {BOUND}")


@asks("SentenceTransformer: trained by contrast, saved and loaded")
@pytest.mark.parametrize("kind", ENCODERS_AND_BERT)
def test_training(kind: Kind, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    save(kind, "AutoModel", tmp_path / "plain")
    client = SentenceTransformer(str(tmp_path / "plain"), **trusting())
    settings = {"max_steps": 8, "logging_steps": 1, "learning_rate": 3e-3, "lr_scheduler_type": "constant"}
    settings |= {
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "disable_tqdm": True,
    }
    trainer = SentenceTransformerTrainer(
        model=client,
        args=SentenceTransformerTrainingArguments(str(tmp_path / "run"), **settings),
        train_dataset=Dataset.from_list([{"anchor": question, "positive": answer} for question, answer in PAIRS]),
        loss=MultipleNegativesRankingLoss(client),
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    client.save_pretrained(str(tmp_path / "trained"))
    loaded = SentenceTransformer(str(tmp_path / "trained"), **trusting())
    torch.testing.assert_close(loaded.encode(TEXTS), client.encode(TEXTS), **CLOSE)


@asks("CrossEncoder: scores of pairs, in a padded batch, as by plain passes")
@pytest.mark.parametrize("kind", ENCODERS_AND_BERT)
@torch.no_grad()
def test_cross_encoder(kind: Kind, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import CrossEncoder

    long = {"max_position_embeddings": 128 if kind.peer else BOUND}
    model = save(kind, "AutoModelForSequenceClassification", tmp_path, num_labels=1, **long)
    found = torch.tensor(CrossEncoder(str(tmp_path), **trusting()).predict(PAIRS))
    wanted = [model(torch.tensor([TOKENIZER(*pair).input_ids])).logits.sigmoid().reshape(()) for pair in PAIRS]
    torch.testing.assert_close(found, torch.stack(wanted), **CLOSE)


@pytest.mark.row(
    "sentence-transformers", "cut: none where no scheme is bounded, else the bound", kind="encoder alibi, learned_absolute"
)
@pytest.mark.parametrize("scheme, cut", [("alibi", None), ("learned_absolute", BOUND)])
def test_cut_of_sentence_transformers(scheme: str, cut: int | None, tmp_path: pathlib.Path) -> None:
    """A long text is embedded whole, unless the scheme has a bound."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling
    from sentence_transformers.models import Transformer

    tokenizer = build_byte_tokenizer()
    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": BOUND}
    model = Case("encoder", scheme, {}).model(dtype=torch.float32, **fields)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    transformer = Transformer(
        str(tmp_path), model_kwargs={"trust_remote_code": True}, config_kwargs={"trust_remote_code": True}
    )
    client = SentenceTransformer(modules=[transformer, Pooling(SIZES["hidden_size"], "mean")], device="cpu")
    assert client.max_seq_length == (cut or tokenizer.model_max_length)
    text = "a text that is longer than the length of training"
    length = client.tokenize([text])["input_ids"].shape[1]
    assert length == (cut or len(tokenizer(text).input_ids)) and torch.tensor(client.encode(text)).isfinite().all()
