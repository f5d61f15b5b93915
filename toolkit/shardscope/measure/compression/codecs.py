"""Compression and decompression times on this machine, measured by running each method's own code without a
network.

A compressor runs as in a job, but with simulated peers: every rank appears to send the compressor's own packet, after a
short sleep that is not counted. The sleep matters, because after it the core has been idle and its caches are cold:
packing a small bucket then takes two to three times as long as without a wait. Gradients are packed bucket by bucket,
since each bucket has a fixed cost. The times are therefore those of the real code, including error feedback, for any
number of ranks.

Other programs can only slow a step down, so the fastest step is the most reproducible. Jobs that are compared take
turns, so that a busy second slows down a few steps of each job instead of all steps of one. The times are kept in the
cache directory, so that every notebook and command on a machine states the same threshold.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from math import inf, isfinite, prod
from pathlib import Path

import torch
from torch import Tensor

from shardscope.calibration.host_calibration import HostMachine, chosen
from shardscope.disk_cache import cache_dir, store
from shardscope.errors import DataError
from shardscope.spec import Job
from shardscope.spec.compression import Shapes
from shardscope.training.collectives.packets import Packets, packet_rows
from shardscope.training.compression import Bucket, Carrier, build_compressor
from shardscope.training.meter import Meter
from shardscope.training.precision import Precision

LARGEST_SAMPLE = 16_000_000
"""Maximum number of elements that are actually packed; the time for a larger model is extrapolated."""
MOST_BUCKETS = 32
"""Maximum number of buckets that are actually packed in one step."""
_WARM_UP = 2
_STEPS = 3
"""Number of steps that are timed in one turn, after the warm-up steps."""
_MOMENT_S = 1e-3
"""Duration of one simulated exchange, in seconds; the packing thread sleeps during it."""


class _Alone(Packets):
    """Exchange of packets with simulated ranks, each of which sends the packet of this rank.

    Attributes:
        waited_s: Time spent waiting so far, in seconds.
    """

    def __init__(self, world_size: int) -> None:
        self.index, self.world_size = 0, world_size
        self.waited_s = 0.0

    def all_to_all(self, outgoing: Tensor) -> Tensor:
        self._wait()
        return outgoing

    def all_gather(self, own: Tensor, *, name: str = "") -> Tensor:  # noqa: ARG002
        self._wait()
        rows = packet_rows(1, own.numel())
        rows[0] = own
        return rows.expand(self.world_size, -1)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Return the tensor unchanged, in place of the sum over ranks."""
        self._wait()
        return tensor

    def _wait(self) -> None:
        start = time.perf_counter()
        time.sleep(_MOMENT_S)
        self.waited_s += time.perf_counter() - start


_timed_here: dict[str, float] = {}
"""Times that this process has measured, which it uses where it cannot write the cache; see `_stored`."""
_timing = threading.Lock()
"""Held while packing is timed: two threads would slow each other down, and set each other's number of threads."""


def packing_seconds(jobs: Sequence[Job], buckets: Sequence[Shapes], *, repeats: int = 3) -> list[float]:
    """Return the time for packing and unpacking in the fastest step of each job, in seconds, on a core of its own.

    Args:
        jobs: The jobs. Only compression, precision, optimizer, seed, threads and number of ranks are used.
            Jobs already measured on this machine are measured again only in the first turn with new jobs, in
            case they were slow before.
        buckets: Shapes of the tensors in each bucket.
        repeats: Number of turns, in each of which every job is timed for a few steps.
    """
    sample = _sample(buckets)
    whole = _elements(buckets) / _elements(sample)
    keys = [_key(job, buckets) for job in jobs]
    with _timing:
        known = {**_timed_here, **_stored()}
        best = {key: known.get(key, inf) for key in keys}
        is_new = {key: key not in known for key in keys}
        for turn in range(repeats if any(is_new.values()) else 0):
            for key, job in zip(keys, jobs, strict=True):
                if is_new[key] or turn == 0:
                    best[key] = min(best[key], whole * min(_turn(job, sample)))
        _timed_here.update(best)
        if any(is_new.values()):
            _store(best)
    return [best[key] for key in keys]


def forget_timings() -> None:
    """Forget all times that were measured on this machine: other programs may have slowed them."""
    with _timing, suppress(OSError, DataError):
        _timed_here.clear()
        _path().unlink(missing_ok=True)


def _path() -> Path:
    """Return the file of the times, which depend on the processor and torch; a new calibration starts a new file."""
    about = f"{HostMachine.here()} {chosen().calibration.measured_at}"
    return cache_dir() / f"packing-{sha256(about.encode()).hexdigest()[:16]}.json"


def _stored() -> Mapping[str, float]:
    """Return the times that processes on this machine have stored, in seconds by key; empty if there are none."""
    with suppress(OSError, ValueError, AttributeError, TypeError, DataError):
        found = {str(key): float(value) for key, value in json.loads(_path().read_text()).items()}
        return {key: value for key, value in found.items() if isfinite(value) and value >= 0}
    return {}


def _store(times: Mapping[str, float]) -> None:
    with suppress(OSError, DataError):
        content = json.dumps({**_stored(), **times})
        store(_path(), lambda file: file.write(content.encode()))


def _key(job: Job, buckets: Sequence[Shapes]) -> str:
    """Return a hash of what the packing time of a job depends on: its settings, the calibration, and the shapes."""
    fields = {"compression", "precision", "optimizer", "seed", "threads", "world_size"}
    shapes = [[*map(tuple, bucket)] for bucket in buckets]
    about = f"{chosen().calibration.measured_at} {job.model_dump_json(include=fields)} {shapes}"
    return sha256(about.encode()).hexdigest()[:32]


def _turn(job: Job, sample: Sequence[Shapes]) -> list[float]:
    """Return the time for packing and unpacking in each step of one turn, in seconds."""
    if not job.compression.is_on:
        return [0.0]
    threads = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        return _timed(job, sample, _Alone(job.world_size), _WARM_UP + _STEPS)[_WARM_UP:]
    finally:
        torch.set_num_threads(threads)


def _timed(job: Job, buckets: Sequence[Shapes], others: _Alone, steps: int) -> list[float]:
    """Return the time of packing and unpacking in each step, in seconds."""
    compressor, carrier = build_compressor(job), Carrier(others.sum_, others, Meter(), job.seed)
    assert compressor is not None
    dtype = Precision(job.precision, torch.device("cpu")).weight_dtype
    gradients = [torch.randn(_elements([shapes]), dtype=dtype) for shapes in buckets]
    seconds = []
    for step in range(1, steps + 1):
        filled = [
            Bucket(
                [f"tensor-{index}-{number}" for number in range(len(shapes))],
                [torch.Size(shape) for shape in shapes],
                flat.clone(),
                step,
            )
            for index, (shapes, flat) in enumerate(zip(buckets, gradients, strict=True))
        ]
        start, waited = time.perf_counter(), others.waited_s
        compressor.begin_step(step)
        for bucket in filled:
            compressor.mean_(bucket, carrier)
        seconds.append(time.perf_counter() - start - (others.waited_s - waited))
    return seconds


def _elements(buckets: Sequence[Shapes]) -> int:
    return sum(prod(shape) for shapes in buckets for shape in shapes)


def _sample(buckets: Sequence[Shapes]) -> list[list[tuple[int, ...]]]:
    """Return the first tensors of the first buckets: at most `LARGEST_SAMPLE` elements, but at least one tensor.

    They come from at most `MOST_BUCKETS` buckets.
    """
    taken: list[list[tuple[int, ...]]] = []
    filled = 0
    for shapes in buckets[:MOST_BUCKETS]:
        taken.append([])
        for shape in shapes:
            if filled and filled + prod(shape) > LARGEST_SAMPLE:
                return [bucket for bucket in taken if bucket]
            taken[-1].append(shape)
            filled += prod(shape)
    return taken
