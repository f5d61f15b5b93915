"""Functions on batches: read a batch, split it into micro-batches, list its tensors, and call a model on its inputs.

A batch is a pair of inputs and targets. Each is a tensor or a structure of tensors (tuples, lists and mappings, nested
to any depth), in which None and booleans are left unchanged. The type of the inputs decides how the model is called:

    tensor           model(inputs)
    tuple or list    model(*inputs)
    mapping          model(**inputs)

A data source may also return a single mapping with the key ``labels``, as for Hugging Face models. The model then
receives the whole mapping, and the labels are also the targets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardscope.errors import DataError

LABELS = "labels"
_WORDS = {
    torch.int64: r"\bLong and\b|'Long'|input dtype \(torch.int64",
    torch.int32: r"\bInt and\b|'Int'|input dtype \(torch.int32",
    torch.uint8: r"\bByte and\b|'Byte'|Input type \(unsigned char|input dtype \(torch.uint8",
    torch.bool: r"\bBool and\b|'Bool'|Input type \(bool|input dtype \(torch.bool",
    torch.float32: "FloatTensor instead",
    torch.float64: "DoubleTensor instead",
}
"""For each dtype, a regular expression that matches the names that PyTorch's error messages use for it."""
Batch = tuple[Any, Any]
"""A batch: a pair of inputs and targets; see the module docstring."""


class _Reads(Protocol):
    def batch(self, indices: Tensor) -> Any: ...


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Call the model on inputs of any structure (see the module docstring) and return its output.

    An error of the model that is about shapes gets a note with the shapes of the inputs.

    Raises:
        DataError: A layer of the model does not support the dtype of the inputs.
    """
    try:
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)
    except (RuntimeError, ValueError) as error:
        dtype = _unsupported_dtype(str(error), inputs)
        if dtype is None:
            if re.search("shape|size|dim|channel", str(error)):
                error.add_note(f"the model's inputs have the shape {_shapes_text(inputs)}")
            raise
        reason = str(error).rstrip(".")
        raise DataError(
            f"the model does not accept inputs of {dtype}: {reason}; convert the inputs to a dtype that it accepts"
        ) from error


def _shapes_text(inputs: Any) -> str:
    """Return the shapes of the tensors in a model's inputs, such as ``(64, 1, 8, 8)``."""
    return ", ".join(str(tuple(tensor.shape)) for _, tensor in named_tensors(inputs, "inputs"))


def _unsupported_dtype(reason: str, inputs: Any) -> torch.dtype | None:
    """Return the dtype named in the message `reason` of a PyTorch error, if any tensor of `inputs` has it; else None.

    Floating-point inputs have already been cast to the dtype of the model's weights.
    """
    if re.search("dtype|scalar type|should be the same|not implemented for", reason) is None:
        return None
    return next(
        (t.dtype for _, t in named_tensors(inputs, "inputs") if re.search(_WORDS.get(t.dtype, "$^"), reason)),
        None,
    )


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return the structure `value` with `function` applied to each tensor in it; mappings become dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [map_tensors(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in a structure with a Python expression for it, such as ``inputs['input_ids']``.

    Args:
        value: The structure.
        name: The expression for the whole structure, such as ``inputs``.

    Raises:
        DataError: The structure contains a value that is not a tensor, None or a boolean.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from named_tensors(part, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from named_tensors(part, f"{name}[{index}]")
    elif value is not None and not isinstance(value, bool):
        raise DataError(
            f"data returned {name} of type {type(value).__name__}; return tensors, or tuples, lists or mappings of "
            "tensors"
        )


def named_tensors_of(batch: Batch) -> list[tuple[str, Tensor]]:
    """Return all tensors of a batch, each with its expression (see `named_tensors`)."""
    inputs, targets = batch
    return [*named_tensors(inputs, "inputs"), *named_tensors(targets, "targets")]


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return all tensors in the inputs and targets of a batch."""
    return [tensor for _, tensor in named_tensors_of(batch)]


def num_rows(inputs: Any) -> int:
    """Return the number of samples in the inputs of a batch: the length of its first tensor."""
    return next((len(tensor) for _, tensor in named_tensors(inputs, "inputs")), 0)


def split(batch: Batch, parts: int) -> list[Batch]:
    """Split a batch into `parts` micro-batches of equal size, in order; their tensors are views."""
    size = num_rows(batch[0]) // parts

    def cut(part: int) -> Batch:
        inputs, targets = map_tensors(lambda tensor: tensor[part * size : (part + 1) * size], batch)
        return inputs, targets

    return [cut(part) for part in range(parts)]


def read_batch(source: _Reads, indices: Tensor) -> Batch:
    """Read the rows of `source` at `indices` and return them as inputs and targets.

    Raises:
        DataError: The source did not return a pair of inputs and targets (or a mapping with ``labels``), a value in the
            pair is not a tensor, or a tensor does not have one row per index.
    """
    inputs, targets = as_pair(source.batch(indices))
    named = named_tensors_of((inputs, targets))
    if num_rows(inputs) == 0:
        raise DataError(
            f"data returned no rows of inputs for {len(indices)} indices; return one row for each index"
        )
    for name, tensor in named:
        if tensor.dim() == 0 or len(tensor) != len(indices):
            got = f"{len(tensor)} rows" if tensor.dim() else "a single number"
            raise DataError(
                f"data returned {got} in {name} for {len(indices)} indices; return one row for each index"
            )
    return inputs, targets


def as_pair(batch: Any) -> Batch:
    """Convert a batch from a data source to a pair of inputs and targets.

    Raises:
        DataError: The batch is neither a pair nor a mapping with ``labels``.
    """
    if isinstance(batch, Mapping) and LABELS in batch:
        return batch, batch[LABELS]
    if isinstance(batch, list | tuple) and len(batch) == 2:
        inputs, targets = batch
        return inputs, targets
    raise DataError(
        f"data returned a batch that is a {_describe(batch)}; return a pair (inputs, targets), where each may be a "
        f"tuple or a mapping of tensors, or a mapping with the key {LABELS!r}"
    )


def _describe(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"mapping with {', '.join(map(repr, batch)) or 'no keys'}"
    return (
        f"{type(batch).__name__} of length {len(batch)}"
        if isinstance(batch, list | tuple)
        else type(batch).__name__
    )


def reads_tokens(micro_batches: Sequence[Batch]) -> bool:
    """Return whether the targets are a tensor with one element per input token, as for a language model."""
    if not micro_batches:
        return False
    inputs, targets = micro_batches[0]
    read = (
        inputs
        if not isinstance(inputs, dict)
        else {key: part for key, part in inputs.items() if key != LABELS}
    )
    return isinstance(targets, Tensor) and any(
        not tensor.is_floating_point() and tensor.shape == targets.shape
        for _, tensor in named_tensors(read, "inputs")
    )
