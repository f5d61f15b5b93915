"""`shardscope lab`: open JupyterLab on the tour notebook, from a checkout or an installed package."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardscope.errors import LaunchError, SpecError

CHECKOUT = Path(__file__).parents[3]
TOUR = "tour.ipynb"


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser("lab", help="open JupyterLab on the tour")
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="where the notebooks are copied to; none of yours is overwritten "
        "(default: a checkout's own notebooks/, else ./shardscope-notebooks)",
    )
    parser.add_argument("--port", type=int, help="port on 127.0.0.1 (default: 8888, or the next free one)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Replace this process with JupyterLab, so that signals reach it and no process is left when it ends."""
    if arguments.port is not None and not 0 <= arguments.port < 2**16:
        raise SpecError(
            f"--port {arguments.port} is not a port; give one from 1 to 65535, or 0 for any that is free"
        )
    folder = prepare(arguments.folder)
    command = lab_command(folder, port=arguments.port, browser=not arguments.no_browser)
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606 (our own interpreter, no shell)


def prepare(folder: Path | None) -> Path:
    """Return the folder to open: that of the checkout, or one to which the packaged notebooks are copied.

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
                shutil.copyfile(notebook, target / notebook.name)
    except OSError as error:
        raise LaunchError(
            f"folder={str(target)!r} cannot be written ({error.strerror}); name another one"
        ) from None
    return target


def lab_command(folder: Path, *, port: int | None, browser: bool) -> list[str]:
    """Return the command that serves `folder` on this machine only, and opens the tour."""
    command = [
        sys.executable,
        "-P",  # do not import modules from the current folder
        "-m",
        "jupyterlab",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={folder}",
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
