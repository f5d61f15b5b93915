"""What is public: a change of it shows in review, and the pages and notebooks need nothing else."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
import pytest

import shardscope as ss
from public_api import PACKAGES, SNAPSHOT, public_names, snapshot

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("notebooks/**/*.md")), *sorted(ROOT.glob("notebooks/*.ipynb"))]
EXPERIMENTAL = (
    ss.goodput, ss.jitter, ss.scaling, ss.extrapolate, ss.observe, ss.train_population, ss.Population,
    ss.simulate.chakra,
)  # fmt: skip


def test_public_names_signatures_and_options_are_those_of_the_snapshot() -> None:
    stored, now = json.loads(SNAPSHOT.read_text()), json.loads(json.dumps(snapshot()))
    changed = {
        f"{part} {name}"
        for part in now
        for name in {**stored[part], **now[part]}
        if stored[part].get(name) != now[part].get(name)
    }
    assert changed == set(), "if that is intended: PYTHONPATH=tests python tests/public_api.py"


def test_few_names_are_public() -> None:
    assert len(ss.__all__) <= 75


@cache
def public() -> frozenset[str]:
    return frozenset([*PACKAGES, *public_names()])


def blocks(page: Path) -> list[str]:
    if page.suffix == ".md":
        return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    cells = nbformat.read(page, as_version=4).cells
    return [
        re.sub(r"^%.*$", "", cell.source, flags=re.MULTILINE) for cell in cells if cell.cell_type == "code"
    ]


def used_names(code: str) -> Iterator[str]:
    """Full names of ours that code imports, or reads from a module that it imported."""
    tree = ast.parse(code)
    modules = {}
    for node in ast.walk(tree):
        names = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
        home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for each in names:
            if each.name.startswith("shardscope") or home.startswith("shardscope"):
                modules[each.asname or each.name] = f"{home}{each.name}"
                yield f"{home}{each.name}"
    for node in ast.walk(tree):
        path = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else [""]
        if path[0] in modules and all(part.isidentifier() for part in path):
            yield ".".join([modules[path[0]], *path[1:]])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_and_notebooks_use_public_names_only(page: Path) -> None:
    """Of `ss.analytic.memory.module_memory` each part is public; members of a class or an object are not followed."""
    code = "\n\n".join(blocks(page))
    unknown = set()
    for name in used_names(code):
        parts = name.split(".")
        prefixes = [".".join(parts[: end + 1]) for end in range(len(parts))]
        known = [each for each in prefixes if each in public()]
        inner = name not in public() and (not known or known[-1] in PACKAGES or _is_module(known[-1]))
        if inner:
            unknown.add(name)
    assert unknown == set(), "add it to the public names, or use one of them"


def test_names_that_are_not_public_are_seen() -> None:
    lines = (
        "import shardscope as ss",
        "from shardscope_widgets import figures",
        "ss.Space, figures.nothing(1).x",
    )
    code = "\n".join([*lines, "ss.Run.attach"])
    assert set(used_names(code)) - public() == {
        "shardscope.Space", "shardscope_widgets.figures.nothing", "shardscope.Run.attach",
    }  # fmt: skip


@cache
def _is_module(name: str) -> bool:
    return inspect.ismodule(public_names().get(name))


def test_what_may_still_change_says_so() -> None:
    assert [
        each.__qualname__ for each in EXPERIMENTAL if "Experimental: may change" not in each.__doc__
    ] == []
    assert "experimental in its docstring" in (ROOT / "README.md").read_text()
