"""Measured steps of a GPU cluster as users provide them: CSV files, data frames, dictionaries, or logs of a trainer."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from math import inf, nan
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

from shardscope.calibration.software import assumed_software, software_of
from shardscope.errors import DataError, SpecError, quoted, unknown_name
from shardscope.foreign_file import parsed_json, unpacked
from shardscope.measure.calibrate.logs import decoded, row_of_log
from shardscope.measure.calibrate.rows import Row, set_fields
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Model, Transformer

MEASURED = ("step_time_s", "step_time_ms", "tokens_per_s", "tokens_per_s_per_device")
"""Each row has one of these columns: time of an optimizer step, or tokens per second on all devices or on one."""
COLUMNS = (
    *MEASURED,
    *Layout.model_fields,
    "model",
    "seq",
    "device",
    "per_node",
    "software",
    "label",
)
"""All columns that are read."""
OTHER_NAMES = {"cluster": "device", "step_s": "step_time_s", "step_ms": "step_time_ms"}
"""Other names of columns."""
_TABLES = (".csv", ".tsv")
Rows = str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]]
"""The path of a CSV or JSON file or of a log, a data frame, one row, or several."""


class Given(NamedTuple):
    """Values for all rows; a row's own columns take precedence."""

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
    listed = _listed(rows, given)
    if not listed:
        raise SpecError(f"rows={quoted(rows)} has no row; give at least one measured step")
    found = [_row(f"rows[{place}]", cells, given) for place, cells in enumerate(listed)]
    _check_same("device", [row.cluster.device.name for row in found])
    _check_same("link inside a node", [row.cluster.intra.name or row.cluster.intra.label for row in found])
    _check_same("software", [row.software for row in found])
    return found


def _listed(rows: Rows, given: Given) -> list[Mapping[str, Any]]:
    if isinstance(rows, str | Path):
        return _of_file(Path(rows), given)
    if isinstance(rows, Mapping):
        return [rows]
    if not isinstance(rows, Iterable):
        raise SpecError(f"rows={quoted(rows)} is not a list of rows; give rows=[...] or a file")
    to_dict = getattr(rows, "to_dict", None)  # of a data frame, or of one row of it
    records = (
        list(rows) if to_dict is None else to_dict("records") if hasattr(rows, "columns") else [to_dict()]
    )
    for place, cells in enumerate(records):
        if not isinstance(cells, Mapping):
            raise SpecError(
                f"rows[{place}]={quoted(cells)} is not a row; give a dictionary such as "
                '{"data": 8, "global_batch": 64, "step_time_s": 1.2}'
            )
    return records


def _of_file(path: Path, given: Given) -> list[Mapping[str, Any]]:
    kind = path.with_suffix("" if path.suffix == ".gz" else path.suffix).suffix.lower()
    try:
        data = unpacked(path)
        is_log = kind not in {*_TABLES, ".json"}
        text = (
            decoded(data) if is_log else data.decode("utf-8-sig")
        )  # Excel marks the byte order of its CSV files
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise DataError(f"rows={str(path)!r} cannot be read: {error}; give a CSV file or a log") from None
    if kind in _TABLES:
        try:
            return _of_csv(text, path.name)
        except csv.Error as error:
            raise DataError(f"rows={str(path)!r} is not a table: {error}; give one row per step") from None
    if kind == ".json":
        try:
            found = parsed_json(text)
        except ValueError as error:
            raise DataError(f"rows={str(path)!r} is not JSON: {error}; give a list of objects") from None
        if not isinstance(found, list | dict):
            raise SpecError(f"rows={str(path)!r} is not a list of rows; give a list of objects")
        return _listed(found, given)
    row = row_of_log(text, path.name, given.model)
    return [row if given.software is None else {**row, "software": given.software}]


def _of_csv(text: str, name: str) -> list[Mapping[str, Any]]:
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)  # Excel writes semicolons where the decimal sign is a comma
    reader = csv.reader(StringIO(text, newline=""), delimiter=delimiter)
    header = [cell.strip() for cell in next(reader, [])]
    twice = next((each for each in header if header.count(each) > 1), None)
    if twice is not None:
        raise SpecError(f"rows={name!r} has the column {twice!r} twice; leave one out")
    found: list[Mapping[str, Any]] = []
    for cells in filter(None, reader):
        if any(map(str.strip, cells[len(header) :])):
            raise SpecError(
                f"rows={name!r} has {len(cells)} cells in line {reader.line_num}, but {len(header)} columns; write "
                "numbers without a thousands separator, such as 52428"
            )
        found.append({each: _value(cell) for each, cell in zip(header, cells, strict=False)})
    return found


def _value(cell: str) -> Any:
    """Return the number or bool that a cell of a CSV file contains, None if it is empty, or its text."""
    text = cell.strip()
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


def _row(where: str, cells: Mapping[str, Any], given: Given) -> Row:
    known: dict[str, Any] = {}
    for given_name, value in cells.items():
        if _is_missing(value):
            continue
        name = OTHER_NAMES.get(given_name, given_name)
        if name not in COLUMNS:
            raise SpecError(f"{where}: {unknown_name('column', name, COLUMNS)}")
        if name in known:
            others = [other for other in cells if OTHER_NAMES.get(other, other) == name]
            raise SpecError(f"{where} has {' and '.join(others)}, which are one column; leave one out")
        known[name] = value
    try:
        model, layout = _model(known, given), _layout(known, given)
        cluster = _cluster(known, given, layout)
        layout.check(model, cluster)
        seconds = _seconds(known, model, layout)
        named = known.get("software", given.software)
        software = assumed_software(layout).software if named is None else software_of(named)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    inputs = {
        "label": str(known.get("label", where)), "layout": set_fields(layout),
        "model": model.model_dump(mode="json", exclude_defaults=True),
    }  # fmt: skip
    return Row("rows", model, cluster, layout, seconds, inputs, software.name)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)  # noqa: PLR0124 - NaN of a data frame


def _model(cells: Mapping[str, Any], given: Given) -> Transformer:
    name = cells.get("model")
    model = given.model if name is None else name if isinstance(name, Model) else Model.of(str(name))
    if model is None:
        raise SpecError(
            "the model is missing; give model='gpt3-175b', --model gpt3-175b in a shell, or a column model"
        )
    if not isinstance(model, Transformer):
        raise SpecError(f"model={name!r} is not a transformer, and only transformers have layouts")
    return model.replace(seq=_integer("seq", cells["seq"])) if "seq" in cells else model


def _layout(cells: Mapping[str, Any], given: Given) -> Layout:
    own = {name: _whole(cells[name]) for name in Layout.model_fields if name in cells}
    stated = own.keys() | (set() if given.layout is None else given.layout.model_fields_set)
    if "global_batch" not in stated:
        raise SpecError("global_batch is missing; give the sequences in one step")
    return Layout(**own) if given.layout is None else given.layout.replace(**own)


def _whole(value: Any) -> Any:
    """Return a whole number as an int: a data frame with empty cells has floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _integer(name: str, value: Any) -> int:
    found = _whole(value)
    if isinstance(found, bool) or not isinstance(found, Integral):
        raise SpecError(f"{name}={quoted(value)} is not an integer; give a whole number such as 8")
    return int(found)


def _cluster(cells: Mapping[str, Any], given: Given, layout: Layout) -> Cluster:
    """Return the part of the cluster that a layout uses.

    Raises:
        SpecError: No cluster is given and the row names no device, or the row contradicts the given cluster.
    """
    per_node = _integer("per_node", cells["per_node"]) if "per_node" in cells else None
    if given.cluster is None:
        if "device" not in cells:
            raise SpecError(
                "the cluster is missing; give cluster=ss.Cluster.of('a100-80gb'), --device a100-80gb in a shell, or a "
                "column device"
            )
        return sized(Cluster.of(str(cells["device"]), per_node=per_node), layout.num_devices)
    device = Cluster.of(str(cells["device"])).device.name if "device" in cells else None
    for name, told, known in (
        ("device", device, given.cluster.device.name),
        ("per_node", per_node, given.cluster.per_node),
    ):
        if told is not None and told != known:
            raise SpecError(
                f"{name}={told!r} contradicts the given cluster, which has {known!r}; omit the cluster or the column"
            )
    return sized(given.cluster, layout.num_devices)


def sized(cluster: Cluster, devices: int) -> Cluster:
    """Return a part of the cluster with this number of devices: whole nodes, or a part of one node."""
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
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else nan
    except OverflowError:
        number = inf
    if not 0 < number < inf:
        raise SpecError(f"{name}={quoted(value)} is not a measurement; give a finite number above 0")
    tokens = layout.global_batch * model.seq
    return {
        "step_time_s": number,
        "step_time_ms": number / 1e3,
        "tokens_per_s": tokens / number,
        "tokens_per_s_per_device": tokens / (number * layout.num_devices),
    }[name]


def _check_same(what: str, values: Sequence[str]) -> None:
    names = list(dict.fromkeys(values))
    if len(names) == 1:
        return
    where = [f"{name!r} in rows[{values.index(name)}]" for name in names[:2]]
    raise SpecError(
        f"rows are from several clusters: the {what} is {' and '.join(where)}; calibrate each with its own rows"
    )
