"""Compressor state in checkpoints: each rank saves and loads its own state, under its own key.

If the number of ranks or the strategy has changed, each rank's own state cannot be restored. Every rank then resumes
with the mean of all saved residuals. This preserves the mean residual: the part of the mean gradient that has not been
applied to the weights yet. The same is done if the method is unchanged but its settings split buckets into packets
differently. Between layouts of which one divides the model over tensor ranks or pipeline stages, the state is dropped.

If the compression method has changed, the new method starts without any state. For example, a residual of top-k may be
the sum of small gradients from a hundred steps, and int8 would send all of it in a single step. Other state, such as
factors, bit widths and velocities, has no meaning for a different method. The notes list the state that was dropped.
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
from shardscope.training.checkpoint.pieces import CheckpointReader
from shardscope.training.strategies.base import DIVIDED_SUFFIX, RankStrategy

_CUTS = ("exchange", "block")
_MERGED_KINDS = {"share"}
"""Kinds of state that are added to another kind when states are merged, and so are not reported as dropped: the
residual of a rank's share is added to the gradient residual."""
_KEY = re.compile(r"compression-(\d+)\.(.+)")


def compressor_state(strategy: RankStrategy) -> dict[str, Any]:
    """Return the compressor state to save in this rank's checkpoint; empty if gradients are not compressed."""
    return (
        {} if strategy.compressor is None else {_name(strategy.all_ranks.rank): strategy.compressor_state()}
    )


@dataclass(frozen=True)
class RestoredState:
    """Result of restoring compressor state.

    Attributes:
        compressor_state: The state that was restored: ``"nothing"``, ``"its own"`` (this rank's own state), or ``"the
            mean"`` of the states of all ranks that saved one.
        dropped: Kinds of state in the checkpoint that were dropped, such as ``residual``.
        notes: Sentences that report the dropped state to the user.
    """

    compressor_state: str
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def method_of(compression: Compression) -> str:
    """Return a method's name, and its settings for splitting buckets into packets, as JSON for a checkpoint."""
    cut = {key: value for key, value in compression.settings.items() if key in _CUTS}
    return json.dumps({"name": compression.name, **cut})


def restore_compressor_state(
    strategy: RankStrategy,
    reader: CheckpointReader,
    saved_layout: str | None,
    saved_method: str | None,
) -> RestoredState:
    """Restore the compressor's state from a checkpoint. All ranks must call this together.

    Args:
        strategy: The strategy that holds the compressor.
        reader: The reader of the checkpoint.
        saved_layout: Value of `RankStrategy.layout` when the checkpoint was saved.
        saved_method: Value of `method_of` when the checkpoint was saved; None if it was the same as now.

    Raises:
        CheckpointError: The job's compression method cannot resume from the method that the checkpoint was saved with.
    """
    saved, now = _zeros_for_saved(reader), method_of(strategy.job.compression)
    before = json.loads(saved_method or now)
    try:
        strategy.job.compression.check_follows(before["name"])
    except SpecError as error:
        raise CheckpointError(str(error)) from None
    if not saved:
        return RestoredState("nothing")
    if strategy.compressor is None or before["name"] != strategy.job.compression.name:
        return _dropped("nothing", _kinds(saved), f"the compression method is no longer {before['name']}")
    if saved_layout == strategy.layout and saved_method in (None, now):
        what, rank = "its own", strategy.all_ranks.rank
        strategy.load_compressor_state(_filled(reader, rank, saved.get(rank, {})))
    elif DIVIDED_SUFFIX in f"{saved_layout} {strategy.layout}":
        return _dropped(
            "nothing", _kinds(saved), "the tensor ranks or stages, which divide the model, have changed"
        )
    else:
        what = "the mean"
        states = (_filled(reader, rank, saved[rank]) for rank in sorted(saved))
        strategy.load_compressor_state(
            strategy.reshard_compressor_state(strategy.compressor.merge(states), saved_layout or "")
        )
    kept = strategy.compressor_state()
    lost = _kinds(saved) - _kinds({0: kept}) - (_MERGED_KINDS if what == "the mean" else set())
    return _dropped(what if kept else "nothing", lost, "the method does not use it with the new settings")


def _dropped(what: str, kinds: set[str], why: str) -> RestoredState:
    names = sorted(kinds)
    return RestoredState(
        what, names, [f"dropped compressor state ({', '.join(names)}): {why}"] if names else []
    )


def _kinds(saved: Mapping[int, Mapping[str, Tensor]]) -> set[str]:
    return {name.partition(".")[0] for state in saved.values() for name in state}


def _name(rank: int) -> str:
    return f"compression-{rank}"


def _zeros_for_saved(reader: CheckpointReader) -> dict[int, dict[str, Tensor]]:
    """Return a tensor of zeros for each compressor tensor in the checkpoint, by rank and name."""
    saved: dict[int, dict[str, Tensor]] = {}
    for key in sorted(reader.keys):
        found = _KEY.fullmatch(key)
        zeros = reader.zeros(key) if found is not None else None
        if found is not None and zeros is not None:
            saved.setdefault(int(found[1]), {})[found[2]] = zeros
    return saved


def _filled(reader: CheckpointReader, rank: int, zeros: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(reader.fill({_name(rank): zeros})[_name(rank)])
