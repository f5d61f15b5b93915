"""Memory of a device that is available to tensors, and other memory that a process allocates there."""

from __future__ import annotations

from shardscope.analytic.memory.architecture import is_cpu
from shardscope.analytic.memory.frameworks import Framework
from shardscope.analytic.memory.rows import known_framework
from shardscope.spec.cluster import Device

SEGMENT_BYTES = 20 * 2**20
"""Bytes that PyTorch's caching allocator reserves at a time for tensors between 1 and 10 MiB (``kLargeBuffer`` in
``CUDACachingAllocator.h``)."""


def tensor_room(device: Device, framework: str | Framework, *, largest_bytes: float = 0.0) -> float:
    """Return the largest peak of allocated tensors that fits on a device, in bytes.

    The remaining memory is used by the driver's context, by communication buffers, and by memory that the caching
    allocator reserves beyond the peak, because free blocks rarely have the requested size. Without
    `Device.context_bytes`, the context is not subtracted. Ranks on CPUs have no such allocator, so tensors can use the
    whole memory.

    The allocator's reserve is a fraction of the peak (`Framework.reserved`) or, if that is more, the size of the
    largest tensor, which fits into none of the blocks that smaller tensors leave. On an H100, eight training runs with
    7 to 59 % of their peak in logits needed .65 to 1.19 times their largest tensor in addition to the peak, which is 2
    to 19 % of the peak (torch 2.11; tests/benchmarks/memory_gpu.py). Smaller largest tensors were not measured.

    Args:
        device: The device.
        framework: A key of `FRAMEWORKS`, or your own `Framework`.
        largest_bytes: Bytes of the largest tensor; 0 if unknown.

    Example:
        >>> room = tensor_room(Device.of("a100-80gb"), "megatron-core")
        >>> round(room / 2**30, 1), round(Device.of("a100-80gb").memory_bytes / 2**30, 1)
        (75.1, 79.2)
    """
    if is_cpu(device):
        return float(device.memory_bytes)
    known = known_framework(framework)
    left = device.memory_bytes - device.context_bytes - known.message_bytes
    kept = largest_bytes + SEGMENT_BYTES if largest_bytes else 0.0
    return max(0.0, min(left / known.reserved, left - kept))


def process_bytes(device: Device, framework: str | Framework, peak_bytes: float) -> float:
    """Return the bytes that a process occupies on a device if its allocated tensors peak at `peak_bytes`."""
    known = known_framework(framework)
    return known.reserved * peak_bytes + device.context_bytes + known.message_bytes
