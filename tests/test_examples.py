"""Examples in docstrings do what they say; one that trains, measures or needs objects of the reader is marked +SKIP."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import shardscope as ss

ROOT = Path(__file__).parents[1]
SOURCES = [*(ROOT / "toolkit").rglob("*.py"), *(ROOT / "widgets").rglob("*.py")]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__"): path
    for path in SOURCES
    if "    >>> " in path.read_text()
}
"""Modules with examples, by name."""
GIVEN = {"ss": ss, "np": np}
"""Names that an example may use without an import, beside those of its own module."""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODULES))
def test_examples_in_docstrings_do_what_they_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong: list[str] = []
    for example in doctest.DocTestFinder().find(import_module(name), name, extraglobs=GIVEN):
        doctest.DocTestRunner(optionflags=FLAGS).run(example, out=wrong.append)
    assert "".join(wrong) == ""


def test_most_examples_run() -> None:
    examples = [
        line for path in MODULES.values() for line in path.read_text().splitlines() if " >>> " in line
    ]
    assert sum("+SKIP" in line for line in examples) < len(examples) / 3
