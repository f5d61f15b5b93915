"""Lazy imports for packages (PEP 562): each name is imported when first used, so a package loads in milliseconds.

A package lists its names in its stub, `__init__.pyi`, one per line: ``from shardscope.spec import Job as Job``. A name
marked ``# kept`` can still be imported, but is not listed, because it may be removed. Type checkers read the stub
directly; `attach` provides the same names at run time. This module imports very little, so that it loads quickly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module


def attach(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package, given its ``__name__`` and ``__file__``."""
    with open(file.removesuffix(".py") + ".pyi", encoding="utf-8") as stub:
        lines = [line.split() for line in stub if line.startswith("from ")]
    homes = {name: home for _from, home, _import, name, *_ in lines}
    listed = sorted(name for _from, _home, _import, name, *more in lines if more[-1:] != ["kept"])
    module = sys.modules[package]

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        found = None if home == package else getattr(import_module(home), name, None)
        value = import_module(f"{home}.{name}") if found is None else found
        setattr(module, name, value)
        return value

    return load, lambda: sorted({*vars(module), *listed}), listed
