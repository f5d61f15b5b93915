"""Converts values other than tensors to JSON and back without loss, including tuples, bytes, NaN and infinities."""

from __future__ import annotations

import base64
import math
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardscope.errors import CheckpointError
from shardscope.training.optim.holding import bytes_of

_TAG = "="
"""Key that marks a JSON object as a value of a type that JSON lacks: the object has only this key, with a list of the
type's name and the content."""


def encode(key: str, value: object) -> Any:  # noqa: C901, PLR0911 - one per type
    """Convert `value` to JSON types.

    Raises:
        CheckpointError: The value is not a tensor, array, number, string, bytes or None, or a list, tuple or dictionary
            of these.
    """
    match value:
        case np.generic() | np.ndarray() if not value.dtype.hasobject and value.dtype.names is None:
            return {_TAG: ["numpy", [value.dtype.str, value.shape, _text(value.tobytes())]]}
        case None | bool() | str():
            return value
        case int():
            return value if abs(value) < 2**53 else {_TAG: ["int", hex(value)]}
        case Tensor() if value.layout == torch.strided and not value.is_quantized:
            dtype = str(value.dtype).removeprefix("torch.")
            return {_TAG: ["tensor", [dtype, tuple(value.shape), _text(bytes_of(value).numpy().tobytes())]]}
        case complex():
            return {_TAG: ["complex", [encode(key, value.real), encode(key, value.imag)]]}
        case float():
            return value if math.isfinite(value) else {_TAG: ["float", str(value)]}
        case bytes():
            return {_TAG: ["bytes", _text(value)]}
        case list():
            return [encode(key, item) for item in value]
        case tuple():
            return {_TAG: ["tuple", [encode(key, item) for item in value]]}
        case deque():
            return {_TAG: ["deque", [value.maxlen, [encode(key, item) for item in value]]]}
        case dict():
            return {_TAG: ["dict", [[encode(key, k), encode(key, v)] for k, v in value.items()]]}
    raise CheckpointError(
        f"{key} is a {type(value).__name__}, which cannot be saved in a checkpoint without a pickle; build it from "
        "tensors, arrays, numbers, text, lists, tuples and dictionaries"
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode(value: Any) -> Any:  # noqa: C901, PLR0911 - one per type
    """Convert the result of `encode` back to the original value."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = value[_TAG]
    match kind:
        case "int":
            return int(content, 16)
        case "float":
            return float(content)
        case "complex":
            return complex(*map(decode, content))
        case "bytes":
            return base64.b64decode(content)
        case "numpy":
            dtype, shape, data = content
            array = np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
            return array if shape else array[()]
        case "tensor":
            dtype, shape, data = content
            row = torch.from_numpy(np.frombuffer(base64.b64decode(data), np.uint8).copy())
            return row.view(getattr(torch, dtype)).reshape(shape)
        case "deque":
            return deque(map(decode, content[1]), content[0])
        case "tuple":
            return tuple(decode(item) for item in content)
    return {decode(key): decode(item) for key, item in content}
