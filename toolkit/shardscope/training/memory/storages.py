"""Counts the storages of tensors by type of memory, each byte once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardscope.training.sharding import local

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers")
"""The types of memory that tensors are counted as; see `shardscope.training.memory`."""

Held = Mapping[str, Iterable[Tensor]]
"""Tensors in a rank's memory, by type of memory (one of `KINDS`)."""


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor that are in this rank's memory.

    For a `DTensor`, this is the storage of the shard on this rank; for a sparse tensor, those of its indices and its
    values. A tensor on the meta device, such as in a pipeline layer of another rank, has no storage.
    """
    tensor = local(tensor)
    if tensor.is_meta:
        return
    if tensor.layout is torch.sparse_coo:
        yield tensor._indices().untyped_storage()  # noqa: SLF001 - indices() requires a coalesced tensor
        yield tensor._values().untyped_storage()  # noqa: SLF001
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def num_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes; for a sparse tensor, the size of its indices and values."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(storage.nbytes() for storage in storages(tensor))


class Storages:
    """Collection of storages, each with one type of memory.

    Storages are referenced weakly, and counted until they are freed, even if a later call of `add_all` no longer lists
    them. For example, between two steps the gradients of `DistributedDataParallel` are None, but the buckets of which
    they were views remain.
    """

    def __init__(self) -> None:
        self._kinds: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def add(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Add the storages of `tensors` with the type of memory `kind`; storages added before get the new type."""
        for tensor in tensors:
            for storage in storages(tensor):
                self._kinds[storage] = kind

    def add_all(self, held: Held) -> None:
        """Add the storages of all tensors in `held`; a storage that is listed under several types gets the first."""
        for kind in reversed(list(held)):
            self.add(kind, held[kind])

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage in self._kinds

    def kinds(self, tensor: Tensor) -> set[str | None]:
        """Return the types of memory of a tensor's storages; the set contains None if a storage was not added."""
        return {self._kinds.get(storage) for storage in storages(tensor)}

    def sizes(self) -> dict[str, int]:
        """Return the current total size in bytes for each type of memory."""
        sizes: dict[str, int] = {}
        for storage, kind in self._kinds.items():
            sizes[kind] = sizes.get(kind, 0) + storage.nbytes()
        return sizes
