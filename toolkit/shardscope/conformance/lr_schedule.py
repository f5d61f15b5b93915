"""Conformance tests for learning-rate schedules."""

from __future__ import annotations

import math

from shardscope.conformance.method import MethodConformance
from shardscope.runtime import Run
from shardscope.spec.lr_schedule import LRSchedule

_STEPS = 50


class LRScheduleConformance(MethodConformance):
    """Test that learning rates are finite, non-negative and independent of call order, and that ranks use them."""

    kind = LRSchedule

    def test_factors_are_finite_and_not_negative(self) -> None:
        """Factors are finite and non-negative with and without a warm-up, in every step and after the last one."""
        for warmup in (0, 5, _STEPS):
            schedule = self.method().replace(warmup_steps=warmup)
            assert isinstance(schedule, LRSchedule)
            for step in range(1, _STEPS + 10):
                factor = schedule.factor(step, _STEPS)
                assert math.isfinite(factor), (
                    f"the factor in step {step} of {_STEPS} is {factor}, not a finite number"
                )
                assert factor >= 0, f"the factor in step {step} of {_STEPS} is {factor}, a negative number"

    def test_nothing_is_kept_between_steps(self) -> None:
        """Factors do not depend on earlier calls, which a resumed run does not repeat."""
        schedule = self.method()
        assert isinstance(schedule, LRSchedule)
        forwards = [schedule.factor(step, _STEPS) for step in range(1, _STEPS + 1)]
        backwards = [schedule.factor(step, _STEPS) for step in range(_STEPS, 0, -1)]
        assert forwards == backwards[::-1], "factors depend on earlier calls"

    def _check_records(self, run: Run) -> None:
        job = run.job
        for event in run.events("step"):
            rate = job.optimizer.lr * job.lr_schedule.factor(event["step"], job.steps)
            assert event["lr"] == rate, f"step {event['step']} trained with lr={event['lr']}, not {rate}"
