"""Storages by kind: whose memory is held for what, each byte counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardscope.training.sharding import local

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers")
"""The kinds of memory that are told apart."""

Held = Mapping[str, Iterable[Tensor]]
"""Tensors that a rank holds, by kind."""


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor: of its shard on this rank, and of a sparse tensor's indices and values.

    None where it is on the meta device, such as the layers that a pipeline has on other ranks: those take no memory.
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
    """Storages seen so far that are still alive, each under one kind.

    A storage is known weakly and stays in the count until it is freed, also when nobody names it any more: between two
    steps the gradients of DistributedDataParallel are gone and its buckets are not.
    """

    def __init__(self) -> None:
        self._kinds: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def add(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count the storages of `tensors` under `kind`; one that is known under another kind moves."""
        for tensor in tensors:
            for storage in storages(tensor):
                self._kinds[storage] = kind

    def add_all(self, held: Held) -> None:
        """Count what is held by kind; a storage that is named in several counts under the first."""
        for kind in reversed(list(held)):
            self.add(kind, held[kind])

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage in self._kinds

    def kinds(self, tensor: Tensor) -> set[str | None]:
        """Under which kinds a tensor's storages count; None for one that is not known."""
        return {self._kinds.get(storage) for storage in storages(tensor)}

    def sizes(self) -> dict[str, int]:
        """Bytes by kind now."""
        sizes: dict[str, int] = {}
        for storage, kind in self._kinds.items():
            sizes[kind] = sizes.get(kind, 0) + storage.nbytes()
        return sizes
