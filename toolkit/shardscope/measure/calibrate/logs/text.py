"""A log as lines of plain text, whatever its encoding, its colours, or the rank labels of a launcher."""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte-order marks; the marks of UTF-32 come first, because one of them starts with a mark of UTF-16."""
_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|(?:\x1b|\^\[)?\[\d{1,3}(?:;\d{1,3})*m|\x1b\[[0-?]*[ -/]*[@-~]"
)
"""Sequences that colour a terminal or move its cursor; copies of a page often lose the escape character of colours."""
_RANK = re.compile(
    r"^\s*(?:\[(?:rank|default|local_rank|trainer)\s*\d+\]:?|\[\d{1,6}\]:|\[\d+,\d+\]<\w+>:|"
    r"(?:rank|default)?\d{1,6}:(?=\s))\s*"
)
"""Label of a rank that torchrun (``[rank0]:``, ``[default3]:``), srun (``12: ``) or mpirun (``[1,12]<stdout>:``) writes
before its lines."""


class Line(NamedTuple):
    """One line of a log, without the label of its rank."""

    rank: str
    """The label, or empty; ranks of one node may share it."""
    text: str


def decoded(data: bytes) -> str:
    """Return the text of a log: UTF-16 and UTF-32 by their mark or their zero bytes, else UTF-8.

    Invalid UTF-8 is replaced: the parts that are read are ASCII, also in Latin-1 and most other encodings.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, "replace")
    head = data[:4096]
    for start, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        if len(head) >= 4 and head[start::2].count(0) > len(head) // 4 > head[1 - start :: 2].count(0):
            return data.decode(encoding, "replace")
    return data.decode("utf-8", "replace").replace("\0", "")


def lines_of(text: str) -> list[Line]:
    """Return the lines of a log; a carriage return ends one, as progress bars use it."""
    return [_line(each) for each in re.split(r"[\r\n]+", _ESCAPES.sub("", text)) if each]


def _line(text: str) -> Line:
    label = _RANK.match(text)
    return Line("", text) if label is None else Line(label[0].strip(), text[label.end() :])
