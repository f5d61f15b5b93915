"""Saves a checkpoint: every rank writes some of the pieces, then rank 0 writes the index and renames the folder.

If several ranks have a copy of a piece, it is assigned to the one with the fewest bytes assigned so far. The ranks tell
one another whether their writes succeeded, so that if one rank fails, all ranks raise the same error.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from io import BufferedWriter
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardscope.errors import CheckpointError
from shardscope.training.checkpoint.contents import contents_of
from shardscope.training.checkpoint.folders import complete_checkpoints, step_of
from shardscope.training.checkpoint.index import FILE, index_of
from shardscope.training.checkpoint.pieces import HeldPiece, flat
from shardscope.training.checkpoint.values import encode
from shardscope.training.context import RankContext
from shardscope.training.disk import advice_on
from shardscope.training.strategies.base import RankStrategy

_REMOVED = ".removed"
"""Suffix of the name of a checkpoint that is being deleted, so that it does not look complete if the run is killed."""
Result = TypeVar("Result")
Opener = Callable[[Path], BufferedWriter]
"""Opens a new file for a rank's part of the checkpoint."""
Place = tuple[str, tuple[int, ...]]
"""The name of a tensor and the offsets of a piece, which identify the piece even if several ranks have copies of it."""


def save(
    folder: Path,
    step: int,
    *,
    strategy: RankStrategy,
    optimizer: torch.optim.Optimizer,
    keep: int,
    data: Mapping[str, int],
) -> Path:
    """Save the state after `step`, and delete old checkpoints. All ranks must call this together.

    Args:
        folder: The folder for the run's checkpoints.
        step: The last step taken.
        strategy: The strategy that holds the model.
        optimizer: The strategy's optimizer.
        keep: Number of checkpoints to keep, including this one.
        data: The position in the data: the result of `GlobalSampler.state_dict`.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: The checkpoint could not be written; earlier ones are kept.
    """
    final, partial = folder / f"step-{step}", folder / f"step-{step}.partial"
    started, context = time.time(), strategy.context
    contents = contents_of(strategy, optimizer, step, data)

    def opened(path: Path) -> BufferedWriter:
        file = open(path, "xb", opener=_private)  # noqa: SIM115 - the caller closes it
        return file if context.faults is None else context.faults.checkpoint_file(file, step)

    with context.meter.span("compute", "checkpoint"):
        try:
            _write(partial, final, contents, context, opened)
        except OSError as error:
            if context.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(_not_written(final, error)) from error
        if context.rank == 0:
            _drop_old(folder, step, keep)
    seconds, traffic = round(time.time() - started, 4), context.meter.drain()[0]
    context.events.emit("checkpoint", step=step, path=final.name, seconds=seconds, traffic=traffic)
    return final


def _write(
    partial: Path, final: Path, contents: Mapping[str, Any], context: RankContext, opened: Opener
) -> None:
    tensors = {
        key: HeldPiece.of(key, value) for key, value in flat(contents) if isinstance(value, torch.Tensor)
    }
    values = {key: encode(key, value) for key, value in flat(contents) if key not in tensors}
    held = {(key, piece.offsets): piece.tensor.nbytes for key, piece in tensors.items()}

    def prepare() -> dict[Place, int]:
        if context.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
        return held

    own = _balanced(_on_every_rank(context, prepare))[context.rank]
    name = f"rank-{context.rank}.bin"
    reports = _on_every_rank(context, lambda: (*_write_pieces(partial / name, own, tensors, opened), values))

    def complete() -> None:
        if context.rank == 0:
            _complete(partial, final, reports)

    _on_every_rank(context, complete)


def _on_every_rank(context: RankContext, work: Callable[[], Result]) -> list[Result]:
    """Run `work` on every rank, and return the results of all ranks in rank order.

    Raises:
        OSError: `work` raised this error on some rank; all ranks raise it.
    """
    mine: tuple[Result | None, tuple[int | None, str] | None]
    try:
        mine = (work(), None)
    except OSError as error:
        mine = (None, (error.errno, error.strerror or str(error)))
    every = [mine]
    if context.group is not None:
        every = [mine] * context.world_size
        dist.all_gather_object(every, mine)
    for _, failed in every:
        if failed is not None:
            raise OSError(*failed)
    return [result for result, _ in every]  # type: ignore[misc]  # None only where `work` returned None


def _balanced(held: list[dict[Place, int]]) -> list[set[Place]]:
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


def _write_pieces(
    path: Path, own: set[Place], tensors: Mapping[str, HeldPiece], opened: Opener
) -> tuple[dict[str, Any], int]:
    """Write the pieces in `own`, and return their entries for the index and the number of bytes written."""
    described: dict[str, Any] = {}
    at = 0
    with opened(path) as file:
        for key, held in tensors.items():
            described[key] = {
                "dtype": str(held.tensor.dtype).removeprefix("torch."),
                "shape": held.whole,
                "pieces": [],
            }
            data = held.as_bytes() if (key, held.offsets) in own else memoryview(b"")
            if not data:  # another rank writes the piece, or it has no elements
                continue
            described[key]["pieces"].append({
                "file": path.name, "at": at, "offsets": held.offsets, "shape": tuple(held.tensor.shape),
                "checksum": zlib.crc32(data),
            })  # fmt: skip
            file.write(data)
            at += len(data)
        file.flush()
        os.fsync(file.fileno())
    return described, at


def _complete(partial: Path, final: Path, reports: list[tuple[dict[str, Any], int, dict[str, Any]]]) -> None:
    """Write the index, which lists the files of all ranks, and rename the folder when everything is on disk."""
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for described, _, said in reports:
        values = {**said, **values}
        for key, stored in described.items():
            tensors.setdefault(key, {**stored, "pieces": []})["pieces"] += stored["pieces"]
    files = {f"rank-{rank}.bin": size for rank, (_, size, _) in enumerate(reports)}
    with open(partial / FILE, "x", encoding="utf-8", opener=_private) as file:
        json.dump(index_of(tensors, values, files), file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    if final.exists():  # an earlier checkpoint of the same step; deleted once the new one has its name
        final.rename(final.with_suffix(_REMOVED))
    partial.rename(final)
    _sync_folder(final.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _drop_old(folder: Path, step: int, keep: int) -> None:
    """Delete old checkpoints, except those from steps after `step`, which an earlier run wrote."""
    older = [path for path in complete_checkpoints(folder) if step_of(path) < step]
    for path in older[: len(older) + 1 - keep]:
        with contextlib.suppress(OSError):
            path.rename(path.with_suffix(_REMOVED))
    for path in folder.glob(f"step-*{_REMOVED}"):
        shutil.rmtree(path, ignore_errors=True)


def _not_written(final: Path, error: OSError) -> str:
    before = complete_checkpoints(final.parent) if os.access(final.parent, os.R_OK) else []
    left = (
        f"the newest earlier checkpoint is {before[-1].name}" if before else "there is no earlier checkpoint"
    )
    advice = advice_on(error)
    where = f"checkpoint {final.name} in {final.parent}"
    return f"{error.strerror} while writing {where}; {left}{'; ' * bool(advice)}{advice}"
