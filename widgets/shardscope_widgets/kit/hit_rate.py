"""How well predictions have done, in the heading of a panel of runs."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

from shardscope_widgets.kit.background import Background
from shardscope_widgets.kit.frame import Frame


class HitRate(Background):
    """Writes how many step times of a folder of runs were inside their intervals beside a panel's title.

    Args:
        frame: The heading of the panel.
        root: Folder of the runs; None takes ``$SHARDSCOPE_RUNS`` or ``./runs``.
    """

    def __init__(self, frame: Frame, root: str | Path | None) -> None:
        self._frame, self._root, self._about = frame, root, frame.about
        self._known: Hashable = None
        self._read: Hashable = None

    def want(self, known: Hashable) -> None:
        """Read the runs again if `known`, which says which of them have ended, has changed, and return at once."""
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
