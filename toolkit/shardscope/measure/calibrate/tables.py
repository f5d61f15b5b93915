"""Measured steps of a GPU cluster as users have them: CSV files, data frames, dictionaries, or logs of a trainer."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardscope.errors import DataError, SpecError, quoted, unknown_name
from shardscope.measure.calibrate.logs import row_of_log
from shardscope.measure.scoreboard.rows import Row
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Model, Transformer
from shardscope.spec.software import assumed_software, software_of

MEASURED = ("step_time_s", "step_time_ms", "tokens_per_s", "tokens_per_s_per_device")
"""Columns of which each row has one: time of an optimizer step, or tokens per second on all devices or on one."""
COLUMNS = (
    *MEASURED,
    *Layout.model_fields,
    "model",
    "seq",
    "device",
    "nodes",
    "per_node",
    "software",
    "label",
)
"""All columns that are read."""
Rows = str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]]
"""The path of a CSV or JSON file or of a log, a data frame, one row, or several."""


class Given(NamedTuple):
    """What rows have in common; a row's own columns come first."""

    cluster: Cluster | None = None
    model: Transformer | None = None
    layout: Layout | None = None
    software: str | None = None


def read_rows(rows: Rows, given: Given) -> list[Row]:
    """Return the measured steps in `rows`.

    Raises:
        DataError: A file cannot be read, or is neither a table nor a log of Megatron or torchtitan.
        SpecError: There is no row, a column is missing or unknown, a value is invalid, or the rows are of several
            clusters or software.
    """
    listed = _listed(rows)
    if not listed:
        raise SpecError(f"rows={quoted(rows)} has no row; give at least one measured step")
    found = [_row(f"rows[{place}]", cells, given) for place, cells in enumerate(listed)]
    _check_same("device", [row.cluster.device.name for row in found])
    _check_same("link inside a node", [row.cluster.intra.name or row.cluster.intra.label for row in found])
    _check_same("software", [row.software for row in found])
    return found


def _listed(rows: Rows) -> list[Mapping[str, Any]]:
    if isinstance(rows, str | Path):
        return _of_file(Path(rows))
    if isinstance(rows, Mapping):
        return [rows]
    records = rows.to_dict("records") if hasattr(rows, "to_dict") else list(rows)
    for place, cells in enumerate(records):
        if not isinstance(cells, Mapping):
            raise SpecError(
                f"rows[{place}]={quoted(cells)} is not a row; give a dictionary such as "
                '{"data": 8, "global_batch": 64, "step_time_s": 1.2}'
            )
    return records


def _of_file(path: Path) -> list[Mapping[str, Any]]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"rows={str(path)!r} cannot be read: {error}; give a CSV file or a log") from None
    if path.suffix == ".csv":
        return [
            {name: _value(cell) for name, cell in row.items()} for row in csv.DictReader(text.splitlines())
        ]
    if path.suffix == ".json":
        try:
            return _listed(json.loads(text))
        except ValueError as error:
            raise DataError(f"rows={str(path)!r} is not JSON: {error}; give a list of objects") from None
    return [row_of_log(text, path.name)]


def _value(cell: Any) -> Any:
    """Return the number or bool that a cell of a CSV file contains, None if it is empty, or its text."""
    text = cell.strip() if isinstance(cell, str) else ""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


def _row(where: str, cells: Mapping[str, Any], given: Given) -> Row:
    known = {name: value for name, value in cells.items() if not _is_missing(value)}
    for name in known:
        if name not in COLUMNS:
            raise SpecError(f"{where}: {unknown_name('column', name, COLUMNS)}")
    try:
        model, layout = _model(known, given), _layout(known, given)
        cluster = _cluster(known, given, layout)
        layout.check(model, cluster)
        seconds = _seconds(known, model, layout)
        named = known.get("software", given.software)
        software = assumed_software(layout).software if named is None else software_of(named)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    inputs = {"label": str(known.get("label", where)), "model": model.to_json(), "layout": layout.to_json()}
    return Row("rows", model, cluster, layout, seconds, inputs, software.name)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)  # noqa: PLR0124 - NaN of a data frame


def _model(cells: Mapping[str, Any], given: Given) -> Transformer:
    name = cells.get("model")
    model = given.model if name is None else name if isinstance(name, Model) else Model.of(str(name))
    if model is None:
        raise SpecError("the model is missing; give model='gpt3-175b' or a column model")
    if not isinstance(model, Transformer):
        raise SpecError(f"model={name!r} is not a transformer, and only transformers have layouts")
    return model.replace(seq=int(cells["seq"])) if "seq" in cells else model


def _layout(cells: Mapping[str, Any], given: Given) -> Layout:
    own = {name: _whole(cells[name]) for name in Layout.model_fields if name in cells}
    if given.layout is not None:
        return given.layout.replace(**own)
    if "global_batch" not in own:
        raise SpecError("global_batch is missing; give the sequences in one step")
    return Layout(**own)


def _whole(value: Any) -> Any:
    """Return a whole number as an int: a data frame with empty cells has floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _cluster(cells: Mapping[str, Any], given: Given, layout: Layout) -> Cluster:
    if "device" in cells and (given.cluster is None or given.cluster.device.name != cells["device"]):
        per_node = cells.get("per_node")
        usual = Cluster.of(str(cells["device"]), per_node=None if per_node is None else int(per_node))
        return sized(usual, layout.num_devices)
    if given.cluster is None:
        raise SpecError("the cluster is missing; give cluster=ss.Cluster.of(...) or a column device")
    return sized(given.cluster, layout.num_devices)


def sized(cluster: Cluster, devices: int) -> Cluster:
    """Return as many of the cluster's nodes as have this number of devices, or a part of one node."""
    if cluster.num_devices == devices or cluster.groups:
        return cluster
    per_node = min(cluster.per_node, devices)
    name = f"{devices} x {cluster.device.name}"
    return cluster.replace(name=name, nodes=max(1, devices // per_node), per_node=per_node)


def _seconds(cells: Mapping[str, Any], model: Transformer, layout: Layout) -> float:
    given = [name for name in MEASURED if name in cells]
    if len(given) != 1:
        told = f"has {' and '.join(given)}" if given else "has no measured time"
        raise SpecError(f"{told}; give one of {', '.join(MEASURED)}")
    name, value = given[0], cells[given[0]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise SpecError(f"{name}={quoted(value)} is not a measurement; give a finite number above 0")
    tokens = layout.global_batch * model.seq
    return {
        "step_time_s": float(value),
        "step_time_ms": value / 1e3,
        "tokens_per_s": tokens / value,
        "tokens_per_s_per_device": tokens / (value * layout.num_devices),
    }[name]


def _check_same(what: str, values: Sequence[str]) -> None:
    names = list(dict.fromkeys(values))
    if len(names) == 1:
        return
    where = [f"{name!r} in rows[{values.index(name)}]" for name in names[:2]]
    raise SpecError(
        f"rows are of several clusters: the {what} is {' and '.join(where)}; calibrate each with its own rows"
    )
