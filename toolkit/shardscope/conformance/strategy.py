"""Conformance tests for strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import ClassVar

from shardscope.analytic.communication import Traffic
from shardscope.conformance.method import MethodConformance
from shardscope.prediction.job import predict_job
from shardscope.runtime import Run
from shardscope.runtime.tools.check import check
from shardscope.spec import Record
from shardscope.spec.strategy import Strategy

_EXAMPLES = {"sums": "fp16", "packets": "int8", "layers": "powersgd", "steps": "local-sgd"}
"""One example method for each type of compression that a strategy can support."""


class StrategyConformance(MethodConformance):
    """Test a strategy's weights, its traffic, the types of compression it supports, and resuming from checkpoints.

    Class attributes:
        exchange_within: Fraction by which the bytes sent may exceed `exchanged_bytes`, for headers, norms and padding.
    """

    kind = Strategy
    exchange_within: ClassVar[float] = 0.1

    def test_it_trains_what_one_process_trains(self) -> None:
        """Weights match those of a single-process run in fp64; skipped if `differs_because` is set."""
        for world_size in (2, 3):
            job = self._job(world_size=world_size, precision="fp64")
            if job.strategy.differs_because is None:
                report = check(job, steps=4)
                assert report.passed, f"on {world_size} ranks: {report}"

    def test_accumulated_micro_batches_are_one_batch(self) -> None:
        """Gradient accumulation over several micro-batches gives the same result as one large batch."""
        job = self._job(world_size=2, precision="fp64", batch={"global_batch": 24, "micro_batch": 4})
        if job.strategy.differs_because is None:
            report = check(job, steps=4)
            assert report.passed, str(report)

    def test_it_carries_the_compression_that_it_says(self) -> None:
        """The strategy trains with one method of each type of compression that it supports."""
        for carriage in sorted(self.method.carries):  # type: ignore[attr-defined]
            self._train(world_size=2, compression=_EXAMPLES[carriage])

    def _check_records(self, run: Run) -> None:
        """Check that losses are finite, and that the bytes sent match `exchanged_bytes` and `traffic` if not None."""
        job, losses = run.job, [event["loss"] for event in run.events("step") if event["loss"] is not None]
        assert losses, "no rank recorded a loss"
        assert all(map(isfinite, losses)), f"losses are {losses}, but must be finite"
        size, sent = run.events("start")[0]["gradient_bytes"], run.summary().bytes_per_step
        said = None if job.compression.is_on else job.strategy.exchanged_bytes(size, job.world_size)
        if said is not None and sent is not None:
            assert said <= sent <= (1 + self.exchange_within) * said, (
                f"ranks sent {sent:.0f} bytes per step, but exchanged_bytes predicts {said:.0f}"
            )

        self._sends_what_it_predicts(run)

    def _sends_what_it_predicts(self, run: Run) -> None:
        """Compare the bytes that ranks sent in the last step with `traffic`; skipped if `drift` is unbounded.

        Drift is unbounded for asynchronous ranks, which record some of their traffic after the step.
        """
        predicted = predict_job(run.job)
        said = run.job.strategy.traffic(replace(predicted.step, number=run.job.steps))
        if said is None or run.job.strategy.drift(run.job.world_size) is None:
            return
        for event in run.events("step"):
            if event["step"] == run.job.steps:
                _compare(event["rank"], event["traffic"], said)

    def test_a_resumed_run_ends_where_one_in_one_piece_does(self) -> None:
        """A resumed run matches an uninterrupted one within rounding; skipped if weights depend on timing."""
        job = self._job(world_size=2, precision="fp64", record=Record(parameters=True))
        if job.strategy.drift(2) is not None:
            self._resumes(job, tolerance=1e-12)


def _compare(rank: int, counted: Mapping[str, Mapping[str, int]], said: Traffic) -> None:
    sent = {name: row["sent_bytes"] for name, row in counted.items() if row["sent_bytes"]}
    for name, expected in said.items():
        least, most = expected.bounds or (expected.bytes, expected.bytes)
        found = sent.pop(name, 0)
        assert least[rank] <= found <= most[rank], (
            f"rank {rank} sent {found} bytes in {name}, but `traffic` predicts {expected.bytes[rank]}"
        )
    assert not sent, f"rank {rank} sent bytes that `traffic` does not predict, by collective: {sent}"
