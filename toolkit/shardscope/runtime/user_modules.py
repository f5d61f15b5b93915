"""Where the user's own modules are found: beside the notebook, but never instead of a library's.

A notebook, and an interpreter that is started by hand, look for modules in the current folder first, so a `queue.py`
there is taken for the standard library's. The launch server, the agents and the ranks do not look there at all, until
a rank loads functions of the user's; and then they look there last. A module that the driver itself has imported from
that folder is the exception: the user's functions mean that one, whatever else has its name.
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
    """What a rank needs to find the modules of the driver's current folder.

    Attributes:
        folder: That folder.
        names: The modules that the driver has imported from there.
    """

    folder: str
    names: tuple[str, ...]


def beyond_current_folder(entries: Iterable[str]) -> list[str]:
    """The entries of a search path without the current folder, absolute."""
    here = Path.cwd().resolve()
    return [str(Path(entry).absolute()) for entry in entries if entry and Path(entry).resolve() != here]


def of_current_folder() -> UserModules | None:
    """The modules of the current folder; None where this process does not look there."""
    here = Path.cwd().resolve()
    if not any(Path(entry).resolve() == here for entry in sys.path):
        return None
    top = {name: module for name, module in [*sys.modules.items()] if "." not in name and name != "__main__"}
    return UserModules(str(here), tuple(name for name, module in top.items() if _home(module) == here))


def make_importable(modules: UserModules) -> None:
    """Let this process find the modules: those that the driver has imported first, all others last."""
    sys.path.append(modules.folder)
    sys.meta_path.insert(0, _Imported(modules))


class _Imported(MetaPathFinder):
    """Finds the modules that the driver has imported, and no other."""

    def __init__(self, modules: UserModules) -> None:
        self._modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or name not in self._modules.names:
            return None
        return PathFinder.find_spec(name, [self._modules.folder])


def _home(module: ModuleType) -> Path | None:
    """The folder that a module, or a package, lies in."""
    spec = getattr(module, "__dict__", {}).get("__spec__")
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    is_package = spec.submodule_search_locations is not None
    return Path(spec.origin).resolve().parents[1 if is_package else 0]
