"""The reference has a page for all that is public and for nothing else, and its links lead somewhere."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_markdown_cell, new_notebook

import shardscope
from public_api import RESULTS, SNAPSHOT

pytest.importorskip("sphinx", reason="Sphinx writes the reference; `make .venv/.installed-dev` installs it")
WEB = Path(__file__).parents[3] / "notebooks/web"
PUBLIC = json.loads(SNAPSHOT.read_text())


@pytest.fixture(scope="module")
def reference():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(WEB))
        yield importlib.import_module("reference")


@pytest.fixture(scope="module")
def pages(reference):
    return dict(reference.pages({"09-planner"}))


@pytest.fixture(scope="module")
def links(reference):
    return importlib.import_module("links")


@pytest.fixture(scope="module")
def rendered(reference):
    return importlib.import_module("rendered")


def documented(pages):
    """Full names for which the pages have a directive."""
    for text in pages.values():
        module = ""
        for directive, name in re.findall(r"^\.\. ([\w:]+):: ?(\S*)", text, re.MULTILINE):
            if directive == "py:currentmodule":
                module = name
            elif directive == "automodule":
                yield name
            elif directive.startswith(("auto", "py:")):
                yield f"{module}.{name.partition('(')[0]}"


def test_every_public_name_has_one_place_and_no_other_name_has_one(pages):
    found = list(documented(pages))
    assert len(found) == len(set(found))
    results = {f"{module}.{name}" for module, names in RESULTS.items() for name in names}
    twice = {f"shardscope.errors.{name}" for name in shardscope.__all__}
    called = {
        name for name in found if name.startswith("shardscope.simulate.")
    }  # functions of a public object
    assert called
    expected = (
        {*PUBLIC["names"], *results, "shardscope", "shardscope_widgets"} - twice - {"shardscope.__version__"}
    )
    assert set(found) - called == expected


def test_every_option_of_every_command_is_on_its_page(pages):
    for command, options in PUBLIC["commands"].items():
        if command != "shardscope":
            shown = re.findall(
                r"^\.\. option:: (.*)", pages[f"command-{command.split()[1]}.rst"], re.MULTILINE
            )
            words = {word.strip("[],.").upper() for line in shown for word in re.split(r"[ ,]+", line)}
            assert {option.upper() for option in options} <= words, command


def test_a_name_that_is_kept_for_old_code_has_no_page(pages):
    assert "CheckReport" not in shardscope.__all__
    assert "shardscope.CheckReport.rst" not in pages


def test_pages_of_the_guide_lead_to_rendered_notebooks_and_else_to_the_repository(reference):
    text = "See [a](../09-planner.ipynb), [b](../03-memory.ipynb), [c](planning.md) and `ss.plan`.\n\n---\n[README](x)"
    shown = reference.guide_page(text, {"09-planner"})
    assert shown == (
        'See <a href="../notebooks/09-planner.html">a</a>, '
        "[b](https://github.com/shardscope/shardscope/blob/main/notebooks/03-memory.ipynb), [c](planning.md) "
        "and {py:obj}`ss.plan <shardscope.plan>`.\n"
    )


def test_links_to_missing_files_and_anchors_are_found(links, tmp_path):
    (tmp_path / "page.js").write_text('[{ id: "memory", widget: "MemoryCalculator" }]')
    (tmp_path / "index.html").write_text(
        '<a href="sub/">1</a><a href="sub/index.html#here">2</a><a href="#memory?zero=2">3</a><a href="#not">4</a>'
        '<img src="no.png"><a href="https://example.org/a#b">5</a><a href="data:,">6</a>'
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/index.html").write_text('<p id="here"></p><a href="../index.html#gone">7</a>')
    assert links.broken_links(tmp_path) == [
        "index.html: #not", "index.html: no.png", "sub/index.html: ../index.html#gone",
    ]  # fmt: skip
    assert links.external_links(tmp_path) == ["https://example.org/a"]


def test_a_rendered_notebook_leads_to_others_that_are_rendered_and_else_to_the_repository(rendered):
    text = "# A title\n\n[a](01-tour.ipynb) and [b](02-architectures.ipynb#Part)"
    _, shown = rendered.as_html(new_notebook(cells=[new_markdown_cell(text)]), {"01-tour"})
    assert '<h1 id="A-title">A title</h1>' in shown
    assert 'href="01-tour.html"' in shown
    assert (
        'href="https://github.com/shardscope/shardscope/blob/main/notebooks/02-architectures.ipynb#Part"'
        in shown
    )


@pytest.mark.slow
def test_the_site_is_written_without_a_warning_and_every_link_inside_it_leads_somewhere(
    built, reference, rendered, links, tmp_path
):
    """All of the site but what only a browser runs: Pyodide, the front end, and outputs of notebooks.

    The build turns a warning of Sphinx into an error.
    """
    site = shutil.copytree(WEB / "site", tmp_path / "site")
    shutil.copytree(built / "reference", site / "reference")
    notebooks = [*WEB.parent.glob("*.ipynb")]
    names = {path.stem for path in notebooks}
    for path in notebooks:
        rendered.write_page(nbformat.read(path, as_version=4), path, site / "notebooks", names)
    for page in reference.GUIDE.glob("*.md"):
        assert {*re.findall(r"\(\.\./([\w-]+)\.ipynb", page.read_text())} <= names, page
    assert len(list(site.rglob("*.html"))) > 200
    assert links.broken_links(site) == []


@pytest.mark.slow
def test_a_reference_to_a_name_that_does_not_exist_is_an_error(reference, tmp_path, monkeypatch):
    monkeypatch.setattr(
        reference, "pages", lambda _: [("index.rst", "Title\n=====\n\n`ss.plan` and `ss.nothing`.\n")]
    )
    with pytest.raises(reference.SphinxFailed, match=r"shardscope\.nothing") as failed:
        reference.write_reference(tmp_path / "out")
    assert "shardscope.plan " not in str(failed.value)
