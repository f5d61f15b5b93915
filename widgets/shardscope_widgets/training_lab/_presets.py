"""Presets of the Training Lab: each sets the whole form, and says in one sentence what to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import ipywidgets as widgets

from shardscope.errors import unknown_name
from shardscope.machine import usable_cores
from shardscope_widgets.job_form.choices import JobChoices
from shardscope_widgets.job_form.topics import reset
from shardscope_widgets.kit.markup import classed, words_html


class Preset(NamedTuple):
    """A job to start with: its name, what to look at while it runs, and the traits that differ from the defaults.

    `tab` is the title of the tab that shows the job best; empty for the first tab.
    """

    title: str
    look: str
    choices: Mapping[str, Any]
    tab: str = ""


_SLOW = {"strategy": "ring", "world_size": 2, "bandwidth": "50 Mbit/s", "latency": "1 ms", "steps": 60}
_STAGES = 4 if usable_cores() >= 4 else 2  # with fewer cores than stages, a smaller bubble gains nothing
PRESETS = (
    Preset(
        "Watch a ring",
        "Look at the One step tab: each rank passes a piece of its gradient to its neighbour, and after "
        "2 × (ranks - 1) rounds every rank has the whole sum.",
        {"strategy": "ring", "world_size": 4, "steps": 100},
        "One step",
    ),
    Preset(
        "Shard a GPT",
        "Scroll to Memory by type under Live: each rank keeps a quarter of the parameters, gradients and optimizer "
        "state, and gathers the rest when a layer needs it.",
        {"strategy": "zero-3", "world_size": 4, "steps": 60},
    ),
    Preset(
        "Make the network slow",
        "Look at the timeline under Live: on a link of 50 Mbit/s, ranks spend most of a step sending gradients.",
        _SLOW,
    ),
    Preset(
        "Compress on the slow network",
        "Look at Bytes sent and Throughput under Live, next to the run without compression: topk sends the largest "
        "1 % of each gradient.",
        _SLOW | {"compression": "topk"},
    ),
    Preset(
        "Speed up a pipeline",
        "Press Start, and scroll to Pipeline under Live: with few micro-batches, stages wait for each other. The line "
        "above the tabs says how many would help; Run it tries them, and the line then says what they changed.",
        {
            "strategy": "pipeline",
            "strategy_options": {"schedule": "gpipe"},
            "model": "gpt-micro",
            "world_size": _STAGES,
            "global_batch": 16 * _STAGES,
            "micro_batch": 32,
            "steps": 40,
        },
    ),
    Preset(
        "Survive a failure",
        "Press Start, and kill a rank under Faults: all ranks continue from the newest checkpoint, and the steps since "
        "then are marked as lost.",
        {"strategy": "zero-2", "world_size": 2, "steps": 300, "checkpoint_every": 20, "restarts": 3},
        "Faults",
    ),
)


def preset_named(title: str) -> Preset:
    """Return the preset with this title; upper and lower case are the same.

    Raises:
        SpecError: The preset does not exist; the message suggests the closest title.
    """
    known = {preset.title.casefold(): preset for preset in PRESETS}
    if (found := known.get(title.casefold())) is None:
        raise unknown_name("preset", title, [preset.title for preset in PRESETS])
    return found


class PresetBar(widgets.VBox):  # type: ignore[misc]
    """A button for each preset, and what to look at for the one that was chosen last.

    Args:
        choices: The form.
        on_choice: Called after a preset has set the form.
    """

    def __init__(self, choices: JobChoices, on_choice: Callable[[Preset], None]) -> None:
        self._choices, self._on_choice = choices, on_choice
        self.chosen: Preset | None = None
        self._is_kept = False
        self.buttons = [self._button(preset) for preset in PRESETS]
        self.words = widgets.HTML()
        super().__init__([classed(widgets.HBox(self.buttons), "ss-presets"), self.words])

    def _button(self, preset: Preset) -> widgets.Button:
        button = widgets.Button(description=preset.title, tooltip=preset.look)
        button.on_click(lambda _button: self.choose(preset))
        return button

    def choose(self, preset: Preset) -> None:
        """Set the whole form to a preset."""
        self.chosen = None
        reset(self._choices, preset.choices)
        self.mark(preset)

    def mark(self, preset: Preset) -> None:
        """Show a preset as chosen, with its hint and the tab to look at, without setting the form."""
        self.chosen = preset
        self._mark()
        self._on_choice(preset)

    def forget(self) -> None:
        """Unmark the preset, because the form has changed, unless within `kept`."""
        if self.chosen is not None and not self._is_kept:
            self.chosen = None
            self._mark()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the preset marked, and its hint in view, while the form is set to a variant of its job."""
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False

    def _mark(self) -> None:
        for button, preset in zip(self.buttons, PRESETS, strict=True):
            button.button_style = "info" if preset is self.chosen else ""
        self.words.value = words_html(self.chosen.look if self.chosen else "", is_live=True)
