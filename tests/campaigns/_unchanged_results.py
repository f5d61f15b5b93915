"""Text and HTML of every kind of result and what the command line prints, for `unchanged.py`.

Runs, a population and a sweep are trained once, packed into the record, and read by every later comparison.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _unchanged_tools import attempt, plain

import shardscope as ss
from shardscope import cli
from shardscope.spec.space import Space

_MLP = {"model": "mlp", "data": "digits", "world_size": 2, "batch": 32, "steps": 12, "seed": 3}
_GPT = {"model": "gpt-nano", "data": "python-source", "world_size": 2, "batch": 8, "steps": 6, "seed": 3}
_RUNS: dict[str, dict[str, Any]] = {
    "ring": {**_MLP, "strategy": "ring", "eval_every": 6, "record": {"spans_first": 4}},
    "all-reduce": {**_MLP, "strategy": "all-reduce", "compression": "int8", "checkpoint": {"every": 4}},
    "server": {**_MLP, "strategy": "parameter-server:async"},
    "zero-3": {**_GPT, "strategy": "zero-3", "record": {"spans_first": 4}},
    "pipeline": {**_GPT, "strategy": "pipeline:1f1b", "record": {"spans_first": 4}},
    "emulated": {**_MLP, "strategy": "ring"},
    "recovered": {**_MLP, "strategy": "ring", "steps": 30, "checkpoint": {"every": 5}, "recovery": 1},
    "failed": {**_MLP, "strategy": "ring"},
}
_KILLED = ("recovered", "failed")
_SPACE = Space({"optimizer[adamw].lr": (1e-3, 1e-1, "log")})
_AGO = re.compile(r"\b\d+ ?(?:s|seconds?|min|minutes?|h|hours?|days?) ago\b")
_TIMES = re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?")


def train(root: Path) -> str:
    """Train what the results are of, and return its folder packed."""
    root.mkdir()
    for name, fields in _RUNS.items():
        cluster = ss.Cluster.emulated(2, "100 Mbit/s", "1 ms") if name == "emulated" else None
        faults = ss.Faults().kill(rank=1, step=18 if name == "recovered" else 3)
        run = ss.launch(
            ss.Job(**fields, name=name), cluster, root=root, faults=faults if name in _KILLED else None
        )
        with contextlib.suppress(ss.RunFailed):
            run.wait(120)
        shutil.move(run.path, root / name)
    job = ss.Job(**_MLP, strategy="ring")
    ss.train_population(job.replace(steps=8), _SPACE, members=2, intervals=2, folder=root / "population")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        archive.add(root, arcname=".")
    shutil.rmtree(root)
    return base64.b64encode(packed.getvalue()).decode()


def unpack(stored: str, root: Path) -> None:
    """Put the folder back."""
    root.mkdir()
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(stored)), mode="r:xz") as archive:
        archive.extractall(root, filter="data")


def _clean(text: str, root: Path) -> str:
    """Return a text without what differs from call to call: the folder, ages, ids of elements."""
    text = text.replace(str(root), "ROOT").replace(root.name, "ROOT")
    text = re.sub(r"\b[0-9a-f]{8}-[0-9a-f-]{27}\b|0x[0-9a-f]{6,}", "ID", text)
    return _AGO.sub("AGO", text)


def _cleaned(value: Any, root: Path) -> Any:
    if isinstance(value, str):
        return _clean(value, root)
    if isinstance(value, dict):
        return {_clean(key, root): _cleaned(each, root) for key, each in value.items()}
    return [_cleaned(each, root) for each in value] if isinstance(value, list) else value


def _shown(make: Callable[[], Any]) -> Any:
    """Return a result as text, as HTML and as data."""

    def show() -> dict[str, Any]:
        value = make()
        told: dict[str, Any] = {"repr": repr(value), "str": str(value)}
        if hasattr(value, "_repr_html_"):
            told["html"] = value._repr_html_()
        if hasattr(value, "to_dict"):
            told["data"] = plain(value.to_dict())
        frame = getattr(value, "frame", None)
        frame = frame() if callable(frame) else frame
        if frame is not None:
            told["frame"] = {str(name): str(list(column)) for name, column in frame.items()}
        return told

    return attempt(show)


def _shape(value: Any) -> Any:
    """Return measured data without its numbers, for what has to be measured anew."""
    if isinstance(value, dict):
        return {key: _shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shape(each) for each in value if not _is_of_git(each)]
    return (
        _TIMES.sub("N", value)
        if isinstance(value, str)
        else "NUMBER"
        if type(value) in {int, float}
        else value
    )


def _is_of_git(value: Any) -> bool:
    """Whether a sentence says how this checkout differs from that of a stored run."""
    return isinstance(value, str) and ("working directory" in value or "git commit" in value)


def _measured(root: Path) -> dict[str, Callable[[], Any]]:
    """Return the kinds of results that can only be measured anew."""
    job = ss.Job(**_MLP, strategy="ring")
    batches = ss.PowersOfTwo(low=16, high=32)
    swept = {"batches": batches, "optimizers": ("sgd",), "factors": (1.0,), "seeds": (0,), "progress": False}
    return {
        "check report": lambda: ss.check(job, root=root / "checks"),
        "batch sweep": lambda: ss.batch_sweep(job, **swept, root=root / "sweep"),
        "learning-rate range": lambda: ss.lr_range_test(job, steps=20, root=root / "range"),
        "scaling": lambda: ss.scaling(job, (1, 2), root=root / "scaling"),
    }


def _results(runs: Path) -> dict[str, Callable[[], Any]]:
    """Return every kind of result."""
    mlp, gpt = ss.Job(**_MLP, strategy="ring"), ss.Job(**_GPT, strategy="zero-2")
    h100 = ss.Cluster.of("h100", nodes=2)
    layout = ss.Layout(data=8, tensor=2, global_batch=64)
    found: dict[str, Callable[[], Any]] = {
        "prediction of a job": lambda: ss.predict(mlp),
        "prediction of a job on GPUs": lambda: ss.predict(gpt, ss.Cluster.of("h100", per_node=2)),
        "prediction of a layout": lambda: ss.predict("llama-3-8b", h100, layout),
        "memory of a job": lambda: ss.predict(gpt).memory,
        "time of a layout": lambda: ss.predict("llama-3-8b", h100, layout).time,
        "simulation": lambda: ss.simulate(mlp),
        "asynchronous simulation": lambda: ss.simulate.asynchronous(mlp.replace(strategy="parameter-server:async")),
        "plans": lambda: ss.plan("llama-3-8b", h100, global_batch=64, top=5, fix={"context": 1}),
        "extrapolation": lambda: ss.extrapolate(mlp, workers=(1, 2, 4)),
        "host calibration": ss.HostCalibration.shipped,
        "listing of runs": lambda: ss.runs(runs),
        "accuracy": lambda: ss.accuracy(runs),
        "accuracy of all": lambda: ss.accuracy(runs, all=True),
        "comparison of runs": lambda: ss.compare_runs([runs / "ring", runs / "all-reduce", runs / "emulated"]),
        "comparison of two": lambda: ss.compare_runs([runs / "ring", runs / "zero-3"]),
        "goodput": lambda: ss.goodput(runs / "recovered", mtbf_s=3600, steps=1000, every=10),
        "jitter": lambda: ss.jitter(runs / "ring"),
        "population": lambda: ss.Population(runs / "population"),
        "job": lambda: mlp, "layout": lambda: layout, "cluster": lambda: h100,
        "space": lambda: _SPACE, "model": lambda: ss.Model.of("mixtral-8x7b"),
    }  # fmt: skip
    for name in _RUNS:
        found[f"run {name}"] = lambda path=runs / name: ss.Run.attach(path)
        found[f"comparison of run {name}"] = lambda path=runs / name: ss.compare(path)
        found[f"explanation of run {name}"] = lambda path=runs / name: ss.explain(path)
    return found


_COMMANDS: tuple[str, ...] = (
    "runs --root {runs}", "runs --all --root {runs}", "accuracy --root {runs}", "accuracy --by model --root {runs}",
    "compare {runs}/ring {runs}/all-reduce", "predict llama-3-8b h100 --nodes 2 --data 8 --tensor 2 --global-batch 64",
    "simulate llama-3-8b --cluster h100 --nodes 2 --data 8 --tensor 2 --global-batch 64",
    "plan llama-3-8b h100 --nodes 2 --global-batch 64 --top 4 --fix context=1", "scoreboard", "cache",
    "stop {runs}/ring",
    "simulate --job {runs}/ring/job.json", "export {runs}/ring --format chrome-trace --to {root}/trace.json",
    "export {runs}/ring --format parquet --to {root}/parquet", "resize {runs}/ring 3", "predict nothing h100",
    "report {runs}/ring {runs}/zero-3 --to {root}/report.html",
    *(f"{command} {{runs}}/{name}" for command in ("show", "logs", "compare") for name in _RUNS),
)  # fmt: skip
_MEASURING: tuple[str, ...] = (
    "run --model mlp --ranks 2 --steps 4", "check --model mlp --ranks 2 --strategy ring", "doctor",
    "reproduce {runs}/ring", "tune --model mlp --ranks 2 --steps 4 --trials 2 --no-baselines --root {root}/study",
)  # fmt: skip
_ALL = (
    "lab", "demo", "run", "check", "compare", "reproduce", "stop", "resize", "runs", "show", "logs", "report", "export",
    "tune", "predict", "simulate", "plan", "scoreboard", "calibrate", "accuracy", "doctor", "cache",
)  # fmt: skip


def _printed(line: str) -> dict[str, Any]:
    """Return what a command prints, and its exit status."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status: Any = cli.main(line.split())
        except SystemExit as end:
            status = end.code
    text, told = out.getvalue(), [line for line in err.getvalue().splitlines() if not _is_of_git(line)]
    with contextlib.suppress(ValueError):
        return {"status": status, "json": json.loads(text), "err": told}
    return {"status": status, "out": text, "err": told}


def record(root: Path) -> dict[str, Any]:
    """Return every result as text and HTML, and what every command prints."""
    runs = root / "runs"
    found = {name: _shown(make) for name, make in _results(runs).items()}
    for command in _COMMANDS:
        for options in ("", " --json"):
            line = command.format(runs=runs, root=root) + options
            found[f"shardscope {command}{options}"] = _printed(line)
    for command in _MEASURING:
        line = command.format(runs=runs, root=root) + " --json"
        found[f"shardscope {command} --json"] = _shape(_cleaned(_printed(line), root))
    found |= {name: _shape(_cleaned(_shown(make), root)) for name, make in _measured(root).items()}
    found |= {f"shardscope {name} --help": _printed(f"{name} --help") for name in ("", *_ALL)}
    return {name: _cleaned(value, root) for name, value in found.items()}
