"""The ranks of a job with several axes, as predicted, and as measured once a step is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ipywidgets as widgets

from shardscope_widgets.figures import theme
from shardscope_widgets.figures._rank_mesh import MOST_CARDS, RankMeshInfo, draw_rank_mesh, rank_mesh_text
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.kit.markup import heading, words_html

if TYPE_CHECKING:
    from shardscope.runlog.step_events import StepEvents

_NOTHING = (
    "This job has one axis of parallelism. For several, choose the strategy mesh and the number of ranks along each "
    "axis."
)
_KEY = (
    "Each card is a rank. Its upper bars are layers: dark if the rank holds a part of the layer, light if it holds all "
    "of it. The lowest bar is the rank's memory by type. Hover over a bar for details."
)


class MeshPanel:
    """One figure with two sentences; this class draws the data it receives and makes no decisions."""

    def __init__(self) -> None:
        self.figure = LiveFigure(theme.blank(), label="Ranks, what each holds, and bytes along each axis")
        self.words, self.key = widgets.HTML(), widgets.HTML()
        title = heading("What each rank holds and sends", "in one step")
        self.box = widgets.VBox([title, self.words, self.figure, self.key])
        self._drawn: tuple[RankMeshInfo | None, tuple[StepEvents, ...]] | None = None
        self.draw(None)

    def draw(self, info: RankMeshInfo | None, *measured: StepEvents) -> None:
        """Draw the ranks with the bytes and times of measured steps; predicted ones if there are none.

        Args:
            info: The ranks, predicted or with their axes only; None if they have one axis.
            measured: Recorded steps, whose medians are shown.
        """
        if self._drawn is not None and self._drawn[0] == info and _are_same(self._drawn[1], measured):
            return
        self._drawn = info, measured
        if info is None or not info.used:
            self.figure.layout.display = "none"
            self.words.value, self.key.value = words_html(_NOTHING), ""
            return
        self.figure.layout.display = None if info.world_size <= MOST_CARDS else "none"
        shown = info.measured(*measured) if measured else info
        self.figure.show(draw_rank_mesh(shown))
        both = [each for each in (info, shown) if each.sent] if shown is not info else [info]
        self.words.value = words_html(rank_mesh_text(*both))
        self.key.value = words_html(_KEY)


def _are_same(one: Sequence[StepEvents], other: Sequence[StepEvents]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
