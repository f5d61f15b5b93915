"""Read files written by other programs in bounded memory; each error message is one sentence."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

_MOST_RATIO = 100
"""Maximum ratio of uncompressed to compressed size of a file; the ratio of JSON is 10 to 40."""
_ALLOWED_BYTES = 64 << 20
"""Uncompressed size up to which a file is accepted at any compression ratio."""
_CHUNK_BYTES = 1 << 20


def parsed_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or has a number with thousands of digits.

    Example:
        >>> parsed_json("[" * 10**6)
        Traceback (most recent call last):
        ValueError: it is nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        raise ValueError(f"it has a number with more than {sys.get_int_max_str_digits():,} digits") from None


def unpacked(path: Path) -> bytes:
    """Return the content of a file, decompressed if its name ends in ``.gz``.

    Raises:
        ValueError: The content is too large for its compressed size; no text compresses that well.
        OSError: The file cannot be read.
        EOFError: The compressed file is truncated.
        zlib.error: The compressed file is corrupt.
    """
    if path.suffix != ".gz":
        return path.read_bytes()
    most, chunks, size = _MOST_RATIO * path.stat().st_size + _ALLOWED_BYTES, list[bytes](), 0
    with gzip.open(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            if size > most:
                raise ValueError(
                    f"it holds more than {most:,} bytes, more than {_MOST_RATIO} times its compressed size"
                )
            chunks.append(chunk)
    return b"".join(chunks)
