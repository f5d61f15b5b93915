"""Read and replace the files of a run directory, which may be damaged, owned by another user, or malicious.

A file is read only if it is a regular file of limited size in the directory itself. Links, pipes, devices and folders
are rejected, because opening a pipe could block, and a link could lead out of the directory. A file is replaced
atomically, without following links: a link in place of the file is replaced, and a link in place of a folder inside the
run directory is an error.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from shardscope.errors import RunUnreadable

MOST_BYTES = 16 * 2**20
"""Size limit in bytes for files that are read as a whole; files that Shardscope writes are about 1000 times smaller."""
MOST = 2**53
"""Largest integer in an event; JSON readers that use float64 represent all integers up to it exactly."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISLNK, "a link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip


class OutOfReach(RunUnreadable):
    """Error for a file that cannot be opened at the moment but may be intact (no free descriptors, a failing disk)."""


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading, and yield its file descriptor.

    Raises:
        FileNotFoundError: The file does not exist.
        OutOfReach: The file cannot be opened at the moment.
        RunUnreadable: The path is not a regular file.
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
        RunUnreadable: The path is not a regular file, or the file is larger than `most` or cannot be opened.
    """
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise RunUnreadable(f"{path.name} has {size:,} bytes, more than the limit of {most:,}")
        return read_range(descriptor, 0, most)


def read_range(descriptor: int, start: int, most: int) -> bytes:
    """Return the content of an open file from byte `start` on, up to `most` bytes."""
    parts: list[bytes] = []
    while most > 0:
        part = os.pread(descriptor, most, start)
        if not part:
            break
        parts.append(part)
        start, most = start + len(part), most - len(part)
    return b"".join(parts)


def read_tail(path: Path, *, most: int = MOST_BYTES) -> str:
    """Return the last `most` bytes of a text file as a string, or the whole text of a shorter file.

    If the file does not exist, return an empty string; if it cannot be read, return the reason in brackets.
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
        RunUnreadable: The path is not a regular file, or the file is too large or is not UTF-8 text.
    """
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise RunUnreadable(f"{path.name} is not text") from None


def read_json(path: Path) -> Any:
    """Return the content of a small JSON file.

    Raises:
        FileNotFoundError: The file does not exist.
        RunUnreadable: The path is not a regular file, or the file is too large or is not strict JSON.
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


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def replace_whole(path: Path, content: bytes, *, within: Path) -> None:
    """Replace a small file atomically: readers see the old content or the new, never a mixture.

    Args:
        path: The file, in the folder `within` or one folder below it.
        content: New content of the file.
        within: The run directory. The path of the directory may contain links, but a folder inside the directory may
            not be a link.

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


def overwrite(path: Path, content: bytes) -> None:
    """Overwrite a small file in place; on most file systems, this works on a full disk if the last block has room.

    Readers may see a part of the new content, unlike with `replace_whole`. If there is no room, the former content is
    restored.

    Raises:
        OSError: The file cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        former = read_range(descriptor, 0, MOST_BYTES)
        if os.pwrite(descriptor, content, 0) < len(content):
            os.pwrite(descriptor, former, 0)
            os.ftruncate(descriptor, len(former))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)


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
    """Return a description of the type of file, such as ``a link``; None for a regular file."""
    return next((name for test, name in _KINDS if test(mode)), None)


def _unopened(path: Path, error: Exception) -> RunUnreadable:
    """Return the error to raise for a file that could not be opened."""
    try:
        kind = _kind(path.lstat().st_mode)
    except (OSError, ValueError):
        kind = None
    if kind is not None:
        return RunUnreadable(f"{path.name} is {kind}, not a file")
    return OutOfReach(f"{path.name} cannot be read ({getattr(error, 'strerror', None) or error})")


def is_whole(value: Any, most: int = MOST) -> bool:
    """Return whether a value is an integer from 0 to `most`."""
    return type(value) is int and 0 <= value <= most


def is_real(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return math.isfinite(value) if type(value) is float else type(value) is int and -MOST <= value <= MOST
