"""Batches of any structure: their contents, and how they are split into micro-batches and passed to a model.

A batch is a pair of inputs and targets, each a tensor or a structure of tensors: tuples, lists and mappings, nested
as needed; None and booleans in it are left unchanged. The structure of the inputs decides how the model is called:

    tensor           model(inputs)
    tuple or list    model(*inputs)
    mapping          model(**inputs)

A mapping with ``labels`` is a whole batch, as Hugging Face's models take it: the model gets all of it, and the labels
are also the targets.
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
"""How torch's errors name the format of an argument that a layer cannot take."""
Batch = tuple[Any, Any]
"""Inputs and targets."""


class _Reads(Protocol):
    def batch(self, indices: Tensor) -> Any: ...


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Call the model on inputs of any structure and return its output.

    Raises:
        DataError: A layer of the model cannot compute with the inputs' number format.
    """
    try:
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)
    except (RuntimeError, ValueError) as error:
        dtype = _refused_dtype(str(error), inputs)
        if dtype is None:
            raise
        reason = str(error).rstrip(".")
        raise DataError(
            f"the model cannot take inputs of {dtype}: {reason}; give the type that it computes in"
        ) from error


def _refused_dtype(reason: str, inputs: Any) -> torch.dtype | None:
    """The number format that an error of torch names, if inputs have it; floats are cast before they get here."""
    if re.search("dtype|scalar type|should be the same|not implemented for", reason) is None:
        return None
    return next(
        (t.dtype for _, t in named_tensors(inputs, "inputs") if re.search(_WORDS.get(t.dtype, "$^"), reason)),
        None,
    )


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply `function` to each tensor of a structure; mappings become dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [map_tensors(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a structure with its expression, such as ``inputs['input_ids']``.

    Raises:
        DataError: The structure holds other values than tensors, None and booleans.
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
            f"data gave {name} of type {type(value).__name__}; give tensors, or tuples, lists and mappings of them"
        )


def named_tensors_of(batch: Batch) -> list[tuple[str, Tensor]]:
    """All tensors of a batch with their expressions."""
    inputs, targets = batch
    return [*named_tensors(inputs, "inputs"), *named_tensors(targets, "targets")]


def tensors_of(batch: Batch) -> list[Tensor]:
    """All tensors of a batch."""
    return [tensor for _, tensor in named_tensors_of(batch)]


def num_rows(inputs: Any) -> int:
    """Number of samples in the inputs of a batch."""
    return next((len(tensor) for _, tensor in named_tensors(inputs, "inputs")), 0)


def split(batch: Batch, parts: int) -> list[Batch]:
    """Split a batch into equal micro-batches, in order; their tensors are views of the batch's."""
    size = num_rows(batch[0]) // parts

    def cut(part: int) -> Batch:
        inputs, targets = map_tensors(lambda tensor: tensor[part * size : (part + 1) * size], batch)
        return inputs, targets

    return [cut(part) for part in range(parts)]


def read_batch(source: _Reads, indices: Tensor) -> Batch:
    """Read the rows of `source` at `indices`, as inputs and targets.

    Raises:
        DataError: The source returned no inputs and targets, values other than tensors, or another number of rows.
    """
    inputs, targets = as_pair(source.batch(indices))
    named = named_tensors_of((inputs, targets))
    if num_rows(inputs) == 0:
        raise DataError(
            f"data gave no rows of inputs for {len(indices)} indices; give one row for each index"
        )
    for name, tensor in named:
        if tensor.dim() == 0 or len(tensor) != len(indices):
            got = f"{len(tensor)} rows" if tensor.dim() else "a single number"
            raise DataError(
                f"data gave {got} of {name} for {len(indices)} indices; give one row for each index"
            )
    return inputs, targets


def as_pair(batch: Any) -> Batch:
    """Inputs and targets of a batch that a source returned.

    Raises:
        DataError: The batch is neither a pair nor a mapping with ``labels``.
    """
    if isinstance(batch, Mapping) and LABELS in batch:
        return batch, batch[LABELS]
    if isinstance(batch, list | tuple) and len(batch) == 2:
        inputs, targets = batch
        return inputs, targets
    raise DataError(
        f"data gave batches that are {_describe(batch)}; give pairs of an input and a target, where each may be a "
        f"tuple or a mapping of tensors, or mappings with {LABELS!r}"
    )


def _describe(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"mappings of {', '.join(map(repr, batch)) or 'nothing'}"
    return (
        f"{type(batch).__name__}s of {len(batch)}"
        if isinstance(batch, list | tuple)
        else type(batch).__name__
    )


def reads_tokens(micro_batches: Sequence[Batch]) -> bool:
    """Whether the targets have one element per input token."""
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
