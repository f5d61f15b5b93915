"""Write the reference: a page for each public name and each command, from docstrings and parsers, and the guide.

    python notebooks/web/reference.py --out build/reference
    python -m http.server --directory build/reference

What is public is what `tests/public_api.py` finds, with which a test holds the code; no page lists names by hand.
`build.py` puts the reference beside the calculators. A warning of Sphinx, such as a reference to nothing, is an error.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from textwrap import indent
from types import GenericAlias
from typing import Any

from sphinx.ext.napoleon import GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path += [str(ROOT / "tests")]

from reference_commands import command_pages
from rst import cards, table, title, toctree

from public_api import RESULTS, signature_text, snapshot

GUIDE, IMAGES = ROOT / "notebooks/guide", ROOT / "notebooks/images"
GITHUB = "https://github.com/shardscope/shardscope/blob/main"
TOPICS = {
    "Jobs, models, layouts and clusters": ("spec", "storage"),
    "Runs": ("runtime",),
    "Predictions, simulations and plans": ("prediction", "simulator", "planner"),
    "Measured against predicted": ("measure", "calibration"),
    "Studies": ("tuning",),
    "Strategies, and methods of your own": ("methods", "training", "conformance"),
    "Errors and modules": ("errors", "analytic"),
}
"""Headings of the names of `shardscope`, and the rooms that these come from."""
PYDANTIC = ("model_config", "model_post_init")
"""Members that pydantic reads or calls, and users need not."""
PARTS = {
    "shardscope": ("shardscope", "Jobs, predictions, simulations, plans, runs and studies."),
    "shardscope.analytic": ("analytic", "The formulas: traffic, memory, pipeline schedules, reliability."),
    "shardscope_widgets": ("widgets", "Labs, calculators, players and reports for notebooks."),
    "shardscope_widgets.figures": ("figures", "Plotly figures of runs, studies, plans and formulas."),
    "results": ("results", "What predictions, comparisons and plans return."),
    "shardscope.errors": ("errors", "What a wrong setting raises, and what a failed run does."),
    "commands": ("command line", "All commands with their options."),
}
"""The parts of the reference: page, name in the side bar, and what it has."""


class SphinxFailed(Exception):
    """A warning or an error of Sphinx."""


def write_reference(out: Path, rendered: Collection[str] = ()) -> Path:
    """Write the reference to `out` and return it.

    Args:
        out: Folder of the pages.
        rendered: Stems of the notebooks that have pages in `../notebooks`; links to others lead to the repository.
    """
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder, "sources")
        shutil.copytree(HERE / "reference", sources)
        for name, text in pages(rendered):
            (sources / name).write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "-j", "auto", "-b", "html"]
        command += ["-c", HERE / "reference", "-d", Path(folder, "doctrees"), sources, out]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode or done.stderr:
        raise SphinxFailed(done.stderr)
    shutil.copytree(IMAGES, out / "images", dirs_exist_ok=True)
    return out


def pages(rendered: Collection[str]) -> Iterator[tuple[str, str]]:
    """Return file name and text of each page."""
    public = snapshot()
    names: dict[str, Any] = public["names"]
    guide = list(_guide_rows())
    yield "index.rst", _index(guide)
    for name in guide:
        yield f"{name}.md", guide_page((GUIDE / f"{name}.md").read_text(encoding="utf-8"), rendered)
    for package in ("shardscope", "shardscope_widgets", "shardscope_widgets.figures"):
        inside = [name for name in names if name.rpartition(".")[0] == package]
        yield f"{package}.rst", _package_page(package, inside)
        for name in inside:
            if not inspect.ismodule(_found(name)) and name != "shardscope.__version__":
                yield f"{name}.rst", _name_page(name, names[name], names)
    yield "shardscope.analytic.rst", _package_page("shardscope.analytic", [])
    for module in ("shardscope.errors", *_modules("shardscope.analytic", names)):
        yield f"{module}.rst", _module_page(module, names)
    results = {
        f"{module}.{name}": public["results"][name] for module, inside in RESULTS.items() for name in inside
    }
    yield "results.rst", _results_page(list(results))
    for name, about in results.items():
        yield f"{name}.rst", _name_page(name, about, names)
    yield from command_pages()


def guide_page(text: str, rendered: Collection[str]) -> str:
    """Return a page of the guide whose links and names lead to pages of the site."""

    def linked(match: re.Match[str]) -> str:
        text, path = match.groups()
        notebook = re.fullmatch(r"\.\./([\w-]+)\.ipynb", path)
        if notebook and notebook[1] in rendered:
            return f'<a href="../notebooks/{notebook[1]}.html">{text}</a>'  # no page of this build, for MyST
        return f"[{text}]({GITHUB}/{(GUIDE / path).resolve().relative_to(ROOT)})"

    text = text.rpartition("\n---\n")[0].replace('"../images/', '"images/')  # without the links back
    prose = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    prose[::2] = [re.sub(r"`ss\.([\w.]+)`", r"{py:obj}`ss.\1 <shardscope.\1>`", part) for part in prose[::2]]
    return re.sub(r"\[([^\]]+)\]\((\.\./[^)]+)\)", linked, "".join(prose))


def _guide_rows() -> dict[str, str]:
    """Return what the README's table says about each page of the guide."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"\(notebooks/guide/([\w-]+)\.md\) \| (.*?) \|", readme))


def _index(guide: list[str]) -> str:
    example = re.search(r"::\n\n((?:    .*\n|\n)+)", import_module("shardscope").__doc__ or "")
    rows = _guide_rows()
    assert example
    code = f".. code-block:: python\n\n{example[1]}"
    return (
        title("Guide and reference")
        + "Describe a distributed training job once; then predict it, simulate it and run it, side by side.\n\n"
        + f"{code}\n"
        + cards([(name, _sentence(rows[name].replace("`", "``"))) for name in guide])
        + title("Reference", "-")
        + cards([(f"{short} <{name}>", about) for name, (short, about) in PARTS.items()])
        + toctree(guide, "Guide")
        + toctree([f"{short} <{name}>" for name, (short, _) in PARTS.items()], "Reference")
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _package_page(package: str, inside: list[str]) -> str:
    module = import_module(package)
    described = inspect.getdoc(module) or ""
    text = title(package) + f".. automodule:: {package}\n\n"
    if not described:
        raise SphinxFailed(f"{package} has no docstring")
    if package == "shardscope.analytic":
        modules = [f"{package}.{name}" for name in module.__all__]
        return text + _summary(modules) + toctree([f"{name} <{package}.{name}>" for name in module.__all__])
    shown = [name for name in inside if not name.endswith("__version__")]
    for heading, names in _by_topic(shown).items() if package == "shardscope" else [("", shown)]:
        text += (title(heading, "-") if heading else "") + _summary(names)
    return text + toctree([name for name in shown if not inspect.ismodule(_found(name))])


def _by_topic(names: list[str]) -> dict[str, list[str]]:
    """Return the names under their headings; a name from a room without a heading is an error."""
    of_room = {room: heading for heading, rooms in TOPICS.items() for room in rooms}
    found: dict[str, list[str]] = {heading: [] for heading in TOPICS}
    for name in names:
        value = _found(name)
        home = value.__name__ if inspect.ismodule(value) else value.__module__
        found[of_room[home.split(".")[1]]].append(name)
    return found


def _module_page(module: str, names: dict[str, Any]) -> str:
    text = title(module) + f".. automodule:: {module}\n\n"
    inside = [name for name in names if name.rpartition(".")[0] == module]
    pages = {
        name: f"shardscope.{name.rpartition('.')[2]}" for name in inside
    }  # of names that are public twice
    text += _summary([pages[name] if pages[name] in names else name for name in inside])
    return text + "\n".join(_documented(name, names[name]) for name in inside if pages[name] not in names)


def _name_page(name: str, about: Any, names: dict[str, Any]) -> str:
    short = name.rpartition(".")[2]
    text = title(short)
    is_result = name not in names
    if is_result:
        makers = [
            f":py:obj:`{each} <{each}>`"
            for each, signature in names.items()
            if isinstance(signature, str) and re.search(rf"\b{short}\b", signature.rpartition("->")[2])
        ]
        text += f"Returned by {', '.join(makers)}; not imported by name.\n\n" if makers else ""
    else:
        text += f"``{name}``\n\n"
    return text + _documented(name, about)


def _results_page(results: list[str]) -> str:
    text = (
        title("Results")
        + "What public functions return. Where these classes lie may change; their members are public.\n\n"
    )
    return text + _summary(results) + toctree([f"{name.rpartition('.')[2]} <{name}>" for name in results])


def _documented(name: str, about: Any) -> str:
    """Return the directive for a name: a class with its fields and members, a function, or a value."""
    package, _, short = name.rpartition(".")
    value, kind = _found(name), _kind(_found(name))
    here = f".. py:currentmodule:: {package}\n\n"
    if kind == "data":
        return f"{here}.. py:data:: {short}\n\n{indent(_value_doc(name), '   ')}\n\n"
    if kind == "object":
        return here + _object(short, value)
    text = f"{here}.. auto{kind}:: {name if kind == 'module' else short}\n"
    if isinstance(about, dict):
        told = re.findall(
            r"^    (\w+): ", value.__doc__ or "", re.MULTILINE
        )  # fields, in the text of the class
        members = [each for each in [*about["fields"], *about["members"]] if each not in {*told, *PYDANTIC}]
        text += f"   :members: {', '.join(members)}\n" if members else ""
    return f"{text}\n"


def _kind(value: Any) -> str:
    """Return what a name stands for: one of autodoc's words, or ``object`` for one of ours that can be called."""
    if inspect.ismodule(value):
        return "module"
    if inspect.isclass(value) and not isinstance(value, GenericAlias):
        return "exception" if issubclass(value, BaseException) else "class"
    if inspect.isfunction(inspect.unwrap(value)):
        return "function"
    return "object" if type(value).__module__.startswith("shardscope.") and callable(value) else "data"


def _value_doc(name: str) -> str:
    """Return the text below the assignment of a value, which may stand in a module that the package imports."""
    package, _, short = name.rpartition(".")
    for home in [module for module in sys.modules if f"{module}.".startswith(f"{package}.")]:
        found = ModuleAnalyzer.for_module(home).find_attr_docs().get(("", short))
        if found:
            return "\n".join(found)
    raise SphinxFailed(f"{name} has no docstring")


def _object(name: str, value: Any) -> str:
    """Return directives for an object that is called like a function, and has functions as attributes."""
    functions = {name: value.__call__} | {
        f"{name}.{each}": getattr(value, each) for each in vars(type(value)) if not each.startswith("_")
    }
    text = ""
    for each, function in functions.items():
        signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature_text(function) or "()")
        doc = str(GoogleDocstring(inspect.getdoc(function) or ""))
        text += f".. py:function:: {each}{signature}\n\n{indent(doc, '   ')}\n\n"
    return text


def _summary(names: Iterable[str]) -> str:
    """Return a table of names with the first sentences of their docstrings."""
    return table([(f":py:obj:`{name.rpartition('.')[2]} <{name}>`", _first_sentence(name)) for name in names])


def _first_sentence(name: str) -> str:
    value = _found(name)
    doc = _value_doc(name) if _kind(value) == "data" else inspect.getdoc(value) or ""
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    return re.sub(r"(?<=\.)\s.*", "", paragraph).replace("|", r"\|")


def _modules(package: str, names: dict[str, Any]) -> list[str]:
    return [name for name in names if name.rpartition(".")[0] == package and inspect.ismodule(_found(name))]


def _found(name: str) -> Any:
    package, _, short = name.rpartition(".")
    return getattr(import_module(package), short)


def main() -> None:
    """Write the reference from the command line."""
    parser = argparse.ArgumentParser(description="Write the reference of public names and commands.")
    parser.add_argument("--out", type=Path, default=Path("build/reference"), help="folder (build/reference)")
    try:
        print(write_reference(parser.parse_args().out))
    except SphinxFailed as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
