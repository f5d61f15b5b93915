"""Effects of a device's architecture on memory: workspaces for matrix products, transposes of fp8 weights."""

from __future__ import annotations

from shardscope.spec.cluster import Device

MIB = 2**20
_CPU = "cpu"
"""Name of the device that represents a rank on a CPU."""


def is_cpu(device: Device | None) -> bool:
    """Return whether a device represents a rank on a CPU; false for None, a GPU of this machine."""
    return device is not None and device.name == _CPU


def torch_workspace_bytes(device: Device | None) -> float:
    """Return the workspace bytes of matrix products when torch runs a training step; None is an unknown GPU.

    torch allocates one workspace for the thread of the forward pass and one for the thread of the backward
    pass (``parseChosenWorkspaceSize`` in ``CUDABlas.cpp``, later ``CublasHandlePool.cpp``). The sizes are
    those of current releases; the size for an H100 was confirmed by measurement. An unknown architecture
    counts as NVIDIA Hopper or later.

    Example:
        >>> [torch_workspace_bytes(Device.of(name)) / 2**20 for name in ("a100-80gb", "h100-80gb")]
        [16.25, 64.0]
    """
    if is_cpu(device):
        return 0.0
    name = device.architecture if device else ""
    if name.startswith("gfx"):
        return 2.0 * MIB * (128 if name.startswith(("gfx94", "gfx95")) else 32)
    return 2.0 * MIB * (32 if _capability(name) >= 90 or not name else 8 + 1 / 8)


def reads_any_fp8_layout(device: Device | None) -> bool:
    """Return whether fp8 matrix products of a device, with one scale per tensor, accept operands in any layout.

    If not, as on Hopper and Ada, training also stores a transposed copy of each weight. TransformerEngine's
    ``nvte_is_non_tn_fp8_gemm_supported`` is true since sm_100, except for sm_120 to sm_129. The result for None is
    False.

    Example:
        >>> [reads_any_fp8_layout(Device.of(name)) for name in ("h100-80gb", "gb200")]
        [False, True]
    """
    capability = _capability(device.architecture if device else "")
    return 100 <= capability < 120 or capability >= 130


def _capability(architecture: str) -> int:
    """Return ten times the compute capability of an NVIDIA architecture, such as 90 for sm_90; 0 for other vendors."""
    number = architecture.removeprefix("sm_")
    return int(number) if number != architecture and number.isdigit() else 0
