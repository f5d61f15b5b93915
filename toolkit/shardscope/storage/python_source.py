"""The source of the installed Python's standard library, as tokens."""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardscope.disk_cache import cached_array
from shardscope.storage.formats import Array

_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


def tokens() -> Array:
    """Return the source of the standard library (over 10 MB), with one token per byte."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    place = hashlib.sha256(bytes(stdlib)).hexdigest()[:8]
    version = f"{sys.implementation.name}-{platform.python_version()}"
    return cached_array(f"python-source-{version}-{place}", lambda: _read_bytes(stdlib))


def _read_bytes(stdlib: Path) -> Array:
    return np.frombuffer(b"\n".join(path.read_bytes() for path in _modules(stdlib)), dtype=np.uint8)


def _modules(stdlib: Path) -> Iterator[Path]:
    """Yield the standard library's source files in a fixed order, without its tests (some systems omit them)."""
    for name in sorted(sys.stdlib_module_names):
        module = stdlib / f"{name}.py"
        if module.exists():
            yield module
        package = (path.relative_to(stdlib) for path in (stdlib / name).rglob("*.py"))
        yield from (stdlib / path for path in sorted(package) if not _TEST_FOLDERS & set(path.parts))
