"""Storages by kind of memory, each byte counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardscope.training.sharding import local

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers")
"""The kinds of memory that are distinguished."""

Held = Mapping[str, Iterable[Tensor]]
"""Tensors that a rank holds, by kind."""


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages behind a tensor: of its shard on this rank, and of a sparse tensor's indices and values.

    A tensor on the meta device, such as in layers that a pipeline has on other ranks, takes no memory and has none.
    """
    tensor = local(tensor)
    if tensor.is_meta:
        return
    if tensor.layout is torch.sparse_coo:
        yield tensor._indices().untyped_storage()  # noqa: SLF001 - indices() asks for a coalesced tensor
        yield tensor._values().untyped_storage()  # noqa: SLF001
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


class Storages:
    """Storages added so far that are still alive, each under one kind.

    A storage is referenced weakly and counts until it is freed, even if it is no longer listed: between two steps
    DistributedDataParallel's gradients are gone, but its buckets are not.
    """

    def __init__(self) -> None:
        self._kinds: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def add(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count the storages of `tensors` under `kind`; one that counted under another kind moves."""
        for tensor in tensors:
            for storage in storages(tensor):
                self._kinds[storage] = kind

    def add_all(self, held: Held) -> None:
        """Count the held tensors by kind; a storage that is listed under several kinds counts under the first."""
        for kind in reversed(list(held)):
            self.add(kind, held[kind])

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage in self._kinds

    def kinds(self, tensor: Tensor) -> set[str | None]:
        """The kinds under which a tensor's storages count; None for a storage that does not count."""
        return {self._kinds.get(storage) for storage in storages(tensor)}

    def sizes(self) -> dict[str, int]:
        """Current bytes by kind."""
        sizes: dict[str, int] = {}
        for storage, kind in self._kinds.items():
            sizes[kind] = sizes.get(kind, 0) + storage.nbytes()
        return sizes
