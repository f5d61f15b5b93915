"""Simulation of one step of a job: through its layout where the prediction uses one, else message by message."""

from __future__ import annotations

from shardscope.errors import SpecError
from shardscope.prediction.job import JobPrediction
from shardscope.simulator.asynchronous import instead_of_step
from shardscope.simulator.breakdown import busy_seconds, lane_seconds, term_tree
from shardscope.simulator.of_job import JobStepGraph
from shardscope.simulator.replicas import Variation, replicate
from shardscope.simulator.result import Simulation
from shardscope.spec.units import work_text

_ORDER = ("data", "forward", "backward", "optimizer", "codec", "communication", "idle")
_IDLE = {"pipeline bubble": "idle", "fixed cost": "idle", "waiting for other ranks": "idle"}


def simulate_job(prediction: JobPrediction, variation: Variation, *, overlap: bool) -> Simulation:
    """Simulate one step of a predicted job; see `shardscope.simulate`.

    Raises:
        SpecError: The job has no step time, its strategy does not say what ranks send or does not wait for the slowest
            ones, or the variation names ranks that do not exist.
    """
    job = prediction.job
    if job.strategy.num_dropped:
        raise SpecError(
            f"strategy={job.strategy.label!r} drops the gradients of the slowest workers, but a simulated step waits "
            "for all of them; use ss.predict, or simulate with backups=0"
        )
    if job.strategy.is_asynchronous:
        raise SpecError(
            f"strategy={job.strategy.label!r} has no step that all ranks take together; use {instead_of_step(job)}"
        )
    variation.check(job.world_size)
    step = JobStepGraph(prediction, overlap=overlap)
    graph = step.graph
    ranks = [[rank] for rank in range(job.world_size)]
    done = replicate(graph, [0], [], ranks, variation)
    lane = int(busy_seconds(done).argmax())
    is_pipeline = job.strategy.arrangement(job.world_size).shape == "row"
    seconds = lane_seconds(done, lane, "pipeline bubble" if is_pipeline else "waiting for other ranks")
    parents = _IDLE | dict.fromkeys(prediction.traffic or {}, "communication")
    merged = list(step.merged)
    if not overlap:
        merged.append("No overlap of computation and communication is assumed.")
    return Simulation(
        label=job.label,
        num_devices=job.world_size,
        time=term_tree(seconds, parents, _ORDER),
        merged=tuple(merged),
        lane_ranks=tuple(map(tuple, ranks)),
        done=done,
        arrangement=job.strategy.arrangement(job.world_size),
        roles=tuple(job.strategy.role(rank, job.world_size) for rank in range(job.world_size)),
        work=work_text(job.batch.global_batch, prediction.seq),
    )
