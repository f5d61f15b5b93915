"""Choice between the two forms of the event loop: compiled by numba, or interpreted.

Compiling takes seconds, once; numba then keeps the result on disk. Loading it takes half a second in each process, so
a small graph runs sooner in the interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from shardscope.errors import SpecError
from shardscope.simulator import _loop

VARIABLE = "SHARDSCOPE_SIMULATOR"
"""Environment variable: ``numba`` or ``python`` runs every graph in this form."""
FORMS = ("numba", "python")
FEWEST = 30_000
"""Smallest number of operations for which loading the compiled loop pays off."""


def form(num_ops: int) -> str:
    """Return the form of the event loop for a graph: ``numba`` or ``python``.

    Raises:
        SpecError: ``SHARDSCOPE_SIMULATOR`` has an unknown value, or is ``numba`` although numba is not installed.
    """
    installed = importlib.util.find_spec("numba") is not None
    asked = os.environ.get(VARIABLE)
    if not asked:
        is_loaded = _compiled_loop.cache_info().currsize > 0
        return "numba" if installed and (is_loaded or num_ops >= FEWEST) else "python"
    if asked not in FORMS:
        raise SpecError(f"{VARIABLE}={asked!r} is not valid; use {' or '.join(FORMS)}, or leave it out")
    if asked == "numba" and not installed:
        raise SpecError(
            f"{VARIABLE}='numba', but numba is not installed; run pip install numba, or set {VARIABLE}=python"
        )
    return asked


def run_loop(chosen: str, columns: list[Any]) -> tuple[int, list[Any]]:
    """Run the event loop over columns, which it changes; return the number of events, and the changed columns."""
    if chosen == "numba":
        return int(_compiled_loop()(*columns)), columns
    lists = [column.tolist() for column in columns]
    return int(_loop.run_loop(*lists)), lists


@cache
def _compiled_loop() -> Callable[..., Any]:
    """Load the event loop's module a second time, as a copy whose functions numba compiles."""
    name = f"{_loop.__name__}_compiled"
    spec = importlib.util.spec_from_file_location(name, _loop.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    loop: Callable[..., Any] = module.run_loop
    return loop
