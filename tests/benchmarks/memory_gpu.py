"""Memory that training takes on one GPU, beside its predictions, and the least memory with which it still runs.

    python tests/benchmarks/memory_gpu.py [seconds] [folder]

Each configuration trains a few steps in a fresh process that has the GPU to itself. "job" is the peak that `ss.predict`
traces, "layout" the one that the formulas give for the same transformer with the memory model of ``fsdp2`` and the
bytes of a logit of this training (`ours`); both over the peak of allocated tensors. "reserved" is what the caching
allocator took for them, over the same peak, and "beside" what the GPU has in use but did not reserve: the driver's
context, libraries and their workspaces.

For the configurations that `LIMITED` names, the allocator's memory is limited, and the smallest limit that runs is
bisected between the peak and what was reserved without a limit: "least", beside what `fits` of a job assumes, both over
the peak. Where `seconds` have passed, the rest is left out. Without a GPU, only the predictions are printed. The rows
are written to `folder` as JSON lines.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import shardscope as ss
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import FRAMEWORKS, Framework, device_memory, tensor_room
from shardscope.runlog.writer import EventWriter
from shardscope.spec.models import MODELS, GPTConfig
from shardscope.training.context import RankContext
from shardscope.training.meter import Meter
from shardscope.training.models.gpt import GPT
from shardscope.training.trainer import Trainer

DEVICE, SOFTWARE = "h100-80gb", "fsdp2"
LOGITS = {"fp32": (12, 4), "bf16-mixed": (10, 2)}
"""Bytes of a logit by precision, and the part of them that is allocated only for its gradient: log-probabilities and
two gradients; or logits, log-probabilities and one gradient, all in 16 bits, and one gradient in float32."""
STEPS = 4
"""The first ones make the optimizer's state, and the allocator's cache settles."""
TRIALS = 5
"""Limits that are tried for each configuration: the peak itself, then a bisection."""
VOCAB, SEQ = 50304, 1024
MIB = 2**20
WITHIN_S = 60.0
"""Longest time of one configuration."""
SIZES = {
    "nano": MODELS["gpt-nano"],
    "124M": GPTConfig(layers=12, hidden=768, heads=12, vocab=VOCAB, seq=SEQ),
    "350M": GPTConfig(layers=24, hidden=1024, heads=16, vocab=VOCAB, seq=SEQ),
    "760M": GPTConfig(layers=24, hidden=1536, heads=16, vocab=VOCAB, seq=SEQ),
    "1.3B": GPTConfig(layers=24, hidden=2048, heads=16, vocab=VOCAB, seq=SEQ),
}


class Case(NamedTuple):
    """One training on one GPU."""

    size: str
    precision: str = "bf16-mixed"
    micro_batch: int = 8
    recompute: str = "none"
    optimizer: str = "adamw"
    num_micro_batches: int = 1

    def __str__(self) -> str:
        batches = f"{self.micro_batch}" + (
            f" x {self.num_micro_batches}" if self.num_micro_batches > 1 else ""
        )
        return f"{self.size:<4}  {self.precision:<10}  {batches:>6}  {self.recompute:<9}  {self.optimizer:<5}"


LIMITED = (
    Case("350M", micro_batch=8),
    Case("1.3B", micro_batch=16, recompute="full"),
    Case("124M", "fp32", 16),
    Case("350M", micro_batch=16),
    Case("1.3B", micro_batch=4),
    Case("350M", micro_batch=8, recompute="full"),
    Case("350M", micro_batch=1),
    Case("124M", micro_batch=16, recompute="selective"),
)
GRID = (
    Case("nano", "fp32", 16),
    Case("nano", micro_batch=256),
    *(Case("124M", "fp32", micro) for micro in (1, 4, 16)),
    *(Case("124M", micro_batch=micro) for micro in (1, 4, 16)),
    Case("124M", micro_batch=16, recompute="full"),
    Case("124M", micro_batch=16, recompute="selective"),
    Case("350M", "fp32", 4),
    Case("350M", "fp32", 4, "full"),
    *(Case("350M", micro_batch=micro) for micro in (1, 4, 8, 16)),
    *(Case("350M", recompute=mode) for mode in ("full", "selective")),
    *(Case("350M", optimizer=name) for name in ("sgd", "lamb")),
    Case("350M", micro_batch=4, num_micro_batches=4),
    Case("760M", micro_batch=4),
    Case("760M", micro_batch=8, recompute="full"),
    Case("1.3B", micro_batch=4),
    Case("1.3B", micro_batch=16, recompute="full"),
    Case("1.3B", micro_batch=8, recompute="selective"),
)


class Prediction(NamedTuple):
    """Predicted bytes of one training."""

    job: float
    layout: float
    needed: float
    """Peak of the job, and what the allocator keeps beside it."""


def make_model(size: str) -> nn.Module:
    """The model, on the GPU at once, where this process uses one: its initial values are drawn in no time there."""
    at_once = torch.cuda.is_initialized() and torch.get_default_device().type == "cpu"
    with torch.device("cuda" if at_once else torch.get_default_device()):
        return GPT(SIZES[size])


def make_data(size: str) -> tuple[object, object]:
    """Random tokens."""
    config = SIZES[size]
    rows = torch.randint(0, config.vocab, (512, config.seq), generator=torch.Generator().manual_seed(0))
    return (rows, rows), (rows[:1], rows[:1])


def ours(precision: str) -> Framework:
    """The memory model of this training."""
    logits_bytes, later = LOGITS[precision]
    return FRAMEWORKS[SOFTWARE]._replace(logits_bytes=logits_bytes, logits_later=later)


def job_of(case: Case) -> ss.Job:
    """The training as a job."""
    return ss.Job.model_validate(
        {
            "model": partial(make_model, case.size), "data": partial(make_data, case.size), "strategy": "single",
            "batch": {"global_batch": case.micro_batch * case.num_micro_batches, "micro_batch": case.micro_batch},
            "precision": case.precision, "recompute": case.recompute, "optimizer": case.optimizer,
            "loss": "cross-entropy", "steps": 10**6, "name": "memory",
        }
    )  # fmt: skip


def predicted(case: Case) -> Prediction:
    """The peak of the job and that of the layout, and what the allocator needs for the job."""
    job = job_of(case)
    cluster = ss.Cluster.of(DEVICE, nodes=1, per_node=1)
    found = ss.predict(job, cluster)
    of_job, device = found.peak_bytes, cluster.device
    assert of_job is not None
    kept = device.memory_bytes - device.context_bytes - found.step.memory[0]
    layout = ss.Layout.model_validate(
        {
            "micro_batch": case.micro_batch, "global_batch": job.batch.global_batch, "recompute": case.recompute,
            "precision": case.precision, "optimizer": case.optimizer,
        }
    )  # fmt: skip
    model = SIZES[case.size].transformer(case.size)
    held = device_memory(model, Layouts.of([layout]), framework=ours(case.precision))
    return Prediction(of_job, float(held.total[0]), of_job + kept)


class Used(NamedTuple):
    """Bytes that a training used on a GPU."""

    allocated: int
    requested: int
    """What was allocated, without the allocator's rounding."""
    reserved: int
    beside: int
    total: int


def train(case: Case, folder: Path) -> Used:
    """Train a few steps from nothing; raises `torch.OutOfMemoryError` where a limit is too small."""
    context = RankContext(0, 1, torch.device("cuda", 0), Meter(), EventWriter(folder / "rank-0.jsonl", 0))
    trainer = None
    try:
        trainer = Trainer(job_of(case), context, folder)
        for step in range(1, 1 + STEPS):
            trainer.take_step(step)
        free, total = torch.cuda.mem_get_info()
        return Used(
            torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["requested_bytes.all.peak"],
            torch.cuda.max_memory_reserved(), total - free - torch.cuda.memory_reserved(), total,
        )  # fmt: skip
    finally:
        if trainer is not None and trainer.loader is not None:
            trainer.loader.close()
        context.events.close()


def _fresh() -> None:
    """Give all memory back to the device."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def runs_within(limit: float, total: int, case: Case, folder: Path) -> bool:
    """Whether a training runs if the allocator may take `limit` bytes."""
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    try:
        train(case, folder)
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return True


def least(used: Used, runs: Callable[[float], bool]) -> float:
    """The smallest limit that runs, in bytes: bisected between the peak and what was reserved without a limit."""
    low, high = float(used.allocated), float(used.reserved)
    if runs(low):
        return low
    for _ in range(TRIALS - 1):
        middle = (low + high) / 2
        low, high = (low, middle) if runs(middle) else (middle, high)
    return high


def measure(case: Case, *, is_limited: bool, answer: Connection) -> None:
    """Send what one configuration used and, if asked for, the least that it needs; runs in a process of its own."""
    torch.cuda.init()
    with tempfile.TemporaryDirectory() as folder:
        used = train(case, Path(folder))
        answer.send(used)
        if is_limited:

            def runs(limit: float) -> bool:
                _fresh()
                return runs_within(limit, used.total, case, Path(folder))

            answer.send(least(used, runs))


def measured(case: Case, *, is_limited: bool) -> Iterator[Any]:
    """What the process of one configuration sends; nothing more once it has failed, or taken too long."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch", "torch._dynamo", "shardscope.training.trainer"])
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(
        target=measure, args=(case,), kwargs={"is_limited": is_limited, "answer": theirs}
    )
    child.start()
    theirs.close()
    try:
        for _ in range(1 + is_limited):
            if not ours.poll(WITHIN_S):
                return
            yield ours.recv()
    except EOFError:
        return
    finally:
        child.kill()
        child.join()


def line(case: Case, prediction: Prediction, used: Used | None, smallest: float | None) -> str:
    """One row of the table."""
    of_job, of_layout, needed = prediction
    cells = [f"{of_job / MIB:>9,.0f}", f"{of_layout / MIB:>9,.0f}"]
    if used is not None:
        cells += [
            f"{used.allocated / MIB:>9,.0f}", f"{of_job / used.allocated:>6.3f}", f"{of_layout / used.allocated:>6.3f}",
            f"{used.reserved / used.allocated:>8.3f}", f"{used.beside / MIB:>6,.0f}",
        ]  # fmt: skip
        if smallest is not None:
            cells.append(f"{smallest / used.allocated:>6.3f}  {needed / used.allocated:>9.3f}")
    return "  ".join([str(case), *cells])


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 165.0
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    started = time.monotonic()
    cases = [*LIMITED, *(case for case in GRID if case not in LIMITED)]
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(4, mp_context=processes) as pool:  # they trace while the GPU trains
        table({case: pool.submit(predicted, case) for case in cases}, started + seconds, folder)


def table(predictions: Mapping[Case, Future[Prediction]], until: float, folder: Path | None) -> None:
    """Measure and print one row after the other."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        device = ss.Device.of(DEVICE)
        room = tensor_room(device, SOFTWARE)
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {device.name}: "
            f"{device.memory_bytes / MIB:,.0f} MiB, {device.context_bytes / MIB:,.0f} of them for the context, "
            f"{room / MIB:,.0f} for tensors, at {FRAMEWORKS[SOFTWARE].reserved} reserved per byte"
        )
    else:
        print("no GPU: predictions only")
    print(
        f"{'':<44}  {'job':>9}  {'layout':>9}  {'allocated':>9}  {'job':>6}  {'layout':>6}  {'reserved':>8}  "
        f"{'beside':>6}  {'least':>6}  {'predicted':>9}   MiB, and ratios to the allocated peak"
    )
    rows = []
    for case, prediction in predictions.items():
        if has_gpu and time.monotonic() > until:
            print(f"{case}  left out: no time")
            prediction.cancel()
            continue
        found = list(measured(case, is_limited=case in LIMITED)) if has_gpu else []
        used, smallest = (*found, None, None)[:2]
        known = prediction.result()
        print(line(case, known, used, smallest), "" if found or not has_gpu else "failed", flush=True)
        rows.append(
            {"case": case._asdict(), "predicted": known, "used": used and used._asdict(), "least": smallest}
        )
    if folder is not None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "memory_gpu.jsonl").write_text(text)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.memory_gpu import main as run  # the processes import this module by its name

    run()
