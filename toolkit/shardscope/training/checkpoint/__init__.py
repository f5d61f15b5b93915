"""Checkpoints: all ranks save them together and atomically; loading one executes no code from it.

    saving            all ranks agree on who writes which tensors, and write them now or in the background
    writing           the files: every rank writes its part; rank 0 writes the index and renames the folder
    background        the thread that writes while training continues, from the copies of `snapshot`
    unchanged         tensors that have not changed, which incremental checkpoints share
    replicas          copies of the state in host memory, in the same format; `memory` has their paths
    loading           loads the newest complete checkpoint, the same on all ranks
    contents          the contents of a checkpoint: model, optimizer, position in the data, random state
    optimizer_state   the state of optimizers; `optimizer_trees` takes apart entries that are not tensors
    compressor_state  the state of compressors
    index             the JSON index of tensors and files, and its validation
    pieces            tensors stored in rectangular pieces, so that a job can resume with any number of ranks

A checkpoint is written to ``step-N.partial``, and renamed to ``step-N`` when the files of all ranks are on disk. So a
folder with the final name is always complete. It can be loaded with a different number of ranks or a different
strategy.
"""

from __future__ import annotations

from shardscope.training.checkpoint.folders import complete_checkpoints
from shardscope.training.checkpoint.loading import Loaded, load
from shardscope.training.checkpoint.saving import Saver

__all__ = [
    "Loaded",
    "Saver",
    "complete_checkpoints",
    "load",
]
