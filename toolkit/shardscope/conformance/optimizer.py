"""Conformance tests for optimizers."""

from __future__ import annotations

from typing import ClassVar

from shardscope.analytic.memory import model_states
from shardscope.conformance.method import MethodConformance
from shardscope.prediction.traced import traced
from shardscope.runtime import Run
from shardscope.runtime.tools.check import check
from shardscope.spec import Record
from shardscope.spec.optimizer import Optimizer


class OptimizerConformance(MethodConformance):
    """Test that an optimizer gives the same weights under every strategy, and that resuming is bitwise identical."""

    kind = Optimizer
    strategies: ClassVar[tuple[str, ...]] = ("ring", "zero-1", "zero-2", "zero-3", "pipeline")

    def test_every_strategy_trains_what_one_process_trains(self) -> None:
        """Weights match those of a single-process run; fp64 rules out rounding as the cause of a difference."""
        for strategy in self.strategies:
            report = check(self._job(strategy=strategy, world_size=2, precision="fp64"), steps=4)
            assert report.passed, f"under {strategy}: {report}"

    def test_a_resumed_run_ends_where_one_in_one_piece_does(self) -> None:
        """Replicated and sharded optimizer states are saved and restored bitwise identically."""
        for strategy in ("ring", "zero-1", "zero-3"):
            self._resumes(self._job(strategy=strategy, world_size=2, record=Record(parameters=True)))

    def _check_records(self, run: Run) -> None:
        """Check the learning rates and, if parameters are replicated, the size of the optimizer state."""
        for event in run.events("step"):
            assert event["lr"] == run.job.optimizer.lr, f"step {event['step']} trained with lr={event['lr']}"
        if run.job.strategy.zero_stage != 0:
            return
        optimizer, table = run.job.optimizer, traced(run.job).table
        said = model_states(table.num_params, optimizer=optimizer, num_tensors=table.num_tensors).optimizer
        for held in run.memory()["optimizer"]:
            assert held == said, (
                f"the optimizer holds {held:,} bytes of state, but its `states` property implies {said:,.0f}; "
                "correct `states`"
            )
