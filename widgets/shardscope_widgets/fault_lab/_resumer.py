"""A button that continues a run that ended before its last step, with a sentence on what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import ipywidgets as widgets

from shardscope.spec.observed import ObservedJob
from shardscope_widgets.kit.markup import classed, note_html
from shardscope_widgets.words import plural

if TYPE_CHECKING:
    from shardscope.runtime import Run


class Resumer:
    """A button for one run at a time; hidden unless the run has ended, has a checkpoint, and has steps left.

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
        """Offer to resume this run, if it can be resumed; None offers nothing."""
        saved = (
            None if run is None or run.is_alive or isinstance(run.job, ObservedJob) else run.newest_checkpoint
        )
        left = 0 if run is None or saved is None else run.job.last_step - saved
        self._run = run if left > 0 else None
        self.box.layout.display = None if left > 0 else "none"
        if left > 0:
            text = f"Starts a new run from the checkpoint of step {saved}; {plural(left, 'step')} are left to train."
            self.sentence.value, self.button.tooltip = note_html(text), text

    def press(self) -> None:
        """Resume the run, as the button does."""
        if self._run is not None:
            self._on_resume(self._run)
