"""Descriptions of spec fields, read from the docstring below each field in the source.

Pydantic's `use_attribute_docstrings` does the same, but searches all loaded modules for each class, which took a fifth
of the time that a notebook needs to show its first lab. Here, each file is parsed once.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from inspect import cleandoc
from typing import NamedTuple

from pydantic import BaseModel


class _Source(NamedTuple):
    """One class statement: its name, its first and last line, and the docstrings of its fields."""

    name: str
    first: int
    last: int
    texts: dict[str, str]


_parsed: dict[str, tuple[list[str], list[_Source]]] = {}
"""Lines of each parsed file, and the classes in it, by file name. A notebook's cell counts as a file."""


def describe_fields(cls: type[BaseModel]) -> None:
    """Use the docstring below each field of `cls` as its description; call this while `cls` is being created."""
    for name, text in _texts_of(cls).items():
        field = cls.model_fields.get(name)
        if field is not None and field.description is None:
            field.description = text


def _texts_of(cls: type[BaseModel]) -> dict[str, str]:
    frame = sys._getframe(1)  # noqa: SLF001 - the class statement is being executed in one of the frames
    while frame is not None:
        if frame.f_globals.get("__name__") == cls.__module__:
            for each in _classes_in(frame.f_code.co_filename):
                if each.name == cls.__name__ and each.first <= frame.f_lineno <= each.last:
                    return each.texts
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def _classes_in(file: str) -> list[_Source]:
    """Return the classes in a file, inner ones first; none if the source is unavailable."""
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    known = _parsed.get(file)
    if known is None or known[0] is not lines:
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:  # IPython's own syntax
            tree = ast.parse("")
        found = [_source(node) for node in _class_nodes(tree)]
        known = _parsed[file] = lines, sorted(found, key=lambda each: each.last - each.first)
    return known[1]


def _class_nodes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    """Yield the class statements in a tree, without looking into expressions."""
    for block in ("body", "orelse", "handlers", "finalbody"):
        nodes = getattr(tree, block, ())
        for node in nodes if isinstance(nodes, list) else ():
            if isinstance(node, ast.ClassDef):
                yield node
            yield from _class_nodes(node)


def _source(node: ast.ClassDef) -> _Source:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    texts = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(ast.Constant(str(text))):
                    texts[field.target.id] = cleandoc(text)
    return _Source(node.name, first, node.end_lineno or node.lineno, texts)
