"""Read and replace the files of a run directory, which may be damaged, another user's, or malicious.

A file is read only if it is a regular file of bounded size in the directory itself. A link, a pipe, a device or a
folder in its place is rejected before opening it can block or lead out of the directory. A file is replaced atomically,
and never through a link: neither the file itself nor its folder may be one.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from shardscope.errors import RunUnreadable

MOST_BYTES = 16 * 2**20
"""Largest file that is read whole, in bytes; the files that Shardscope writes are about a thousand times smaller."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISLNK, "a link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip


class OutOfReach(RunUnreadable):
    """A file that may be intact but cannot be opened at the moment (no free file descriptors, a failing disk)."""


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading, and yield its file descriptor.

    Raises:
        FileNotFoundError: The file does not exist.
        OutOfReach: It cannot be opened at the moment.
        RunUnreadable: It is not a regular file.
    """
    try:
        descriptor = os.open(path, _READ)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # a name with a null byte raises ValueError
        raise _unopened(path, error) from None
    try:
        kind = _kind(os.fstat(descriptor).st_mode)
        if kind is not None:
            raise RunUnreadable(f"{path.name} is {kind}, not a file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file of at most `most` bytes.

    Raises:
        FileNotFoundError: The file does not exist.
        RunUnreadable: It is not a regular file, is larger, or may not be read.
    """
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise RunUnreadable(f"{path.name} has {size:,} bytes; at most {most:,} are read")
        return read_range(descriptor, 0, most)


def read_range(descriptor: int, start: int, most: int) -> bytes:
    """Return the content of a file from offset `start` on, at most `most` bytes."""
    parts: list[bytes] = []
    while most > 0:
        part = os.pread(descriptor, most, start)
        if not part:
            break
        parts.append(part)
        start, most = start + len(part), most - len(part)
    return b"".join(parts)


def read_tail(path: Path, *, most: int = MOST_BYTES) -> str:
    """Return the end of a text file, at most `most` bytes; empty if the file does not exist.

    If the file cannot be read, the reason is returned in brackets.
    """
    try:
        with opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            return read_range(descriptor, max(0, size - most), most).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except RunUnreadable as error:
        return f"[{error}]\n"


def read_text(path: Path) -> str:
    """Return the content of a small text file.

    Raises:
        FileNotFoundError: The file does not exist.
        RunUnreadable: It is not a regular file, is too large, or is not text.
    """
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise RunUnreadable(f"{path.name} is not text") from None


def read_json(path: Path) -> Any:
    """Return the content of a small JSON file.

    Raises:
        FileNotFoundError: The file does not exist.
        RunUnreadable: It is not a regular file, is too large, or is not JSON.
    """
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError:
        raise RunUnreadable(f"{path.name} is not JSON") from None


def parse_json(text: str | bytes) -> Any:
    """Parse strict JSON: no NaN, no numbers with thousands of digits, no nesting beyond Python's recursion limit.

    Raises:
        ValueError: The text is not strict JSON.
    """
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def replace_whole(path: Path, content: bytes, *, within: Path) -> None:
    """Replace a small file atomically: readers see the old content or the new, never a mixture.

    Args:
        path: The file, in the folder `within` or one folder below it.
        content: New content of the file.
        within: The run directory. It may be reached through a link; the folder below it may not be a link.

    Raises:
        OSError: The file cannot be written.
    """
    is_top = path.parent == within
    folder = os.open(
        path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if is_top else os.O_NOFOLLOW)
    )
    partial = f".{path.name}.{secrets.token_hex(8)}"
    try:
        try:
            _write_new(partial, content, folder)
            os.replace(partial, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            _discard(partial, folder)
            raise
    finally:
        os.close(folder)


def _write_new(name: str, content: bytes, folder: int) -> None:
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with open(descriptor, "wb") as file:
        file.write(content)


def _discard(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return


def _kind(mode: int) -> str | None:
    """Return what the file is if it is not a regular file; None if it is one."""
    return next((name for test, name in _KINDS if test(mode)), None)


def _unopened(path: Path, error: Exception) -> RunUnreadable:
    """Return the error for a file that cannot be opened."""
    try:
        kind = _kind(path.lstat().st_mode)
    except (OSError, ValueError):
        kind = None
    if kind is not None:
        return RunUnreadable(f"{path.name} is {kind}, not a file")
    return OutOfReach(f"{path.name} cannot be read ({getattr(error, 'strerror', None) or error})")
