"""Writes the files of a checkpoint: every rank writes its part, then rank 0 writes the index and renames the folder.

None of these functions communicates, so they can run on a thread while training continues.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple

from shardscope.errors import CheckpointError
from shardscope.training.checkpoint.folders import complete_checkpoints, step_of
from shardscope.training.checkpoint.index import FILE, index_of
from shardscope.training.checkpoint.pieces import HeldPiece
from shardscope.training.checkpoint.unchanged import Place, Unchanged
from shardscope.training.disk import advice_on
from shardscope.training.faults import RankFaults

PARTIAL = ".partial"
"""Suffix of the name of a checkpoint that is not complete."""
_REMOVED = ".removed"
"""Suffix of the name of a checkpoint that is being deleted, so that it does not look complete if the run is killed."""

_SYNC_BYTES = 2**28
"""Number of bytes after which a file is synced to disk, so that progress is reported also on a slow disk."""
_COPIED_BYTES = 2**24
"""Number of bytes copied and synced at a time; `Run.stop` waits as long as a file grows, even on a slow disk."""


class Report(NamedTuple):
    """The part of a checkpoint that one rank has written, in JSON types."""

    tensors: dict[str, Any]
    """Index entries of the rank's tensors, by name."""
    values: dict[str, Any]
    """The values that are not tensors, by name."""
    files: dict[str, int]
    """Size of each file in bytes."""
    written_bytes: int


@dataclass(frozen=True)
class CheckpointPart:
    """One rank's part of a checkpoint.

    Attributes:
        partial: The folder to write to.
        final: The folder's name when the checkpoint is complete.
        step: The last step taken.
        rank: This rank.
        is_leader: Whether this rank creates and completes the folder, for all ranks that write to it.
        tensors: The pieces that this rank writes, by their places.
        values: All values that are not tensors, in JSON types, by name.
        unchanged: Comparison with the previous checkpoint; None writes all pieces.
        is_durable: Whether the files must survive a crash of the machine.
        faults: The injected faults of this rank, some of which occur while it writes; None if there are none.
        wrote: Called after each piece is written.
    """

    partial: Path
    final: Path
    step: int
    rank: int
    is_leader: bool
    tensors: Mapping[Place, HeldPiece]
    values: Mapping[str, Any]
    unchanged: Unchanged | None = None
    is_durable: bool = True
    faults: RankFaults | None = None
    wrote: Callable[[], None] = lambda: None

    def write(self) -> Report:
        """Write the pieces, and return the report for the index.

        Raises:
            OSError: A file cannot be written.
        """
        described: dict[str, Any] = {
            key: {"dtype": str(held.tensor.dtype).removeprefix("torch."), "shape": held.whole, "pieces": []}
            for (key, _), held in self.tensors.items()
        }
        if self.unchanged is None:
            files = {
                f"rank-{self.rank}.bin": self._write_file(f"rank-{self.rank}.bin", self.tensors, described)
            }
            return Report(described, dict(self.values), files, sum(files.values()))
        return self._write_changes(self.unchanged, described)

    def _write_changes(self, unchanged: Unchanged, described: dict[str, Any]) -> Report:
        changed, settled, linked = unchanged.divide(self.tensors)
        names = (f"rank-{self.rank}.bin", f"rank-{self.rank}-step-{self.step}.bin")
        files = {
            name: self._write_file(name, places, described)
            for name, places in zip(names, (changed, settled), strict=True)
            if places or places is changed
        }
        written = sum(files.values())
        for (key, _), entry in linked.items():
            described[key]["pieces"].append(entry)
        for name in {entry["file"] for entry in linked.values()}:
            assert unchanged.folder is not None
            os.link(unchanged.folder / name, self.partial / name)
            files[name] = (self.partial / name).stat().st_size
        unchanged.note(
            {
                (key, offsets): entry
                for key, offsets in (*settled, *linked)
                for entry in described[key]["pieces"]
                if tuple(entry["offsets"]) == offsets
            },
            files,
        )
        return Report(described, dict(self.values), files, written)

    def _write_file(self, name: str, places: Iterable[Place], described: dict[str, Any]) -> int:
        """Write pieces to a file, add them to their entries for the index, and return the size of the file."""
        at = synced = 0
        with self._opened(self.partial / name) as file:
            for place in places:
                held = self.tensors[place]
                data = held.as_bytes()
                if not data:  # the piece has no elements
                    continue
                described[place[0]]["pieces"].append({
                    "file": name, "at": at, "offsets": held.offsets, "shape": tuple(held.tensor.shape),
                    "checksum": zlib.crc32(data),
                })  # fmt: skip
                file.write(data)
                at += len(data)
                if self.is_durable and at - synced >= _SYNC_BYTES:
                    file.flush()
                    os.fsync(file.fileno())
                    synced = at
                self.wrote()
            file.flush()
            if self.is_durable:
                os.fsync(file.fileno())
        return at

    def _opened(self, path: Path) -> BufferedWriter:
        file = open(path, "xb", opener=_private)  # noqa: SIM115 - the caller closes it
        return file if self.faults is None else self.faults.checkpoint_file(file, self.step)

    def prepare(self) -> None:
        """On the leader, create the folder to write to, and delete incomplete folders of interrupted saves of any step.

        Raises:
            OSError: The folder cannot be created, or does not support hard links, which incremental checkpoints need.
        """
        for left in self.final.parent.glob(f"step-*{PARTIAL}"):  # a run saves one checkpoint after the other
            shutil.rmtree(left, ignore_errors=True)
        self.partial.mkdir(mode=0o700)
        if self.unchanged is not None and self.unchanged.folder is None:
            try:
                _require_links(self.partial)
            except OSError:
                self.discard()
                raise

    def complete(self, reports: Sequence[Report]) -> None:
        """On the leader, complete the checkpoint that all ranks have written.

        Raises:
            OSError: The index cannot be written.
        """
        _complete(self.partial, self.final, reports, is_durable=self.is_durable)

    def drop_older(self, keep: int) -> None:
        """On the leader, delete all but the newest `keep` checkpoints up to this one, which is complete everywhere."""
        _drop_old(self.final.parent, self.step, keep)

    def discard(self) -> None:
        """On the leader, delete the incomplete checkpoint."""
        shutil.rmtree(self.partial, ignore_errors=True)


def copy_to_disk(copy: Path, folder: Path, keep: int) -> None:
    """Copy a complete checkpoint to another folder, where it survives a crash of the machine; delete older ones there.

    Args:
        copy: The checkpoint to copy.
        folder: Folder for the copy; must not contain a checkpoint of the same step.
        keep: Number of checkpoints to keep, including the new one.

    Raises:
        CheckpointError: The checkpoint cannot be copied; no part of it is left.
    """
    partial, final = folder / f"{copy.name}{PARTIAL}", folder / copy.name
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        for path in copy.iterdir():
            _copy_file(path, partial / path.name)
        _sync_folder(partial)
        partial.rename(final)
        _sync_folder(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise not_written(final, error) from error
    _drop_old(folder, step_of(copy), keep)


def balanced(held: Sequence[Mapping[Place, int]]) -> list[set[Place]]:
    """Distribute the pieces among the ranks that have them, so that all ranks write similar numbers of bytes.

    Args:
        held: For each rank, the pieces that it has and their sizes in bytes.

    Returns:
        For each rank, the pieces to write.
    """
    holders: dict[Place, list[int]] = {}
    for rank, pieces in enumerate(held):
        for place in pieces:
            holders.setdefault(place, []).append(rank)
    load, own = [0] * len(held), [set[Place]() for _ in held]
    for place, ranks in holders.items():
        rank = min(ranks, key=lambda rank: load[rank])
        load[rank] += held[rank][place]
        own[rank].add(place)
    return own


def not_written(final: Path, error: OSError) -> CheckpointError:
    """Return the error that names the checkpoint that could not be written, and the newest one that remains."""
    before = complete_checkpoints(final.parent) if os.access(final.parent, os.R_OK) else []
    left = (
        f"the newest earlier checkpoint is {before[-1].name}" if before else "there is no earlier checkpoint"
    )
    advice = advice_on(error)
    where = f"checkpoint {final.name} in {final.parent}"
    return CheckpointError(f"{error.strerror} while writing {where}; {left}{'; ' * bool(advice)}{advice}")


def _complete(partial: Path, final: Path, reports: Collection[Report], *, is_durable: bool) -> None:
    """Write the index, which lists the files of all ranks, and rename the folder when everything is on disk."""
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    files: dict[str, int] = {}
    for report in reports:
        values = {**report.values, **values}
        files.update(report.files)
        for key, stored in report.tensors.items():
            tensors.setdefault(key, {**stored, "pieces": []})["pieces"] += stored["pieces"]
    with open(partial / FILE, "x", encoding="utf-8", opener=_private) as file:
        json.dump(index_of(tensors, values, files), file, allow_nan=False)
        file.flush()
        if is_durable:
            os.fsync(file.fileno())
    if is_durable:
        _sync_folder(partial)
    if final.exists():  # an earlier checkpoint of the same step; deleted once the new one has its name
        final.rename(final.with_suffix(_REMOVED))
    partial.rename(final)
    if is_durable:
        _sync_folder(final.parent)


def _copy_file(path: Path, to: Path) -> None:
    with path.open("rb") as source, open(to, "xb", opener=_private) as file:
        while some := source.read(_COPIED_BYTES):
            file.write(some)
            file.flush()
            os.fsync(file.fileno())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _require_links(folder: Path) -> None:
    """Raise `OSError` if the file system does not support hard links, which incremental checkpoints need."""
    probe, link = folder / "probe", folder / "link"
    probe.touch()
    try:
        os.link(probe, link)
        link.unlink()
    except OSError as error:
        raise OSError(errno.EOPNOTSUPP, "No hard links for checkpoint.incremental=True") from error
    finally:
        probe.unlink()


def _drop_old(folder: Path, step: int, keep: int) -> None:
    """Delete old checkpoints, except those from steps after `step`, which an earlier run wrote."""
    older = [path for path in complete_checkpoints(folder) if step_of(path) < step]
    for path in older[: len(older) + 1 - keep]:
        with contextlib.suppress(OSError):
            path.rename(path.with_suffix(_REMOVED))
    for path in folder.glob(f"step-*{_REMOVED}"):
        shutil.rmtree(path, ignore_errors=True)
