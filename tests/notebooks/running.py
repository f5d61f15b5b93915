"""Notebooks run from start to end, once per test session, and what their cells then show."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
RUN = [path for path in NOTEBOOKS if path.stem != "00-index"]
SHORT = "short.txt"
SHORTER = {'"python-source"': f'"{SHORT}"'}
"""A text of 100 kB: after its last step, a run evaluates its model on a tenth of the data, at most 512 rows."""
FEWER = {
    "01-tour": {"steps=200": "steps=60"},
    "02-architectures": {
        '"steps": 12': '"steps": 5', "steps=30": "steps=8", "steps=4)": "steps=2)", "batch=RANKS": "batch=8 * RANKS",
        **SHORTER,
    },
    "05-pipelines": {"steps=16": "steps=6", **SHORTER},
    "06-compression": {
        **SHORTER,
        '"steps": 20': '"steps": 6', "steps=60": "steps=20",
        "link=None, steps=12": 'link=None, steps=3, model="mlp", data="digits"',
    },
    "07-large-batch": {
        "batches=ss.PowersOfTwo(32, 512), seeds=(0, 1, 2)":
            "batches=ss.PowersOfTwo(32, 64), seeds=(0,), factors=(1.0,)",
    },
    "08-tuning": {
        "trials=16": "trials=6", "trials=18": "trials=7", "steps=32": "steps=16", "intervals=4": "intervals=2",
    },
    "10-bring-your-own": {"trials=6": "trials=4", "for method in mine:": "for method in mine[:1]:", **SHORTER},
    "11-twin": {
        "STEPS = 4": "STEPS = 2", "workers=(1, 4), kind": "workers=(1, 2), kind",
        '"gpt-nano", "data": "python-source"': '"mlp", "data": "digits"',
    },
    "12-faults": {
        "STEPS, MTBF_STEPS = 48": "STEPS, MTBF_STEPS = 24", "{2, min(max(best, 3), 15), 16}": "{2, 16}",
        "flops=2e8": "flops=1e9",
    },
    "13-data": {"80 kB/s": "400 kB/s"},
    "14-hybrid": {"STEPS = 12": "STEPS = 4", "TIMED = 8": "TIMED = 3", "flops=1e9": "flops=1e10", **SHORTER},
}  # fmt: skip
"""Steps, trials, sweeps and models of a notebook, and what is enough to run each of its cells (`--every-case`: as it
is). An evaluation takes longest for language models and small batches."""
PLOTLY = "application/vnd.plotly.v1+json"
NO_TORCH = "import sys\nassert 'torch' not in sys.modules, 'the first cell is slow: it imports torch'"
NO_PROBLEM = "assert not lab.problem, lab.problem\nlab.close()"


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder that all workers of a test session share."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


def run(path: Path, folder: Path, *, as_it_is: bool) -> nbformat.NotebookNode:
    """Return the notebook with its outputs; checks added to it raise in the cell that they follow."""
    notebook = nbformat.read(path, as_version=4)
    shutil.copy(argparse.__file__, folder / SHORT)
    for text, less in {} if as_it_is else FEWER.get(path.stem, {}).items():
        cells = [cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source]
        assert cells, f"{text!r} is not in the notebook any more"
        for cell in cells:
            cell.source = cell.source.replace(text, less)
    first = next(n for n, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    notebook.cells.insert(first + 1, nbformat.v4.new_code_cell(NO_TORCH))
    if any("TrainingLab(" in cell.source for cell in notebook.cells if cell.cell_type == "code"):
        notebook.cells.append(nbformat.v4.new_code_cell(NO_PROBLEM))
    resources = {"metadata": {"path": str(folder)}}
    with tempfile.TemporaryDirectory(
        prefix="kernel-"
    ) as short:  # the path of a socket has at most 107 characters
        NotebookClient(
            notebook, timeout=600, store_widget_state=False, resources=resources, config=_sockets_in(short)
        ).execute()
    return notebook


def _sockets_in(folder: str) -> Config:
    """Have a kernel listen on files. Jupyter chooses TCP ports before it starts one, and others may take them."""
    return Config(AsyncKernelManager={"transport": "ipc", "connection_file": f"{folder}/kernel.json"})


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def words(output: nbformat.NotebookNode) -> str:
    """The text of one output as a person reads it: a sentence, a table without its tags, or the labels of a figure."""
    if output.output_type == "stream":
        return output.text
    data = output.get("data", {})
    if PLOTLY in data:
        return json.dumps(data[PLOTLY], ensure_ascii=False)
    if "text/markdown" in data:
        return data["text/markdown"].replace(r"\$", "$").replace("<span>$</span>", "$")
    text = re.sub(r"<style.*?</style>", " ", data.get("text/html", ""), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text)) or data.get("text/plain", "")
