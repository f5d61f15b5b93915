"""MLCommons Chakra execution traces: the messages of the file format, and reading and writing one rank's file.

A file holds messages in protocol buffers' wire format, each preceded by its length: one with the version, then one for
each node. Names and numbers of the fields are those of Chakra's public schema (Sridharan et al. 2023, arXiv 2305.14516;
https://github.com/mlcommons/chakra); only fields that the simulator needs are described here, and others are skipped.
The library ``protobuf`` encodes and decodes the messages; it is imported when a trace is read or written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from shardscope.errors import SpecError

COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
"""Types of nodes: ``COMP_NODE``, ``COMM_SEND_NODE``, ``COMM_RECV_NODE`` and ``COMM_COLL_NODE``."""
COLLECTIVES = {
    0: "all_reduce", 2: "all_gather", 5: "broadcast", 6: "all_to_all", 7: "reduce_scatter", 9: "barrier",
}  # fmt: skip
"""Values of the attribute ``comm_type`` that the simulator knows."""
_GATHER = "all_gather"
_PACKAGE = "ShardscopeChakra"
_TYPES = {
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "fixed64": 6, "fixed32": 7, "bool": 8, "string": 9,
    "bytes": 12, "uint32": 13, "sfixed32": 15, "sfixed64": 16, "sint32": 17, "sint64": 18,
}  # fmt: skip
"""Numbers of the types in protocol buffers' own description, ``FieldDescriptorProto.Type``."""
_MESSAGE = 11
_VALUES = {
    f"{kind}_val": (3 + 2 * place, kind, False)
    for place, kind in enumerate((
        "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
        "sfixed64", "bool", "string", "bytes",
    ))
}  # fmt: skip
"""Fields for an attribute's value, exactly one of which is set; list fields, which have even numbers, are skipped."""
_MESSAGES: dict[str, dict[str, tuple[int, str, bool]]] = {
    "AttributeProto": {"name": (1, "string", False), **_VALUES},
    "GlobalMetadata": {"version": (1, "string", False), "attr": (2, "AttributeProto", True)},
    "Node": {
        "id": (1, "uint64", False), "name": (2, "string", False), "type": (3, "int32", False),
        "ctrl_deps": (4, "uint64", True), "data_deps": (5, "uint64", True), "start_time_micros": (6, "uint64", False),
        "duration_micros": (7, "uint64", False), "attr": (10, "bytes", True),
    },
}  # fmt: skip
"""Number and type of each field of each message, and whether the field is repeated.

A node's attributes are declared as bytes, which have the same encoding as messages. Most attributes occur in many
nodes, and bytes can be cached, so each attribute is decoded only once.
"""
_ONE_OF = "value"


class TraceNode(NamedTuple):
    """One node of a rank's trace."""

    id: int
    name: str
    type: int
    """`COMPUTE`, `SEND`, `RECEIVE`, `COLLECTIVE`, or another of Chakra's types."""
    after: tuple[int, ...] = ()
    """Ids of the nodes that must end before this node starts."""
    start_us: int = 0
    duration_us: int = 0
    attributes: Mapping[str, Any] = MappingProxyType({})
    """Values by name, such as ``comm_size`` (bytes; see `input_bytes`), ``comm_type``, ``comm_src``, ``comm_dst``,
    ``comm_tag`` and ``stream``."""


def input_bytes(comm_type: int, num_bytes: int, ranks: int) -> int:
    """Return ``comm_size`` of a collective on a whole tensor: the bytes of each rank's input.

    This is one rank's part for an all-gather, and the whole tensor for the other collectives, as in the traces that
    Chakra's own converter makes from PyTorch's, and as ASTRA-sim expects.
    """
    return -(-num_bytes // ranks) if COLLECTIVES.get(comm_type) == _GATHER else num_bytes


def tensor_bytes(comm_type: int, comm_size: int, ranks: int) -> int:
    """Return the bytes of the whole tensor of a collective; the inverse of `input_bytes`."""
    return comm_size * ranks if COLLECTIVES.get(comm_type) == _GATHER else comm_size


def write_nodes(path: Path, nodes: Iterable[TraceNode]) -> None:
    """Write the trace of one rank.

    Raises:
        SpecError: The library ``protobuf`` is not installed.
    """
    classes, proto = _classes(), _library("google.protobuf.proto")
    with path.open("wb") as file:
        proto.serialize_length_prefixed(classes["GlobalMetadata"](version="0.0.4"), file)
        for node in nodes:
            made = classes["Node"](
                id=node.id, name=node.name, type=node.type, data_deps=node.after,
                start_time_micros=node.start_us, duration_micros=node.duration_us,
                attr=[_encoded(name, value) for name, value in node.attributes.items()],
            )  # fmt: skip
            proto.serialize_length_prefixed(made, file)


def read_traces(paths: Sequence[Path]) -> list[list[TraceNode]]:
    """Return the nodes of each file; files with the same content share one list.

    Raises:
        SpecError: A file is not a Chakra trace, or the library ``protobuf`` is not installed.
    """
    known: dict[bytes, list[TraceNode]] = {}
    return [_read(path, known) for path in paths]


def _read(path: Path, known: dict[bytes, list[TraceNode]]) -> list[TraceNode]:
    _classes()
    error = _library("google.protobuf.message").DecodeError
    try:
        content = path.read_bytes()
        if content not in known:
            known[content] = list(_nodes(content))
    except (error, ValueError, OSError) as reason:
        raise SpecError(f"{path} is not a Chakra trace ({reason}); give a file such as step.0.et") from reason
    return known[content]


def _nodes(content: bytes) -> Iterator[TraceNode]:
    """Yield the nodes of a file, skipping its first message, which describes the file.

    Raises:
        ValueError: A message ends after the file.
        DecodeError: A message is corrupt.
    """
    classes = _classes()
    begin, at = _extent(content, 0)
    classes["GlobalMetadata"].FromString(content[begin:at])
    decode = classes["Node"].FromString
    while at < len(content):
        begin, at = _extent(content, at)
        node = decode(content[begin:at])
        yield TraceNode(
            node.id, node.name, node.type, (*node.ctrl_deps, *node.data_deps), node.start_time_micros,
            node.duration_micros, dict(map(_decoded, node.attr)),
        )  # fmt: skip


def _extent(content: bytes, at: int) -> tuple[int, int]:
    """Return the start and end of the message whose length, a base-128 number, is at index `at`.

    Raises:
        ValueError: The file ends before the message does.
    """
    size = shift = 0
    for place in range(at, len(content)):
        digit = content[place]
        size |= (digit & 127) << shift
        if digit < 128:
            end = place + 1 + size
            if end > len(content):
                break
            return place + 1, end
        shift += 7
    raise ValueError("the file ends within a node")


@lru_cache(maxsize=1 << 16, typed=True)  # True is not 1 here
def _encoded(name: str, value: Any) -> bytes:
    """Return an attribute as bytes."""
    field = {bool: "bool_val", str: "string_val"}.get(type(value), "int64_val")
    made: bytes = _classes()["AttributeProto"](name=name, **{field: value}).SerializeToString()
    return made


@lru_cache(maxsize=1 << 16)
def _decoded(attribute: bytes) -> tuple[str, Any]:
    """Return the name and value of an attribute; 0 for a list, which the simulator does not need."""
    made = _classes()["AttributeProto"].FromString(attribute)
    name = made.WhichOneof(_ONE_OF)
    return made.name, 0 if name is None else getattr(made, name)


def _library(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise SpecError(
            f"format='chakra' needs protobuf 5.29 or newer ({error}); pip install protobuf"
        ) from error


@cache
def _classes() -> dict[str, Any]:
    """Return the classes of the messages, made from their description."""
    descriptor = _library("google.protobuf.descriptor_pb2")
    file = descriptor.FileDescriptorProto(name="shardscope_chakra.proto", package=_PACKAGE, syntax="proto3")
    for message, fields in _MESSAGES.items():
        made = file.message_type.add(name=message)
        if message == "AttributeProto":
            made.oneof_decl.add(name=_ONE_OF)
        for name, (number, kind, is_repeated) in fields.items():
            label = 3 if is_repeated else 1
            field = made.field.add(name=name, number=number, type=_TYPES.get(kind, _MESSAGE), label=label)
            if name in _VALUES:
                field.oneof_index = 0
            if kind in _MESSAGES:
                field.type_name = f".{_PACKAGE}.{kind}"
    pool = _library("google.protobuf.descriptor_pool").DescriptorPool()
    pool.Add(file)
    made_class = _library("google.protobuf.message_factory").GetMessageClass
    return {name: made_class(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}
