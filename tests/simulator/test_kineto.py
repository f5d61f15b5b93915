"""Traces of torch.profiler: those of two real ranks, and the arguments of NCCL's kernels."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardscope as ss

LINK = ss.Link(bandwidth=1e6, latency=0.0)
INSTANT = ss.Link(bandwidth=1e15, latency=0.0)
FEATURES = (96, 160)


def profiled(rank: int, folder: Path) -> None:
    """Profile one step of DistributedDataParallel, an all-gather, a message, a broadcast, two sums and a barrier."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=60))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(*FEATURES))
    for _ in range(2):  # in its first steps, DDP broadcasts how it rebuilds its buckets
        model(torch.ones(8, FEATURES[0])).sum().backward()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        model(torch.ones(8, FEATURES[0])).sum().backward()
        dist.all_gather([torch.zeros(500), torch.zeros(500)], torch.ones(500))
        (dist.send if rank == 0 else dist.recv)(torch.ones(250, dtype=torch.float64), 1 - rank)
        dist.broadcast(torch.ones(300), 0)
        dist.all_reduce_coalesced([torch.ones(1000), torch.ones(1000)])
        dist.barrier()
    profile.export_chrome_trace(str(folder / f"rank{rank}.json"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("kineto")
    start = multiprocessing.get_context("forkserver")
    ranks = [start.Process(target=profiled, args=(rank, folder), daemon=True) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
        if each.is_alive():
            each.kill()
            each.join()
    assert [each.exitcode for each in ranks] == [0, 0]
    return [folder / f"rank{rank}.json" for rank in range(2)]


@pytest.mark.slow
def test_collectives_of_real_ranks_have_their_sizes_and_take_the_time_of_the_link(traces: list[Path]) -> None:
    found = ss.simulate.kineto(traces, LINK)
    gradients = 4 * (FEATURES[0] + 1) * FEATURES[1]
    sent = found.collectives().set_index("collective")["bytes"]
    assert sent.to_dict() == {
        "all_reduce": 2 * (gradients + 8000), "all_gather": 2 * 2000, "send": 2000, "broadcast": 1200,
    }  # fmt: skip
    instant = ss.simulate.kineto(traces, INSTANT)
    assert {"computation", "host"} <= {term.name for term in instant.time.parts}
    carried = (gradients + 8000 + 2000 + 2000 + 1200) / LINK.bandwidth
    assert found.step_time_s == pytest.approx(instant.step_time_s + carried, rel=0.1)


@pytest.mark.slow
def test_traces_may_be_given_in_any_order_but_not_without_a_rank(traces: list[Path]) -> None:
    ahead, behind = (ss.simulate.kineto(paths, LINK) for paths in (traces, traces[::-1]))
    assert ahead.step_time_s == behind.step_time_s
    with pytest.raises(ss.SpecError, match=r"ranks \[1\] of 2; give one trace of each rank"):
        ss.simulate.kineto(traces[1:], LINK)
    with pytest.raises(ss.SpecError, match="needs the trace of each rank"):
        ss.simulate.kineto([], LINK)


def kernel(name: str, start_us: float, length_us: float, **about: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": start_us,
        "dur": length_us,
        "args": about,
        "tid": 7,
    }


def nccl(op: str, start_us: float, length_us: float, elements: int | str, **about: Any) -> dict[str, Any]:
    given = {
        "Collective name": op,
        "In msg nelems": elements,
        "Out msg nelems": elements * 2,
        "dtype": "BFloat16",
    }
    return kernel(f"ncclDevKernel_{op}", start_us, length_us, **given, **about)


def written(folder: Path, *ranks: list[dict[str, Any]]) -> list[Path]:
    paths = [folder / f"{rank}.json" for rank in range(len(ranks))]
    for rank, (path, events) in enumerate(zip(paths, ranks, strict=True)):
        about = {"rank": rank, "world_size": len(ranks)}
        path.write_text(json.dumps({"distributedInfo": about, "traceEvents": events}))
    return paths


def test_kernels_of_a_gpu_overlap_with_those_of_nccl(tmp_path: Path) -> None:
    # 1 ms of work, then an all-reduce of 1,000 elements of 2 bytes under 4 ms of work, then 1 ms of work after it.
    rank = [
        kernel("gemm", 0, 1000), nccl("allreduce", 1000, 500, 1000), kernel("gemm", 1000, 4000),
        nccl("_allgather_base", 5000, 900, 500), kernel("gemm", 5900, 1000),
    ]  # fmt: skip
    paths = written(tmp_path, rank, rank)
    sent = ss.simulate.kineto(paths, LINK).collectives().set_index("collective")["bytes"]
    assert sent.to_dict() == {"all_reduce": 4000, "all_gather": 2000}
    # At 1 MB/s the all-reduce hides behind the first part of the work that followed it only as far as the trace did.
    fast = ss.simulate.kineto(paths, ss.Link(bandwidth=4e6, latency=0.0))
    assert fast.step_time_s == pytest.approx(1e-3 + 4e-3 + 0.25e-3 + 1e-3)
    assert ss.simulate.kineto(paths, LINK).step_time_s == pytest.approx(1e-3 + 2e-3 + 3.5e-3 + 1e-3 + 1e-3)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (kernel("ncclDevKernel_x", 0, 1), "does not say which collective"),
        (nccl("reduce", 0, 1, 5), "'reduce' is not simulated"),
        (nccl("send", 0, 1, 5), "does not name the other rank"),
    ],
)
def test_what_a_trace_does_not_say_is_named(event: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ss.SpecError, match=why):
        ss.simulate.kineto(written(tmp_path, [kernel("gemm", 0, 1), event]), LINK)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "0.json"
    path.write_text("[]")
    with pytest.raises(ss.SpecError, match="not a Kineto trace"):
        ss.simulate.kineto([path], LINK)


def test_a_damaged_trace_is_an_error_with_its_file_and_event(tmp_path: Path) -> None:
    cut = tmp_path / "0.json.gz"
    cut.write_bytes(gzip.compress(json.dumps({"traceEvents": [kernel("gemm", 0, 1)] * 9}).encode())[:-12])
    with pytest.raises(ss.SpecError, match=r"0.json.gz is not a Kineto trace \(EOFError"):
        ss.simulate.kineto([cut], LINK)
    nameless = kernel("gemm", 0, 1)
    del nameless["name"]
    with pytest.raises(ss.SpecError, match=r"0.json has an event with \{'name': None, 'ts': 0, 'dur': 1\}"):
        ss.simulate.kineto(written(tmp_path, [nameless]), LINK)
    with pytest.raises(ss.SpecError, match=r"args cannot be read \(ValueError: .*'many'"):
        ss.simulate.kineto(written(tmp_path, [kernel("gemm", 0, 1), nccl("allreduce", 1, 1, "many")]), LINK)
