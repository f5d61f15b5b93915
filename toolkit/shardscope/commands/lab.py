"""`shardscope lab`: open the tour notebook in JupyterLab, from a checkout or from the installed package."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from importlib.resources import files
from pathlib import Path

from shardscope.errors import LaunchError, SpecError

CHECKOUT = Path(__file__).parents[3]
TOUR = "01-tour.ipynb"
EXTENSIONS = ("shardscope_widgets.server", "shardscope_widgets.warm_start")
"""Jupyter server extensions that are enabled on the command line: the first is not enabled in a checkout, the second
nowhere else."""


HELP = "open the tour notebook in JupyterLab"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="folder to which the notebooks are copied; existing files are not overwritten "
        "(default: in a checkout, its notebooks/ without a copy; else ./shardscope-notebooks)",
    )
    parser.add_argument("--port", type=int, help="port on 127.0.0.1 (default: 8888, or the next free one)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def carry_out(arguments: argparse.Namespace) -> int:
    """Replace this process with JupyterLab, which then receives all signals and leaves no parent process behind."""
    if arguments.port is not None and not 0 <= arguments.port < 2**16:
        raise SpecError(
            f"--port {arguments.port} is not a valid port; use 1 to 65535, or 0 for any free port"
        )
    folder = prepare(arguments.folder)
    command = lab_command(folder, port=arguments.port, browser=not arguments.no_browser)
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606 (our own interpreter, no shell)


def prepare(folder: Path | None) -> Path:
    """Return the notebooks folder to open: the checkout's, or a folder with copies of the packaged notebooks.

    Args:
        folder: Folder to copy the notebooks to; None uses the checkout's own notebooks, or ``./shardscope-notebooks``.

    Raises:
        LaunchError: The notebooks are not installed, or the folder cannot be written to.
    """
    own = CHECKOUT / "notebooks"
    if folder is None and (own / TOUR).is_file():
        return own
    target = (folder or Path("shardscope-notebooks")).absolute()
    try:
        target.mkdir(parents=True, exist_ok=True)
        for notebook in _packaged():
            if not (target / notebook.name).exists():
                (target / notebook.name).write_text(_unpaired(notebook), encoding="utf-8")
        if (pictures := notebook.parent / "images").is_dir():
            shutil.copytree(pictures, target / "images", dirs_exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"folder={str(target)!r} cannot be written to ({error.strerror}); choose another folder"
        ) from None
    return target


def _unpaired(notebook: Path) -> str:
    """Return a notebook without its pairing, for which Jupytext would write a script beside it at each save."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    content["metadata"].pop("jupytext", None)
    return f"{json.dumps(content, indent=1, ensure_ascii=False)}\n"


def lab_command(folder: Path, *, port: int | None, browser: bool) -> list[str]:
    """Return the command that starts JupyterLab on `folder`, reachable from this machine only, and opens the tour."""
    command = [
        sys.executable,
        "-P",  # do not import modules from the current folder
        "-m",
        "jupyterlab",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={folder}",
        *(f"--ServerApp.jpserver_extensions={extension}=True" for extension in EXTENSIONS),
        "--LabApp.news_url=None",  # no request leaves this machine, and no question covers the lab
        "--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate",
    ]
    command += [f"--LabApp.default_url=/lab/tree/{TOUR}"]
    if port is not None:
        command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    if not browser:
        command += ["--no-browser"]
    if _is_root():
        command += ["--allow-root"]  # needed in a container; the server listens on loopback only
    return command


def _packaged() -> list[Path]:
    for folder in (Path(str(files("shardscope_widgets"))) / "notebooks", CHECKOUT / "notebooks"):
        if (folder / TOUR).is_file():
            return sorted(folder.glob("*.ipynb"))
    raise LaunchError(
        "the notebooks are not installed; reinstall shardscope: pip install --force-reinstall shardscope"
    )


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0
