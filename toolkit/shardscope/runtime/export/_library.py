"""Import libraries that only an export needs; if one is missing, the error names it and the pip command."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shardscope.errors import SpecError


def library(*modules: str, package: str, format: str) -> Any:  # noqa: A002 - as in `export_run`
    """Return the first of these modules that can be imported; Shardscope installs none of them.

    Raises:
        SpecError: None of them can be imported.
    """
    for module in modules:
        try:
            return import_module(module)
        except ImportError as error:
            failed = error
    raise missing(package, format, failed)


def missing(package: str, form: str, error: ImportError) -> SpecError:
    """Return the error for a package that an export needs but cannot import."""
    reason = "" if isinstance(error, ModuleNotFoundError) else f" ({str(error).splitlines()[0]})"
    return SpecError(
        f"format={form!r} needs {package}, which cannot be imported{reason}; pip install {package}"
    )
