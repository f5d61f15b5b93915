"""Every notebook runs from start to end, and is committed the way source is: paired, bare, with stable cell ids."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FEWER = {
    "architectures": {'"steps": 12': '"steps": 4', "steps=30": "steps=8", "steps=4\n": "steps=2\n"},
    "compression": {'"steps": 20': '"steps": 5', "steps=60": "steps=20", "steps=12": "steps=3", "steps=30": "steps=5"},
    "large_batch": {
        "batches=ss.PowersOfTwo(32, 512), seeds=(0, 1), factors=(1.0, 4.0)":
            "batches=ss.PowersOfTwo(32, 64), seeds=(0,), factors=(1.0,)",
    },
    "pipeline": {"steps=16": "steps=6"},
    "tuning": {"trials=16": "trials=6", "trials=18": "trials=7", "steps=32": "steps=16", "intervals=4": "intervals=2"},
}  # fmt: skip
"""Steps, trials and sweeps of a notebook, and what is enough to run each of its cells (`--every-case`: as it is)."""


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


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


def test_it_is_paired_with_its_text(path):
    jupytext = pytest.importorskip("jupytext", reason="jupytext is not installed (pip install jupytext)")
    text = jupytext.read(path.with_suffix(".py"))
    sources = lambda notebook: [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert sources(text) == sources(nbformat.read(path, as_version=4)), (
        "run: jupytext --sync notebooks/*.ipynb"
    )


def test_it_runs_from_start_to_end(path, tmp_path, monkeypatch, request):
    monkeypatch.setenv("SHARDSCOPE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    for text, less in FEWER.get(path.stem, {}).items():
        cells = [cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source]
        assert cells, f"{text!r} is not in the notebook any more"
        for cell in cells if not request.config.getoption("--every-case") else ():
            cell.source = cell.source.replace(text, less)
    if any("TrainingLab(" in cell.source for cell in notebook.cells):
        notebook.cells.append(nbformat.v4.new_code_cell("assert not lab.problem, lab.problem\nlab.close()"))
    NotebookClient(
        notebook, timeout=180, store_widget_state=False, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
