"""Import the user's own modules from the notebook's folder, without shadowing library modules.

A notebook, or an interpreter started by hand, looks for modules in the current folder first, so a `queue.py` there
shadows the standard library's. The launch server and the agents do not search that folder. A rank that loads user
functions searches it last; other ranks do not search it. Modules that the driver itself has imported from that folder
take precedence over any other module with the same name, since the user's functions refer to them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class UserModules(NamedTuple):
    """The driver's current folder, and the modules that a rank must import from it.

    Attributes:
        folder: The driver's current folder.
        names: Names of the modules that the driver has imported from that folder.
    """

    folder: str
    names: tuple[str, ...]


def beyond_current_folder(entries: Iterable[str]) -> list[str]:
    """Return the entries of a search path except the current folder, as absolute paths."""
    here = Path.cwd().resolve()
    return [str(Path(entry).absolute()) for entry in entries if entry and Path(entry).resolve() != here]


def of_current_folder() -> UserModules | None:
    """Return the modules imported from the current folder; None if this process does not search that folder."""
    here = Path.cwd().resolve()
    if not any(Path(entry).resolve() == here for entry in sys.path):
        return None
    top = {name: module for name, module in [*sys.modules.items()] if "." not in name and name != "__main__"}
    return UserModules(str(here), tuple(name for name, module in top.items() if _home(module) == here))


def make_importable(modules: UserModules) -> None:
    """Let this process import modules from the driver's folder.

    Modules that the driver has imported from it take precedence; the others are searched after all other folders.
    """
    sys.path.append(modules.folder)
    sys.meta_path.insert(0, _Imported(modules))


class _Imported(MetaPathFinder):
    """Finder for the modules that the driver has imported, and for no others."""

    def __init__(self, modules: UserModules) -> None:
        self._modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or name not in self._modules.names:
            return None
        return PathFinder.find_spec(name, [self._modules.folder])


def _home(module: ModuleType) -> Path | None:
    """Return the folder that contains a module or a package; None if it has no file."""
    spec = getattr(module, "__dict__", {}).get("__spec__")
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    is_package = spec.submodule_search_locations is not None
    return Path(spec.origin).resolve().parents[1 if is_package else 0]
