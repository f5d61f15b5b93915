"""Shards as tar files in the layout of WebDataset: the members of a sample share their name up to its first dot.

They are read with `tarfile`. The package ``webdataset`` reads a tar file as a stream, without row numbers, so it allows
neither an exact order of rows nor resuming at the same row.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardscope.disk_cache import cached
from shardscope.errors import DataError
from shardscope.foreign_file import parsed_json
from shardscope.spec.units import plural
from shardscope.storage.formats import Array, ShardInfo, loaded, not_a_column, paired

_MOST_INDEXED = 4096
_RULES = "complete samples up to the end of the archive"
"""Part of the name of a row count cached on disk, so that counts made by earlier rules are not reused."""


class TarShards:
    """Shards whose samples are members such as ``000017.x.npy`` and ``000017.cls``."""

    fields = ("x", "y")
    is_mapped = holds_tokens = False

    def __init__(self, files: Sequence[Path], inputs: str, targets: str) -> None:
        self.columns = (inputs.removeprefix("."), targets.removeprefix("."))
        self.shards = tuple(self._info(path) for path in files)

    def read(self, index: int) -> Array:
        """Return the rows of a shard, in the order of the file."""
        path, (inputs, targets) = self.shards[index].path, self.columns
        with _opened(path) as file:
            samples = [
                (_value(file, parts[inputs], key), _value(file, parts[targets], key))
                for key, parts in _samples(file)
                if inputs in parts and targets in parts
            ]
        x, y = (_stacked([sample[column] for sample in samples], path) for column in (0, 1))
        return paired(x, y, where=str(path))

    def _info(self, path: Path) -> ShardInfo:
        """Return a shard's sizes; the row count is cached on disk, because counting reads the header of each member."""
        status = path.stat()
        asked = (_RULES, str(path.resolve()), status.st_mtime_ns, status.st_size, self.columns)
        rows = cached(
            f"tar-{hashlib.sha256(repr(asked).encode()).hexdigest()[:32]}.json",
            lambda: self._count(path),
            read=lambda file: int(json.loads(file.read_text())),
            write=lambda file, count: file.write(json.dumps(count).encode()),
            keep=_MOST_INDEXED,
        )
        return ShardInfo(path, rows, status.st_size, status.st_size)  # it is not compressed

    def _count(self, path: Path) -> int:
        """Return the number of samples; samples that have neither inputs nor targets do not count."""
        known: dict[str, None] = {}
        halves: list[tuple[str, str]] = []
        rows = 0
        with _opened(path) as file:
            for key, parts in _samples(file):
                known |= dict.fromkeys(parts)
                missing = [column for column in self.columns if column not in parts]
                rows += not missing
                if missing and any(column in parts for column in self.columns):
                    halves.append((key.lstrip("/"), missing[0]))
        for name in self.columns:
            if name not in known:
                raise not_a_column(name, [*known][:8], where=str(path))
        if halves:
            raise _incomplete(halves, path)
        return rows


def _incomplete(halves: Sequence[tuple[str, str]], path: Path) -> DataError:
    """Return the error for samples whose inputs or targets are missing or not adjacent to the other member.

    Args:
        halves: For each such sample, its name and the member that it lacks.
        path: The file.
    """
    (first, lacks), names = halves[0], {name for name, _ in halves}
    if len(names) < len(halves):
        return DataError(
            f"{path}: the members of sample {first!r} are not adjacent; members of a sample must be adjacent, so write "
            "the file again in the order of the samples"
        )
    count = plural(len(halves), "sample")
    return DataError(
        f"{path} has {count} without inputs or targets; the first is {first!r}, without {lacks!r}; add the member, or "
        "remove the sample"
    )


def _opened(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path, "r:")  # uncompressed, so that counting members skips their content
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{path} cannot be read as an uncompressed tar file: {error}") from None


def _samples(file: tarfile.TarFile) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Yield the name of each sample and its members by suffix, in the order of the file."""
    now, parts = "", dict[str, tarfile.TarInfo]()
    try:
        for member in file:
            if not member.isfile():
                continue
            folder, _, base = member.name.rpartition("/")
            stem, _, suffix = base.partition(".")
            key = f"{folder}/{stem}"
            if key != now and parts:
                yield now, parts
                parts = {}
            now = key
            if suffix in parts:
                raise DataError(
                    f"{file.name!r} has the member {member.name!r} twice in a row, of which only one would be read; "
                    "write each sample once, under a name of its own"
                )
            parts[suffix] = member
        _require_end(file, now)
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{file.name!r} is damaged after the member {now!r}: {error}") from None
    if parts:
        yield now, parts


def _require_end(file: tarfile.TarFile, last: str) -> None:
    """Reject an archive that does not end after its last member, because `tarfile` takes unreadable data for the end.

    Raises:
        DataError: The block of zeros that ends an archive is missing, as in a truncated file, or more data follows it.
    """
    content = file.fileobj
    assert content is not None
    content.seek(file.offset)
    end = content.read(tarfile.BLOCKSIZE)
    if len(end) < tarfile.BLOCKSIZE or any(end):
        raise DataError(
            f"{file.name!r} is cut or damaged after the sample {last.lstrip('/')!r}: the end of the archive is "
            "missing; write or copy the file again"
        )
    while block := content.read(tarfile.RECORDSIZE):
        if any(block):
            raise DataError(
                f"{file.name!r} has more data after the end of its archive, which would not be read; "
                "write one archive with "
                "all samples instead of joining several"
            )


def _value(file: tarfile.TarFile, member: tarfile.TarInfo, key: str) -> Any:
    """Return one member as a number or an array."""
    content = file.extractfile(member)
    assert content is not None, "only files are listed"
    suffix = member.name.rpartition(".")[2].lower()
    try:
        raw = content.read()
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{file.name!r} is damaged in the member {member.name!r}: {error}") from None
    try:
        if suffix == "npy":
            return loaded(io.BytesIO(raw))
        return parsed_json(raw)  # a class in .cls is a number, as in .json
    except Exception as error:  # noqa: BLE001 - NumPy evaluates headers and JSON nests, so damage raises any error
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{file.name!r}: the member {member.name!r} of the sample {key.lstrip('/')!r} is not an array or a number "
            f"({why}); store .npy, .cls or .json, or give a function that decodes it as data="
        ) from None


def _stacked(values: Sequence[Any], path: Path) -> Array:
    try:
        return np.stack([np.asarray(value) for value in values])
    except ValueError as error:
        raise DataError(
            f"{path} has samples of different shapes ({error}); crop or pad them to one shape"
        ) from None
