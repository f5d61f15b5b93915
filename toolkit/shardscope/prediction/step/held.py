"""Memory of layouts on a cluster, by the memory model of the software."""

from __future__ import annotations

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import MemoryParts, device_memory, tensor_room
from shardscope.analytic.memory.offload import host_bytes_per_device
from shardscope.calibration.software import memory_model
from shardscope.spec.cluster import Cluster
from shardscope.spec.model import Transformer


def memory_with(model: Transformer, layouts: Layouts, cluster: Cluster, software: str) -> MemoryParts:
    """Return bytes by type of memory; offloaded bytes that exceed a device's share of host memory are on drives."""
    room = host_bytes_per_device(cluster)
    return device_memory(
        model, layouts, framework=memory_model(software), device=cluster.device, host_capacity=room
    )


def room_on(cluster: Cluster, software: str, *, largest_bytes: float = 0.0) -> float:
    """Return the bytes that tensors can take on a device of a cluster, with a software; see `tensor_room`."""
    return tensor_room(cluster.device, memory_model(software), largest_bytes=largest_bytes)
