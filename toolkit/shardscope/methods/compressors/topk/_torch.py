"""Top-k: send the elements of largest magnitude, with their indices.

Each rank selects different elements, so packets cannot be summed during an all-reduce. Instead, they are gathered, at a
cost that grows with the number of ranks, or exchanged in two phases. If k of n elements are sent, the others account
for at most 1 - k/n of the sum of squares (Stich et al. 2018, lemma A.1).

A packet contains k float32 values in the order of their indices, followed by the indices as encoded by
`_torch_indices`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardscope.methods.compressors.randomk._torch import num_kept
from shardscope.methods.compressors.topk._torch_indices import index_format
from shardscope.methods.compressors.topk._torch_loops import chosen_loops
from shardscope.methods.compressors.topk._torch_select import Picked, largest, largest_by_sample
from shardscope.spec import Compression
from shardscope.training.compression.codec import Codec


class TopKCodec(Codec):
    """Codec that keeps the elements of largest magnitude, unscaled.

    Args:
        ratio: Fraction of the elements to keep.
        selection: ``sampled`` or ``exact``; see `TopK.selection`.
    """

    def __init__(self, ratio: float, selection: str = "sampled") -> None:
        self.ratio, self.selection = ratio, selection
        self.loops = chosen_loops()
        self.is_compiled = self.loops is not None

    def contraction(self, num_elements: int) -> float | None:
        return num_kept(num_elements, self.ratio) / num_elements

    def num_bytes(self, num_elements: int) -> int:
        kept = num_kept(num_elements, self.ratio)
        return 4 * kept + index_format(num_elements, kept).num_bytes

    def _parts(self, packet: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
        """Return two views of a packet: its values, and its encoded indices."""
        head = 4 * num_kept(num_elements, self.ratio)
        return packet[:head].view(torch.float32), packet[head:]

    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:
        kept, places = self._parts(packet, values.numel())
        picked = self._select(values, kept.numel(), seed)
        kept.copy_(picked.values)
        index_format(values.numel(), kept.numel()).write(picked.indices, places, self.loops)

    def _select(self, values: Tensor, count: int, seed: int) -> Picked:
        if self.selection == "exact":
            return largest(values, count, self.loops)
        return largest_by_sample(values, count, seed, self.loops)

    def decode(self, packet: Tensor, out: Tensor, seed: int, *, add: bool = False) -> None:
        kept, places = self._parts(packet, out.numel())
        if not add:
            out.zero_()
        out.index_add_(0, index_format(out.numel(), kept.numel()).read(places, self.loops), kept)


class WarmUpTopKCodec(TopKCodec):
    """Top-k codec whose ratio changes from step to step, as given by `Compression.at_step`."""

    def __init__(self, compression: Compression) -> None:
        super().__init__(compression.settings["ratio"])
        self._compression = compression

    def begin_step(self, step: int) -> None:
        self.ratio = self._compression.at_step(step).settings["ratio"]
