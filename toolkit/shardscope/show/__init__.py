"""Render sentences, tables and trees of terms as text, and as HTML in the theme of the page.

A result returns its parts from `_shown`; `Shown` renders these as text and as HTML. All text is escaped here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, takewhile, zip_longest
from operator import add
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from unicodedata import combining, east_asian_width

from shardscope.spec.units import figure, scaled

if TYPE_CHECKING:
    import pandas as pd

_COUNTS = {"T": 1e12, "G": 1e9, "M": 1e6}
_SCROLL = "max-width:100%;overflow-x:auto"
_BESIDE = "display:flex;flex-wrap:wrap;gap:.3em 3em;margin:.4em 0"
_SHORT = 24
"""Maximum number of characters of a cell's text that is not wrapped."""
_RULE = "border-bottom:1px solid color-mix(in srgb,currentColor 15%,transparent)"
_TABLE = "border-collapse:collapse;font-variant-numeric:tabular-nums"


@dataclass(frozen=True)
class Sentences:
    """Lines of text.

    Attributes:
        lines: The sentences.
        is_titled: Whether the first sentence is a title, which is bold in HTML.
        folded: Heading of a collapsed ``<details>`` element around the sentences in HTML; empty for no such element.
    """

    lines: Sequence[str]
    is_titled: bool = True
    folded: str = ""

    def text(self) -> str:
        """Return one line for each sentence."""
        return "\n".join(self.lines)

    def html(self) -> str:
        """Return the title and one paragraph for each remaining sentence."""
        lines = [*map(escape, filter(None, self.lines))]
        title = "".join(f"<strong>{line}</strong>" for line in lines[: self.is_titled])
        said = title + "".join(f"<p style='margin:.2em 0'>{line}</p>" for line in lines[self.is_titled :])
        return f"<details><summary>{escape(self.folded)}</summary>{said}</details>" if self.folded else said


class Cell(NamedTuple):
    """A table cell with formatting.

    Attributes:
        text: Text of the cell.
        small: Secondary text: in parentheses after the text, or in HTML in small print on a second line.
        about: Tooltip in HTML.
        indent: Indentation level.
        style: Further CSS.
        mark: HTML before the text, such as a line sample in a legend.
        span: Number of columns that the cell spans in HTML.
    """

    text: str
    small: str = ""
    about: str = ""
    indent: int = 0
    style: str = ""
    mark: str = ""
    span: int = 1

    def __str__(self) -> str:
        return f"{'  ' * self.indent}{self.text}{f' ({self.small})' if self.small else ''}"

    def html(self, tag: str, side: str) -> str:
        """Return the cell as an element, such as ``td``, aligned to a side; without style if `side` is empty."""
        about = f' title="{escape(self.about)}"' if self.about else ""
        span = f' colspan="{self.span}"' if self.span > 1 else ""
        small = f"<br><small>{escape(self.small)}</small>" if self.small else ""
        wrap = "nowrap" if tag == "td" and len(self.text) <= _SHORT else "normal"
        look = f"text-align:{side};padding:.2em .9em .2em {self.indent}em;white-space:{wrap};{_RULE};{self.style}"
        style = f' style="{look}"' if side else ""
        return f"<{tag}{about}{span}{style}>{self.mark}{escape(self.text)}{small}</{tag[:2]}>"


Texts = Mapping[str, Callable[[Any], str]]
Row = str | Sequence[str | Cell]
"""Cells of a row, possibly fewer than there are columns; or a heading for the rows that follow."""


@dataclass(frozen=True)
class Table:
    """A table of texts; without rows, only its caption is shown.

    Attributes:
        header: Names of the columns; empty for none.
        rows: Rows of cells, and headings.
        caption: Line above the table.
        more: Line below the table.
        num_left: Number of columns, from the first on, that are aligned left; numbers are aligned right.
        gap: Spaces between columns of text.
        has_row_heads: Whether the first cell of each row is its heading, for screen readers.
    """

    header: Sequence[str | Cell]
    rows: Sequence[Row]
    caption: str = ""
    more: str = ""
    num_left: int = 1
    gap: int = 2
    has_row_heads: bool = False

    @classmethod
    def of_frame(
        cls, frame: pd.DataFrame, caption: str = "", more: str = "", *, texts: Texts = MappingProxyType({})
    ) -> Table:
        """Return a data frame as a table; leading columns of text are aligned left.

        Args:
            frame: The data frame; its missing values become empty cells.
            caption: Line above the table.
            more: Line below the table.
            texts: Functions that format a column's values, by suffix of the column's name.
        """
        ways = [
            next((way for end, way in texts.items() if str(name).endswith(end)), str)
            for name in frame.columns
        ]
        rows = [
            ["" if value is None or value != value else way(value) for way, value in zip(ways, row, strict=True)]  # noqa: PLR0124 - NaN
            for row in frame.itertuples(index=False, name=None)
        ]  # fmt: skip
        names = [
            *takewhile(lambda name: all(isinstance(value, str) for value in frame[name].dropna()), frame)
        ]
        return cls([*map(str, frame.columns)], rows, caption, more, num_left=len(names), gap=1)

    def text(self) -> str:
        """Return the table as aligned text."""
        if not self.rows:
            return self.caption
        rows = [[row] if isinstance(row, str) else row for row in self.rows]
        cells = padded([*filter(None, [self.header]), *rows], num_left=self.num_left)
        lines = [(" " * self.gap).join(line).rstrip() for line in cells]
        return "\n".join([*filter(None, [self.caption]), *lines, *filter(None, [self.more])])

    def html(self, kind: str = "", marks: Mapping[int, str] = MappingProxyType({})) -> str:
        """Return the table as HTML, which scrolls if it is too wide.

        Args:
            kind: CSS classes of the table; empty for the inline style of tables in notebooks.
            marks: HTML attributes of rows, by row index.
        """
        caption = f"<strong>{escape(self.caption)}</strong>" if self.caption else ""
        if not self.rows:
            return caption
        top = f"<caption style='text-align:left'>{caption}</caption>" if caption else ""
        head = self._row(self.header, 'th scope="col"', is_plain=bool(kind))
        rows = enumerate(self.rows)
        body = "".join(self._row(row, mark=marks.get(at, ""), is_plain=bool(kind)) for at, row in rows)
        more = f"<div><small>{escape(self.more)}</small></div>" if self.more else ""
        look = f'class="{kind}"' if kind else f'style="{_TABLE}"'
        return (
            f'<div class="ss-plan-scroll" style="{_SCROLL}"><table {look}>{top}<thead>{head}</thead>'
            f"<tbody>{body}</tbody></table>{more}</div>"
        )

    def _row(self, row: Row, tag: str = "td", mark: str = "", *, is_plain: bool) -> str:
        if isinstance(row, str):
            row, tag = [row], f'th scope="rowgroup" colspan="{len(self.header)}"'
        tags = ['th scope="row"' if self.has_row_heads and tag == "td" else tag, *[tag] * len(row)]
        sides = [""] * len(row) if is_plain else ["left"] * self.num_left + ["right"] * len(row)
        cells = (each if isinstance(each, Cell) else Cell(each) for each in row)
        return f"<tr{mark}>{''.join(map(Cell.html, cells, tags, sides))}</tr>"


def padded(rows: Iterable[Iterable[str | Cell]], *, num_left: int) -> list[list[str]]:
    """Return the cells of rows as text, padded to the width of their column; short rows get empty cells at the end.

    Args:
        rows: The rows.
        num_left: Number of columns, from the first on, that are aligned left; all other columns are aligned right.
    """
    columns = []
    for at, column in enumerate(zip_longest(*rows, fillvalue="")):
        texts = [*map(str, column)]
        widths = [*map(_width, texts)]
        gaps = [" " * (max(widths) - width) for width in widths]
        columns.append(map(add, texts, gaps) if at < num_left else map(add, gaps, texts))
    return [*map(list, zip(*columns, strict=True))]


def _width(text: str) -> int:
    """Return the number of columns that a text takes in a terminal."""
    return sum(0 if combining(sign) else 1 + (east_asian_width(sign) in "FW") for sign in text)


@dataclass(frozen=True)
class Tree:
    """Tree of a term and its parts.

    Attributes:
        root: A `shardscope.analytic.terms.Term`.
        unit: Unit of all values, in place of each term's own; see `shardscope.spec.units.suitable_unit`.
    """

    root: Any
    unit: str = ""

    def text(self) -> str:
        """Return one line per term: name, value, percentage of the root's value, and formula.

        The parts of a term follow it, indented; if the term is a maximum, only its largest part is shown.
        """
        return "\n".join(self._lines(self.root, 0))

    def _lines(self, term: Any, depth: int) -> Iterator[str]:
        share = f"{term.value / self.root.value:7.1%}" if self.root.value else " " * 7
        name = "  " * depth + term.name
        yield f"{name:<38} {self._figure(term):>12} {share}  {term.formula}".rstrip()
        for part in term.parts if term.how == "sum" else (max(term.parts, key=lambda part: part.value),):
            yield from self._lines(part, depth + 1)

    def html(self) -> str:
        """Return nested ``<details>`` elements.

        A closed element shows a term's name and value. An open element also shows the term's parts, or its formula,
        inputs and source.
        """
        return f"<div style='{_SCROLL}'>{self._details(self.root)}</div>"

    def _details(self, term: Any) -> str:
        inputs = ", ".join(f"{escape(name)} = {escape(_input(value))}" for name, value in term.inputs.items())
        leaf = f"<div><code>{escape(term.formula)}</code><br>{inputs}<br><em>{escape(term.source)}</em></div>"
        inside = "".join(map(self._details, term.parts)) or leaf
        head = f"{escape(term.name)}: <strong>{escape(self._figure(term))}</strong>"
        return (
            f"<details style='margin-left:1em'><summary>{head}</summary>"
            f"<div style='margin-left:1em'>{inside}</div></details>"
        )

    def _figure(self, term: Any) -> str:
        return figure(term.value, self.unit or term.unit)


def _input(value: float | str) -> str:
    """Format an input of a formula: ``126 M``, ``12,288`` or ``0.25``."""
    if isinstance(value, str):
        return value
    return scaled(value, _COUNTS) if abs(value) >= _COUNTS["M"] else f"{value:,.6g}"


Part = Sentences | Table | Tree


class Shown:
    """A result that is shown as text and, in notebooks, as HTML."""

    def _shown(self) -> Iterable[Part]:
        """Return the parts of the result, in reading order."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return text(self._shown())

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return html(self._shown())


def text(parts: Iterable[Part]) -> str:
    """Return parts as text, separated by empty lines."""
    return "\n\n".join(filter(None, (part.text() for part in parts)))


def html(parts: Iterable[Part]) -> str:
    """Return parts as HTML; consecutive tables and trees are placed side by side if there is room."""
    shown = []
    for is_said, some in groupby(parts, lambda part: isinstance(part, Sentences)):
        inside = "".join(part.html() for part in some)
        if not inside:
            continue
        shown.append(inside if is_said else f"<div style='{_BESIDE}'>{inside}</div>")
    return f"<div>{''.join(shown)}</div>"
