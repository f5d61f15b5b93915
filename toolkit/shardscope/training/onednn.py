"""Memory that a fused LSTM layer takes on CPUs, where it is one operation of oneDNN.

The layer returns a workspace, which autograd keeps for the backward pass. In a trace on fake tensors, the workspace is
empty; within `OneDNN`, it has the size that oneDNN gives it (``set_workspace_sizes`` in its ``cpu/rnn/rnn_utils.hpp``).
The layer also copies its weights. Compared with recordings of torch's allocator with and without AVX-512 (torch 2.13,
oneDNN 3.11), the sizes are exact for the forward pass in float32, and within 2 % of a step's peak otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardscope.training.memory.ledger import Scratch

_ATEN = torch.ops.aten
_LSTM, _LSTM_BACKWARD = _ATEN.mkldnn_rnn_layer.default, _ATEN.mkldnn_rnn_layer_backward.default
_PAGE, _LINE = 4096, 64
"""Bytes of a page, at which the parts of a workspace start, and of a cache line, at which their rows start."""
_FIXED = 4664
"""Bytes of a recurrent layer's scratch memory that do not depend on its size."""


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


def scratch(func: Any, args: Any) -> tuple[Scratch, ...]:
    """Return the workspace that a fused LSTM layer allocates while it runs."""
    if func is _LSTM:
        return (_forward(args[0], args[1], args[2]),)
    if func is _LSTM_BACKWARD:
        return (_backward(args[0], args[1], args[2], args[10]),)
    return ()


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


def _forward(inputs: Tensor, of_input: Tensor, of_state: Tensor) -> Scratch:
    """Return the memory of a layer's forward pass: its gates, the sum of its biases, and copies of its weights."""
    hidden, size = of_state.shape[1], inputs.element_size()
    width = _row(4 * hidden, size) if size == 4 else 4 * hidden
    weights = (of_input.shape[1] + hidden) * width * size
    return Scratch(_gates_bytes(inputs, hidden) + _copied(inputs), 4 * hidden * size + weights + _FIXED)


def _backward(inputs: Tensor, of_input: Tensor, of_state: Tensor, gradient: Tensor) -> Scratch:
    """Return the memory of a layer's backward pass, which also copies the gradients of its weights, in float32."""
    (steps, samples, _), (gates, hidden) = inputs.shape, of_state.shape
    size, width = inputs.element_size(), of_input.shape[1]
    fixed = gates * size + (width + hidden) * _row(gates, 4) * 4 + _FIXED
    grows = _gates_bytes(inputs, hidden) + _copied(inputs, gradient)
    if size == 4:
        fixed += sum(gates * _row(each, 4) * 4 for each in (width, hidden) if _row(each, 4) != each)
    else:
        fixed += (width + hidden) * gates * size
        grows += (steps + 2) * samples * hidden * 4
    return Scratch(grows, fixed)


def _gates_bytes(inputs: Tensor, hidden: int) -> int:
    """Return the bytes of a layer's gates and states: gates of all time steps in float32, else of one step."""
    steps, samples, _ = inputs.shape
    size = inputs.element_size()
    gates = samples * (steps if size == 4 else 1) * _row(4 * hidden, size) * 4
    states = samples * _row(hidden, size)
    return _pages(gates) + _pages(states * size) + _pages(states * 4)


def _copied(*tensors: Tensor) -> int:
    """Return the bytes of copies of non-contiguous tensors, such as one direction of a layer's gradient."""
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_contiguous())


def _row(length: int, size: int) -> int:
    """Return the length to which oneDNN rounds rows up: whole cache lines, and not a multiple of 256."""
    each = _LINE // size
    rounded = -(-length // each) * each
    return rounded + each if rounded % 256 == 0 else rounded


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
