"""Every notebook runs from start to end without a warning, and opens with a result that a person can read."""

from __future__ import annotations

import re

import pytest

from notebooks.running import PLOTLY, RUN, outputs, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # whoever comes first runs the notebook
RAW = re.compile(r"\d\.\d{3,}e[+-]?\d|\d\.\d{7,}")
"""A number as a computer prints it: 7.616444e+10, 0.30000000000000004."""


def is_for_machines(data):
    """Whether an output is a figure, or a tree whose folded branches hold the inputs of formulas."""
    return PLOTLY in data or "<details" in data.get("text/html", "")


@pytest.fixture(params=RUN, ids=lambda path: path.stem)
def notebook(request, executed):
    return executed(request.param.stem)


def test_it_runs_from_start_to_end_without_a_warning(notebook):
    shown = outputs(notebook)
    assert [
        output.text for output in shown if output.output_type == "stream" and output.name == "stderr"
    ] == []
    assert not [output for output in shown if output.output_type == "error"]


def test_its_first_cell_shows_a_result_in_words(notebook):
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    told = " ".join(words(output) for output in first.outputs if "text/markdown" in output.get("data", {}))
    assert re.search(r"\w+ \w+ \w+", told), "the first cell says nothing"
    assert re.search(r"\d", told), "the first cell states no result"


def test_its_numbers_are_written_for_people(notebook):
    told = [words(output) for output in outputs(notebook) if not is_for_machines(output.get("data", {}))]
    assert [found for text in told for found in RAW.findall(text)] == []
