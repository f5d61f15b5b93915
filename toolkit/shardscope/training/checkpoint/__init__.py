"""Checkpoints: saved by all ranks together, atomically, and read without executing any code from them.

    saving            every rank writes its share of the tensors, rank 0 the index; then the folder gets its final name
    loading           loads the newest complete checkpoint, the same one on all ranks
    contents          the contents: model, optimizer, position in the data, random state
    compressor_state  the state of compressors
    index             the JSON index of tensors and files, with its checks
    pieces            tensors as boxes of elements, so that any number of ranks can read what any other number wrote
    pickled           checkpoints of earlier versions

A checkpoint is written to ``step-N.partial`` and renamed to ``step-N`` after every rank's part is on disk, so a folder
with the final name is always complete. It can be loaded with another number of ranks, and under another strategy, than
it was saved with.
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
