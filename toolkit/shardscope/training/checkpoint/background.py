"""Writes a checkpoint on a thread of each rank, while the ranks train.

    training thread    ── copy ──▶ step ─────── step ─────── step ──▶
    writer of rank R               └─ write the part ─ report ─┐    ┌─ complete
    writer of rank 0               └─ write the part ──────────┴────┴─ index, rename, announce

The writers report to each other through the store of the process group, whose connections training does not use while
it takes steps. Collectives on the writer threads would have to be in the same order, relative to those of training, on
all ranks. A waiting writer fails if no rank has made progress for the timeout of the process group, `Job.timeout_s`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardscope.errors import CheckpointError
from shardscope.training.checkpoint.agreement import Failure, failure_of
from shardscope.training.checkpoint.writing import CheckpointPart, Report
from shardscope.training.context import RankContext

_SOON_S, _LATER_S = 1e-3, 2e-2
"""Shortest and longest interval between two checks of the store, in seconds."""
_PROGRESS_S = 0.5
"""Shortest interval between two progress notices of a writer, in seconds."""
_PROGRESS, _READ = "progress", "read"
"""Keys of two counters in the store: progress notices, and ranks that have read a checkpoint's last value."""


@dataclass(frozen=True)
class Notices:
    """Messages about one checkpoint between the writers of all ranks.

    All values are deleted once they have been read, so the store does not grow with the number of checkpoints.

    Attributes:
        store: The store of the process group, under a prefix of this checkpoint.
    """

    store: dist.Store

    @classmethod
    def of(cls, context: RankContext, name: str) -> Notices:
        """Return the notices of a checkpoint; no other checkpoint may have its `name`."""
        group = context.group
        return cls(
            dist.PrefixStore(
                f"checkpoint-{name}", dist.HashStore() if group is None else group.get_group_store()
            )
        )

    def send(self, key: str, value: Any) -> None:
        """Store a JSON-serializable value."""
        self.store.set(key, json.dumps(value))

    def note_progress(self) -> None:
        """Show waiting ranks that this rank is still writing."""
        self.store.add(_PROGRESS, 1)

    def receive(self, key: str, *, what: str, readers: int | None = None) -> Any:
        """Wait for a value, without blocking other users of the store.

        Args:
            key: Key of the value.
            what: What the value represents, for the error.
            readers: Number of ranks that read the value, if it is a checkpoint's last one; None if only one rank reads
                it.

        Raises:
            CheckpointError: No rank has made progress within the timeout of the store.
        """
        timeout_s, wait_s = self._timeout_s, _SOON_S
        deadline, progress = time.monotonic() + timeout_s, self._progress()
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                deadline, before, progress = time.monotonic() + timeout_s, progress, self._progress()
                if progress == before:
                    raise CheckpointError(
                        f"no rank has written anything for {timeout_s:g} s, while waiting for {what}; raise timeout_s "
                        "if a write may take longer"
                    )
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LATER_S)
        value = json.loads(self.store.get(key))
        if readers is None:
            self.store.delete_key(key)
        elif self.store.add(_READ, 1) == readers:
            for each in (key, _READ, _PROGRESS):
                self.store.delete_key(each)
        return value

    @property
    def _timeout_s(self) -> float:
        timeout: timedelta = self.store.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
        return timeout.total_seconds()

    def _progress(self) -> int:
        return int(self.store.add(_PROGRESS, 0))


class BackgroundSave:
    """One rank's thread that writes its part of a checkpoint, and ends when the checkpoint is complete on all ranks.

    Args:
        part: The rank's part.
        notices: Messages to the writers of other ranks.
        world_size: Number of ranks.
        keep: Number of checkpoints to keep.
        is_copied: Function that waits until the copies of the part's pieces can be read.
        completed: Called on the thread when the checkpoint is complete, with the number of bytes that this rank has
            written.
    """

    def __init__(
        self, part: CheckpointPart, notices: Notices, *, world_size: int, keep: int, is_copied: Callable[[], None],
        completed: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.part = replace(part, wrote=self._wrote)
        self.failed: Failure | None = None
        """Reason why a file could not be written, the same on all ranks; None if all files were written."""
        self.error: BaseException | None = None
        """Any other error that this rank's thread raised."""
        self._notices, self._world_size, self._keep = notices, world_size, keep
        self._is_copied, self._completed = is_copied, completed
        self._noted = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is complete, or could not be written."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until `is_done`."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._is_copied()
            report, failed = self._written()
            if self.part.rank == 0:
                self.failed = self._completed_by_all(report, failed)
                self._notices.send("outcome", self.failed)
            else:
                self._notices.send(f"part-{self.part.rank}", [report, failed])
                what = f"rank 0 to complete checkpoint {self.part.final.name}"
                outcome = self._notices.receive("outcome", what=what, readers=self._world_size - 1)
                self.failed = None if outcome is None else (outcome[0], outcome[1])
            if self.failed is None:
                self._completed(0 if report is None else report.written_bytes)
        except BaseException as error:  # noqa: BLE001 - raised again on the training thread
            self.error = error

    def _wrote(self) -> None:
        if time.monotonic() > self._noted + _PROGRESS_S:
            self._noted = time.monotonic()
            self._notices.note_progress()

    def _written(self) -> tuple[Report | None, Failure | None]:
        try:
            return self.part.write(), None
        except OSError as error:
            return None, failure_of(error)

    def _completed_by_all(self, mine: Report | None, failed: Failure | None) -> Failure | None:
        """On rank 0, wait for the parts of all ranks and complete the checkpoint; return why it failed, if it did."""
        reports = [mine]
        for rank in range(1, self._world_size):
            what = f"the part of rank {rank} of checkpoint {self.part.final.name}"
            report, theirs = self._notices.receive(f"part-{rank}", what=what)
            reports.append(None if report is None else Report(*report))
            failed = failed or (None if theirs is None else (theirs[0], theirs[1]))
        if failed is None:
            try:
                self.part.complete([report for report in reports if report is not None])
                self.part.drop_older(self._keep)
            except OSError as error:
                failed = failure_of(error)
        if failed is not None:
            self.part.discard()
        return failed
