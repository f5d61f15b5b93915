"""Checkpoints: saved by all ranks together, complete or not there at all, and read without running anything.

    saving       every rank writes its share of the tensors, rank 0 the index; then the folder gets its name
    loading      the newest whole checkpoint, on all ranks the same one
    contents     what is in one: model, optimizer, place in the data, random state
    remembered   what compressors remember
    index        the JSON that says what is where, with its checks
    pieces       tensors as boxes of elements, so that any number of ranks can read what any other wrote
    pickled      checkpoints of earlier versions

A checkpoint is written to ``step-N.partial`` and renamed to ``step-N`` once every rank's part is on disk, so whatever
carries the final name was complete. It can be loaded on another number of ranks, and under another strategy, than it
was saved on.
"""

from __future__ import annotations

from shardscope.training.checkpoint.contents import (
    load_optimizer_state_of,
    load_state_of,
    optimizer_state_of,
    state_of,
)
from shardscope.training.checkpoint.folders import complete_checkpoints
from shardscope.training.checkpoint.loading import Loaded, load
from shardscope.training.checkpoint.saving import save

__all__ = [
    "Loaded",
    "complete_checkpoints",
    "load",
    "load_optimizer_state_of",
    "load_state_of",
    "optimizer_state_of",
    "save",
    "state_of",
]
