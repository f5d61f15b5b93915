"""One axis of a figure: its range and ticks, as Plotly chooses them, and the conversion of values to pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, isfinite, log10
from typing import Any

from shardscope_widgets.kit.svg.text import DEFAULT, text_size


class Axis:
    """Scale of one axis.

    Args:
        name: Plotly's reference, such as ``x`` or ``y2``.
        settings: The axis in the figure's layout.
        values: All values on the axis, which determine its type and its range.
        is_padded: Whether the range ends beyond the first and last values.
    """

    def __init__(
        self, name: str, settings: Mapping[str, Any], values: Sequence[Any], *, is_padded: bool
    ) -> None:
        self.name, self.settings = name, settings
        self.is_x = name.startswith("x")
        self.domain: tuple[float, float] = tuple(settings.get("domain", (0, 1)))
        named = [*settings.get("categoryarray", ()), *(v for v in values if isinstance(v, str))]
        self.categories = {value: at for at, value in enumerate(dict.fromkeys(named))}
        self.is_log = settings.get("type") == "log"
        if settings.get("type", "category") != "category":
            self.categories = {}
        self.range = self._range(values, is_padded=is_padded)
        self.pixels = (0.0, 1.0)

    def number(self, value: Any) -> float:
        """Return a value in the units of `range`; NaN if it has no position on the axis."""
        if isinstance(value, str):
            return float(self.categories[value]) if value in self.categories else float(value)
        if value is None:
            return float("nan")
        if self.is_log:
            return log10(value) if value > 0 else float("nan")
        return float(value)

    def at(self, value: Any) -> float:
        """Return the pixel of a value."""
        return self.pixel(self.number(value))

    def pixel(self, number: float) -> float:
        """Return the pixel of a number in the units of `range`."""
        (low, high), (first, last) = self.range, self.pixels
        return first + (number - low) / ((high - low) or 1) * (last - first)

    def _range(self, values: Sequence[Any], *, is_padded: bool) -> tuple[float, float]:
        settings = self.settings
        numbers = [number for number in map(self.number, values) if isfinite(number)] or [0.0, 1.0]
        low, high = min(numbers), max(numbers)
        if self.categories:
            low, high = -0.5, len(self.categories) - 0.5
        else:
            pad = 0.05 * (high - low or abs(high) or 1)
            starts_at_zero = not self.is_log and (settings.get("rangemode") == "tozero" or low == 0)
            low = min(0.0, low) if starts_at_zero and low >= 0 else low - pad * is_padded
            high += pad * (is_padded or high == low)
        given = settings.get("range")
        if given is not None and settings.get("autorange") is not True:
            low, high = (
                other if end is None else float(end) for end, other in zip(given, (low, high), strict=True)
            )
        return (high, low) if settings.get("autorange") == "reversed" else (low, high)

    def ticks(self) -> list[tuple[float, str]]:
        """Return the ticks inside the range, as numbers in its units and labels."""
        low, high = sorted(self.range)
        slack = 1e-6 * (high - low)
        return [(at, text) for at, text in self._all_ticks(low, high) if low - slack <= at <= high + slack]

    def _all_ticks(self, low: float, high: float) -> list[tuple[float, str]]:
        settings, values = self.settings, self.settings.get("tickvals")
        if settings.get("visible") is False:
            return []
        if values is not None and settings.get("tickmode") != "auto":
            texts = settings.get("ticktext")
            labels = [self._label(value) for value in values] if texts is None else map(str, texts)
            return [(self.number(value), text) for value, text in zip(values, labels, strict=False)]
        if self.categories:
            return [(float(at), name) for name, at in self.categories.items()]
        if self.is_log:
            return self._decades(low, high)
        step = self._step(high - low)
        return [
            (at * step, self._label(at * step))
            for at in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)
        ]

    def _decades(self, low: float, high: float) -> list[tuple[float, str]]:
        marks = (1,) if high - low > 1.5 else (1, 2, 5)
        every = max(1, round((high - low) / 8))
        return [
            (exponent + log10(mark), self._label(mark * 10.0**exponent))
            for exponent in range(floor(low), ceil(high) + 1)
            if exponent % every == 0
            for mark in marks
        ]

    def _step(self, span: float) -> float:
        dtick = self.settings.get("dtick")
        if isinstance(dtick, int | float):
            return float(dtick)
        room = abs(self.pixels[1] - self.pixels[0]) / (90 if self.is_x else 45)
        rough = (span or 1) / max(1, min(room, self.settings.get("nticks") or 10))
        power = 10.0 ** floor(log10(rough))
        step = next(mark * power for mark in (1, 2, 5, 10) if mark * power >= rough * 0.999)
        return max(1.0, step) if self.settings.get("tickformat") == "d" else step

    def _label(self, value: Any) -> str:
        prefix, suffix = (self.settings.get(f"tick{end}", "") for end in ("prefix", "suffix"))
        return f"{prefix}{_number_text(value, self.settings.get('tickformat') or '')}{suffix}"

    def label_room(self) -> tuple[float, float]:
        """Return the largest width and the largest height of the tick labels in pixels."""
        if self.settings.get("showticklabels") is False:
            return 0.0, 0.0
        sizes = [text_size(text, self.size) for _, text in self.ticks()] or [(0.0, 0.0)]
        return max(width for width, _ in sizes), max(height for _, height in sizes)

    @property
    def size(self) -> float:
        """Font size of the ticks in pixels."""
        return float((self.settings.get("tickfont") or {}).get("size") or DEFAULT)

    @property
    def title(self) -> str:
        """Title of the axis; empty if it has none."""
        title = self.settings.get("title") or ""
        return str(title.get("text") or "") if isinstance(title, Mapping) else str(title)


def _number_text(value: Any, how: str) -> str:
    """Return a number in one of d3's formats; without a format, large numbers are abbreviated as in Plotly."""
    number = float(value)
    is_short = how in {"", "~s"} or how.endswith("s")
    if is_short and abs(number) >= (1e4 if not how else 1e3):
        power, letter = next(
            (p, s)
            for p, s in ((1e12, "T"), (1e9, "G" if how else "B"), (1e6, "M"), (1e3, "k"))
            if abs(number) >= p
        )
        return f"{number / power:.6g}{letter}"
    if how == "~s" and 0 < abs(number) < 1:
        power, letter = next(
            ((p, s) for p, s in ((1e-3, "m"), (1e-6, "µ"), (1e-9, "n")) if abs(number) >= p), (1e-12, "p")
        )
        return f"{number / power:.6g}{letter}"
    if how == "d":
        return f"{number:.0f}"
    return f"{number:.6g}" if is_short or how.startswith("~") else format(number, how)
