"""Jobs that faults are tried on: what each reads, what it does, and what must be there at its end.

A job runs in a folder of its own, its room, where all names are relative and the caches of tables lie too. It is run again after
a fault, by the same words, and must then end as if there had been none.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from typing import NamedTuple

import torch
import yaml

TEXT = "".join(f"line {i}: the quick brown fox jumps over {i * 7919 % 997} lazy dogs\n" for i in range(400))
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
RUN: dict[str, Any] = {
    "train_file": "text.txt", "output_dir": "out", "resume_from_checkpoint": "auto", "block_size": 32, "max_steps": 12,
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "max_eval_samples": 8, "learning_rate": 0.01, "logging_steps": 1,
    "save_strategy": "steps", "save_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "sample_tokens": 4,
    "config_overrides": SMALL | {"hidden_dropout": 0.1},
}  # fmt: skip
COMPARISON: dict[str, Any] = {
    "schemes": ["nope", "t5"],
    "seeds": [0],
    "settings": {
        "config_overrides": SMALL, "max_steps": 4, "per_device_train_batch_size": 4, "use_cpu": True, "train_file": ["text.txt"],
        "validation_split_percentage": 40,
    },
    "tasks": {"text": {"kind": "language_modelling", "lengths": [1], "tokens": 128, "settings": {"block_size": 16}}},
}  # fmt: skip
REPO, TOKEN = "me/tiny", "hf_of_the_faults"
TIMES = ("time", "per_second", "flos", "seconds", "memory")
"""Parts of the names of numbers that differ from run to run."""
Outcome = dict[str, str]


class Job(NamedTuple):
    """A job: how its room is laid out, what it does there, and what it leaves; `checkpoints` is where it keeps its progress."""

    lay_out: Callable[[Path], None]
    run: Callable[[str], None]
    outcome: Callable[[Path], Outcome]
    checkpoints: str | None = None
    memory: bool = False


# What is there at the end


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def bits_of(value: Any) -> Any:
    """Return a nested value with each tensor as the digest of its bytes: files of torch hold more than their numbers."""
    if isinstance(value, torch.Tensor):
        return digest(value.reshape(-1).view(torch.uint8).numpy().tobytes()) if value.numel() else "empty"
    if isinstance(value, dict):
        return {str(name): bits_of(part) for name, part in value.items()}
    return [bits_of(part) for part in value] if isinstance(value, list | tuple) else repr(value)


def steady(value: Any) -> Any:
    """Return JSON without what differs from run to run."""
    if isinstance(value, dict):
        return {name: steady(part) for name, part in value.items() if not any(word in name for word in TIMES)}
    return [steady(part) for part in value] if isinstance(value, list) else value


def files_of(folder: Path) -> Outcome:
    return {str(path.relative_to(folder)): digest(path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()}


def trained(room: Path) -> Outcome:
    """Weights, optimizer, log and results of a finished run; every checkpoint that is there."""
    out, found = room / "out", {}
    for folder in (out, *sorted(out.glob("checkpoint-*"))):
        found[f"{folder.name} weights"] = digest((folder / "model.safetensors").read_bytes())
        state = json.loads((folder / "trainer_state.json").read_text())
        found[f"{folder.name} log"] = json.dumps([entry for entry in map(steady, state["log_history"]) if "loss" in entry])
        if folder != out:
            optimizer = bits_of(torch.load(folder / "optimizer.pt", weights_only=True))
            found[f"{folder.name} optimizer"] = digest(json.dumps(optimizer).encode())
    # Trainer's mean of the loss is over the steps since it was started, if there were any.
    results = steady(json.loads((out / "all_results.json").read_text()))
    results = {name: value for name, value in results.items() if name.startswith("eval_")}
    return found | {"results": json.dumps(results), "sample": (out / "sample.txt").read_text()}


def compared(room: Path) -> Outcome:
    found = {path.parent.name: digest(path.read_bytes()) for path in (room / "out").rglob("cells/*/result.json")}
    assert found, "no result"
    return found


def converted(room: Path) -> Outcome:
    return files_of(room / "converted")


def evaluated(room: Path) -> Outcome:
    return {"said": (room / "numbers.txt").read_text(), **files_of(room / "model")}


def prepared(room: Path) -> Outcome:
    return json.loads((room / "blocks.json").read_text())


# What is done


def lay_out_run(room: Path, **settings: Any) -> None:
    (room / "text.txt").write_text(TEXT)
    (room / "run.yaml").write_text(yaml.safe_dump(RUN | settings))


def lay_out_memory(room: Path) -> None:
    lay_out_run(room, mem_len=16, lane_groups=2)


def lay_out_workers(room: Path) -> None:
    lay_out_run(room, dataloader_num_workers=2)


def lay_out_preparation(room: Path) -> None:
    lay_out_run(room, preprocessing_num_workers=2, tokenizer_name="bpe", vocab_size=300)
    (room / "text.txt").write_text("\n".join(TEXT.replace("fox", f"fox {part}") for part in range(200)))


def lay_out_evaluation(room: Path) -> None:
    from transformers import AutoModelForCausalLM

    lay_out_run(room, max_steps=1, output_dir="model", save_strategy="no")
    with within(room), silent():
        run_training("run.yaml")
    assert AutoModelForCausalLM.from_pretrained(room / "model")


def lay_out_comparison(room: Path) -> None:
    (room / "text.txt").write_text(TEXT)
    (room / "compare.yaml").write_text(yaml.safe_dump(COMPARISON))


def lay_out_conversion(room: Path) -> None:
    from transformers import GPT2Config
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=5000, n_embd=64, n_layer=6, n_head=4, n_positions=128)).save_pretrained(
        room / "gpt2"
    )


def run_training(config: str = "run.yaml") -> None:
    from hf_relpos.training.run import main

    main([config])


def run_preparation(_: str) -> None:
    """Read, tokenize and pack a text, and write down what came out."""
    from hf_relpos.training.run import prepare

    try:
        job = prepare(["run.yaml"])
        blocks = {name: [row["input_ids"].tolist() for row in part] for name, part in tables_of(job).items()}
        part = Path("blocks.part")
        part.write_text(json.dumps({name: digest(json.dumps(rows).encode()) for name, rows in blocks.items()}))
        part.replace("blocks.json")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


def tables_of(job: Any) -> dict[str, Any]:
    return {"train": job.trainer.train_dataset, "eval": job.texts["eval"].blocks}


def run_command(*words: str) -> None:
    from hf_relpos.__main__ import main

    main(words)


def run_evaluation(_: str) -> None:
    with open("numbers.part", "w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        run_command("evaluate", "model", "text.txt")
    Path("numbers.part").replace("numbers.txt")


def run_push(address: str) -> None:
    """Publish a model's folder on the Hub at an address, as a run does at its end."""
    import transformers.utils.hub
    from huggingface_hub import HfApi
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError

    from hf_relpos.training.publishing import publish

    constants.HF_HUB_OFFLINE = False
    transformers.utils.hub._hf_api = api = HfApi(endpoint=address, token=TOKEN)
    try:
        api.create_repo(REPO, exist_ok=True)
        publish("model", REPO)
    except (ValueError, OSError, HTTPError) as error:  # the last is that of `create_repo`
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


JOBS = {
    "training": Job(lay_out_run, lambda _: run_training(), trained, "out"),
    "training with memory": Job(lay_out_memory, lambda _: run_training(), trained, "out", memory=True),
    "training with workers": Job(lay_out_workers, lambda _: run_training(), trained, "out"),
    "data preparation": Job(lay_out_preparation, run_preparation, prepared),
    "evaluate": Job(lay_out_evaluation, run_evaluation, evaluated),
    "compare": Job(lay_out_comparison, lambda _: run_command("compare", "compare.yaml", "--output_dir", "out"), compared),
    "convert": Job(lay_out_conversion, lambda _: run_command("convert", "gpt2", "converted"), converted),
    "push": Job(lay_out_evaluation, run_push, lambda room: {}),
}


# In the process of a job


@contextlib.contextmanager
def within(room: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(room)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def work(name: str, room: str, said: str, told: Connection, spoil: str | None, address: str) -> None:
    """Do a job in its room; what it prints goes to `said`, its beginning and each whole checkpoint are told."""
    sys.dont_write_bytecode = True
    with open(said, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in its background ignores it
    os.chdir(room)
    import hf_relpos.data.tables
    from hf_relpos.training.checked_trainer import CheckedTrainer

    hf_relpos.data.tables.HF_DATASETS_CACHE = f"{room}/cache"
    save = CheckedTrainer._save_checkpoint

    def save_and_tell(trainer: Any, *arguments: Any) -> None:
        told.send(["saves", trainer.state.global_step])
        save(trainer, *arguments)
        told.send(["saved", trainer.state.global_step])

    CheckedTrainer._save_checkpoint = save_and_tell
    if spoil is not None:
        import spoil as spoiling

        spoiling.install(spoil)
    told.send(["begins", 0])
    JOBS[name].run(address)
