"""The bytes that each rank of a job holds at its peak, kind by kind."""

from __future__ import annotations

from shardscope.analytic.job_step import JobStep
from shardscope.analytic.memory import RankStates, module_memory
from shardscope.analytic.terms import Term
from shardscope.prediction.traced import Traced
from shardscope.spec import Job

_STATES = "Rajbhandari et al. 2020, arXiv 1910.02054; torch's cuts"
_TRACE = "a step traced on shapes"


def rank_memory(step: JobStep, found: Traced, states: RankStates | None) -> list[Term] | None:
    """Bytes that each rank holds at its peak, by rank; None where the strategy, or the loss, says too little.

    Args:
        step: Of the job.
        found: Its model, traced.
        states: What each rank holds of the model.
    """
    if not step.trace.saved_bytes:
        return None
    if step.job.strategy.zero_stage is not None:
        return [_by_moments(step, found)] * step.world_size
    saved = step.job.strategy.activations(step)
    if states is None or saved is None:
        return None
    data = found.sample_bytes * step.samples * step.micro_batches
    return [
        _sum(
            ("parameters", float(states.parameters[rank]), _STATES),
            ("gradients", float(states.gradients[rank]), _STATES),
            ("optimizer state", float(states.optimizer[rank]), _STATES),
            ("saved activations", held, _TRACE),
            ("batch", data, "inputs and targets"),
        )
        for rank, held in enumerate(saved)
    ]


def _by_moments(step: JobStep, found: Traced) -> Term:
    """Of replicas and shards, at the moment at which most is alive; of the first rank, where an uneven cut has most."""
    job = step.job
    assert job.strategy.zero_stage is not None
    held = module_memory(
        found.table, batch=step.samples, data_bytes=found.sample_bytes * step.micro_batches,
        optimizer=step.kept, recompute=job.recompute,
        zero_stage=job.strategy.zero_stage, data_parallel=_shards(job),
        bucket_mb=getattr(job.strategy, "bucket_mb", 25.0), accumulates=step.micro_batches > 1,
        element_bytes=step.element_bytes,
    )  # fmt: skip
    return _sum(
        ("parameters", held.parameters, _STATES),
        ("the model's buffers", held.buffers, _TRACE),
        ("optimizer state", held.optimizer, _STATES),
        ("activations, at the peak", held.alive, _TRACE),
        ("gradients and gathered, at the peak", held.moving, _STATES),
        ("buffers to work in", held.work, "updates that wait for norms; two slices of the ring"),
        ("batch", held.data, "inputs and targets"),
    )


def _shards(job: Job) -> int:
    degrees = job.strategy.degrees(job.world_size) or {}
    return int(degrees.get("shard", job.world_size))


def _sum(*parts: tuple[str, float, str]) -> Term:
    terms = tuple(Term(name, value, "bytes", "", {}, source) for name, value, source in parts if value > 0)
    return Term.total("memory", terms)
