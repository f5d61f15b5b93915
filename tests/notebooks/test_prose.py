"""Text that does not change with the data must not state what the data say: numbers and findings are computed."""

from __future__ import annotations

import re

import nbformat
import pytest

from notebooks.running import NOTEBOOKS

CODE = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|^#+ [^\n]*$|^\| \d+ \|", re.MULTILINE)
"""Code, links, headings and the numbers of the rows of a table."""
NAMES = re.compile(
    r"""\b(?:19|20)\d\d\b | arXiv[ :]\S+ | rank\s\d\b | stages?\s[0-3]\b
    | \b(?:1F1B|GPT-\d|Llama\s3|ZeRO[- ][0-3]|ZB-H\d|V-Half|A100s?|H100s?)(?!\w)
    | power\sof\stwo | double\sbinary\stree""",
    re.VERBOSE,
)
"""Numbers that are part of a name or of a date."""
FORMULAS = re.compile(
    r"""\(?\b[a-zW]\s?[-+]\s?\d\)? (?:/[A-Z])? | \([a-z]\+[a-z]-\d\) | \b\d\s?\([A-Z]\s?-\s?1\)(?:/[A-Z])?
    | \b\d(?:w|\slog)\b (?:\s\+\s\d)? | \b[A-Z]\s/\s\d\b""",
    re.VERBOSE,
)
"""Formulas in symbols, such as 2(W-1)/W."""
NUMBER = re.compile(
    r"""\d\S* (?:\s\S+)? | \b(?:half|halves|twice|thrice|(?:third|quarter|tenth|hundredth|thousandth)s?)\b
    | \b(?:two|three|four|five|six|seven|eight|nine|ten)\s
      (?:ranks|cores|workers|processes|steps|schedules|seeds|layers|samples|trials|notebooks|times)\b""",
    re.VERBOSE | re.IGNORECASE,
)
CLAIM = re.compile(
    r"what to see|(?:figure|chart|table) shows|as (?:we|you) (?:can )?see|\b(?:green|orange|blue|red)\b",
    re.IGNORECASE,
)
ALLOWED = {
    "06-compression": {
        "two ranks": "what tests/benchmarks/convergence.py runs; its results are data in the next cell",
        "three seeds": "what tests/benchmarks/convergence.py runs; its results are data in the next cell",
    },
    "10-bring-your-own": {
        "8 bits,": "the definition of the compressor that the next cell writes",
        "2, 3": "what check_method runs",
        "4 ranks,": "what check_method runs",
    },
}
"""Numbers that stay in the text of a notebook, and why each of them cannot drift."""


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def plain(source: str) -> str:
    for pattern in (CODE, NAMES, FORMULAS):
        source = pattern.sub(" ", source)
    return source


def prose(path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells
    return [plain(cell.source) for cell in cells if cell.cell_type == "markdown"]


def test_its_text_states_no_number_that_the_data_could_contradict(path):
    found = [number.group() for text in prose(path) for number in NUMBER.finditer(text)]
    assert sorted(found) == sorted(ALLOWED.get(path.stem, {})), "compute the number in a cell, with say()"


def test_its_text_describes_no_figure_by_its_outcome(path):
    found = [claim.group() for text in prose(path) for claim in CLAIM.finditer(text)]
    assert found == [], "compute the sentence from the figure's data, with say()"


@pytest.mark.parametrize(
    "drifting",
    [
        "ranks are idle for 27 % of it",
        "it takes 38.6 GiB",
        "the bubble is half as wide",
        "Two ranks take 12 steps",
    ],
)
def test_the_scan_finds_measured_numbers(drifting):
    assert NUMBER.search(plain(drifting))
