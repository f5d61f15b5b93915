"""Step time: what one optimizer step takes under any layout, part by part."""

from shardscope.analytic.step.parts import StepParts
from shardscope.analytic.step.term import time_term
from shardscope.analytic.step.uneven import step_time

__all__ = ["StepParts", "step_time", "time_term"]
