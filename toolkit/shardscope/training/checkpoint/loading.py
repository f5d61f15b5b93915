"""Load the newest complete checkpoint, the same one on all ranks, into model and optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardscope.errors import CheckpointError
from shardscope.training.checkpoint.compressor_state import RestoredState, restore_compressor_state
from shardscope.training.checkpoint.contents import RANK, asked_of, extra_of, random_key, what_fits
from shardscope.training.checkpoint.folders import complete_checkpoints, is_checkpoint
from shardscope.training.checkpoint.index import FILE, Damaged, read_index, verify
from shardscope.training.checkpoint.pickled import PICKLE, PickledReader, is_pickled
from shardscope.training.checkpoint.pieces import Reader
from shardscope.training.context import RankContext
from shardscope.training.random_state import random_state, set_random_state
from shardscope.training.strategies.base import RankStrategy

Item = TypeVar("Item")
_NO_DATA = {"global_size": 0, "step": 0, "epoch": 0, "row": 0, "samples": 0}


@dataclass(frozen=True)
class Loaded:
    """What loading a checkpoint returns on this rank; model and optimizer are loaded in place.

    Attributes:
        path: The checkpoint's path.
        step: The step after which it was saved.
        data: The saved position in the data: `GlobalSampler.state_dict` after that step.
        restored: The outcome of restoring the compressor's state.
        notes: One sentence for each part of the state that was not resumed unchanged.
    """

    path: Path
    step: int
    data: Mapping[str, int]
    restored: RestoredState
    notes: list[str]


def load(
    source: Path, *, strategy: RankStrategy, optimizer: torch.optim.Optimizer, allow_pickle: bool = False
) -> Loaded:
    """Load a checkpoint into model and optimizer. All ranks must call this together.

    Args:
        source: A checkpoint, or a run's checkpoint folder, from which the newest complete checkpoint is loaded.
        strategy: The strategy that holds the model.
        optimizer: The strategy's optimizer.
        allow_pickle: Whether to read checkpoints of earlier versions, which are pickles: reading a pickle can run code.

    Raises:
        CheckpointError: There is no checkpoint, all are damaged, or the checkpoint does not fit the model.
    """
    reader, notes = _open(source, strategy.context, allow_pickle=allow_pickle)
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
    return f"checkpoint {path} does not fit this model ({reason}); resume the same model"


def _load(
    reader: Reader | PickledReader,
    notes: Sequence[str],
    strategy: RankStrategy,
    optimizer: torch.optim.Optimizer,
) -> Loaded:
    context, known = strategy.context, reader.keys
    extra = _fill_known(reader, {"extra": extra_of(strategy, optimizer, 0, _NO_DATA)})["extra"]
    fits, changes = what_fits(strategy.job, extra)
    asked = asked_of(strategy.state_to_fill(optimizer, known), known, with_state=fits)
    changes += _averaged(known, asked)
    state = reader.fill(asked)
    strategy.precision.load_state_dict(extra.get("precision", {}))
    # after the precision's shared state, because a rank may have its own loss scale
    strategy.load_checkpoint_state(state, optimizer)
    restored = restore_compressor_state(strategy, reader, extra.get("layout"), extra.get("method"))
    strategy.follow_order(extra.get("gradient_order", []))
    _go_on_at_random(reader, context)
    size = strategy.job.batch.global_batch
    data = extra.get("data") or {**_NO_DATA, "global_size": size}
    return Loaded(reader.path, int(extra["step"]), data, restored, [*notes, *changes, *restored.notes])


def _go_on_at_random(reader: Reader | PickledReader, context: RankContext) -> None:
    """Restore this rank's random state; without one in the checkpoint, the state from the rank's seed is kept."""
    mine = random_key(context.rank)
    if isinstance(reader, PickledReader):  # pickled checkpoints hold only torch's state, under another key
        saved = _fill_known(reader, {"extra": {mine: torch.get_rng_state()}})["extra"]
        set_random_state({"torch": saved[mine]} if saved else {}, context.device)
        return
    saved = _fill_known(reader, {mine: random_state(context.device)})[mine]
    set_random_state(saved, context.device)


def _averaged(known: set[str], asked: Mapping[str, Any]) -> list[str]:
    """Return a note if each rank had its own model when saving and all ranks now share one."""
    if not any(key.startswith(RANK) for key in known) or any(part.startswith(RANK) for part in asked):
        return []
    return [
        "each rank had its own model and optimizer: the weights continue from the mean, the optimizer state is reset"
    ]


def _fill_known(reader: Reader | PickledReader, state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Fill only those parts of `state` that the checkpoint contains; older checkpoints contain fewer."""
    return reader.fill({
        part: {
            key: value
            for key, value in values.items()
            if any(name == f"{part}.{key}" or name.startswith(f"{part}.{key}.") for name in reader.keys)
        }
        for part, values in state.items()
    })  # fmt: skip


# Choosing the checkpoint.


def _open(
    source: Path, context: RankContext, *, allow_pickle: bool
) -> tuple[Reader | PickledReader, list[str]]:
    """Open the checkpoint to load, the same on all ranks; return its reader and notes on newer, damaged checkpoints.

    Raises:
        CheckpointError: No checkpoint can be loaded.
    """
    named = is_checkpoint(source)
    folder = source.parent if named else source
    found = [
        folder / name for name in _together(context, [source.name] if named else _names(source, context))[0]
    ]
    if not found:
        raise CheckpointError(
            f"no complete checkpoint in {source}; run with Checkpoint(every=...) to save checkpoints"
        )
    damages: list[str] = []
    for path in reversed(found):
        try:
            reader, damage = _whole(path, context, allow_pickle=allow_pickle)
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
    """Return the names of a folder's checkpoints, oldest first; only on rank 0, as other ranks may see fewer."""
    return [path.name for path in complete_checkpoints(folder)] if context.rank == 0 else []


def _together(context: RankContext, mine: Item) -> list[Item]:
    """Gather one item from each rank, in rank order."""
    every = [mine] * context.world_size
    if context.group is not None:
        dist.all_gather_object(every, mine)
    return every


@dataclass(frozen=True)
class _Look:
    """A rank's view of a checkpoint: a checksum that identifies it, or the reason why it cannot be read."""

    content: int | None = None
    damage: str | None = None
    refusal: str | None = None


def _whole(
    path: Path, context: RankContext, *, allow_pickle: bool
) -> tuple[Reader | PickledReader | None, str | None]:
    """Return a reader if all ranks find their share of this checkpoint intact; otherwise None and the first damage.

    Raises:
        CheckpointError: A rank refuses to read it, for example because it is a pickle.
    """
    reader: Reader | PickledReader | None = None
    try:
        reader, content = _read(path, context, allow_pickle=allow_pickle)
        look = _Look(content)
    except (Damaged, OSError) as error:
        look = _Look(damage=str(error))
    except CheckpointError as error:
        look = _Look(refusal=str(error))
    looks = _together(context, look)
    refusals = [look.refusal for look in looks if look.refusal is not None]
    damages = [look.damage for look in looks if look.damage is not None]
    if refusals:
        raise CheckpointError(refusals[0])
    if len({look.content for look in looks}) > 1 and not damages:
        damages = ["ranks see different checkpoints of this name; give all machines the same folder"]
    return (None, damages[0]) if damages else (reader, None)


def _read(path: Path, context: RankContext, *, allow_pickle: bool) -> tuple[Reader | PickledReader, int]:
    """Verify this rank's share of the checkpoint; return a reader and a checksum of the index."""
    if is_pickled(path):
        reader = PickledReader.open(path, allowed=allow_pickle)
        return reader, zlib.crc32((path / PICKLE).read_bytes())
    index = read_index(path)
    verify(path, index, sorted(index.files)[context.rank :: context.world_size])
    return Reader(path, index), zlib.crc32((path / FILE).read_bytes())


def _notes(damages: list[str], path: Path) -> list[str]:
    return [f"{'; '.join(damages)}: the run continues from the earlier {path.name}"] if damages else []


def _instead(named: Path, context: RankContext) -> str:
    for name in reversed(_together(context, _names(named.parent, context))[0]):
        if name == named.name:
            continue
        with suppress(CheckpointError):  # a pickle
            if _whole(named.parent / name, context, allow_pickle=False)[0] is not None:
                return f"the newest intact one is {named.parent / name}"
    return "there is no other intact one"
