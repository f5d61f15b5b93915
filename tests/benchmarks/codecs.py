"""What packing and unpacking take, method by method, against a copy of the same gradient in memory.

    python tests/benchmarks/codecs.py [method ...]

The gradient has the shapes of a 25 M parameter GPT. Two threads; medians of interleaved rounds; once compiled, if numba
is installed, and once in plain torch. ``encode`` and ``decode`` are the codec alone, where a method has one; ``step``
is all that a rank computes for one exchange by the method's defaults, as if it were alone, with the check for NaN;
``with feedback`` the same with error feedback. Packets of one bucket this large are fresh memory at every step.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks._report import compare
from benchmarks.optimizer_step import gpt_parameters
from conformance.compressor import job_of
from shardscope.spec.registry import names, require_known
from shardscope.training.collectives.packets import Packets, packet_rows
from shardscope.training.compression import Bucket, Carrier
from shardscope.training.compression.packed import Packed
from shardscope.training.compression.route import VARIABLE
from shardscope.training.meter import Meter

ROUNDS = 9
BARS = {"int8": 4, "sign": 4, "topk": 5, "qsgd": 8, "powersgd": 10}
"""Largest ratio of packing to a copy; of a whole step where a method has no codec."""
COPY = "copy"
ADAPTIVE = "adaptive-bits"
"""What it exchanges moves, but not what it is to be measured by: its bits are those of a step after a first look."""
COLUMNS = ("encode", "decode", "step", "with feedback")


class Alone(Packets):
    """A rank without others."""

    def __init__(self) -> None:
        self.index, self.world_size = 0, 1

    def all_to_all(self, outgoing: Tensor) -> Tensor:
        return outgoing

    def all_gather(self, own: Tensor) -> Tensor:
        return own[None]


def calls_of(
    compression: ss.Compression, flat: Tensor, shapes: list[torch.Size]
) -> dict[str, Callable[[], object]]:
    """The columns that the method has, ready to be timed."""
    compressor = compression.build(job_of(compression, 2))
    calls: dict[str, Callable[[], object]] = {}
    if isinstance(compressor, Packed):
        codec, out = compressor.codec, torch.empty_like(flat)
        packet = packet_rows(1, codec.num_bytes(flat.numel()))[0]
        calls["encode"] = lambda: codec.encode(flat, packet, 7)
        calls["decode"] = lambda: codec.decode(packet, out, 7)
    calls["step"] = step_of(compression, flat, shapes)
    if "feedback" in compression.settings:
        calls["with feedback"] = step_of(compression.replace(feedback=True), flat, shapes)
    return calls


def step_of(compression: ss.Compression, flat: Tensor, shapes: list[torch.Size]) -> Callable[[], None]:
    compressor = compression.build(job_of(compression, 2))
    carrier = Carrier(lambda tensor: tensor, Alone(), Meter(), 0, lambda tensor: tensor)
    names, own, steps = [f"p{i}" for i in range(len(shapes))], flat.clone(), itertools.count(100)

    def step() -> None:
        bucket = Bucket(names, shapes, own, next(steps))
        compressor.begin_step(bucket.step)
        compressor.mean_(bucket, carrier)
        carrier.meter.drain()

    return step


def routes() -> Iterator[str]:
    if importlib.util.find_spec("numba") is not None:
        yield "numba"
    yield "torch"


def usual() -> list[str]:
    known = [require_known(ss.Compression, name) for name in names(ss.Compression)]
    return [m.name for m in known if m.is_on and (m.is_fixed or m.name == ADAPTIVE)]


def main() -> None:
    torch.set_num_threads(2)
    shapes = [param.shape for param in gpt_parameters()]
    flat = 0.01 * torch.randn(sum(prod(shape) for shape in shapes))
    there = torch.empty_like(flat)
    for route in routes():
        os.environ[VARIABLE] = route
        print(f"\n{route}, {flat.numel() / 1e6:.1f} M elements: times a copy")
        print(f"{'':<15}{'copy ms':>9}" + "".join(f"{column:>15}" for column in COLUMNS))
        for name in sys.argv[1:] or usual():
            calls = {COPY: lambda: there.copy_(flat), **calls_of(ss.Compression(name), flat, shapes)}
            with contextlib.redirect_stdout(io.StringIO()):
                timings = compare(calls, rounds=ROUNDS, baseline=COPY, warm_up=2)
            cells = [f"{timings[c].ratio:>15.2f}" if c in timings else f"{'':>15}" for c in COLUMNS]
            bar = f"   bar {BARS[name]}" if name in BARS else ""
            print(f"{name:<15}{timings[COPY].median_ms:>9.1f}" + "".join(cells) + bar, flush=True)


if __name__ == "__main__":
    main()
