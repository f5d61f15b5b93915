"""Build the wheel and the sdist once, and try each where nothing of Shardscope is installed.

    python .ci/dist.py                            # with each of Python 3.11 to 3.14 that is on PATH
    python .ci/dist.py --tag v0.1.0 --build-only  # the release workflow: one build, whose version is that of the tag
    python .ci/dist.py --keep python              # try the archives that are in dist/ with one interpreter

A trial makes an environment, installs the wheel with the newest dependencies that it allows (and the pinned torch), and
uses it from an empty folder: all public names, `shardscope --version`, a prediction, and a run on two ranks, compared
with one process. Then the same with the sdist in place of the wheel. To build, the package `build` must be installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
NAMES = """
import importlib, sys
from pathlib import Path
for package in ("shardscope", "shardscope.analytic", "shardscope_widgets", "shardscope_widgets.figures"):
    module = importlib.import_module(package)
    assert Path(module.__file__).is_relative_to(sys.prefix), module.__file__
    for name in module.__all__:
        getattr(module, name)
"""
"""Import every public name, from where the archive was installed to."""
COMMANDS = (
    "predict gpt3-175b a100-80gb --nodes 128 --data 16 --tensor 8 --pipeline 8 --zero 1 --global-batch 1536",
    "check --strategy ring --ranks 2 --steps 4 --model mlp --data digits",
)
_FROM_THE_SHELL = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE")
"""Variables that a trial keeps, beside those of pip: none of Python's, and none of ours."""


def main() -> int:
    """Build, check and try; return the exit status."""
    asked = _arguments()
    if not asked.keep:
        build()
    wheel, sdist = archives()
    version = check_contents(wheel, sdist)
    if asked.tag and asked.tag != f"v{version}":
        sys.exit(
            f"the tag is {asked.tag}, but _version.py has {version}: tag v{version}, or change the version"
        )
    print(f"{wheel.name}, {sdist.name}: all tracked files are in them", flush=True)
    if asked.build_only:
        return 0
    missing = [] if asked.pythons else [name for name in PYTHONS if not _runs(name)]
    for python in asked.pythons or [name for name in PYTHONS if name not in missing]:
        attempt(python, wheel, sdist, version)
    if missing:
        print(f"Not tried, as they are not on PATH: {', '.join(missing)}")
    return 1 if len(missing) == len(PYTHONS) else 0


def build() -> None:
    """Write one sdist to `dist/`, and one wheel, which is built from the sdist."""
    shutil.rmtree(DIST, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)


def archives() -> tuple[Path, Path]:
    """Return the one wheel and the one sdist in `dist/`."""
    found = [*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")]
    if [path.suffix for path in found] != [".whl", ".gz"]:
        sys.exit(f"{DIST} must hold one wheel and one sdist; it has {[path.name for path in found]}")
    return found[0], found[1]


def check_contents(wheel: Path, sdist: Path) -> str:
    """Compare what is in the archives with what is in the repository, and return the version in their names."""
    tracked = set(_run("git", "ls-files", cwd=ROOT).splitlines())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    code = {
        path.partition("/")[2] for path in tracked if re.match(r"toolkit/|widgets/shardscope_widgets/", path)
    }
    notebooks = {
        f"shardscope_widgets/{path}" for path in tracked if re.fullmatch(r"notebooks/[^/]+\.ipynb", path)
    }
    extra = {path for path in in_wheel if not re.match(r"shardscope-[^/]+\.(dist-info|data)/", path)}
    for what, different in (
        ("the sdist lacks", tracked - in_sdist),
        ("the wheel lacks", (code | notebooks) - in_wheel),
        ("the wheel has, and the repository has not,", extra - code - notebooks),
    ):
        if different:
            sys.exit(f"{what} {', '.join(sorted(different))}")
    version = wheel.name.split("-")[1]
    if sdist.name != f"shardscope-{version}.tar.gz":
        sys.exit(f"{wheel.name} and {sdist.name} are of different versions")
    return version


def attempt(python: str, wheel: Path, sdist: Path, version: str) -> None:
    """Install and use the wheel, then the sdist, in a new environment of an interpreter."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardscope-dist-") as folder:
        environment, work = Path(folder, "env"), Path(folder, "work")
        _run(python, "-m", "venv", environment)
        inside = environment / "bin/python"
        label = _run(inside, "--version").strip()
        _run(inside, ROOT / "binder/install.py", "torch", env=_clean(folder))
        for archive in (wheel, sdist):
            _run(inside, "-m", "pip", "install", "--progress-bar", "off", archive, env=_clean(folder))
            work.mkdir()
            use(environment, work, version)
            shutil.rmtree(work)
            _run(inside, "-m", "pip", "uninstall", "--yes", "shardscope", env=_clean(folder))
            _run(
                inside,
                "-c",
                "import importlib.util as u; assert u.find_spec('shardscope') is None",
                cwd=folder,
            )
            print(f"{label}: {archive.name} works, {time.monotonic() - started:.0f} s", flush=True)


def use(environment: Path, work: Path, version: str) -> None:
    """Use what is installed, in an empty folder."""
    env = _clean(str(work))
    _run(environment / "bin/python", "-c", NAMES, cwd=work, env=env)
    said = _run(environment / "bin/shardscope", "--version", cwd=work, env=env).strip()
    if said != f"shardscope {version}":
        sys.exit(f"`shardscope --version` says {said!r}; the archive is {version}")
    for command in COMMANDS:
        _run(environment / "bin/shardscope", *command.split(), cwd=work, env=env)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Build wheel and sdist, and try each in an empty environment."
    )
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help=f"interpreters ({', '.join(PYTHONS)})")
    parser.add_argument("--tag", help="the tag of the release, which must be v and the version")
    parser.add_argument("--build-only", action="store_true", help="build and check the contents; try nothing")
    parser.add_argument("--keep", action="store_true", help="take the archives that are in dist/")
    return parser.parse_args()


def _clean(folder: str) -> dict[str, str]:
    """Return an environment without what a developer has set, whose runs and caches go to a folder."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _FROM_THE_SHELL or name.startswith("PIP_")
    }
    return kept | {
        "SHARDSCOPE_RUNS": f"{folder}/runs",
        "SHARDSCOPE_CACHE": f"{folder}/cache",
        "OMP_NUM_THREADS": "1",
    }


def _runs(python: str) -> bool:
    """Whether there is such an interpreter; a name on PATH may be a shim without one."""
    try:
        return subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _run(*command: object, cwd: Path | str | None = None, env: dict[str, str] | None = None) -> str:
    """Return the standard output of a command; end with all that it wrote if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed with exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
