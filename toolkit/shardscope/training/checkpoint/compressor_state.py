"""Compressor state in checkpoints: each rank saves and loads its own state under its own key.

If the number of ranks or the strategy changes, old and new ranks do not correspond. Every rank then resumes with the
mean of all old ranks' residuals. This preserves the mean residual, which is the part still missing from the mean
gradient. The same happens if the method stays the same but splits its packets differently.

A different method starts with empty state. For example, the residual of top-k may be the sum of a hundred steps of
small gradients, all of which int8 would send in a single step; and factors, bit widths and velocities have no meaning
in another method. The notes report which state was dropped.
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
"""Kinds of state that merging preserves: the residual of a rank's share is merged into every rank's residual."""
_KEY = re.compile(r"compression-(\d+)\.(.+)")


def compressor_state(strategy: RankStrategy) -> dict[str, Any]:
    """Return the compressor state that this rank saves; empty if gradients are not compressed."""
    return {} if strategy.compressor is None else {_name(strategy.context.rank): strategy.compressor_state()}


@dataclass(frozen=True)
class RestoredState:
    """The outcome of restoring compressor state.

    Attributes:
        compressor_state: What was restored: ``"nothing"``, ``"its own"`` (this rank's own state), or ``"the mean"``
            over the ranks that saved it.
        dropped: Kinds of state in the checkpoint that were dropped, such as ``residual``.
        notes: The same information as sentences.
    """

    compressor_state: str
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def method_of(compression: Compression) -> str:
    """Return, as JSON for a checkpoint, a method's name and the settings that determine how it splits its packets."""
    cut = {key: value for key, value in compression.settings.items() if key in _CUTS}
    return json.dumps({"name": compression.name, **cut})


def restore_compressor_state(
    strategy: RankStrategy,
    reader: Reader | PickledReader,
    saved_layout: str | None,
    saved_method: str | None,
) -> RestoredState:
    """Restore the compressor's state from a checkpoint. All ranks must call this together.

    Args:
        strategy: The strategy that holds the compressor.
        reader: The reader of the checkpoint.
        saved_layout: `RankStrategy.layout` when the checkpoint was saved.
        saved_method: Value of `method_of` when it was saved; None for the same method as now.

    Raises:
        CheckpointError: The job's method cannot follow the saved one.
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
    return _dropped(what if kept else "nothing", lost, "the method does not use it with its new settings")


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
    """Return tensors of zeros for each rank's saved state, by rank and name, as listed in the checkpoint."""
    saved: dict[int, dict[str, Tensor]] = {}
    for key in sorted(reader.keys):
        found = _KEY.fullmatch(key)
        room = reader.room(key) if found is not None else None
        if found is not None and room is not None:
            saved.setdefault(int(found[1]), {})[found[2]] = room
    return saved


def _filled(reader: Reader | PickledReader, rank: int, room: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(reader.fill({_name(rank): room})[_name(rank)])
