"""How the ranks hold the parameters that their optimizers update."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


class SavedCheckpoint(Protocol):
    """A checkpoint that is being loaded."""

    @property
    def keys(self) -> set[str]:
        """Names of all tensors and values in the checkpoint."""

    def described(self, key: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return shape and dtype of a saved tensor; None if it is not a tensor."""

    def fill(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `state` with its values replaced by those in the checkpoint."""


def digest_of(value: Any) -> str:
    """Return a short text that is the same for equal values of JSON types."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a strided tensor in row-major order, as uint8 on the CPU, without a copy if possible."""
    whole = tensor.detach().cpu().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(
        torch.uint8
    )  # a single element may have the stride 0


@dataclass(frozen=True)
class Holding:
    """How the ranks hold parameters; in this base class, a rank that has a parameter holds all of it.

    Attributes:
        layout: Name that identifies the pieces of parameters that this rank holds.
    """

    layout: str

    is_split: ClassVar[bool] = False
    """Whether the ranks hold pieces of the parameters."""

    def join(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Combine the ranks' pieces of one entry, by parameter name; called by all ranks together."""
        return parts

    def part(self, name: str, whole: Tensor) -> Tensor:  # noqa: ARG002
        """Return this rank's piece of a tensor of a parameter's whole shape."""
        return whole

    def whole(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """Return an empty tensor of a parameter's whole shape, to be filled from a checkpoint."""
        return torch.empty_like(like, dtype=dtype)

    def shape(self, name: str, held: Tensor) -> tuple[int, ...]:  # noqa: ARG002
        """Return the whole shape of a parameter of which the rank holds `held`."""
        return tuple(held.shape)
