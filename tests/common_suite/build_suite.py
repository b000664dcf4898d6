"""Build transformers' common model tests from the source distribution of the installed version, which pip fetches.

None of their files are kept in this repository. What the distribution leaves out is replaced by stubs, and what hangs on it is
skipped by name (`skip_gates.py`).
"""

import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile

import transformers
from filelock import FileLock

ROOT = pathlib.Path(__file__).parents[2]
TAKEN = ("LICENSE", "tests/test_modeling_common.py", "tests/test_configuration_common.py")
STUBS = {
    "tests/__init__.py": "",
    "tests/exporters/__init__.py": "",
    "tests/exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "tests/generation/__init__.py": "",
    "tests/generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "tests/utils/__init__.py": "",
    "tests/utils/test_configuration_utils.py": "config_common_kwargs = "
    + repr({"output_attentions": True, "return_dict": False, "dtype": "float16", "problem_type": "regression"})
    + "\n",
}
"""What the two files import and the distribution does not hold; the last one are arguments that every configuration takes."""


class NoSourceDistribution(RuntimeError):
    """Say that pip could not fetch the source distribution, and why."""


def suite_folder() -> pathlib.Path:
    """Return the folder whose package `tests` holds the common tests, and build it where it is not there yet.

    It stands in pytest's cache folder, under the version's name. Processes that ask at the same time wait for the first.

    Raises:
        NoSourceDistribution: the index cannot be reached, or has no such distribution.
    """
    folder = ROOT / ".pytest_cache" / "common_suite" / transformers.__version__
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as made:
                build(pathlib.Path(made))
                os.replace(made, folder)
                os.mkdir(made)  # for the context to remove
    return folder


def build(folder: pathlib.Path) -> None:
    """Write the package `tests` into `folder`."""
    named = f"transformers=={transformers.__version__}"
    command = ["-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers", "--retries", "1", named]
    with tempfile.TemporaryDirectory() as fetched:
        done = subprocess.run([sys.executable, *command], cwd=fetched, capture_output=True, text=True)
        archives = list(pathlib.Path(fetched).glob("*.tar.gz"))
        if done.returncode or not archives:
            last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise NoSourceDistribution(f"pip cannot fetch the source distribution of {named}: {last}")
        with tarfile.open(archives[0]) as archive:
            for name in TAKEN:
                found = archive.extractfile(f"transformers-{transformers.__version__}/{name}")
                write(folder / name, b"" if found is None else found.read())
    for name, text in STUBS.items():
        write(folder / name, text.encode())


def write(path: pathlib.Path, content: bytes) -> None:
    """Write a file, and the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
