"""The share of accurate predictions, shown in the heading of a panel of runs."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

from shardscope_widgets.kit.background import Background
from shardscope_widgets.kit.frame import Frame


class HitRate(Background):
    """Shows next to a panel's title how many step times of the runs in a folder were inside their prediction intervals.

    Args:
        frame: The heading of the panel.
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
    """

    def __init__(self, frame: Frame, root: str | Path | None) -> None:
        self._frame, self._root, self._about = frame, root, frame.about
        self._known: Hashable = None
        self._read: Hashable = None

    def want(self, known: Hashable) -> None:
        """Read the runs again if `known`, which identifies the ended runs, has changed; return at once."""
        self._known = known
        if known != self._read and not self._is_busy:
            self._start(self._work, name="hit-rate")

    def _work(self) -> None:
        from shardscope.measure.accuracy import accuracy, inside_text

        inside = ""
        while self._read != self._known:
            self._read = self._known
            inside = inside_text(accuracy(self._root).runs)
        self._frame.about = " · ".join(filter(None, [inside, self._about]))
