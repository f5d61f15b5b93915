"""A button that continues a run that ended before its last step, with a sentence on the remaining steps.

A run ends with the kernel that launched it, so that no unattended ranks are left on a machine. If it has no checkpoint,
it can then only be started again from its first step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import ipywidgets as widgets

from shardscope.runtime.record.status import Cause
from shardscope.spec.observed import ObservedJob
from shardscope_widgets.kit.markup import classed, note_html
from shardscope_widgets.words import plural

if TYPE_CHECKING:
    from shardscope.runtime import Run


AGAIN = "The run has no checkpoint, so its job starts again from the first step."


def carry_on(run: Run, root: Path | None) -> Run:
    """Start a run that continues `run` from its newest checkpoint, or that starts its job again without a checkpoint.

    Raises:
        ShardscopeError: The run cannot be resumed.
    """
    from shardscope.runtime import launch

    if run.newest_checkpoint is None:
        return launch(run.job, run.cluster, root=root, group=run.group)
    return launch(run.job, root=root, resume=run, group=run.group)


class Resumer:
    """A button for one run at a time; hidden unless the run has ended before its last step and has a checkpoint.

    The button also restarts a run without a checkpoint that ended because the program that launched it ended.

    Args:
        on_resume: Called with the run when the button is pressed.
    """

    def __init__(self, on_resume: Callable[[Run], object]) -> None:
        self.button = widgets.Button(description="Resume", icon="play")
        self.sentence = widgets.HTML()
        self.box = classed(widgets.HBox([self.button, self.sentence]), "ss-break-row")
        self._run: Run | None = None
        self._on_resume = on_resume
        self.show(None)

    def show(self, run: Run | None) -> None:
        """Show the button for this run, if it can be resumed; None hides the button."""
        text = "" if run is None or run.is_alive or isinstance(run.job, ObservedJob) else _offer(run)
        self._run = run if text else None
        self.box.layout.display = None if text else "none"
        if text:
            self.button.description = "Start again" if text == AGAIN else "Resume"
            self.sentence.value, self.button.tooltip = note_html(text), text

    def press(self) -> None:
        """Resume the run, as the button does."""
        if self._run is not None:
            self._on_resume(self._run)


def _offer(run: Run) -> str:
    """Return a sentence on what the button does for a run that has ended; empty if there is nothing to continue."""
    saved = run.newest_checkpoint
    if saved is None:
        return AGAIN if run.cause is Cause.DRIVER_ENDED else ""
    left = run.job.last_step - saved
    if left <= 0:
        return ""
    return f"Starts a new run from the checkpoint of step {saved}; {plural(left, 'step')} remain."
