"""The files of Pyodide that the page needs: the interpreter and the compiled packages, pinned by SHA-256.

`pyodide.json` names them: `core` are the interpreter's files, and `lock` is the part of Pyodide's own lock file with
the packages that the calculators import. Two places hold the same files:

- Pyodide's distribution, on the content delivery network that Pyodide's documentation names;
- the Python package Open WebUI, which carries a copy of this Pyodide release. It is about 100 MB, and is used where
  only Python packages can be downloaded.

Whichever is used, a file whose hash differs from the pinned one is refused.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PINS: dict[str, Any] = json.loads(Path(__file__).with_name("pyodide.json").read_text(encoding="utf-8"))
DISTRIBUTION = f"https://cdn.jsdelivr.net/pyodide/v{PINS['version']}/full/"
COPY, COPY_FOLDER = "open-webui==0.12.4", "open_webui/frontend/pyodide/"
"""The Python package that carries a copy of this release, and the folder inside it."""
PATIENCE_S = 20


class PyodideMissing(RuntimeError):
    """Pyodide's files can be had from none of the known places."""


def hashes() -> dict[str, str]:
    """Return the SHA-256 of each file, by file name."""
    packages = PINS["lock"]["packages"].values()
    return PINS["core"] | {package["file_name"]: package["sha256"] for package in packages}


def fetch(folder: Path) -> Path:
    """Download the files that `folder` does not hold yet, check all of them, and return `folder`.

    Raises:
        PyodideMissing: No place holds the pinned files; the message names what was tried and why it failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name, pinned in hashes().items() if _hash(folder / name) != pinned]
    failures = []
    for place, download in (("Pyodide's distribution", _distribution), (f"the package {COPY}", _package)):
        if not missing:
            break
        try:
            _keep(folder, download(missing))
            missing = []
        except (OSError, PyodideMissing, subprocess.CalledProcessError) as error:
            failures.append(f"{place}: {error}")
            print(f"Pyodide {PINS['version']} was not downloaded from {place} ({error})")
    if missing:
        raise PyodideMissing(f"cannot download Pyodide {PINS['version']}: {'; '.join(failures)}")
    (folder / "pyodide-lock.json").write_text(json.dumps(PINS["lock"]), encoding="utf-8")
    return folder


def _keep(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != hashes()[name]:
            raise PyodideMissing(f"{name} is not the pinned file")
        (folder / name).write_bytes(content)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _distribution(names: Iterable[str]) -> dict[str, bytes]:
    return {name: _read(DISTRIBUTION + name) for name in names}


def _read(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:  # noqa: S310 - always https
        content: bytes = answer.read()
    return content


def _package(names: Iterable[str]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        ask = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder]
        ask += ["--only-binary", ":all:", "--python-version", "3.12", "--disable-pip-version-check", COPY]
        subprocess.run(ask, check=True, capture_output=True, timeout=600)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return {name: archive.read(COPY_FOLDER + name) for name in names}
