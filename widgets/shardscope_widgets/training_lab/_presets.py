"""Presets of the Training Lab: jobs that one click predicts, animates and starts, each with a hint on what to look
at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import ipywidgets as widgets

from shardscope.errors import unknown_name
from shardscope.machine import usable_cores
from shardscope_widgets.kit.markup import classed, words_html


class Preset(NamedTuple):
    """A job that a chip starts: its title, a hint on what to look at, and the traits that differ from the defaults.

    The job runs on an emulated cluster with the traits in `place`, whose links and processors keep their speed even if
    other programs use the machine. If this machine cannot emulate clusters, the job runs directly on it, with the
    traits in `here`. The run is shown beside the last run of the preset named `beside`.
    """

    title: str
    look: str
    choices: Mapping[str, Any]
    place: Mapping[str, Any]
    here: Mapping[str, Any] = MappingProxyType({})
    beside: str = ""


_RING = {"node_bandwidth": "50 Mbit/s", "processor": "1 GFLOP/s"}
_SLOW = {"strategy": "ring", "world_size": 2, "steps": 60}
_SLOW_PLACE = {"node_bandwidth": "20 Mbit/s", "node_latency": "1 ms", "processor": "5 GFLOP/s"}
_SLOW_HERE = {"bandwidth": "20 Mbit/s", "latency": "1 ms"}
_STAGES = 4 if usable_cores() >= 4 else 2  # with fewer cores than stages, a smaller bubble gains nothing
PRESETS = (
    Preset(
        "Watch a ring",
        "Each rank passes a chunk of its gradients to its neighbour, which adds its own: after 3 rounds each rank has "
        "one chunk summed over all ranks, and after 3 more every rank has them all.",
        {"strategy": "ring", "world_size": 4, "global_batch": 16, "steps": 60},
        _RING,
    ),
    Preset(
        "Shard a GPT",
        "Each rank keeps a quarter of the parameters, gradients and optimizer state. The lower cells fill when the "
        "parameters of a layer are gathered, and empty when they are freed.",
        {"strategy": "zero-3", "world_size": 4, "global_batch": 16, "steps": 60},
        {"node_bandwidth": "100 Mbit/s", "processor": "1 GFLOP/s"},
    ),
    Preset(
        "Make the network slow",
        "On a link of 20 Mbit/s, ranks spend most of a step sending gradients. Choose another link under “Where it "
        "runs”: its prediction appears at once, and the run starts again on that link.",
        _SLOW,
        _SLOW_PLACE,
        _SLOW_HERE,
    ),
    Preset(
        "Compress on the slow network",
        "With topk, ranks send only the largest 1% of the entries of each gradient over the same slow link. When the "
        "run ends, the lab says whether that paid off; the Compression tab shows on which links it would pay off.",
        _SLOW | {"compression": "topk"},
        _SLOW_PLACE,
        _SLOW_HERE,
        beside="Make the network slow",
    ),
    Preset(
        "Break the bubble",
        "With few micro-batches, stages wait for each other. The sentence above the tabs says how many would help. "
        "Press “Run it” to try them; the sentence then says what has changed.",
        {
            "strategy": "pipeline",
            "strategy_options": {"schedule": "gpipe"},
            "world_size": 4,
            "global_batch": 16,
            "micro_batch": 4,
            "steps": 60,
        },
        {"node_bandwidth": "1 Gbit/s", "processor": "1 GFLOP/s"},
        {
            "model": "gpt-micro",
            "world_size": _STAGES,
            "global_batch": 16 * _STAGES,
            "micro_batch": 32,
            "steps": 40,
        },
    ),
    Preset(
        "Kill a rank",
        "When the ranks are running, press “Kill rank 0”: all of them continue from the newest checkpoint, and the "
        "steps since then are marked as lost under Faults.",
        {"strategy": "zero-2", "world_size": 2, "steps": 300, "checkpoint_every": 20, "restarts": 3},
        {"node_bandwidth": "100 Mbit/s", "processor": "2 GFLOP/s"},
    ),
)


def preset_named(title: str) -> Preset:
    """Return the preset with this title, ignoring case.

    Raises:
        SpecError: The preset does not exist; the message suggests the closest title.
    """
    known = {preset.title.casefold(): preset for preset in PRESETS}
    if (found := known.get(title.casefold())) is None:
        raise unknown_name("preset", title, [preset.title for preset in PRESETS])
    return found


class PresetBar(widgets.VBox):  # type: ignore[misc]
    """A chip for each preset, and the hint of the preset that was chosen last.

    Args:
        on_press: Called with the preset of the button that was pressed.
    """

    def __init__(self, on_press: Callable[[Preset], None]) -> None:
        self._on_press = on_press
        self.chosen: Preset | None = None
        self._is_kept = False
        self.buttons = [self._button(preset) for preset in PRESETS]
        self.words = widgets.HTML()
        super().__init__([classed(widgets.HBox(self.buttons), "ss-presets"), self.words])

    def _button(self, preset: Preset) -> widgets.Button:
        button = widgets.Button(description=preset.title, tooltip=preset.look)
        button.on_click(lambda _button: self._on_press(preset))
        return button

    def mark(self, preset: Preset) -> None:
        """Show a preset as chosen, with its hint."""
        self.chosen = preset
        self._mark()

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
