"""What others wrote, folders, settings and names, is data: nothing of it runs, leaves its place or becomes markup."""

import ast
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from matrix import CONFIGS
from originals import original
from runs import SMALL
from runs import write_config
from test_convert_refusals import TINY

import hf_relpos
from hf_relpos.__main__ import main as command
from hf_relpos.conversion.api import convert_folder
from hf_relpos.evaluation.page import code_span
from hf_relpos.model.configuration_checks import BOUNDS
from hf_relpos.model.scheme_registry import SCHEMES
from hf_relpos.training.run import main
from hf_relpos.training.run import prepare
from hf_relpos.training.run import run
from hf_relpos.training.settings_file import parse_yaml

PACKAGE = Path(hf_relpos.__file__).parent
NAME = "a`b <script>x</script> | *c* ```"


class Trap:
    """Unpickled without care, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a checkpoint; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("trained")
    main([write_config(folder, save_strategy="steps", save_steps=2)])
    return folder


# ---- nothing runs


DANGEROUS = {
    "eval", "exec", "compile", "os.system", "os.popen", "pickle.load", "pickle.loads", "marshal.loads", "joblib.load", "shelve.open",
    "shutil.unpack_archive", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "tarfile.open", "zipfile.ZipFile", "__import__",
}  # fmt: skip
WITH: dict[str, Any] = {"torch.load": ("weights_only", True)}
WITHOUT = {"trust_remote_code", "shell", "allow_pickle"}


def calls_of(path: Path) -> list[tuple[str, ast.Call]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_no_code_of_the_package_runs_what_it_reads() -> None:
    """No pickle, no archive, no shell, no remote code; torch.load takes tensors only, and YAML is read by a SafeLoader."""
    for path in sorted([*PACKAGE.rglob("*.py"), PACKAGE.parent / "train_lm.py"]):
        for name, call in calls_of(path):
            given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
            where = f"{path.name}:{call.lineno}: {name}"
            assert name not in DANGEROUS, where
            assert name not in WITH or given.get(WITH[name][0]) is WITH[name][1], where
            assert not [word for word in WITHOUT if given.get(word) is True], where
            assert name != "yaml.load" or ast.unparse(call.args[1]) == "_Loader", where


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.mkdir [{}]", "!!python/name:os.system", "!!python/object/new:os.mkdir [{}]"]
)
def test_tags_of_yaml_are_refused(tag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trap = tmp_path / "trap"
    text = f"learning_rate: {tag.format(trap)}\n"
    with pytest.raises(ValueError, match="could not determine a constructor for the tag"):
        parse_yaml(text)
    (tmp_path / "evil.yaml").write_text(text)
    for words in (["compare", str(tmp_path / "evil.yaml")], None):
        with pytest.raises(SystemExit, match="could not determine a constructor for the tag"):
            command(words) if words else main([str(tmp_path / "evil.yaml")])
    with pytest.raises(SystemExit, match="position_parameters"):
        main(["--position_parameters", f"{{a: {tag.format(trap)}}}"])
    assert not trap.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_folder_with_a_pickle_in_place_of_weights_is_refused(trained: Path, tmp_path: Path, name: str) -> None:
    folder, trap = tmp_path / "model", tmp_path / "trap"
    folder.mkdir()
    for path in (trained / "out").glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / name).write_bytes(pickle.dumps(Trap(trap)))
    for words in (
        ["generate", str(folder), "--prompt", "a"],
        ["evaluate", str(folder), str(trained / "text.txt")],
        ["convert", str(folder), str(tmp_path / "out")],
    ):
        with pytest.raises((SystemExit, pickle.UnpicklingError)):
            command(words)
    assert not trap.exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_a_checkpoint_with_a_pickle_is_not_run(trained: Path, tmp_path: Path, name: str) -> None:
    """Whoever can write it can write its digests, too."""
    trap = tmp_path / "trap"
    config = write_config(tmp_path, save_strategy="steps", save_steps=2, train_file=str(trained / "text.txt"))
    main([config, "--max_steps", "2"])
    file = tmp_path / "out" / "checkpoint-2" / name
    torch.save(Trap(trap), file)
    (file.parent / "digests.json").unlink()
    try:
        main([config, "--resume_from_checkpoint", "auto"])
        assert name == "training_args.bin"  # which is not read
    except (SystemExit, pickle.UnpicklingError):
        assert name != "training_args.bin"
    assert not trap.exists()


def test_code_in_a_folder_runs_for_those_only_who_ask_for_it(trained: Path, tmp_path: Path) -> None:
    """Models of this package are loaded by this package; others by nothing."""
    folder, trap = tmp_path / "model", tmp_path / "trap"
    folder.mkdir()
    for path in (trained / "out").iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    for path in folder.glob("*.py"):
        path.write_text(f"open({str(trap)!r}, 'w')\n")
    command(["evaluate", str(folder), str(trained / "text.txt")])
    command(["generate", str(folder), "--prompt", "a", "--max_new_tokens", "2"])
    assert not trap.exists()
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "somebody_elses"}
    (folder / "config.json").write_text(json.dumps(config))
    sys.stdin.close()  # else transformers would ask
    for words in (["generate", str(folder), "--prompt", "a"], ["evaluate", str(folder), str(trained / "text.txt")]):
        with pytest.raises(SystemExit, match="error: "):
            command(words)
    assert not trap.exists()


# ---- names are no markup


def test_names_are_no_markup_in_the_card_of_a_run(tmp_path: Path) -> None:
    """Nor settings, nor the sample; the metadata is read as it was meant."""
    folder = tmp_path / f"{NAME.replace('/', '')}\n# heading"
    folder.mkdir()
    text = folder / "<img src=x>\n## [a](b) `.txt"
    text.write_text("".join(f"line {i} <b>\n```\n# no heading\n" for i in range(200)))
    out = folder / "out `<i>"
    main([write_config(tmp_path, train_file=str(text), output_dir=str(out), run_name="x\n```\n# heading")])
    card = ModelCard.load(out / "README.md")
    outside = prose_of(card.text)
    assert not re.search(r"(?<!\\)<", outside), outside
    headings = [line for line in outside.splitlines() if line.startswith("#")]
    assert headings == [r"# out \`\<i\>", *(f"## {name}" for name in HEADINGS)]
    assert "](" not in outside.replace(r"\](", "")
    assert card.data.to_dict()["model-index"][0]["name"] == out.name


HEADINGS = ("How to load it", "Text", "Results", "How it was made", "Limits")


def prose_of(text: str) -> str:
    """Return Markdown without its blocks of code and its code within lines."""
    lines, fence = [], None
    for line in text.splitlines():
        mark = re.match("`{3,}", line)
        if fence is None and mark:
            fence = mark[0]
        elif fence is not None:
            fence = None if line.startswith(fence) and not line.strip("`") else fence
        else:
            lines.append(line)
    assert fence is None, "a block of code does not end"
    return re.sub(r"(?<![`\\])(`+)(?!`).*?(?<!`)\1(?!`)", "", "\n".join(lines))


def test_names_are_no_markup_in_the_card_of_a_converted_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "a` <b>\n# heading"
    original("LlamaForCausalLM", **TINY).float().save_pretrained(source)
    convert_folder(str(source), tmp_path / "<i>`out")
    outside = prose_of(ModelCard.load(tmp_path / "<i>`out" / "README.md").text)
    assert not re.search(r"(?<!\\)<", outside) and [line for line in outside.splitlines() if line.startswith("#")] == [
        r"# \<i\>\`out"
    ]


@pytest.mark.parametrize("text", ["a", "`", "a `` b", "`a", " a\n# b "])
def test_code_within_a_line_ends_where_it_should(text: str) -> None:
    assert prose_of(f"x {code_span(text)} y") == "x  y"


def test_names_are_no_markup_in_the_reports_of_a_comparison(tmp_path: Path) -> None:
    """Of its file: title, names of schemes and tasks, and the error of a cell that fails."""
    (tmp_path / "text.txt").write_text("".join(f"line {i}\n" for i in range(200)))
    settings = {"config_overrides": SMALL, "max_steps": 1, "use_cpu": True, "train_file": [str(tmp_path / "text.txt")]}
    settings |= {"validation_split_percentage": 40, "block_size": 16}
    schemes = {NAME: {"position_scheme": "t5"}, "plain": {"position_scheme": "nope"}}
    task = {"kind": "language_modelling", "lengths": [1], "tokens": 32}
    whole = {"title": f"<script>\n# {NAME}", "schemes": schemes, "seeds": [0], "settings": settings, "tasks": {NAME: task}}
    (tmp_path / "evil.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    command(["compare", str(tmp_path / "evil.yaml"), "--output_dir", str(tmp_path / "out")])
    page, markdown = (tmp_path / "out" / "report.html").read_text(), (tmp_path / "out" / "report.md").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page
    outside = prose_of(markdown)
    assert not re.search(r"(?<!\\)<", outside)
    assert len([line for line in outside.splitlines() if line.startswith("# ")]) == 1
    assert not [path for path in tmp_path.rglob("*") if "<" in path.name]


# ---- nothing leaves its place


def test_a_shard_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    """An index names files beside it, and no others."""
    original("LlamaForCausalLM", **TINY).float().save_pretrained(tmp_path / "source", max_shard_size="30KB")
    index = tmp_path / "source" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(iter(content["weight_map"].values()))
    (tmp_path / "source" / name).rename(tmp_path / name)
    for outside in (f"../{name}", str(tmp_path / name)):
        content["weight_map"] = {key: outside if value == name else value for key, value in content["weight_map"].items()}
        index.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="names the shard .*, which .* does not have"):
            convert_folder(str(tmp_path / "source"), tmp_path / "out")
        name = outside


def test_an_archive_in_place_of_weights_is_not_unpacked(tmp_path: Path) -> None:
    import zipfile

    original("LlamaForCausalLM", **TINY).float().save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").unlink()
    with zipfile.ZipFile(tmp_path / "source" / "pytorch_model.bin", "w") as archive:
        archive.writestr("../../escaped", "x")
    with pytest.raises(ValueError, match="damaged or holds more than tensors"):
        convert_folder(str(tmp_path / "source"), tmp_path / "out", allow_pickle=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_an_overwritten_run_removes_links_and_not_what_they_lead_to(tmp_path: Path) -> None:
    config = write_config(tmp_path, overwrite_output_dir=True)
    (outside := tmp_path / "outside").mkdir()
    (outside / "mine.txt").write_text("mine")
    (outside / "model.safetensors").write_text("mine")
    (out := tmp_path / "out").mkdir()
    (out / "checkpoint-1").symlink_to(outside)
    (out / "model.safetensors").symlink_to(outside / "model.safetensors")
    try:
        run(prepare([config]))
    except ValueError as error:
        assert "cannot be written" in str(error)
    assert [(outside / name).read_text() for name in ("mine.txt", "model.safetensors")] == ["mine", "mine"]


# ---- numbers


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("field", BOUNDS)
def test_every_number_of_a_configuration_is_bounded(family: str, field: str) -> None:
    """One error that names the field, before anything is allocated."""
    kind = CONFIGS[family]
    if field not in {name for one in kind.__mro__ for name in getattr(one, "__annotations__", {})}:
        pytest.skip("a field of another family")
    huge = (
        (1e17, 1e308, float("inf"), float("nan"), -1.0) if field in ("initializer_range", "layer_norm_eps") else (10**12, -1)
    )
    for value in huge:
        with pytest.raises(ValueError, match=f"{field}=") as refused:
            kind(**{field: value})
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_number_of_a_scheme_is_bounded(scheme: str) -> None:
    kind = CONFIGS["encoder" if "causal" in SCHEMES[scheme].refuses else "decoder"]
    for name, spec in SCHEMES[scheme].parameter_specs.items():
        if spec.choices is None:
            for value in (10**12 if spec.kind is int else 1e17, 1e308, float("inf"), float("nan")):
                with pytest.raises(ValueError, match=f"{name}=") as refused:
                    kind(position_scheme=scheme, position_parameters={name: value})
                assert "\n" not in str(refused.value)


def test_sizes_that_no_memory_holds_end_a_run_with_one_line(tmp_path: Path) -> None:
    """Each is within its bounds."""
    large = {"hidden_size": 2**22, "num_hidden_layers": 2, "num_attention_heads": 2**15}
    with pytest.raises(SystemExit, match="error: .*parameters.* memory") as ended:
        main([write_config(tmp_path, config_overrides=large)])
    assert "\n" not in str(ended.value) and not (tmp_path / "out").exists()
