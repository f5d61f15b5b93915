"""What a rank's training holds in memory: as the process shows it at every step, and by kind on measured steps.

A strategy has one `MemoryWatch`. It follows the memory of the process, which costs microseconds. On the steps that
the job's `Record` asks for, the trainer opens `MemoryWatch.measure` around the strategy's step, and what tensors hold
is counted by kind, storage by storage; on all other steps nothing of that runs.

| kind | what is counted |
|---|---|
| `parameters` | this rank's own parameters, or its shards of them, and the model's buffers |
| `gradients` | gradients; where they are views of the buckets that are sent, the buckets |
| `optimizer` | what the optimizer carries from step to step for each parameter, step counters included |
| `activations` | what autograd has saved for backward passes that are still to come |
| `gathered` | parameters of other ranks, held here for a while |
| `buffers` | what is kept to work in: communication buffers, padding, an optimizer's scratch |

A storage counts with all its bytes, once, however many tensors share it. Bytes are those that tensors ask for; what an
allocator rounds up is not in them.
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
