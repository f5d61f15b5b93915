"""A digest of the code of a user-defined class, with which a saved job identifies that class."""

from __future__ import annotations

import hashlib
import inspect
import re
from types import CodeType, FunctionType
from typing import Any

_DIGEST = "_code_digest"
_PACKAGE = "shardscope."
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def digest_of(cls: type[Any]) -> str:
    """Return the SHA-256 digest of a class's code; equal source gives an equal digest in every process.

    The digest covers the class and its user-defined base classes: settings with their bounds, functions, and other
    attributes. Code that these functions call is not covered. The digest is stored as an attribute of the class, and
    is therefore pickled with it; the source is not pickled.
    """
    kept = vars(cls).get(_DIGEST)
    if isinstance(kept, str):
        return kept
    own = [
        base
        for base in cls.__mro__
        if not base.__module__.startswith((_PACKAGE, "pydantic", "builtins", "abc"))
    ]
    found = hashlib.sha256(repr([_described(base) for base in own]).encode()).hexdigest()
    setattr(cls, _DIGEST, found)
    return found


def _described(cls: type[Any]) -> list[Any]:
    fields = getattr(cls, "__pydantic_fields__", {})
    settings = [
        (name, _plain(info.annotation), _plain(info.metadata), _default(info))
        for name, info in fields.items()
    ]
    members = [
        (name, _text_of(value))
        for name, value in vars(cls).items()
        if not name.startswith("__") and name not in (_DIGEST, "_abc_impl", "model_config", "model_fields")
    ]
    return [cls.__name__, sorted(settings), sorted(members)]


def _default(info: Any) -> str:
    return _text_of(info.default_factory) if info.default_factory else _plain(info.default)


def _text_of(member: Any) -> str:
    """Return the source of a function, or its compiled code if there is no source; for other members the repr."""
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    if not isinstance(function, FunctionType):
        return _plain(member)
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return repr(
            (_compiled(function.__code__), _plain(function.__defaults__), _plain(function.__kwdefaults__))
        )


def _compiled(code: CodeType) -> tuple[Any, ...]:
    """Return the compiled code of a function, without its file name and line numbers."""
    constants = [_compiled(each) if isinstance(each, CodeType) else _plain(each) for each in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, constants


def _plain(value: Any) -> str:
    """Return the repr of a value, with sets sorted and memory addresses removed."""
    if isinstance(value, set | frozenset):
        return repr(sorted(map(_plain, value)))
    return _ADDRESS.sub("", repr(value))
