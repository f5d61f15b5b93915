"""Conformance tests of optimizers."""

from __future__ import annotations

from typing import ClassVar

from shardscope.analytic.memory import model_states
from shardscope.conformance.method import MethodConformance
from shardscope.prediction.traced import traced
from shardscope.runtime import Run
from shardscope.runtime.check import check
from shardscope.spec import Record
from shardscope.spec.optimizer import Optimizer


class OptimizerConformance(MethodConformance):
    """It trains the same weights under every strategy, and resumes bit-identically from a checkpoint."""

    kind = Optimizer
    strategies: ClassVar[tuple[str, ...]] = ("ring", "zero-1", "zero-2", "zero-3", "pipeline")

    def test_every_strategy_trains_what_one_process_trains(self) -> None:
        """Results match one process in fp64, so that a difference is not rounding."""
        for strategy in self.strategies:
            report = check(self._job(strategy=strategy, world_size=2, precision="fp64"), steps=4)
            assert report.passed, f"under {strategy}: {report}"

    def test_a_resumed_run_ends_where_one_in_one_piece_does(self) -> None:
        """Whole and sharded states are saved and restored bit-identically."""
        for strategy in ("ring", "zero-1", "zero-3"):
            self._resumes(self._job(strategy=strategy, world_size=2, record=Record(parameters=True)))

    def _look_at(self, run: Run) -> None:
        """Learning rates are the job's; for whole parameters, the state has the bytes that `Optimizer.states` gives."""
        for event in run.events("step"):
            assert event["lr"] == run.job.optimizer.lr, f"step {event['step']} trained with lr={event['lr']}"
        if run.job.strategy.zero_stage != 0:
            return
        optimizer, table = run.job.optimizer, traced(run.job).table
        said = model_states(table.num_params, optimizer=optimizer, num_tensors=table.num_tensors).optimizer
        for held in run.memory()["optimizer"]:
            assert held == said, (
                f"it keeps {held:,} bytes, and says {said:,.0f}: let states return what it keeps"
            )
