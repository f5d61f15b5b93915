"""Memory that a rank's training holds: of the whole process at every step, and by kind on measured steps.

A strategy has one `MemoryWatch`. It follows the memory of the process, which costs microseconds. On the steps that
the job's `Record` selects, the trainer opens `MemoryWatch.measure` around the strategy's step, and the memory of
tensors is counted by kind, storage by storage. On all other steps none of that runs.

| kind | what is counted |
|---|---|
| `parameters` | this rank's own parameters, or its shards of them, and the model's buffers |
| `gradients` | gradients; where they are views of the buckets that are sent, the buckets |
| `optimizer` | the optimizer's state per parameter, including step counters |
| `activations` | tensors that autograd has saved for coming backward passes |
| `gathered` | parameters of other ranks, held here temporarily |
| `buffers` | work space: communication buffers, padding, an optimizer's scratch |

A storage counts once, with all its bytes, however many tensors share it. Bytes are those that tensors request, without
the allocator's rounding.
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
