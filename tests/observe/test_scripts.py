"""A script on two real ranks under torchrun, observed: plain collectives, DDP, accumulation and FSDP2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import shardscope as ss
from shardscope.spec.observed import ObservedJob

WRAPPERS = ("ddp", "accumulate", "fsdp2")
MIXED = "mixed"
"""DDP around weights of two dtypes, evaluated after every step."""
SCRIPT = Path(__file__).with_name("script.py")


class Trained(NamedTuple):
    """What a script of two ranks left behind."""

    results: list[dict[str, Any]]
    runs: dict[str, ss.Run]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("observed")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(SCRIPT), str(folder), *WRAPPERS, MIXED,
    ]  # fmt: skip
    env = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SCRIPT.parents[1]),
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads((folder / f"results-{rank}.json").read_text()) for rank in (0, 1)]
    return Trained(results, {run.job.name: run for run in ss.runs(folder)})


def sent(run: ss.Run, rank: int, step: int) -> dict[str, int]:
    (event,) = [event for event in run.events("step", rank=rank) if event["step"] == step]
    return {name: row["sent_bytes"] for name, row in event["traffic"].items() if row["sent_bytes"]}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_script_computes_what_it_computes_alone(trained: Trained, wrapper: str) -> None:
    for result in trained.results:
        alone, observed = result[wrapper]["alone"], result[wrapper]["observed"]
        assert observed["losses"] == alone["losses"]
        assert observed["weights"] == alone["weights"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_run_has_every_step_of_both_ranks_with_the_losses(trained: Trained, wrapper: str) -> None:
    run = trained.runs[wrapper]
    assert (run.state, run.reason, run.problems) == ("completed", None, ())
    assert run.metrics()["step"].tolist() == [1, 2, 3, 4]
    assert (run.summary().steps, run.summary().world_size, run.job.steps) == (4, 2, 4)
    for rank, result in enumerate(trained.results):
        losses = result[wrapper]["observed"]["losses"]
        parts = len(losses) // 4
        sums = [sum(losses[i : i + parts]) for i in range(0, len(losses), parts)]
        assert [event["loss"] for event in run.events("step", rank=rank)] == sums
    assert {event["samples"] for event in run.events("step")} == {8 * parts}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_bytes_and_model_states_are_those_of_the_formulas(trained: Trained, wrapper: str) -> None:
    run = trained.runs[wrapper]
    predicted = ss.predict(run.job)
    assert predicted.traffic
    assert predicted.states is not None
    for rank in (0, 1):
        expected = {name: int(one.bytes[rank]) for name, one in predicted.traffic.items()}
        assert sent(run, rank, 3) == sent(run, rank, 4) == expected
        (memory,) = run.events("memory", rank=rank)
        for kind in ("parameters", "gradients", "optimizer"):
            assert memory[kind] == getattr(predicted.states, kind)[rank], kind
        assert memory["activations"] > 0
    compared = ss.compare(run)
    assert compared.disagreeing == ()
    assert {row.term for row in compared.rows if row.agrees} >= {
        *predicted.traffic,
        "parameters",
        "gradients",
    }


def test_mixed_dtypes_and_evaluations_agree_with_the_formulas(trained: Trained) -> None:
    run = trained.runs[MIXED]
    predicted = ss.predict(run.job).traffic
    assert predicted is not None
    assert {name: one.is_exact for name, one in predicted.items()} == {"all_reduce": True, "broadcast": False}
    assert sent(run, 0, 3) == {"all_reduce": int(predicted["all_reduce"].bytes[0])}
    compared = ss.compare(run)
    assert {"all_reduce", "broadcast"} <= {row.term for row in compared.rows if row.agrees}
    assert compared.disagreeing == ()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads sockets as Linux shows them")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_bytes_are_those_that_the_kernel_counts(trained: Trained, wrapper: str) -> None:
    told = int(trained.runs[wrapper].metrics()["sent_bytes"].sum())
    kernel = {
        how: sum(result[wrapper][how]["sent"] for result in trained.results) for how in ("alone", "observed")
    }
    for counted in kernel.values():  # gloo's headers come on top
        assert 0 < counted - told < 0.01 * told


def test_spans_show_passes_and_collectives_on_one_clock(trained: Trained) -> None:
    for wrapper, collectives in (("ddp", {"all_reduce"}), ("fsdp2", {"all_gather", "reduce_scatter"})):
        spans = trained.runs[wrapper].timeline()
        spans = spans[spans["step"] == 4]
        assert set(spans["name"]) >= {"forward", "backward", "optimizer", *collectives}
        assert (spans["end_s"] >= spans["start_s"]).all()
        for name in collectives:  # a collective ends on no rank before it has started on every rank
            rows = [spans[(spans["rank"] == rank) & (spans["name"] == name)] for rank in (0, 1)]
            starts = [row["start_s"].tolist() for row in rows]
            ends = [row["end_s"].tolist() for row in rows]
            for pair, done in zip(zip(*starts, strict=True), zip(*ends, strict=True), strict=True):
                assert max(pair) <= min(done)


def test_the_job_says_how_the_ranks_share_the_work(trained: Trained) -> None:
    job = trained.runs["fsdp2"].job
    assert isinstance(job, ObservedJob)
    assert (job.strategy.label, job.optimizer.label) == ("observed (FSDP2)", "adamw lr=0.01")
    assert (job.batch.global_batch, job.world_size, job.backend) == (16, 2, "gloo")
    assert [unit.gathers for unit in job.units] == [1, 2, 2]
    assert trained.runs["accumulate"].job.num_micro_batches == 2
