"""Push a trained model to a hub on this machine, delete the environment that made it, and pull and generate in another one.

    python tests/hub_round_trip.py SERVER

`SERVER` is a script that plays the Hub on the loopback interface (`--root FOLDER --port N --token TOKEN`, prints its address). Each
environment is a new venv that sees the installed torch and transformers; only the first one sees this package.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOKEN, REPO = "hf_dummy", "me/tiny"
RUN = {
    "position_scheme": "transformer_xl",
    "config_overrides": {"mem_len": 16, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1},
    **{"block_size": 32, "max_steps": 2, "per_device_train_batch_size": 2, "max_eval_samples": 4, "sample_tokens": 4},
    **{"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True},
    **{"push_to_hub": True, "hub_private_repo": True, "hub_model_id": REPO},
}
BREAK = """
import os, sys, signal
from huggingface_hub import HfApi
from hf_relpos.training.publishing import publish
sent = HfApi.preupload_lfs_files
def send_and_die(*args, **options):
    sent(*args, **options)
    os.kill(int(sys.argv[1]), signal.SIGKILL)
HfApi.preupload_lfs_files = send_and_die
try:
    publish(sys.argv[2], sys.argv[3], revision="later")
except OSError as error:
    print("lost:", error)
"""
COMPLETE = """
import sys
from huggingface_hub import HfApi
from hf_relpos.training.publishing import files_to_publish, publish
folder, repo = sys.argv[1:]
api = HfApi()
assert set(api.list_repo_files(repo, revision="later")) - {".gitattributes"} in (set(), set(api.list_repo_files(repo)) - {".gitattributes"})
publish(folder, repo, revision="later")
assert set(files_to_publish(folder)) <= set(api.list_repo_files(repo, revision="later"))
api.create_tag(repo, tag="v1")
first = api.model_info(repo).sha
code = open(f"{folder}/package_version.py").read()
api.upload_file(path_or_fileobj=(code + "\\nUPDATED = True\\n").encode(), path_in_repo="package_version.py", repo_id=repo)
print(first)
"""
PULL = """
import importlib.util, sys
assert importlib.util.find_spec("hf_relpos") is None
import torch, transformers
from huggingface_hub import ModelCard
repo, first = sys.argv[1:]
def version_of(model):
    name = type(model).__module__.rpartition(".")[0] + ".package_version"
    return sys.modules[name]
auto = transformers.AutoModelForCausalLM
try:
    transformers.AutoConfig.from_pretrained(repo, trust_remote_code=True, token=False)
    raise SystemExit("a private repository was read without a token")
except OSError:
    pass
model = auto.from_pretrained(repo, trust_remote_code=True)
assert version_of(model).UPDATED, "the code of main is the updated one"
pinned = auto.from_pretrained(repo, trust_remote_code=True, code_revision=first)
assert not hasattr(version_of(pinned), "UPDATED") and first in type(pinned).__module__
tagged = auto.from_pretrained(repo, trust_remote_code=True, revision="v1")
assert not hasattr(version_of(tagged), "UPDATED"), "the code of a tag is that of its time"
later = auto.from_pretrained(repo, trust_remote_code=True, revision="later")
tokenizer = transformers.AutoTokenizer.from_pretrained(repo, trust_remote_code=True, revision="v1")
ids = tokenizer("def main", return_tensors="pt").input_ids
texts = {tokenizer.decode(one.generate(ids, max_new_tokens=8, do_sample=False)[0]) for one in (model, pinned, tagged, later)}
assert len(texts) == 1, texts
card = ModelCard.load(repo)
assert card.data.eval_results, "the card has a model-index"
print("generated:", texts.pop().encode())
"""


class Environment:
    """A venv of its own with a cache of its own, which sees installed packages, and this one only if it should."""

    def __init__(self, folder: Path, with_package: bool) -> None:
        self.folder = folder
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        for installed in Path(sysconfig.get_path("purelib")).iterdir():
            if "hf_relpos" not in installed.name and installed.suffix != ".pth":
                site.joinpath(installed.name).symlink_to(installed)
        if with_package:
            site.joinpath("package.pth").write_text(f"{ROOT}\n")

    def run(self, *arguments: str, **variables: str) -> str:
        """Run its Python with closed standard input, and return what it printed."""
        home = {"HF_HOME": str(self.folder / "hf"), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HF_TOKEN": TOKEN}
        command = [str(self.folder / "bin/python"), *arguments]
        options: dict = {"stdin": subprocess.DEVNULL, "cwd": self.folder, "capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run(command, env={**home, "HF_HUB_DISABLE_XET": "1", **variables}, **options)
        assert done.returncode == 0, f"{arguments[0]}: {done.stdout[-1000:]}{done.stderr[-6000:]}"
        return done.stdout


def start(server: str, root: Path, port: int = 0) -> tuple[subprocess.Popen, str]:
    """Start the Hub, and return its process and its address."""
    command = [sys.executable, server, "--root", str(root), "--port", str(port), "--token", TOKEN, "--lfs", "auto"]
    hub = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert hub.stdout is not None
    return hub, hub.stdout.readline().strip()


def main(server: str, work: Path) -> None:
    """Go through all steps, and print what each one showed."""
    text, folder = work / "text.txt", str(work / "run")
    text.write_text("def main():\n    return 1\n\n\n" * 400)
    hub, address = start(server, work / "hub")
    try:
        maker = Environment(work / "maker", with_package=True)
        settings = work / "run.yaml"
        settings.write_text(json.dumps({**RUN, "train_file": str(text), "output_dir": folder}))
        printed = maker.run(str(ROOT / "train_lm.py"), str(settings), HF_ENDPOINT=address)
        print(next(line for line in printed.splitlines() if line.startswith("published as"))[:60], "...")
        lost = maker.run("-c", BREAK, str(hub.pid), folder, REPO, HF_ENDPOINT=address)
        assert lost.startswith("lost: the upload to me/tiny ended early"), lost
        print(lost.strip())
        hub.wait()
        hub, address = start(server, work / "hub", int(address.rpartition(":")[2]))
        first = maker.run("-c", COMPLETE, folder, REPO, HF_ENDPOINT=address).splitlines()[-1]
        shutil.rmtree(maker.folder)
        shutil.rmtree(folder)
        print("pushed again, tagged, code updated; the first environment and the run are deleted")
        user = Environment(work / "user", with_package=False)
        print(user.run("-c", PULL, REPO, first, HF_ENDPOINT=address).strip().splitlines()[-1])
    finally:
        hub.kill()
        hub.wait()


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit(textwrap.dedent(__doc__ or ""))
    with tempfile.TemporaryDirectory() as made:
        main(str(Path(sys.argv[1]).resolve()), Path(made))
