"""Measurement of a rank's memory: the total of its process at every step, and a breakdown of tensors on some steps.

A strategy has one `MemoryWatch`. At every step it reads the memory of the process, which takes microseconds. On the
steps that the job's `Record` selects, the trainer runs the strategy's step within `MemoryWatch.measure`, which counts
the bytes of tensors by type of memory. On all other steps nothing is counted.

| type of memory | tensors that are counted |
|---|---|
| `parameters` | this rank's parameters, or its shards of them, and the model's buffers |
| `gradients` | gradients; if they are views of communication buckets, the buckets |
| `optimizer` | the optimizer's state for each parameter, including step counters |
| `activations` | tensors that autograd has saved for the backward pass |
| `gathered` | parameters gathered from other ranks, kept only temporarily |
| `buffers` | communication buffers, padding, and temporary tensors of the optimizer |

Each storage is counted once, with all its bytes, even if several tensors share it. The sizes are those that tensors
request, without the allocator's rounding.
"""

from shardscope.training.memory.activations import Activations, counting
from shardscope.training.memory.held import held_by_default
from shardscope.training.memory.storages import KINDS, Held, Storages
from shardscope.training.memory.watch import MemoryWatch, StepMemory

__all__ = [
    "KINDS",
    "Activations",
    "Held",
    "MemoryWatch",
    "StepMemory",
    "Storages",
    "counting",
    "held_by_default",
]
