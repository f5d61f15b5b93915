"""Sparse codecs on 25 million elements against a copy of them: times, and bits that an index takes.

python tests/benchmarks/sparse.py [millions]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks._report import compare
from shardscope.analytic.communication.compressed import index_bytes
from shardscope.methods.compressors.randomblock._torch import RandomBlockCodec
from shardscope.methods.compressors.randomk._torch import RandomKCodec
from shardscope.methods.compressors.topk._torch import TopKCodec
from shardscope.training.compression.codec import Codec

RATIO = 0.01
BAR = 5.0
"""Copies of the gradient that top-k by a sampled threshold may take."""


def plain(codec: TopKCodec) -> TopKCodec:
    """The same without compiled loops."""
    codec.loops = None
    return codec


def calls_of(
    name: str, codec: Codec, values: torch.Tensor, out: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Packing and unpacking, into memory that is there already."""
    packet = torch.empty(codec.num_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, packet, 1)
    return {
        f"{name} pack": lambda: codec.encode(values, packet, 1),
        f"{name} unpack": lambda: codec.decode(packet, out, 1),
    }


def main() -> None:
    count = int(1e6 * float(sys.argv[1])) if len(sys.argv) > 1 else 25_000_000
    torch.set_num_threads(2)
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(values)
    codecs: dict[str, Codec] = {
        "topk": TopKCodec(RATIO),
        "topk in plain torch": plain(TopKCodec(RATIO)),
        "topk exact": TopKCodec(RATIO, "exact"),
        "randomk": RandomKCodec(RATIO),
        "randomblock": RandomBlockCodec(RATIO, 256),
    }
    calls: dict[str, Callable[[], object]] = {"copy": lambda: out.copy_(values)}
    for name, codec in codecs.items():
        calls |= calls_of(name, codec, values, out)
    timings = compare(calls, rounds=12, baseline="copy", warm_up=1)
    ratio = timings["topk pack"].ratio
    print(
        f"top-k by a sampled threshold: {ratio:.1f} copies, bar {BAR:g}: {'met' if ratio <= BAR else 'MISSED'}"
    )
    kept = round(RATIO * count)
    nats = math.lgamma(count + 1) - math.lgamma(kept + 1) - math.lgamma(count - kept + 1)
    bits, least = 8 * int(index_bytes(count, kept)) / kept, nats / math.log(2) / kept
    print(f"{bits:.2f} bits an index of {kept} among {count}; the least possible is {least:.2f}")


if __name__ == "__main__":
    main()
