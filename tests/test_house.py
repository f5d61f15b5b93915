"""The rules of the house: who may import whom, what lies at the top, what a committed notebook holds."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

import shardscope
import shardscope.spec
import shardscope_widgets
import shardscope_widgets.figures
from shardscope.cli import build_parser

ROOT = Path(__file__).parents[1]
GROUND = {"errors", "_compat", "_experimental", "_lazy", "_version", "disk_cache", "foreign_file", "machine"}
FIRST = GROUND | {"show", "spec", "runlog", "storage"}
ENGINES = FIRST | {"training", "analytic"}
SECOND = ENGINES | {"methods"}
PREDICTED = SECOND | {"calibration", "prediction"}
THIRD = PREDICTED | {"planner", "runtime", "simulator"}
MAY_IMPORT = {
    "aliases": set(),
    "_lazy": set(),
    "errors": {"aliases"},
    "_compat": set(),
    "_experimental": set(),
    "_version": set(),
    "disk_cache": {"_version", "errors"},
    "foreign_file": set(),
    "machine": set(),
    "show": {"spec"},
    "spec": GROUND,
    "runlog": GROUND | {"spec"},
    "storage": GROUND | {"spec"},
    "training": FIRST,
    "analytic": FIRST,
    "methods": ENGINES,
    "calibration": GROUND | {"show", "spec"},
    "prediction": SECOND | {"calibration"},
    "planner": PREDICTED,
    "simulator": PREDICTED,
    "runtime": PREDICTED,
    "tuning": THIRD,
    "measure": THIRD,
    "conformance": THIRD | {"tuning", "measure"},
    "commands": THIRD | {"tuning", "measure"},
    "cli": THIRD | {"tuning", "measure", "commands"},
}
WITH_TORCH = {"training", "runtime", "tuning", "measure", "conformance", "commands", "cli"}
ALL_FLOORS = set(MAY_IMPORT)

NOTES = {"words", "sentences", "attempts", "trace"}
KIT = NOTES | {"figures", "kit", "html"}
MAY_SHOW = {
    "words": set(),
    "sentences": set(),
    "attempts": set(),
    "server": set(),
    "warm_start": set(),
    "trace": {"attempts"},
    "figures": NOTES,
    "kit": NOTES | {"figures"},
    "html": NOTES | {"figures", "kit"},
    "job_form": NOTES | {"figures", "kit"},
    "communication_calculator": KIT,
    "fault_lab": KIT,
    "memory_calculator": KIT,
    "pipeline_explorer": KIT,
    "planner": KIT,
    "report": KIT,
    "step_player": KIT,
    "twin": KIT,
    "training_lab": KIT | {"job_form", "fault_lab", "step_player"},
    "tuning_lab": KIT | {"job_form", "training_lab"},
    "lab": KIT | {"job_form", "fault_lab", "planner", "step_player", "training_lab", "tuning_lab", "twin"},
    "demo": KIT | {"report"},
}
"""What the modules and folders of the widgets may import of each other; a panel imports those that it contains."""

BY_NAME = {
    ("commands/demo.py", "shardscope_widgets"): "draws figures, and the shell lists every command",
    ("commands/report.py", "shardscope_widgets"): "draws figures, and the shell lists every command",
    (
        "commands/lab.py",
        "shardscope_widgets",
    ): "Jupyter loads its extensions by name, and notebooks lie there",
    ("measure/compression/curve.py", "shardscope_widgets"): "a result that notebooks show as its figure",
    ("spec/model/base.py", "training"): "`Model.from_module` is public; it traces, which needs torch",
    (
        "spec/compression.py",
        "analytic",
    ): "`bucket_bytes` is public; the formulas of a compressor import `spec`",
    ("spec/registry.py", "methods"): "finds the built-in methods by their folders",
    ("training/optim/user_defined.py", "methods"): "imports nothing; tells built-in classes by their package",
}
"""Modules of higher floors that a string names, by file and floor, with the reason."""
SOURCES = {"shardscope": "toolkit", "shardscope_widgets": "widgets"}
TOP_FOLDERS = {"toolkit", "notebooks", "widgets", "tests", "binder"}
LONG_FILE = 400


@cache
def tracked() -> tuple[Path, ...]:
    """Every file that is in the repository or would be added to it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a git checkout")
    return tuple(path for name in listed.splitlines() if (path := ROOT / name).is_file())


def python_files() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".py"]


def floor_of(path: Path) -> str:
    """The folder or module right below the package: the toolkit's floors, and the parts of the widgets."""
    return path.relative_to(ROOT).parts[2].removesuffix(".py")


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The imports and the constants of a file; it is parsed once for all rules."""
    kinds = ast.Import | ast.ImportFrom | ast.Constant
    return tuple(node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))


def imports(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, inside functions and for type checkers included."""
    package = path.relative_to(ROOT).with_suffix("").parts[1:-1]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            home = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{home}.{alias.name}" for alias in node.names)


def imports_by_name(path: Path) -> Iterator[str]:
    """Names of our modules in a file's strings: "module", "module:attribute", and imports in code for a child."""
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            whole = re.fullmatch(r"(shardscope(?:_widgets|\.\w+)[\w.]*?)(?::\w+)?\.?", node.value)
            yield from [whole[1]] if whole else []
            yield from re.findall(r"(?:^|;)\s*(?:from|import|-m) (shardscope[\w.]+)", node.value)


@cache
def exported(package: str) -> dict[str, str]:
    """Where the names of a lazy package come from, by its stub."""
    stub = (ROOT / SOURCES[package] / package / "__init__.pyi").read_text()
    pairs = re.findall(r"^from (\S+) import (\w+)", stub, re.MULTILINE)
    return {name: f"{home}.{name}" for home, name in pairs}


def place_of(name: str) -> str | None:
    """The floor of a name of the toolkit, and `widgets.` and the folder or module of one of the widgets."""
    package, first, *_ = [*name.split("."), "", ""]
    if package not in SOURCES:
        return None
    first = exported(package).get(first, f"{package}.{first}").split(".")[1] if first else first
    return first if package == "shardscope" else f"widgets.{first}"


def code_files(package: str) -> list[Path]:
    """A package's modules and stubs; its own lazy `__init__` reaches every floor by design."""
    top = ROOT / SOURCES[package] / package
    files = (path for path in tracked() if path.suffix in {".py", ".pyi"} and top in path.parents)
    return [path for path in files if path.with_suffix("") != top / "__init__"]


def toolkit_files() -> list[Path]:
    return code_files("shardscope")


def test_a_modules_entry_point_is_its_last_statement() -> None:
    """What stands behind it is not defined yet when the module is run."""
    files = [
        path
        for path in (*code_files("shardscope"), *code_files("shardscope_widgets"))
        if path.suffix == ".py"
    ]
    assert files
    for path in files:
        before = ast.parse(path.read_text("utf-8")).body[:-1]
        tests = [ast.unparse(each.test) for each in before if isinstance(each, ast.If)]
        assert not any("__main__" in test for test in tests), path


def test_the_house_has_the_floors_and_panels_of_this_list() -> None:
    assert {floor_of(path) for path in toolkit_files()} == ALL_FLOORS
    assert {floor_of(path) for path in code_files("shardscope_widgets")} == set(MAY_SHOW)
    named = set().union(*MAY_IMPORT.values(), WITH_TORCH)
    assert named <= ALL_FLOORS
    assert set().union(*MAY_SHOW.values()) <= set(MAY_SHOW)


def test_a_floor_imports_only_floors_below_it() -> None:
    offences, used = set(), set()
    for path in toolkit_files():
        allowed = MAY_IMPORT[floor_of(path)] | {floor_of(path), None}
        file = str(path.relative_to(ROOT / "toolkit/shardscope"))
        for name in imports(path):
            if place_of(name) not in allowed:
                offences.add(f"{file} imports {name}")
        for name in imports_by_name(path):
            floor = name.split(".")[0] if name.startswith("shardscope_widgets") else place_of(name)
            if floor not in allowed and floor in {*ALL_FLOORS, "shardscope_widgets"}:
                used.add((file, floor))
    assert offences == set()
    assert used == set(BY_NAME), "a string names a module of a higher floor"


def test_panels_share_only_the_figures_and_the_kit() -> None:
    """The halves of a figure lie in private modules, which panels may import: `_front` beside the function `front`."""
    offences = set()
    for path in code_files("shardscope_widgets"):
        own = floor_of(path)
        for name in [*imports(path), *imports_by_name(path)]:
            place = (place_of(name) or "").removeprefix("widgets.")
            is_ours = name.startswith("shardscope_widgets.")
            inner = [*name.split("."), "", ""][2]
            is_private = inner.startswith("_") and place not in {"figures", own}
            if is_ours and (place not in MAY_SHOW[own] | {own} or is_private):
                offences.add(f"{path.relative_to(ROOT)} imports {name}")
    assert offences == set()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("importlib.import_module('shardscope.tuning.tune')", "shardscope.tuning.tune"),
        ("run(extension='shardscope_widgets')", "shardscope_widgets"),
        ("HOOK = 'shardscope.cli:main'", "shardscope.cli"),
        ("run([python, '-c', 'import json; from shardscope.tuning import x'])", "shardscope.tuning"),
        ("GROUP = f'shardscope.methods.{folder}'", "shardscope.methods"),
    ],
)
def test_imports_by_a_string_are_seen(tmp_path: Path, line: str, name: str) -> None:
    file = tmp_path / "module.py"
    file.write_text(line)
    assert [*imports_by_name(file)] == [name]


def test_names_of_lazy_packages_stand_for_the_floor_that_they_come_from() -> None:
    assert place_of("shardscope.tune") == "tuning"
    assert place_of("shardscope_widgets.write_report") == "widgets.report"
    assert place_of("numpy.ma") is None


def test_the_floors_for_calculators_import_no_torch() -> None:
    offences = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in toolkit_files()
        if floor_of(path) not in WITH_TORCH and not path.name.startswith("_torch")
        for name in imports(path)
        if name.split(".")[0] == "torch"
    ]
    assert not offences


@pytest.mark.parametrize("code", ["import shardscope", "import shardscope.cli", "import shardscope.spec"])
def test_importing_loads_nothing_heavy(code: str) -> None:
    heavy = ["torch", "plotly", "ipywidgets", "optuna", "sklearn"]
    check = f"{code}, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "code",
    [
        "import shardscope_widgets.figures as made; made.loss; made.plans",
        "from shardscope_widgets import CommunicationCalculator as made; made()",
        "from shardscope_widgets import MemoryCalculator as made; made()",
        "from shardscope_widgets import PipelineExplorer as made; made()",
        "from shardscope_widgets import Planner as made; made()",
    ],
)
def test_figures_and_calculators_load_neither_torch_nor_optuna(code: str) -> None:
    heavy = ["torch", "optuna", "sklearn", "multiprocessing"]
    check = f"{code}; import sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "package", [shardscope, shardscope.spec, shardscope_widgets, shardscope_widgets.figures]
)
def test_every_name_in_a_stub_is_listed_once_and_found(package: ModuleType) -> None:
    stub = Path(package.__file__).with_suffix(".pyi").read_text()  # type: ignore[arg-type]
    lines = re.findall(r"^from \S+ import (\w+) as (\w+)(  # kept)?$", stub, re.MULTILINE)
    names, kept = (
        [name for name, same, mark in lines if name == same and bool(mark) == is_kept] for is_kept in (0, 1)
    )
    assert len(names) + len(kept) == len({*names, *kept}) == stub.count("from ") > 10
    assert set(names) <= set(package.__all__) <= set(dir(package)) - {*kept} | {*vars(package)}
    assert not {*kept} & {*package.__all__}
    assert {name for name in [*package.__all__, *kept] if not hasattr(package, name)} == set()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_names_can_be_imported_with_a_star() -> None:
    names: dict[str, object] = {}
    exec("from shardscope import *; from shardscope_widgets.figures import *", names)
    assert {*shardscope.__all__, *shardscope_widgets.figures.__all__} <= names.keys()


def test_only_the_agreed_folders_lie_at_the_top() -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in tracked() if path.parent != ROOT}
    assert {folder for folder in folders if not folder.startswith(".")} <= TOP_FOLDERS


def test_a_long_source_file_says_why_it_is_not_two() -> None:
    for path in (
        path for path in python_files() if {"toolkit", "widgets"} & set(path.relative_to(ROOT).parts)
    ):
        source = path.read_text()
        if lines_of_code(source) > LONG_FILE:
            assert "# Long because " in source, f"{path.relative_to(ROOT)} has over {LONG_FILE} lines of code"


def lines_of_code(source: str) -> int:
    """Lines that are not blank, comments or docstrings; of a short file, all lines."""
    if source.count("\n") <= LONG_FILE:
        return source.count("\n")
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = (
        token
        for token in tokens
        if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
    )
    return len({line for token in code for line in range(token.start[0], token.end[0] + 1)} - texts)


def test_notebooks_are_committed_without_results() -> None:
    for path in (path for path in tracked() if path.suffix == ".ipynb"):
        notebook = json.loads(path.read_text())
        assert "widgets" not in notebook["metadata"], f"{path.name} stores widget state"
        assert notebook["metadata"]["kernelspec"]["name"] == "python3"
        for cell in notebook["cells"]:
            assert cell.get("id"), f"{path.name} has a cell without an id"
            if cell["cell_type"] == "code":
                assert not cell["outputs"], f"{path.name} stores outputs; clear them"
                assert cell["execution_count"] is None, f"{path.name} stores execution counts; clear them"


def test_the_licence_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert project()["license"] == "Apache-2.0"


def test_versions_agree() -> None:
    assert project()["dynamic"] == ["version"]  # read from _version.py
    assert f"version: {shardscope.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{shardscope.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    pins = dict(
        re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "binder/constraints.txt").read_text(), re.MULTILINE)
    )
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    extras = [line for lines in project()["optional-dependencies"].values() for line in lines]
    for line in [*project()["dependencies"], *extras, *settings()["dependency-groups"]["dev"]]:
        wanted = Requirement(line)
        pin = pins.get(wanted.name.lower().replace("_", "-"))
        assert pin is not None, f"{wanted.name} is not in binder/constraints.txt; run make pins"
        assert wanted.specifier.contains(pin), f"{wanted} is pinned to {pin}"


BROUGHT_BY = {
    "IPython": "jupyterlab", "jupyter_server": "jupyterlab", "pydantic_core": "pydantic", "sklearn": "scikit-learn",
    "sqlalchemy": "optuna",
    "traitlets": "ipywidgets", "triton": "torch",
}  # fmt: skip
"""The declared package with which what is imported comes, where the names differ."""


def test_every_package_that_is_imported_is_declared() -> None:
    extras = [line for lines in project()["optional-dependencies"].values() for line in lines]
    declared = {Requirement(line).name for line in [*project()["dependencies"], *extras]}
    ours = {*sys.stdlib_module_names, "shardscope", "shardscope_widgets"}
    strangers = {
        (package, str(path.relative_to(ROOT)))
        for path in python_files()
        if path.relative_to(ROOT).parts[0] in {"toolkit", "widgets"}
        for package in {name.split(".")[0] for name in imports(path)} - ours
        if BROUGHT_BY.get(package, package) not in declared
    }
    assert strangers == set()


def test_torch_has_one_pin() -> None:
    pins = {
        re.search(r"^torch==(\S+)$", (ROOT / "binder" / name).read_text(), re.MULTILINE)[1]  # type: ignore[index]
        for name in ("torch-cpu.txt", "constraints.txt")
    }
    assert len(pins) == 1


def test_only_binder_names_a_package_index() -> None:
    index = re.compile("index" + r"-url|find" + r"-links|whl/" + "cpu")
    offenders = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.suffix in {"", ".toml", ".txt", ".cfg", ".yml", ".yaml", ".md", ".py"}
        and ROOT / "binder" not in path.parents
        and ROOT / "tests" not in path.parents
        and index.search(path.read_text(errors="replace"))
    ]
    assert offenders == []


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("notebooks/guide/*.md"), *ROOT.glob(".changes/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_and_file_in_the_pages_exists(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)) <= targets
    commands = set(build_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]
    assert set(re.findall(r"(?:^|`)shardscope ([a-z]+)", text, re.MULTILINE)) <= commands
    links = re.findall(r"(?:\]\(|(?:src|srcset)=\")(?!https?://|#)([^)#\"\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_sample_tests_for_contributors_stand_on_what_there_is() -> None:
    (sample,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    made: dict[str, object] = {"__name__": "sample"}
    exec(sample, made)
    assert {"TestQsgd", "TestCodec", "TestOnRanks"} <= made.keys()


def settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def project() -> dict:
    return settings()["project"]


def test_a_dependency_is_capped_only_where_its_reason_stands() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    lines = [line for line in text.splitlines() if re.match(r'\s*"[\w.\[\]-]+>=', line)]
    assert len(lines) > 20
    assert [line for line in lines if "<" in line.partition("#")[0] and "#" not in line] == []


def test_public_packages_import_without_torch() -> None:
    """Calculators and figures answer without it; only what runs methods or is built into them needs torch."""
    packages = [
        f"shardscope.{name}" for name in ("analytic", "measure", "prediction", "runlog", "runtime", "tuning")
    ]
    code = (
        "import importlib, sys\n"
        f"for name in ['shardscope', *{packages!r}, 'shardscope_widgets', 'shardscope_widgets.figures']:\n"
        "    module = importlib.import_module(name)\n"
        "    for public in getattr(module, '__all__', ()):\n"
        "        if public not in ('OwnAllReduce', 'SimpleCodec', 'check_method'):\n"
        "            getattr(module, public)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
