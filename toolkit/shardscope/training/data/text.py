"""Text as tokens: the source of Python's standard library, and the split of tokens into training and test windows."""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardscope.disk_cache import cached_array
from shardscope.errors import DataError
from shardscope.training.data.sources import Array, Dataset, WindowSource

_TEST_SHARE = 0.05
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


def read_python_source(*, seq: int, vocab: int | None = None) -> Dataset:
    """Read the source of the installed Python's standard library (over 10 MB), with one token per byte.

    Args:
        seq: Tokens per window.
        vocab: The model's vocabulary size; reading a token outside it raises an error. None accepts all tokens.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    place = hashlib.sha256(bytes(stdlib)).hexdigest()[:8]
    version = f"{sys.implementation.name}-{platform.python_version()}"
    tokens = cached_array(f"python-source-{version}-{place}", lambda: _read_bytes(stdlib))
    return split_windows(tokens, seq=seq, vocab=vocab)


def split_windows(tokens: Array, *, seq: int, vocab: int | None = None) -> Dataset:
    """Split tokens into windows of `seq` tokens; the last 5 % of the tokens (at least one window) are for testing.

    Raises:
        DataError: There are too few tokens for one training and one test window.
    """
    if tokens.ndim == 1 and len(tokens) < 2 * (seq + 1):
        raise DataError(
            f"{len(tokens)} tokens are too few to train and test with seq={seq}; "
            f"give at least {2 * (seq + 1)}"
        )
    num_test = max(int(len(tokens) * _TEST_SHARE), seq + 1)
    return Dataset(
        train=WindowSource(tokens[:-num_test], seq, vocab), test=WindowSource(tokens[-num_test:], seq, vocab)
    )


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
