"""Notebooks are committed as source: paired, bare, with stable cell ids, linked to one another and to the index."""

from __future__ import annotations

import re

import nbformat
import pytest

from notebooks.running import FOLDER, NOTEBOOKS

INDEX = FOLDER / "00-index.ipynb"
ORDER = [path for path in NOTEBOOKS if path != INDEX]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def prose(path):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]


def test_it_carries_no_output_and_no_widget_state(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert "widgets" not in notebook.metadata
    assert notebook.metadata.kernelspec.name == "python3"


def test_its_cells_have_ids_that_mean_something(path):
    ids = [cell["id"] for cell in nbformat.read(path, as_version=4).cells]
    assert len(set(ids)) == len(ids)
    assert not any(len(cell_id) == 8 and all(c in "0123456789abcdef" for c in cell_id) for cell_id in ids)


def test_its_links_within_the_page_lead_to_a_heading(path):
    text = "\n".join(prose(path))
    headings = {found.replace(" ", "-") for found in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    assert [link for link in re.findall(r"\]\(#([^)]*)\)", text) if link not in headings] == []


def test_the_notebook_on_pipelines_opens_a_lab_for_a_slow_one_on_which_only_start_is_left_to_press():
    cells = nbformat.read(FOLDER / "05-pipelines.ipynb", as_version=4).cells
    intro, _first, text, lab = cells[:4]
    assert "slow?" in intro.source
    assert "Press Start" in text.source
    assert lab.source.startswith("from shardscope_widgets import TrainingLab\n")  # it needs no other cell
    assert 'TrainingLab(preset="Break the bubble")' in lab.source


def test_it_is_paired_with_its_text(path):
    jupytext = pytest.importorskip("jupytext", reason="jupytext is not installed (pip install jupytext)")
    text = jupytext.read(path.with_suffix(".py"))
    sources = lambda notebook: [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert sources(text) == sources(nbformat.read(path, as_version=4)), (
        "run: jupytext --sync notebooks/*.ipynb"
    )


def test_notebooks_are_numbered_without_a_gap():
    assert [int(path.stem.split("-")[0]) for path in NOTEBOOKS] == list(range(len(NOTEBOOKS)))
    assert all(prose(path)[0].startswith(f"# {number} · ") for number, path in enumerate(ORDER, start=1))


def test_the_index_links_to_each_in_order():
    table = prose(INDEX)[0]
    places = [table.index(f"({path.name})") for path in ORDER]
    assert places == sorted(places)


def test_each_links_to_the_one_before_to_the_index_and_to_the_next_at_both_ends():
    for place, path in enumerate(ORDER):
        neighbours = [INDEX, *ORDER[max(0, place - 1) : place], *ORDER[place + 1 : place + 2]]
        for cell in (prose(path)[0], prose(path)[-1]):
            assert [near.name for near in neighbours if f"({near.name})" not in cell] == [], path.name


def test_each_ends_with_what_to_try_next():
    assert [path.name for path in ORDER if "## Try next\n" not in prose(path)[-1]] == []
