"""Pieces that have not changed since a rank's previous checkpoint, and where they are on disk.

With incremental checkpoints, a rank writes up to two files:

    rank-R.bin           the pieces that have changed since the previous checkpoint
    rank-R-step-N.bin    pieces that seem to have stopped changing, written after step N

Only files of the second kind are shared: the next checkpoints have hard links to them, under the same name, so they
stay on disk as long as a checkpoint needs them. A piece whose last version is in a file of the first kind is written
once more when it stops changing. Frozen parameters are written to a file of the second kind at once. If more than half
of such a file is no longer needed, because its pieces have changed after all, the remaining pieces are written again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardscope.training.checkpoint.pieces import HeldPiece

Place = tuple[str, tuple[int, ...]]
"""The name of a tensor and the offsets of a piece, which identify the piece even if several ranks have copies of it."""


class Division(NamedTuple):
    """How a rank writes its pieces, by their places."""

    changed: list[Place]
    """Pieces for ``rank-R.bin``."""
    settled: list[Place]
    """Pieces for ``rank-R-step-N.bin``."""
    linked: dict[Place, dict[str, Any]]
    """Index entries of unchanged pieces, which are in files of the previous checkpoint."""


class _Written(NamedTuple):
    digest: bytes
    entry: dict[str, Any] | None
    """Index entry of the piece, if it is in a file that later checkpoints may share."""


class Unchanged:
    """Digests of the pieces in a rank's previous checkpoint, with which the next checkpoint is compared.

    Args:
        frozen: Names of the tensors in checkpoints that training is not expected to change.
    """

    def __init__(self, frozen: Collection[str]) -> None:
        self.folder: Path | None = None
        """Path of the previous checkpoint; None before the first."""
        self._frozen = frozenset(frozen)
        self._known: dict[Place, _Written] = {}
        self._next: dict[Place, _Written] = {}
        self._sizes: dict[str, int] = {}
        self._next_sizes: dict[str, int] = {}

    def divide(self, tensors: Mapping[Place, HeldPiece]) -> Division:
        """Compare a rank's pieces with those of its previous checkpoint."""
        if self.folder is None or not self.folder.is_dir():  # somebody may have deleted it
            self._known = {}
        digests = {
            place: hashlib.blake2b(held.as_bytes(), digest_size=16).digest()
            for place, held in tensors.items()
        }
        self._next = {place: _Written(digest, None) for place, digest in digests.items()}
        before = {place: self._known.get(place) for place in tensors}
        same = {
            place: known
            for place, known in before.items()
            if known is not None and known.digest == digests[place]
        }
        linked = self._worth_sharing({
            place: (known.entry, tensors[place].tensor.nbytes)
            for place, known in same.items() if known.entry is not None
        })  # fmt: skip
        settled = [
            place for place in tensors
            if place not in linked and (place in same or (before[place] is None and place[0] in self._frozen))
        ]  # fmt: skip
        rest = {*linked, *settled}
        return Division([place for place in tensors if place not in rest], settled, linked)

    def _worth_sharing(
        self, entries: Mapping[Place, tuple[dict[str, Any], int]]
    ) -> dict[Place, dict[str, Any]]:
        """Return the index entries in files of which at least half is still needed."""
        needed: Counter[str] = Counter()
        for entry, size in entries.values():
            needed[entry["file"]] += size
        return {
            place: entry
            for place, (entry, _) in entries.items()
            if 2 * needed[entry["file"]] >= self._sizes[entry["file"]]
        }

    def note(self, shared: Mapping[Place, dict[str, Any]], sizes: Mapping[str, int]) -> None:
        """Record the index entries and the sizes of the files that the next checkpoints may share."""
        self._next = {place: known._replace(entry=shared.get(place)) for place, known in self._next.items()}
        self._next_sizes = dict(sizes)

    def commit(self, folder: Path) -> None:
        """Record that the checkpoint at `folder` is complete, so that the next checkpoint may refer to it."""
        self.folder, self._known, self._sizes = folder, self._next, self._next_sizes
