"""Checks that the ranks of one replica, which each read their data, train on the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch

from shardscope.errors import DataError
from shardscope.training.data import Batch, tensors_of
from shardscope.training.tensor.axis import TensorAxis

COMPARED_EVERY = 10
"""Number of steps between comparisons, each of which takes about a millisecond."""


def require_same_batch(axis: TensorAxis, micro_batches: Sequence[Batch]) -> None:
    """Refuse micro-batches that differ between the ranks of a group; called by all its ranks.

    Raises:
        DataError: They differ, on all ranks.
    """
    digest, tensors = (
        blake2b(digest_size=16),
        [tensor for batch in micro_batches for tensor in tensors_of(batch)],
    )
    for tensor in tensors:
        strided = tensor.to_dense() if tensor.layout != torch.strided else tensor
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(strided.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    device = tensors[0].device if tensors else None
    own = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=device)
    if not all(torch.equal(each, own) for each in axis.of_all_ranks(own)):
        raise DataError(
            f"the ranks of a {axis.name} group have read different batches, but they compute parts of the same "
            "samples; let the data return the same sample for an index on every rank, without random changes of its "
            f"own, or use {axis.name}=1"
        )
