"""Loads the newest complete checkpoint, the same on all ranks, into the model and the optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardscope.errors import CheckpointError
from shardscope.training.checkpoint.agreement import gather_items
from shardscope.training.checkpoint.compressor_state import RestoredState, restore_compressor_state
from shardscope.training.checkpoint.contents import (
    RANK,
    extra_of,
    optimizer_state_fits,
    random_key,
)
from shardscope.training.checkpoint.folders import complete_checkpoints, is_checkpoint
from shardscope.training.checkpoint.index import FILE, Damaged, read_index, verify
from shardscope.training.checkpoint.pieces import CheckpointReader
from shardscope.training.context import RankContext
from shardscope.training.optim.holding import digest_of
from shardscope.training.optim.state import complete
from shardscope.training.random_state import random_state, seed_everything, set_random_state
from shardscope.training.strategies.base import RankStrategy

_NO_DATA = {"global_size": 0, "step": 0, "epoch": 0, "row": 0, "samples": 0}


@dataclass(frozen=True)
class Loaded:
    """Result of loading a checkpoint on this rank, in addition to model and optimizer, which are loaded in place.

    Attributes:
        path: The checkpoint's path.
        step: The step after which the checkpoint was saved.
        data: The position in the data after that step, from `GlobalSampler.state_dict`.
        restored: The result of restoring the compressor's state.
        world_size: Number of ranks that saved the checkpoint.
        notes: Sentences for the user, one for each part of the state that was changed or dropped.
    """

    path: Path
    step: int
    data: Mapping[str, int]
    restored: RestoredState
    notes: list[str]
    world_size: int | None = None


def load(source: Path, *, strategy: RankStrategy, optimizer: torch.optim.Optimizer) -> Loaded:
    """Load a checkpoint into model and optimizer. All ranks must call this together.

    Args:
        source: A checkpoint, or a run's checkpoint folder, from which the newest complete checkpoint is loaded.
        strategy: The strategy that holds the model.
        optimizer: The strategy's optimizer.

    Raises:
        CheckpointError: There is no checkpoint, all are damaged, or the checkpoint was saved with a different model.
    """
    reader, notes = _open(source, strategy.all_ranks)
    try:
        return _load(reader, notes, strategy, optimizer)
    except Damaged as error:
        raise CheckpointError(f"checkpoint {reader.path} is damaged: {error}") from error
    except KeyError as error:
        reason = f"it has no {error.args[0]}"
        raise CheckpointError(_misfit(reader.path, reason)) from error
    except (RuntimeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(_misfit(reader.path, str(error).strip().splitlines()[-1])) from error


def _misfit(path: Path, reason: str) -> str:
    return f"checkpoint {path} does not fit this model ({reason}); resume with the model that was saved"


def _load(
    reader: CheckpointReader,
    notes: Sequence[str],
    strategy: RankStrategy,
    optimizer: torch.optim.Optimizer,
) -> Loaded:
    known = reader.keys
    saved = {name: 0 for name in (*_NO_DATA, "order") if f"extra.data.{name}" in known}
    now = extra_of(strategy, optimizer, 0, saved)
    extra = _fill_known(reader, {"extra": now})["extra"]
    fits, changes = optimizer_state_fits(strategy.job, extra)
    asked = strategy.state_to_fill(optimizer, reader, with_state=fits)
    changes += _averaging_notes(known, asked)
    state = reader.fill(asked)
    strategy.precision.load_state_dict(extra.get("precision", {}))
    # loaded after the precision's state, which it may overwrite, as a rank can have its own loss scale
    strategy.load_checkpoint_state(state, optimizer)
    named = strategy.named_optimizer(optimizer)
    if named is not None and extra.get("settings") != now["settings"]:
        complete(named)
    restored = restore_compressor_state(strategy, reader, extra.get("layout"), extra.get("method"))
    strategy.follow_order(extra.get("gradient_order", []))
    _restore_random_state(reader, strategy)
    size = strategy.job.batch.global_batch
    data = extra.get("data") or {**_NO_DATA, "global_size": size}
    told = [*notes, *changes, *restored.notes]
    return Loaded(reader.path, int(extra["step"]), data, restored, told, extra.get("world_size"))


def _restore_random_state(reader: CheckpointReader, strategy: RankStrategy) -> None:
    """Restore this rank's random state, in a tensor group that of its first rank, for the same draws on all its ranks.

    If the checkpoint has none for that rank, the state from seeding is kept. Ranks of a tensor group have saved the
    same state; those that no longer share samples are seeded from it, each differently. Called by all ranks.
    """
    device, alike = strategy.all_ranks.device, strategy.same_samples
    rank = strategy.all_ranks.rank if alike is None else alike.first_rank
    mine = random_key(rank)
    saved = _fill_known(reader, {mine: random_state(device)})[mine]
    set_random_state(saved, device)
    state = saved.get("cuda" if device.type == "cuda" else "torch")
    own = "" if state is None else digest_of(state.tolist())
    others = {other for other, same in gather_items(strategy.all_ranks, (rank, own)) if same == own}
    before = sum(other < rank for other in others)
    if state is not None and before:
        seed_everything(int(digest_of([own, before])[:15], 16))


def _averaging_notes(known: set[str], asked: Mapping[str, Any]) -> list[str]:
    """Return a note if each rank had its own model when the checkpoint was saved, and all ranks now share one."""
    if not any(key.startswith(RANK) for key in known) or any(part.startswith(RANK) for part in asked):
        return []
    return [
        "each rank had its own model and optimizer: the weights resume from the mean, the optimizer state is reset"
    ]


def _fill_known(reader: CheckpointReader, state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries of `state` that the checkpoint contains, filled from it; older checkpoints lack some."""
    return reader.fill({
        part: {
            key: value
            for key, value in values.items()
            if any(name == f"{part}.{key}" or name.startswith(f"{part}.{key}.") for name in reader.keys)
        }
        for part, values in state.items()
    })  # fmt: skip


# Choice of the checkpoint.


def _open(source: Path, context: RankContext) -> tuple[CheckpointReader, list[str]]:
    """Open the newest intact checkpoint, the same on all ranks; return its reader, and notes on newer, damaged ones.

    Raises:
        CheckpointError: No checkpoint can be loaded.
    """
    named = is_checkpoint(source)
    folder = source.parent if named else source
    found = [
        folder / name
        for name in gather_items(context, [source.name] if named else _names(source, context))[0]
    ]
    if not found:
        raise CheckpointError(
            f"no complete checkpoint in {source}, because the run saved none before it ended; train from the start, "
            "with Checkpoint(every=...) to save some"
        )
    damages: list[str] = []
    for path in reversed(found):
        try:
            reader, damage = _verified_by_all(path, context)
        except CheckpointError as error:
            raise CheckpointError("; ".join([*damages, str(error)])) from None
        if reader is not None:
            return reader, _notes(damages, path)
        damages.append(f"checkpoint {path.name} is damaged ({damage})")
    if named:
        raise CheckpointError(f"{damages[0]} in {source.parent}; {_instead(source, context)}")
    raise CheckpointError(
        f"no checkpoint in {source} can be loaded: {', '.join(damages)}; train from the start"
    )


def _names(folder: Path, context: RankContext) -> list[str]:
    """On rank 0, return the names of the checkpoints in `folder`, oldest first; on other ranks, an empty list."""
    return [path.name for path in complete_checkpoints(folder)] if context.rank == 0 else []


@dataclass(frozen=True)
class _ReadAttempt:
    """Result of one rank's attempt to read a checkpoint.

    Attributes:
        content: Checksum of the index, if the rank can read the checkpoint.
        damage: Description of the damage, if the checkpoint is damaged.
        refusal: Reason why the rank cannot read an intact checkpoint, for example its byte order.
    """

    content: int | None = None
    damage: str | None = None
    refusal: str | None = None


def _verified_by_all(path: Path, context: RankContext) -> tuple[CheckpointReader | None, str | None]:
    """Check a checkpoint on all ranks, each of which verifies its share of the files.

    Returns:
        A reader and None if the checkpoint is intact; else None and a description of the first damage.

    Raises:
        CheckpointError: A rank cannot read an intact checkpoint, for example because of its byte order.
    """
    reader: CheckpointReader | None = None
    try:
        reader, content = _read(path, context)
        look = _ReadAttempt(content)
    except (Damaged, OSError) as error:
        look = _ReadAttempt(damage=str(error))
    except CheckpointError as error:
        look = _ReadAttempt(refusal=str(error))
    looks = gather_items(context, look)
    refusals = [look.refusal for look in looks if look.refusal is not None]
    damages = [look.damage for look in looks if look.damage is not None]
    if refusals:
        raise CheckpointError(refusals[0])
    if len({look.content for look in looks}) > 1 and not damages:
        damages = ["its contents differ between ranks; use a folder that all machines share"]
    return (None, damages[0]) if damages else (reader, None)


def _read(path: Path, context: RankContext) -> tuple[CheckpointReader, int]:
    """Verify this rank's share of a checkpoint's files; return a reader and a checksum of the index."""
    index = read_index(path)
    verify(path, index, sorted(index.files)[context.rank :: context.world_size])
    return CheckpointReader(path, index), zlib.crc32((path / FILE).read_bytes())


def _notes(damages: list[str], path: Path) -> list[str]:
    return [f"{'; '.join(damages)}: the run continues from the earlier {path.name}"] if damages else []


def _instead(named: Path, context: RankContext) -> str:
    for name in reversed(gather_items(context, _names(named.parent, context))[0]):
        if name == named.name:
            continue
        with suppress(CheckpointError):  # such as of another byte order
            if _verified_by_all(named.parent / name, context)[0] is not None:
                return f"the newest intact checkpoint is {named.parent / name}"
    return "there is no other intact checkpoint"
