"""Bytes on a device, by formula: model states, saved activations, buffers, and offloaded bytes.

`model_states` applies the ZeRO formulas to a number of parameters. `device_memory` adds activations and buffers for a
transformer with any layout, `stage_memory` does so for each stage, and `memory_term` returns the same total as a tree
of terms. The differences between frameworks are in a table, `FRAMEWORKS`.
"""

from shardscope.analytic.memory.activations import activation_bytes_per_layer
from shardscope.analytic.memory.device import MemoryParts, device_memory, stage_memory
from shardscope.analytic.memory.explain import KINDS, memory_term
from shardscope.analytic.memory.frameworks import FRAMEWORKS, Framework
from shardscope.analytic.memory.held import RankStates, placed_states, spread_states
from shardscope.analytic.memory.module import ModuleMemory, module_memory
from shardscope.analytic.memory.offload import HostTraffic, offload_traffic
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
    "Framework",
    "MemoryParts",
    "ModelStates",
    "ModuleMemory",
    "RankStates",
    "ElementBytes",
    "HostTraffic",
    "activation_bytes_per_layer",
    "device_memory",
    "memory_term",
    "model_state_bytes",
    "model_states",
    "module_memory",
    "offload_traffic",
    "placed_states",
    "spread_states",
    "stage_memory",
]
