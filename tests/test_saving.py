"""What is saved loads anywhere: in a process without this package, offline, with closed standard input."""

import json
import pathlib
from typing import Any

import pytest
import torch
import transformers
from elsewhere import reload_folders
from matrix import CONFIGS
from matrix import Case
from matrix import cases
from matrix import ids_of
from matrix import sharpen
from pairs import pairs
from reload_folders import run
from reload_folders import state_of
from safetensors.torch import load_file
from safetensors.torch import save_file
from seams import KINDS

import hf_relpos

HEADS = {family: [name for name in kind.family_auto_map if name != "AutoConfig"] for family, kind in CONFIGS.items()}
ABSOLUTE = [name for name, kind in hf_relpos.SCHEMES.items() if kind.acts_on_embeddings]
HYBRID = Case("decoder", ["rope", "nope"], {"rope": {"rope_theta": 500.0}})
OTHER_SHAPES = ["AutoModelForMultipleChoice"]
SEQ2SEQ_HEADS = ["AutoModel", "AutoModelForSeq2SeqLM"]
FOLDER = {"dtype": torch.float32, "attn_implementation": None}
BY_REMOTE_CODE = (HYBRID.scheme, *(schemes[0] for schemes in KINDS.values()))
"""Schemes whose folders every head loads by the code in them; those of the others are loaded by this package."""
LANGUAGE_HEAD = {"decoder": "AutoModelForCausalLM", "encoder": "AutoModelForMaskedLM"}


def heads_from(case: Case) -> list[str]:
    """The Auto classes that load from a folder of this case: a query stream is refused for absolute positions."""
    absolute = case.scheme in ABSOLUTE
    return [auto for auto in HEADS[case.family] if not (absolute and auto == "AutoModelForPreTraining")]


def save_job(folder: pathlib.Path, model: Any, auto: str, heads: list[str], **inputs: torch.Tensor) -> None:
    """Save a model and what it computes, for the other process to compute again."""
    folder.mkdir(parents=True)
    model.save_pretrained(folder / "model")
    write_job(folder, model, auto, heads, **inputs)


def write_job(folder: pathlib.Path, model: Any, auto: str, heads: list[str], **inputs: torch.Tensor) -> None:
    ids = ids_of()
    (folder / "job.json").write_text(json.dumps({"auto": auto, "heads": heads}))
    save_file({"ids": ids, **inputs}, folder / "inputs.safetensors")
    save_file(run(model, ids, **inputs), folder / "expected.safetensors")
    save_file(state_of(model), folder / "expected_state.safetensors")


def train_a_checkpoint(folder: pathlib.Path) -> None:
    """A folder that Trainer wrote in the middle of training, with what its model computes."""
    model = Case("decoder", "transformer_xl", {}).model(head=True, mem_len=4, **FOLDER)
    rows = [{"input_ids": row, "labels": row} for row in ids_of(4)]
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(folder), max_steps=2, save_steps=1, **quiet)
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    (folder / "checkpoint-2").rename(folder / "model")
    (folder / "checkpoint-1").rename(folder / "earlier")
    write_job(folder, model, "AutoModelForCausalLM", [])


def save_two_streams(folder: pathlib.Path) -> None:
    """A job with targets in an order, token types and a memory to fill."""
    case = Case("encoder", "xlnet", {})
    model = hf_relpos.RelPosEncoderForPermutationLM(case.config(mem_len=6, reuse_len=4, type_vocab_size=2, **FOLDER))
    order = torch.stack([torch.randperm(11), torch.randperm(11)])
    inputs = {
        "perm_mask": (order[:, :, None] <= order[:, None, :]).float(),
        "target_mapping": torch.nn.functional.one_hot(order[:, 7:], 11).float(),
        "token_type_ids": ids_of(seed=1) % 2,
    }
    heads = ["AutoModel", "AutoModelForSequenceClassification"]
    save_job(folder, sharpen(model).eval(), "AutoModelForPreTraining", heads, **inputs)


def heads_of(family: str) -> dict[str, type]:
    """The classes of a family by the name of their Auto class."""
    entries = CONFIGS[family].family_auto_map.items()
    return {auto: getattr(hf_relpos, name.split(".")[1]) for auto, name in entries if auto != "AutoConfig"}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """All models saved here and loaded again by one other process."""
    root, home = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("home")
    for given in [*cases(), pytest.param(HYBRID, id="decoder-hybrid")]:
        case = given.values[0]
        model = case.model(head=True, **FOLDER)
        heads = heads_from(case) if case.scheme in BY_REMOTE_CODE else []
        save_job(root / given.id, model, LANGUAGE_HEAD[case.family], heads)
    for family in CONFIGS:
        for auto, kind in heads_of(family).items():
            if auto not in OTHER_SHAPES:
                config = Case(family, "t5", {}).config(num_labels=3, tie_word_embeddings=False, attn_implementation=None)
                save_job(root / f"{family}-{auto}", sharpen(kind(config)).eval(), auto, [])
    for given in pairs():
        model = given.values[0].model(head=True, tie_word_embeddings=given.id != "lists", **FOLDER)
        save_job(root / f"seq2seq-{given.id}", model, "AutoModelForSeq2SeqLM", SEQ2SEQ_HEADS)
    train_a_checkpoint(root / "decoder-trainer")
    save_two_streams(root / "encoder-two-streams")
    reload_folders(root, home)
    return root


def names_of_jobs() -> list[str]:
    singles = [f"{family}-{auto}" for family in CONFIGS for auto in HEADS[family] if auto not in OTHER_SHAPES]
    both = [f"seq2seq-{given.id}" for given in pairs()]
    return [*(given.id for given in cases()), "decoder-hybrid", *singles, *both, "decoder-trainer", "encoder-two-streams"]


@pytest.mark.parametrize("name", names_of_jobs())
def test_reloaded_elsewhere(folders: pathlib.Path, name: str) -> None:
    """Same numbers, weights and buffers after the first and the second load, by code that came with the folder."""
    folder = folders / name
    report = json.loads((folder / "report.json").read_text())
    for load in ("first", "second"):
        assert report[f"{load} class"].startswith("transformers_modules.")
        outputs, expected = load_file(folder / f"{load}.safetensors"), load_file(folder / "expected.safetensors")
        assert outputs.keys() == expected.keys()
        for key, wanted in expected.items():
            # Weights that a file maps are aligned otherwise, so a product may round its last bits otherwise.
            last_bits = 2**-20 * float(wanted.abs().max())
            torch.testing.assert_close(outputs[key], wanted, rtol=0, atol=last_bits)
        found, wanted = (load_file(folder / f"{part}_state.safetensors") for part in (load, "expected"))
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", names_of_jobs())
def test_second_save_is_the_first(folders: pathlib.Path, name: str) -> None:
    first, second = folders / name / "model", folders / name / "again"
    saved = [path.name for path in second.iterdir()]
    assert {"config.json", "model.safetensors", "modeling_relpos.py", "configuration_relpos.py"} <= set(saved)
    for file in saved:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


@pytest.mark.parametrize("given", cases())
def test_every_head_loads_from_any_folder(folders: pathlib.Path, given: Case) -> None:
    report = json.loads((folders / given.name / "report.json").read_text())
    kinds = heads_of(given.family)
    if given.scheme not in BY_REMOTE_CODE:
        model = folders / given.name / "model"
        report |= {auto: type(getattr(transformers, auto).from_pretrained(model)).__name__ for auto in heads_from(given)}
    assert {auto: report[auto] for auto in heads_from(given)} == {auto: kinds[auto].__name__ for auto in heads_from(given)}
    assert report["config"] == CONFIGS[given.family].__name__


@pytest.mark.parametrize("given", pairs())
def test_heads_of_encoder_decoders(folders: pathlib.Path, given: Any, request: pytest.FixtureRequest) -> None:
    report = json.loads((folders / f"seq2seq-{request.node.callspec.id}" / "report.json").read_text())
    assert [report[auto] for auto in ("config", *SEQ2SEQ_HEADS)] == [
        "RelPosSeq2SeqConfig",
        "RelPosSeq2SeqModel",
        "RelPosSeq2SeqForConditionalGeneration",
    ]


def test_folder_of_a_checkpoint_is_complete(folders: pathlib.Path) -> None:
    """The code stands in every checkpoint, not only in the last folder."""
    for part in ("model", "earlier"):
        names = {path.name for path in (folders / "decoder-trainer" / part).iterdir()}
        assert {"modeling_relpos.py", "positions.py", "segment_memory.py", "scheme_registry.py", "trainer_state.json"} <= names


@pytest.mark.parametrize("family", CONFIGS)
def test_the_installed_package_comes_first(folders: pathlib.Path, family: str) -> None:
    """Where the package is installed, no remote code is needed and its own classes are used."""
    folder = folders / f"{family}-t5-num_buckets=8-max_distance=10" / "model"
    for auto, kind in heads_of(family).items():
        assert type(getattr(transformers, auto).from_pretrained(folder)) is kind


def test_unused_weights_are_named(folders: pathlib.Path) -> None:
    """A base model saved alone loads under a head, whose new layers alone are reported missing."""
    folder = folders / "encoder-AutoModel" / "model"
    kind = hf_relpos.RelPosEncoderForTokenClassification
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert set(report["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    assert torch.isfinite(model.classifier.weight).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_precision_of_a_folder(folders: pathlib.Path, dtype: str, tmp_path: pathlib.Path) -> None:
    kind = hf_relpos.RelPosDecoderForCausalLM
    kind.from_pretrained(folders / "decoder-rope" / "model", dtype=dtype).save_pretrained(tmp_path)
    assert str(kind.from_pretrained(tmp_path).dtype) == f"torch.{dtype}"
