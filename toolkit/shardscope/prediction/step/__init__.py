"""Step time: what one optimizer step takes under any layout, part by part."""

from shardscope.prediction.step.parts import StepParts
from shardscope.prediction.step.term import time_term
from shardscope.prediction.step.uneven import step_time

__all__ = ["StepParts", "step_time", "time_term"]
