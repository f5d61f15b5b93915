"""A list and a button that change the number of ranks of a running elastic run, with a sentence on the effect."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import ipywidgets as widgets

from shardscope.spec.elastic import sizes
from shardscope.spec.observed import ObservedJob
from shardscope_widgets.fault_lab import _words
from shardscope_widgets.kit.markup import classed, heading, note_html
from shardscope_widgets.words import plural

if TYPE_CHECKING:
    from shardscope.runtime import Run

_MOST_OFFERED = 32
"""Maximum number of sizes that the list offers."""


class Resizer:
    """Controls for one run at a time, which is set by `show`; disabled, with the reason, if it cannot be resized."""

    def __init__(self) -> None:
        self.ranks = widgets.Dropdown(description="Ranks", tooltip="Number of ranks to continue with")
        self.button = widgets.Button(description="Resize", icon="users")
        self.sentence = widgets.HTML()
        self.ranks.observe(lambda _change: self._say(), "value")
        bar = classed(widgets.HBox([self.ranks]), "ss-controls", "ss-break-bar")
        row = classed(widgets.HBox([self.button, self.sentence]), "ss-break-row")
        title = heading("Change the number of ranks", "while the run trains")
        self.box = classed(widgets.VBox([title, bar, row]), "ss-resize")
        self._run: Run | None = None
        self._shown: tuple[str, bool, int] | None = None
        self._asked = 0
        self.show(None, 0)

    def show(self, run: Run | None, world_size: int) -> None:
        """Show the controls for this run.

        Args:
            run: The run; None hides the controls.
            world_size: Current number of ranks of the run.
        """
        shown = None if run is None else (run.id, run.is_alive, world_size)
        self._run = run
        self.box.layout.display = "none" if run is None else None
        if shown == self._shown or run is None:
            return
        self._shown, self._asked = shown, 0
        why_not = _words.why_not_resized(run.job, is_alive=run.is_alive)
        can = not why_not and not isinstance(run.job, ObservedJob)
        offered = [*islice(sizes(run.job), _MOST_OFFERED)] if can else [world_size]
        self.ranks.options = offered
        self.ranks.value = world_size if world_size in offered else offered[0]
        self.ranks.disabled = bool(why_not)
        self._say()

    def _say(self) -> None:
        if self._run is None or self._shown is None:
            return
        _, is_alive, before = self._shown
        why_not = _words.why_not_resized(self._run.job, is_alive=is_alive)
        wanted = self.ranks.value
        self.button.disabled = bool(why_not) or wanted == before
        if why_not:
            text = why_not
        elif self._asked:
            text = f"Requested: {plural(self._asked, 'rank')}, which will start after the step in progress."
        else:
            assert not isinstance(self._run.job, ObservedJob)
            text = _words.resize_text(self._run.job, before, wanted)
        self.sentence.value, self.button.tooltip = note_html(text), text

    def press(self) -> None:
        """Resize the run to the chosen number of ranks, as the button does."""
        if self._run is not None:
            self._run.resize(self.ranks.value)
            self._asked = self.ranks.value
            self._say()
