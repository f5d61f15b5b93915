"""Checkpoints: all ranks save them together, atomically, and reading them never executes code from the file.

    saving            every rank writes its share of the tensors, rank 0 writes the index and renames the folder
    loading           loads the newest complete checkpoint, the same one on all ranks
    contents          what a checkpoint contains: model, optimizer, position in the data, random state
    compressor_state  the state of compressors
    index             the JSON index of tensors and files, and its validation
    pieces            tensors stored as boxes of elements, so that a job can resume with any number of ranks
    pickled           checkpoints of earlier versions

A checkpoint is written to ``step-N.partial`` and renamed to ``step-N`` after every rank's part is on disk, so a folder
with the final name is always complete. It can be loaded with a different number of ranks or a different strategy.
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
