"""The public names as data: what `tests/test_public_api.py` compares with `public_api.json`, which this file writes.

PYTHONPATH=tests python tests/public_api.py
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

from shardscope.cli import build_parser

SNAPSHOT = Path(__file__).with_name("public_api.json")
PACKAGES = ("shardscope", "shardscope.analytic", "shardscope_widgets", "shardscope_widgets.figures")
RESULTS = {
    "shardscope.measure.accuracy": ["Accuracy"],
    "shardscope.measure.compare.comparison": ["Comparison"],
    "shardscope.measure.compare_runs.comparison": ["RunsComparison"],
    "shardscope.measure.explain.of_run": ["Explanation"],
    "shardscope.measure.goodput": ["ExpectedGoodput"],
    "shardscope.measure.scaling.result": ["Scaling"],
    "shardscope.planner": ["Plans"],
    "shardscope.prediction.job": ["JobPrediction"],
    "shardscope.prediction.layout": ["Prediction"],
    "shardscope.runlog.summary": ["Summary"],
    "shardscope.runtime.tools.check_report": ["CheckReport"],
    "shardscope.simulator": ["AsyncSimulation", "Simulation"],
}
"""Classes that public functions return: their members are public, where they lie is not."""


def signature_text(of: Any) -> str | None:
    """A signature without names of modules and addresses; None if there is none."""
    try:
        text = str(inspect.signature(of))
    except (TypeError, ValueError):
        return None
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])", "", text)


def member_text(of: type, name: str) -> str:
    """Kind and signature of a member of a class."""
    value = inspect.getattr_static(of, name)
    if isinstance(value, classmethod | staticmethod):
        return f"{type(value).__name__} {signature_text(getattr(of, name))}"
    if inspect.isfunction(value):
        return f"method {signature_text(value)}"
    return "property" if isinstance(value, property) or hasattr(value, "func") else "attribute"


def fields_of(value: type) -> list[str]:
    """Names of the fields of a spec, a dataclass or a named tuple."""
    fields = getattr(value, "model_fields", None) or getattr(value, "__dataclass_fields__", None) or {}
    return list(fields) or list(getattr(value, "_fields", ()))


def described(value: Any, known: set[type]) -> Any:
    """The signature of a function; that of a class, its fields, and the members that no class in `known` has."""
    if inspect.ismodule(value):
        return "module"
    if not inspect.isclass(value):
        return signature_text(value) if callable(value) else type(value).__name__
    if issubclass(value, BaseException):
        return f"error, a {value.__base__.__name__}"
    own = [
        each
        for each in value.__mro__
        if each.__module__.startswith("shardscope") and not (each in known and each is not value)
    ]
    members = sorted({name for each in own for name in vars(each) if not name.startswith("_")})
    return {
        "signature": signature_text(value),
        "fields": fields_of(value),
        "members": {name: member_text(value, name) for name in members if name not in fields_of(value)},
    }


def public_names() -> dict[str, Any]:
    """Every public name and what it stands for; the modules of `shardscope.analytic` with their own names."""
    found: dict[str, Any] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            found[f"{package}.{name}"] = value
            if inspect.ismodule(value) and package == "shardscope.analytic":
                found |= {f"{package}.{name}.{each}": getattr(value, each) for each in value.__all__}
    raised = inspect.getmembers(importlib.import_module("shardscope.errors"), inspect.isclass)
    return found | {
        f"shardscope.errors.{name}": each for name, each in raised if issubclass(each, BaseException)
    }


def results() -> dict[str, type]:
    """The classes of `RESULTS`, by name."""
    return {
        name: getattr(importlib.import_module(module), name)
        for module, names in RESULTS.items()
        for name in names
    }


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Arguments and options of a command, without those for help."""
    names = [
        action.option_strings or [str(action.metavar or action.dest).upper()]
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    ]
    return sorted(name for each in names for name in each)


def commands() -> dict[str, list[str]]:
    """The commands with their arguments and options."""
    parser = build_parser()
    (group,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return {"shardscope": options_of(parser)} | {
        f"shardscope {name}": options_of(each) for name, each in group.choices.items()
    }


def snapshot() -> dict[str, Any]:
    """All that is public, as JSON can hold it."""
    names, found = public_names(), results()
    known = {value for value in [*names.values(), *found.values()] if inspect.isclass(value)}
    return {
        "names": {name: described(value, known) for name, value in sorted(names.items())},
        "results": {name: described(value, known) for name, value in sorted(found.items())},
        "commands": dict(sorted(commands().items())),
    }


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(snapshot(), indent=1, ensure_ascii=False) + "\n")
