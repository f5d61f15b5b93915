"""Saves the checkpoints of a run: every rank writes some of the pieces, then rank 0 completes the checkpoint.

If several ranks have a copy of a piece, it is assigned to the one with the fewest bytes assigned so far. The ranks
exchange whether their writes succeeded, so that if one rank fails, all ranks raise the same error.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardscope.errors import CheckpointError
from shardscope.training.checkpoint.agreement import on_every_rank
from shardscope.training.checkpoint.background import BackgroundSave, Notices
from shardscope.training.checkpoint.contents import contents_of
from shardscope.training.checkpoint.pieces import HeldPiece, flat
from shardscope.training.checkpoint.unchanged import Place, Unchanged
from shardscope.training.checkpoint.values import encode
from shardscope.training.checkpoint.writing import PARTIAL, CheckpointPart, Report, balanced, not_written
from shardscope.training.strategies.base import RankStrategy


class Saver:
    """Saves the checkpoints of a run, one after another; all ranks call its methods together.

    Args:
        folder: The folder for the checkpoints.
        strategy: The strategy that holds the model.
        optimizer: The strategy's optimizer.
        keep: Number of checkpoints to keep, including the newest.
        asynchronous: Whether to write while training continues.
        incremental: Whether to write only pieces that have changed.
        is_durable: Whether checkpoints must survive a crash of the machine.
    """

    event: ClassVar[str] = "checkpoint"
    """Kind of the event that every rank writes when a checkpoint is complete."""

    def __init__(
        self, folder: Path, *, strategy: RankStrategy, optimizer: torch.optim.Optimizer, keep: int,
        asynchronous: bool = False, incremental: bool = False, is_durable: bool = True,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.newest: Path | None = None
        """Path of the newest complete checkpoint; None before the first."""
        self.blocked_s = 0.0
        """Time for which the last save has delayed training, in seconds."""
        self._strategy, self._optimizer, self._context = strategy, optimizer, strategy.all_ranks
        self._keep, self._is_durable = keep, is_durable
        self._is_leader = self._context.rank == 0
        self._copies = HostCopies() if asynchronous else None
        self._unchanged = Unchanged(_frozen(strategy)) if incremental else None
        self._background: BackgroundSave | None = None

    @property
    def in_flight(self) -> Path | None:
        """Path of the checkpoint that is being written in the background; None if none is."""
        return None if self._background is None else self._background.part.final

    def save(self, step: int, data: Mapping[str, int]) -> None:
        """Save the state after `step`, and delete old checkpoints.

        Without `asynchronous`, the checkpoint is complete when this returns. Otherwise this first waits until the
        previous one is complete.

        Args:
            step: The last step taken.
            data: The position in the data: the result of `GlobalSampler.state_dict`.

        Raises:
            CheckpointError: This or the previous checkpoint could not be written; earlier ones are kept.
        """
        started, meter = time.monotonic(), self._context.meter
        self.wait()
        contents = contents_of(self._strategy, self._optimizer, step, data)
        with meter.span("compute", "checkpoint"):
            try:
                part, name = self._part(step, contents)
                if self._copies is None:
                    written = self._write(part)
                else:
                    copies, is_copied = self._copies.take(part.tensors)
            except OSError as error:
                raise self._refusal(self.folder / f"step-{step}", error) from error
        self.blocked_s, traffic = time.monotonic() - started, meter.drain()[0]
        final, blocked_s = part.final, round(self.blocked_s, 4)

        def completed(num_bytes: int) -> None:
            self._context.events.emit(
                self.event, step=step, path=final.name, seconds=round(time.monotonic() - started, 4),
                blocked_s=blocked_s, bytes=num_bytes, traffic=traffic,
            )  # fmt: skip

        if self._copies is None:
            completed(written)
            self._note_complete(part)
            return
        self._background = BackgroundSave(
            replace(part, tensors=copies), Notices.of(self._context, name), world_size=self._context.world_size,
            keep=self._keep, is_copied=is_copied, completed=completed,
        )  # fmt: skip

    def check(self) -> None:
        """Raise the error of a failed checkpoint in the background, if there is one; called every step.

        Raises:
            CheckpointError: The checkpoint could not be written; earlier ones are kept.
        """
        background = self._background
        if background is None or not background.is_done:
            return
        self._background = None
        if background.error is not None:
            raise background.error
        if background.failed is not None:
            raise self._refusal(background.part.final, OSError(*background.failed))
        self._note_complete(background.part)

    def wait(self) -> None:
        """Wait until no checkpoint is being written in the background.

        Raises:
            CheckpointError: The checkpoint could not be written; earlier ones are kept.
        """
        if self._background is not None:
            self._background.wait()
            self.check()

    def _part(self, step: int, contents: Mapping[str, Any]) -> tuple[CheckpointPart, str]:
        """Agree with the other ranks on who writes which piece.

        Returns:
            This rank's part, and a unique name for the checkpoint.
        """
        items = dict(flat(contents))
        named = {key: value for key, value in items.items() if isinstance(value, torch.Tensor)}
        tensors = {
            (key, piece.offsets): piece
            for key, value in named.items()
            for piece in HeldPiece.all_of(key, value)
        }
        final, rank = self.folder / f"step-{step}", self._context.rank
        part = CheckpointPart(
            final.with_name(f"{final.name}{PARTIAL}"), final, step, rank, self._is_leader, tensors,
            {key: encode(key, value) for key, value in items.items() if key not in named},
            self._unchanged, self._is_durable, self._context.faults if self._is_durable else None,
        )  # fmt: skip

        def prepare() -> tuple[str, dict[Any, int]]:
            if part.is_leader:
                part.prepare()
            return uuid.uuid4().hex, {place: piece.tensor.nbytes for place, piece in tensors.items()}

        prepared = on_every_rank(self._context, prepare)
        own = balanced([held for _, held in prepared])[rank]
        assigned = {place: piece for place, piece in tensors.items() if place in own}
        return replace(part, tensors=assigned), prepared[0][0]

    def _write(self, part: CheckpointPart) -> int:
        """Write the checkpoint now; return the number of bytes that this rank has written."""
        try:
            reports = on_every_rank(self._context, part.write)
            self._share(part, reports)
            on_every_rank(self._context, lambda: part.complete(reports) if part.is_leader else None)
        except (OSError, CheckpointError):
            if part.is_leader:
                part.discard()
            raise
        if part.is_leader:
            part.drop_older(self._keep)
        return reports[part.rank].written_bytes

    def _share(self, part: CheckpointPart, reports: Sequence[Report]) -> None:
        """Copy files to the folders of other nodes; a no-op for checkpoints on disk, which have a single folder."""

    def _refusal(self, final: Path, error: OSError) -> CheckpointError:
        return not_written(final, error)

    def _note_complete(self, part: CheckpointPart) -> None:
        self.newest = part.final
        if self._unchanged is not None:
            self._unchanged.commit(part.final)


def _frozen(strategy: RankStrategy) -> set[str]:
    """Return the names in checkpoints of parameters that are not trained."""
    return {f"model.{name}" for name, p in strategy.model.named_parameters() if not p.requires_grad}


@dataclass
class HostCopies:
    """Buffers in host memory, reused by every snapshot; page-locked if they are copied from a GPU.

    A snapshot overwrites the previous one.
    """

    _buffers: dict[Place, Tensor] = field(default_factory=dict)

    def take(self, tensors: Mapping[Place, HeldPiece]) -> tuple[dict[Place, HeldPiece], Callable[[], None]]:
        """Copy pieces, by their places.

        Copies from a GPU may still be in progress when this returns. Later changes on the same stream come after them.

        Returns:
            The copies, and a function that waits until they can be read.
        """
        copies = {
            place: replace(held, tensor=self._copied(place, held.tensor)) for place, held in tensors.items()
        }
        self._buffers = {place: copy.tensor for place, copy in copies.items()}
        if any(held.tensor.is_cuda for held in tensors.values()):
            copied = torch.cuda.Event()
            copied.record()
            return copies, copied.synchronize
        return copies, lambda: None

    def _copied(self, place: Place, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)
