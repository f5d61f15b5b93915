"""One training step as an animation: ranks, messages, memory and timeline move together.

`StepPlayer` shows a recorded step of a run, or a predicted step that has never run. The JavaScript reads only the plain
values of `StepEvents.to_dict`; the same code plays in a notebook and in the file that `StepPlayer.html` writes.
"""

from shardscope_widgets.step_player._player import StepPlayer

__all__ = ["StepPlayer"]
