"""Memory of devices by formula: model states, saved activations, buffers, and data offloaded to the host.

`model_states` applies the ZeRO formulas to a number of parameters. `device_memory` adds activations and buffers, for a
transformer with any layout. `stage_memory` returns the same for each pipeline stage, and `memory_term` as a tree of
terms. Differences between frameworks are listed in `FRAMEWORKS`. `tensor_room` is the part of a device's memory that
tensors can use.
"""

from shardscope.analytic.memory.activations import activation_bytes_per_layer
from shardscope.analytic.memory.architecture import is_cpu, torch_workspace_bytes
from shardscope.analytic.memory.device import MemoryParts, device_memory, stage_memory
from shardscope.analytic.memory.explain import KINDS, SYMBOLS, memory_term
from shardscope.analytic.memory.frameworks import FRAMEWORKS, Framework
from shardscope.analytic.memory.held import RankStates, placed_states, spread_states
from shardscope.analytic.memory.module import ModuleMemory, module_memory
from shardscope.analytic.memory.offload import HostTraffic, offload_traffic
from shardscope.analytic.memory.room import process_bytes, tensor_room
from shardscope.analytic.memory.states import (
    RECIPES,
    ElementBytes,
    ModelStates,
    model_state_bytes,
    model_states,
)

__all__ = [
    "FRAMEWORKS",
    "KINDS",
    "RECIPES",
    "SYMBOLS",
    "ElementBytes",
    "Framework",
    "HostTraffic",
    "MemoryParts",
    "ModelStates",
    "ModuleMemory",
    "RankStates",
    "activation_bytes_per_layer",
    "device_memory",
    "is_cpu",
    "memory_term",
    "model_state_bytes",
    "model_states",
    "module_memory",
    "offload_traffic",
    "placed_states",
    "process_bytes",
    "spread_states",
    "stage_memory",
    "tensor_room",
    "torch_workspace_bytes",
]
