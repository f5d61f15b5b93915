"""Memory that torch's CPU kernels take beside their results: workspaces of oneDNN, copies in its formats, columns.

A trace on shapes sees only what operations return. These rules were compared, to the byte where nothing else is said,
with what torch's allocator recorded on a processor with AVX-512 (torch 2.13, oneDNN 3.11, one thread);
tests/campaigns/modules.py compares them again.

- A fused LSTM layer returns a workspace, which autograd keeps for the backward pass. On shapes it is empty; `OneDNN`
  gives it its size (``set_workspace_sizes`` in oneDNN's ``cpu/rnn/rnn_utils.hpp``). The layer copies its weights.
- A convolution in 32 or 16 bits copies its input and its output between torch's format and blocks of 16 channels.
  oneDNN chooses among many kernels, so this is within a few percent. In other dtypes, it lists the patches under its
  kernel as the columns of a matrix.
- `nn.Bilinear` computes its outputs one at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_LSTM, _LSTM_BACKWARD = _ATEN.mkldnn_rnn_layer.default, _ATEN.mkldnn_rnn_layer_backward.default
_PAGE, _LINE = 4096, 64
"""Bytes of a page, at which the parts of a workspace start, and of a cache line, at which their rows start."""
_FIXED = 4664
"""Bytes of a recurrent layer's scratch memory that do not depend on its size."""
_BLOCK = 16
"""Channels in a block of oneDNN's format for convolutions."""
_FEW = 3
"""Most input channels, such as those of an image, that the backward pass of a convolution leaves as they are."""


class OneDNN(TorchDispatchMode):
    """Mode in which fused LSTM layers on fake tensors return a workspace of the size that they return in a real run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if func is not _LSTM:
            return results
        *others, workspace = results
        return (*others, workspace.new_empty(_workspace_bytes(args[0], args[2]), dtype=torch.uint8))


def scratch_bytes(func: Any, args: Any, results: Any) -> int:  # noqa: ARG001 - as on a GPU
    """Return the bytes that an operation takes on a CPU while it runs, beside its arguments and results."""
    if func is _LSTM:
        return _lstm_bytes(args[0], args[1], args[2]) + _copied(args[0])
    if func is _LSTM_BACKWARD:
        return _lstm_backward_bytes(args[0], args[1], args[2]) + _copied(args[0], args[10])
    return 0


def _workspace_bytes(inputs: Tensor, of_state: Tensor) -> int:
    """Return the bytes that a fused LSTM layer keeps: its gates and states, and room for gradients of the states."""
    steps, samples, width = inputs.shape
    hidden, size = of_state.shape[1], inputs.element_size()
    rows, states = steps * samples, 2 * (steps + 1) * samples
    return sum(
        map(
            _pages,
            (
                rows * _row(4 * hidden, size) * size,
                rows * _row(hidden, size) * size,
                states * _row(max(width, hidden), size) * size,
                states * hidden * size,
                states * _row(max(width, hidden), 4) * 4,
                states * _row(max(width, hidden), 4) * 4,
                states * hidden * 4,
            ),
        )
    )


def _lstm_bytes(inputs: Tensor, of_input: Tensor, of_state: Tensor) -> int:
    """Return the bytes of a layer's forward pass: sum of its biases, copies of its weights, and gates."""
    hidden, size = of_state.shape[1], inputs.element_size()
    width = _row(4 * hidden, size) if size == 4 else 4 * hidden
    weights = (of_input.shape[1] + hidden) * width * size
    return 4 * hidden * size + weights + _gates_bytes(inputs, hidden)


def _lstm_backward_bytes(inputs: Tensor, of_input: Tensor, of_state: Tensor) -> int:
    """Return the bytes of a layer's backward pass, which also copies the gradients of its weights, in float32."""
    (steps, samples, _), (gates, hidden) = inputs.shape, of_state.shape
    size, width = inputs.element_size(), of_input.shape[1]
    held = gates * size + (width + hidden) * _row(gates, 4) * 4
    if size == 4:
        held += sum(gates * _row(each, 4) * 4 for each in (width, hidden) if _row(each, 4) != each)
    else:
        held += (width + hidden) * gates * size + (steps + 2) * samples * hidden * 4
    return held + _gates_bytes(inputs, hidden)


def _gates_bytes(inputs: Tensor, hidden: int) -> int:
    """Return the bytes in which a layer computes its gates: of all steps in float32, else of one."""
    steps, samples, _ = inputs.shape
    size = inputs.element_size()
    gates = samples * (steps if size == 4 else 1) * _row(4 * hidden, size) * 4
    states = samples * _row(hidden, size)
    return _pages(gates) + _pages(states * size) + _pages(states * 4) + _FIXED


def _copied(*tensors: Tensor) -> int:
    """Return the bytes of copies of tensors that are not contiguous, such as one direction of a layer's gradient."""
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_contiguous())


def _row(length: int, size: int) -> int:
    """Return the length to which oneDNN rounds rows up: whole cache lines, and not a multiple of 256."""
    each = _LINE // size
    rounded = -(-length // each) * each
    return rounded + each if rounded % 256 == 0 else rounded


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
