"""Predict the time of one optimizer step under any layout, part by part."""

from shardscope.prediction.step.step import StepParts, step_time
from shardscope.prediction.step.term import time_term

__all__ = ["StepParts", "step_time", "time_term"]
