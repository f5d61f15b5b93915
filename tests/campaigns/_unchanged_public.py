"""Public names with signatures and members, what imports load, and the wheel's files by room, for `unchanged.py`."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from public_api import member_text, signature_text

PACKAGES = ("shardscope", "shardscope_widgets", "shardscope_widgets.figures", "shardscope.analytic")
CHECKOUT = Path(__file__).parents[2]
_CALCULATORS = ("Job", "predict", "plan", "simulate", "Layout", "Cluster", "Calibration", "analytic")
_LOADED = (
    "import json, sys; {what}; print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
)


def _described(value: Any) -> dict[str, Any]:
    """Return the kind, the signature and the fields and public members of a public name."""
    if inspect.ismodule(value):
        return {"kind": "module", "names": sorted(getattr(value, "__all__", ()))}
    if not inspect.isclass(value):
        return {
            "kind": "function" if callable(value) else type(value).__name__,
            "signature": signature_text(value),
        }
    fields = getattr(value, "model_fields", None) or getattr(value, "__dataclass_fields__", None) or {}
    return {
        "kind": "class",
        "signature": signature_text(value),
        "fields": list(fields) or list(getattr(value, "_fields", ())),
        "members": {name: member_text(value, name) for name in dir(value) if not name.startswith("_")},
    }


def _loads(what: str) -> list[str]:
    """Return the packages that a fresh interpreter has loaded after a statement, without those of Python itself."""
    command = [sys.executable, "-c", _LOADED.format(what=what)]
    names = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return [name for name in names if name not in sys.stdlib_module_names and not name.startswith("__")]


def _wheel() -> dict[str, int]:
    """Return how many files of each suffix the wheel has by room: a folder below a package."""
    with (CHECKOUT / "pyproject.toml").open("rb") as file:
        packaged = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]
    listed = subprocess.run(
        ["git", "ls-files", "--", *packaged["include"], *packaged["shared-data"]],
        cwd=CHECKOUT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    folders = ["/".join(Path(name).parent.parts[1:3]) or Path(name).parts[0] for name in listed]
    suffixes = [Path(name).suffix for name in listed]
    pairs = zip(folders, suffixes, strict=True)
    return dict(Counter(f"{folder} {suffix}" for folder, suffix in pairs))


def record(_root: Path) -> dict[str, Any]:
    """Return what is public and what is loaded."""
    found: dict[str, Any] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        names = getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]
        found |= {f"{package}.{name}": _described(getattr(module, name)) for name in names}
        found[f"names of {package}"] = dict.fromkeys(sorted(names), "")
    for name in found["names of shardscope.analytic"]:
        part = found[f"shardscope.analytic.{name}"]
        if part["kind"] == "module":
            module = importlib.import_module(f"shardscope.analytic.{name}")
            found |= {
                f"{module.__name__}.{each}": _described(getattr(module, each)) for each in part["names"]
            }
    found["loaded by import shardscope"] = _loads("import shardscope")
    for name in _CALCULATORS:
        found[f"loaded by shardscope.{name}"] = _loads(f"import shardscope; shardscope.{name}")
    for name in ("shardscope_widgets", "shardscope_widgets.figures"):
        found[f"loaded by import {name}"] = _loads(f"import {name}")
    found["wheel"] = _wheel()
    return found
