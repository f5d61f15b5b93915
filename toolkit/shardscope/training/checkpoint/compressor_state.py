"""Compressor state in checkpoints: each rank saves it under its own name and loads it from there.

With another number of ranks, or under another strategy, ranks do not correspond. Then every rank resumes with the mean
of all old ranks' residuals. That preserves the mean residual, which is what the next mean gradient lacks. The same
happens where the same method cuts its packets differently.

Another method starts with empty state. The residual of top-k is the sum of a hundred steps' small gradients, which int8
would send in a single step. Factors, bits and velocities mean nothing to another method. The notes report dropped
state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardscope.errors import CheckpointError, SpecError
from shardscope.spec import Compression
from shardscope.training.checkpoint.pickled import PickledReader
from shardscope.training.checkpoint.pieces import Reader
from shardscope.training.strategies.base import RankStrategy

_CUTS = ("exchange", "block")
_JOINS = {"share"}
"""Kinds that are not lost when states are merged: the residual of a rank's share joins every rank's residual."""
_KEY = re.compile(r"compression-(\d+)\.(.+)")


def compressor_state(strategy: RankStrategy) -> dict[str, Any]:
    """This rank's part of a checkpoint; nothing where gradients are not compressed."""
    return {} if strategy.compressor is None else {_name(strategy.context.rank): strategy.compressor_state()}


@dataclass(frozen=True)
class RestoredState:
    """The outcome of restoring compressor state.

    Attributes:
        compressor_state: ``"nothing"``, ``"its own"``, or ``"the mean"`` over the ranks that saved it.
        dropped: Kinds of state in the checkpoint that were dropped, such as ``residual``.
        notes: The same as sentences.
    """

    compressor_state: str
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def method_of(compression: Compression) -> str:
    """A method's name and the settings that decide how its packets are cut, as a checkpoint stores them."""
    cut = {key: value for key, value in compression.settings.items() if key in _CUTS}
    return json.dumps({"name": compression.name, **cut})


def restore_compressor_state(
    strategy: RankStrategy,
    reader: Reader | PickledReader,
    saved_layout: str | None,
    saved_method: str | None,
) -> RestoredState:
    """Restore the compressor's state from a checkpoint; called by all ranks.

    Args:
        strategy: The strategy that holds the compressor.
        reader: Reads the checkpoint.
        saved_layout: The `RankStrategy.layout` that it was saved under.
        saved_method: The value of `method_of` at that time; None for the same as now.

    Raises:
        CheckpointError: The method cannot resume after the saved one.
    """
    saved, now = _saved(reader), method_of(strategy.job.compression)
    before = json.loads(saved_method or now)
    try:
        strategy.job.compression.check_follows(before["name"])
    except SpecError as error:
        raise CheckpointError(str(error)) from None
    if not saved:
        return RestoredState("nothing")
    if strategy.compressor is None or before["name"] != strategy.job.compression.name:
        return _dropped("nothing", _kinds(saved), f"{before['name']} is no longer the method")
    if saved_layout == strategy.layout and saved_method in (None, now):
        what, rank = "its own", strategy.context.rank
        strategy.load_compressor_state(_filled(reader, rank, saved.get(rank, {})))
    else:
        what = "the mean"
        states = (_filled(reader, rank, saved[rank]) for rank in sorted(saved))
        strategy.load_compressor_state(
            strategy.reshard_compressor_state(strategy.compressor.merge(states), saved_layout or "")
        )
    kept = strategy.compressor_state()
    lost = _kinds(saved) - _kinds({0: kept}) - (_JOINS if what == "the mean" else set())
    return _dropped(what if kept else "nothing", lost, "the method's new settings have no place for it")


def _dropped(what: str, kinds: set[str], why: str) -> RestoredState:
    names = sorted(kinds)
    return RestoredState(
        what, names, [f"dropped compressor state ({', '.join(names)}): {why}"] if names else []
    )


def _kinds(saved: Mapping[int, Mapping[str, Tensor]]) -> set[str]:
    return {name.partition(".")[0] for state in saved.values() for name in state}


def _name(rank: int) -> str:
    return f"compression-{rank}"


def _saved(reader: Reader | PickledReader) -> dict[int, dict[str, Tensor]]:
    """Empty tensors for each rank's saved state, by rank and name; only the checkpoint lists them all."""
    saved: dict[int, dict[str, Tensor]] = {}
    for key in sorted(reader.keys):
        found = _KEY.fullmatch(key)
        room = reader.room(key) if found is not None else None
        if found is not None and room is not None:
            saved.setdefault(int(found[1]), {})[found[2]] = room
    return saved


def _filled(reader: Reader | PickledReader, rank: int, room: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(reader.fill({_name(rank): room})[_name(rank)])
