"""Run the tests of loading, decoding and training on the oldest, the tested and the newest versions, and exchange folders among them.

`nox` makes an environment for each row of `ROWS` (about 5 GB each with torch's CUDA build); `nox -s "versions(oldest)"` only one. Each
saves a folder of every family, which all environments that exist then load by its own code, and loads what they saved.
"""

import re
import tomllib
from pathlib import Path

import nox

HERE = Path(__file__).parent
TESTS = "test_versions test_old_folders test_memory_generation test_publishing test_train_lm test_segment_trainer"
LEAST = [
    f"{name}=={least}.0"
    for need in tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["dependencies"]
    for name, least in re.findall(r"(\w+)>=([\d.]+)", need)
]
"""The lower bounds that `pyproject.toml` states."""
ROWS = [
    nox.param("3.11", LEAST, id="oldest"),
    nox.param("3.12", ["--constraint", "constraints.txt"], id="tested"),
    nox.param("3.13", ["--upgrade"], id="newest"),
]

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True


@nox.session
@nox.parametrize("python,versions", ROWS)
def versions(session: nox.Session, versions: list[str]) -> None:
    """Test these versions, and exchange saved folders with those that were tested before."""
    session.install("--editable", ".[test]", *versions)
    session.env["OMP_NUM_THREADS"] = "1"
    session.run("python", "-m", "pytest", "-q", *(f"tests/{name}.py" for name in TESTS.split()), *session.posargs)
    environment = Path(session.virtualenv.location)
    script, own = str(HERE / "tests/across_versions.py"), environment / "saved"
    session.run("python", script, "save", str(own))
    session.run("python", script, "load", *map(str, environment.parent.glob("versions-*/saved")))
    for python in environment.parent.glob("versions-*/bin/python"):
        session.run(str(python), script, "load", str(own), external=True)
