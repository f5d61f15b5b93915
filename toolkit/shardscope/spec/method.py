"""Base class of methods, which implement parts of training; a kind is a type of method, such as optimizers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import cache
from inspect import Parameter, Signature
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, SerializerFunctionWrapHandler, model_serializer

from shardscope.errors import SpecError, quoted, unknown_name
from shardscope.spec import registry
from shardscope.spec._base import Spec, takes, without_unknown
from shardscope.spec.code_digest import digest_of
from shardscope.spec.job_parts import UserCode
from shardscope.spec.look import DASHES, MethodStyle

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass

    Required = TypeVar("Required")

    def required(function: Required) -> Required:
        """Mark a member of a kind's base class that every method of this kind must define."""
        return function
else:
    ModelMetaclass = type(BaseModel)
    required = abstractmethod


_ORIGINS = ("code", "package", "observed")
"""JSON keys that state the origin of a method that is not built in: the digest of a user-defined class, an installed
package, or the torch class that `ss.observe` saw in a user's own training loop."""


class _ByName(ModelMetaclass):
    """Metaclass that lets a kind's base class construct methods by name: ``LRSchedule("cosine", final_ratio=0.1)``.

    Type checkers see only the base class's `__init__`: neither this metaclass, nor that the class is abstract.
    """

    if not TYPE_CHECKING:

        def __call__(cls, /, *args: Any, **fields: Any) -> Any:  # noqa: N805 - `cls` is right in a metaclass
            if Method in cls.__bases__:
                return cls.by_name(*args, **fields)
            if cls.__abstractmethods__:
                registry.check(cls)  # raises an error that names the missing members
            return super().__call__(*args, **fields)


class Method(Spec, metaclass=_ByName):
    """Base class of all kinds of methods. The fields of a method are its settings, each of which needs a default.

    A kind is a direct subclass, which sets `kind` and `folder`. A method is a subclass of a kind, which sets `name`. In
    JSON, a method is represented by its name and settings. A user-defined method also has a digest of its code, and a
    method from an installed package also has the package's name.
    """

    _positional = "name"

    kind: ClassVar[str]
    """Name of the kind in error messages: the job field for such methods, for example ``lr_schedule``."""
    folder: ClassVar[str]
    """The folder of the built-in methods of this kind, in `shardscope.methods`."""
    needs_code: ClassVar[tuple[str, ...]] = ()
    """Members with defaults that a stand-in for a missing class must not use, because the class may override them."""
    name: ClassVar[str]
    """The method's name, unique within its kind: lower-case letters, digits and hyphens."""

    @classmethod
    def by_name(cls, /, *args: Any, **fields: Any) -> Any:
        """Return the method of this kind with this name and these settings; None leaves a setting at its default.

        Raises:
            SpecError: There is no method with this name, or it does not accept these settings.
        """
        fields = cls._with_positional(args, fields) if args else fields
        if "name" not in fields:
            raise SpecError(f"{cls.__name__} needs a name; give one of {', '.join(registry.names(cls))}")
        method = registry.require_known(cls, fields.pop("name"))
        if not fields:
            return _at_defaults(method) if registry.origin(method) == "built-in" else method()
        fields = without_unknown(method, fields)
        for setting in fields.keys() - method.model_fields.keys():
            if fields[setting] is not None:
                raise _no_setting(method, setting, fields[setting])
        given = {key: each for key, each in fields.items() if each is not None or _takes_none(method, key)}
        return method(**given)

    @classmethod
    def from_fields(cls, fields: Any) -> Any:
        """Build the method described by JSON, or a stand-in if its code or package is unavailable in this process.

        Raises:
            SpecError: There is no such method, or it does not accept these settings.
        """
        if not isinstance(fields, dict):
            return super().from_fields(fields)
        name, origin = (
            fields.get("name"),
            {key: fields[key] for key in _ORIGINS if fields.get(key) is not None},
        )
        found = registry.find(cls.base_class(), name) if isinstance(name, str) else None
        ignored = ("name", *_ORIGINS)
        settings = {key: value for key, value in fields.items() if key not in ignored}
        if Method not in cls.__bases__:  # `cls` is a method, not a kind; the fields may include its name
            return super().from_fields(settings if name == cls.name else fields)
        if origin:
            if not all(isinstance(text, str) for text in (name, *origin.values())):
                raise SpecError(
                    f"{cls.kind}={quoted(fields)} has a name, package or code digest that is not a string; give strings"
                )
            if (
                found is None
                or "observed" in origin
                or ("code" in origin and found.code_digest() != origin["code"])
            ):
                return _stand_in(cls, str(name), origin, settings)
        return super().from_fields(settings | ({"name": name} if "name" in fields else {}))

    @classmethod
    def resolve(cls, value: Any) -> Any:
        """Convert the value of a job's field (a name, JSON fields, a class or a method) to a method."""
        if isinstance(value, str):
            return cls.by_name(value)
        if isinstance(value, dict):
            return cls.from_fields(value)
        if isinstance(value, type) and issubclass(value, cls):
            registry.register_used(value)
            return value()
        if not isinstance(value, cls):
            article = "an" if cls.__name__[0] in "AEIOU" else "a"
            raise SpecError(
                f"{cls.kind}={quoted(value)} is not {article} {cls.__name__}; give a name such as "
                f"{registry.names(cls)[0]!r}, or an object of this class"
            )
        if not isinstance(value, _Unloaded):
            registry.register_used(type(value))
        return value

    @classmethod
    def check_class(cls) -> None:
        """Check the members of a class before it is registered. The base class of a kind may extend this check.

        Raises:
            SpecError: A member is invalid; the message names it.
        """
        look = getattr(cls, "look", None)
        if look is not None and not (isinstance(look, MethodStyle) and look.dash in DASHES):
            raise SpecError(
                f"{cls.__name__}.look={look!r} is not a MethodStyle with a valid dash; write "
                f"MethodStyle(colour, dash, symbol) with one of the dashes {', '.join(DASHES)}"
            )

    def __str__(self) -> str:
        return repr(self)

    @classmethod
    def heading(cls) -> str:
        """Return the method's name for lists."""
        return cls.name

    @classmethod
    def base_class(cls) -> type[Method]:
        """Return the base class of the method's kind, such as `LRSchedule`."""
        return next(base for base in cls.__mro__ if Method in base.__bases__ and base is not _Unloaded)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings and their values."""
        return {field: getattr(self, field) for field in type(self).model_fields}

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults, with their values."""
        fields = type(self).model_fields.items()
        usual = {name: info.get_default(call_default_factory=True) for name, info in fields}
        return {
            name: getattr(self, name) for name, default in usual.items() if getattr(self, name) != default
        }

    @property
    def label(self) -> str:
        """The method's name and the settings that differ from their defaults, such as ``topk ratio=0.05``."""
        given = self.changed
        words = (f"{value:g}" if isinstance(value, float) else f"{value}" for value in given.values())
        return " ".join([self.name, *map("=".join, zip(given, words, strict=True))])

    @property
    def is_here(self) -> bool:
        """Whether the method's code is loaded, rather than only its name and settings."""
        return True

    def require_here(self) -> None:
        """Reject a method whose code is not loaded.

        Raises:
            SpecError: The code is not loaded; the message states where to get it.
        """

    @property
    def user_code(self) -> UserCode | None:
        """The method's class as `UserCode` if it is user-defined; None otherwise."""
        cls = type(self)
        if (
            cls.code_digest() is None
        ):  # this call also stores the digest on a user-defined class, for pickling
            return None
        return UserCode.of(cls, name=cls.name)

    @classmethod
    def code_digest(cls) -> str | None:
        """Return the digest of a user-defined class's code, equal for equal source; None for other methods.

        The digest covers the class's settings and functions, but not the code that these functions call.
        """
        return digest_of(cls) if registry.origin(cls) == "user" else None

    @classmethod
    def _prefix(cls) -> str:
        return f"{cls.kind}."

    @classmethod
    def _signature(cls) -> Signature:
        if "kind" not in vars(cls):
            return super()._signature()
        named = Parameter("name", Parameter.POSITIONAL_OR_KEYWORD, annotation=str)
        return Signature([named, Parameter("settings", Parameter.VAR_KEYWORD)])

    @classmethod
    def _in_annotation(cls) -> str:
        return f"str | {cls.__name__}"

    def _in_signature(self) -> str:
        return repr(self.label)

    @model_serializer(mode="wrap")
    def _with_name(self, write_fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"name": self.name, **write_fields(self), **self._origin()}

    def _origin(self) -> dict[str, str]:
        """Return the additional JSON keys of a method that is not built in."""
        found = {"code": self.code_digest(), "package": registry.package_of(type(self))}
        return {key: text for key, text in found.items() if text is not None}


def methods_in(place: str, value: Any) -> Iterator[tuple[str, Method]]:
    """Yield pairs of a path and a method: the method in a field, then those in its settings (``strategy.schedule``)."""
    if isinstance(value, Method):
        yield place, value
        for setting, each in value.settings.items():
            yield from methods_in(f"{place}.{setting}", each)


class _Unloaded(Method):
    """Stand-in for a user-defined or installed method whose code is not loaded; it has only a name and settings."""

    _from: dict[str, str] = PrivateAttr()

    def replace(self, **changes: Any) -> Any:
        return _stand_in(self.base_class(), self.name, self._from, {**self.settings, **changes})

    def __reduce__(self) -> tuple[Any, ...]:
        return _stand_in, (self.base_class(), self.name, self._from, self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, **(self.model_extra or {})}

    @property
    def is_here(self) -> bool:
        return False

    def require_here(self) -> None:
        if "observed" in self._from:
            raise SpecError(
                f"{self.kind}={self.name!r} was observed in a training script by ss.observe and cannot be launched; "
                f"use for example {registry.names(self.base_class())[0]!r}"
            )
        if "package" in self._from:
            raise registry.why_not_here(self.base_class(), self.name, self._from["package"])
        _ = UserCode(name=self.name).function  # raises SpecError, since no code is loaded

    @property
    def user_code(self) -> UserCode | None:
        return UserCode(name=self.name) if "code" in self._from else None

    def _origin(self) -> dict[str, str]:
        return self._from


def _stand_in(kind: type[Method], name: str, origin: dict[str, str], settings: dict[str, Any]) -> Any:
    """Return a stand-in for a method of this `kind`; its required members raise an error."""
    made: Any = _stand_in_class(kind, name)(**settings)
    made._from = origin  # noqa: SLF001 - a class of this module
    return made


@cache
def _stand_in_class(kind: type[Method], name: str) -> Any:
    def refuse(self: Method, *_args: object, **_fields: object) -> None:
        self.require_here()

    members = {
        member: property(refuse) if isinstance(getattr(kind, member), property) else refuse
        for member in (*kind.__abstractmethods__, *kind.needs_code)
    }
    about = {"name": name, "__module__": __name__, "model_config": ConfigDict(extra="allow")}
    build: Any = type(kind)
    return build(f"Unloaded{kind.__name__}", (_Unloaded, kind), {**about, **members})


@cache
def _at_defaults(method: type[Method]) -> Any:
    """Return a built-in method with default settings; all jobs share one object, since methods are immutable."""
    return method()


def _no_setting(method: type[Method], setting: str, value: Any) -> SpecError:
    """Return the error for a setting that a method lacks; its message lists the methods with this setting."""
    takers = " or ".join(registry.having(method.base_class(), setting))
    if not takers:
        return unknown_name(f"{method.name} setting", setting, method.model_fields)
    return SpecError(
        f"{method.kind}.{setting}={quoted(value)} has no effect on {method.name}; leave it out, or use {takers}"
    )


def _takes_none(method: type[Method], setting: str) -> bool:
    field = method.model_fields.get(setting)
    return field is not None and takes(field.annotation, NoneType)
