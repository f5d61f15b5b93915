"""The registry of methods, by kind and name: built-in, from installed packages, and user-defined.

A kind is a type of method, such as ``optimizer`` or ``strategy``.

Each built-in method has a folder in `shardscope.methods`. A package adds methods through entry points in the group
``shardscope.methods``, each of which names a class. A user-defined class is registered by `register`, or when it is
passed to a job. If a class is defined again, for example because a notebook cell is run again, the new class replaces
the earlier one. All classes pass the same checks. Built-in and installed methods are imported when first needed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from inspect import isabstract, isfunction, signature
from pkgutil import iter_modules
from threading import local
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from weakref import WeakSet

from shardscope.errors import SpecError, quoted, unknown_name

if TYPE_CHECKING:
    from shardscope.spec.method import Method

AnyMethod = TypeVar("AnyMethod", bound="type[Method]")
Kind = TypeVar("Kind", bound="Method")

GROUP = "shardscope.methods"
"""The entry-point group in which packages list their methods; also the package with the built-in methods."""
_NAME = re.compile("(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*")
_RESERVED = {"name", "kind", "folder", "code", "package", "settings", "changed", "label"}
"""Reserved names that settings must not use."""

_of_users: dict[tuple[str, str], type[Method]] = {}
_replaced: WeakSet[type[Method]] = WeakSet()
"""User-defined classes that have been replaced by a later definition."""
_loading = local()
"""Thread-local flag: whether this thread is loading the methods of packages."""


class _Broken(NamedTuple):
    """A method from an installed package that cannot be used."""

    package: str
    point: str
    kind: str | None
    """Kind of the method; None if the import failed."""
    name: str
    why: str


class _Plugins(NamedTuple):
    """Methods from installed packages."""

    found: Mapping[tuple[str, str], type[Method]]
    """Usable methods, by kind and name."""
    packages: Mapping[type[Method], str]
    broken: tuple[_Broken, ...]


_loaded: list[_Plugins] = []
"""The loaded plug-ins as a single item; empty until the packages have been imported."""


def register(cls: AnyMethod) -> AnyMethod:
    """Register a user-defined method under its name; use it as a decorator of the class.

    Raises:
        SpecError: The class is not a method, lacks a member, or has the name of a built-in or installed method.

    Example:
        >>> @register  # doctest: +SKIP
        ... class Halving(ss.LRSchedule):
        ...     name = "halving"
        ...
        ...     def factor_after_warmup(self, step, steps):
        ...         return 0.5 ** (10 * step // steps)
    """
    check(cls)
    if origin(cls) != "user":
        return cls
    key = (cls.kind, cls.name)
    _check_free(cls, _plugins().found)
    earlier = _of_users.get(key)
    if earlier is not None and earlier is not cls:
        _replaced.add(earlier)
    _replaced.discard(cls)
    _of_users[key] = cls
    return cls


def register_used(cls: type[Method]) -> None:
    """Register a class that was passed to a job, unless a later definition of the class has already replaced it.

    Raises:
        SpecError: As for `register`.
    """
    if origin(cls) == "user" and cls not in _replaced and cls not in list(_of_users.values()):
        register(cls)


def register_loaded(cls: type[Method]) -> None:
    """Register a class that was loaded from a file, unless a class defined in this process already has its name.

    Raises:
        SpecError: As for `register`.
    """
    known = _of_users.get((cls.kind, cls.name))
    if known is None:
        register_used(cls)
    elif known is not cls:
        _replaced.add(cls)


def names(kind: type[Method]) -> tuple[str, ...]:
    """Return the names of all methods of a kind: built-in, then installed, then user-defined."""
    found = [
        *_built_in(kind.folder),
        *(name for of, name in _plugins().found if of == kind.kind),
        *(name for of, name in list(_of_users) if of == kind.kind),
    ]
    return tuple(dict.fromkeys(found))


def find(kind: type[Kind], name: str) -> type[Kind] | None:
    """Return the class of a method; None if there is no method with this name."""
    module = _built_in(kind.folder).get(name)
    if module is not None:
        return cast("type[Kind]", _class_in(module, kind))
    key = (kind.kind, name)
    return cast("type[Kind] | None", _of_users.get(key) or _plugins().found.get(key))


def require_known(kind: type[Kind], name: Any) -> type[Kind]:
    """Return the class of a method.

    Raises:
        SpecError: There is no method with this name; the message suggests the closest name.
    """
    found = find(kind, name) if isinstance(name, str) else None
    if found is None:
        raise _broken_error(kind, name) or unknown_name(kind.kind, name, names(kind))
    return found


def all_of(kind: type[Kind]) -> tuple[type[Kind], ...]:
    """Return the classes of all methods of a kind, in the order of `names`."""
    return _all_of(kind, (*_plugins().packages, *_of_users.values()))


@lru_cache(maxsize=64)
def _all_of(kind: type[Kind], _not_built_in: tuple[type[Method], ...]) -> tuple[type[Kind], ...]:
    """Return the result of `all_of` from a cache, since formulas call it often; a new class changes the cache key."""
    return tuple(require_known(kind, name) for name in names(kind))


def having(kind: type[Method], setting: str) -> Iterator[str]:
    """Yield the names of the methods of a kind that have this setting."""
    return (name for name in names(kind) if setting in require_known(kind, name).model_fields)


def origin(cls: type[Method]) -> str:
    """Return the origin of a method: ``built-in``, ``installed`` or ``user``."""
    if cls.__module__.startswith(f"{GROUP}."):
        return "built-in"
    return "user" if package_of(cls) is None else "installed"


def package_of(cls: type[Method]) -> str | None:
    """Return the name of the package that provides an installed method; None for all other methods."""
    if cls.__module__.partition(".")[0] not in _modules_of_packages():
        return None  # without importing the packages
    by_place = _packages().get(f"{cls.__module__}:{cls.__qualname__}")
    return by_place or _plugins().packages.get(cls)


def module_on_ranks(cls: type[Method]) -> str | None:
    """Return the module that ranks import to run a built-in method; None for a method of a user or a package."""
    if origin(cls) != "built-in":
        return None
    module = f"{cls.__module__}._torch"
    return module if find_spec(module) else cls.__module__


def broken_plugins() -> dict[str, str]:
    """Return the reason why each broken method of an installed package is unusable, by package and entry point."""
    return {f"{each.package}: {each.point}": each.why for each in _plugins().broken}


def why_not_here(kind: type[Method], name: str, package: str) -> SpecError:
    """Return the error for a saved method whose package is not available in this process."""
    broken = _broken_error(kind, name)
    if broken is not None:
        return broken
    there = "is installed but has no such method; install the version that has it"
    what = there if package in _packages().values() else "is not installed here; install it"
    return SpecError(f"{kind.kind}={quoted(name)} is a method of the package {quoted(package)}, which {what}")


def _broken_error(kind: type[Method], name: Any) -> SpecError | None:
    """Return the error for a broken method of a package, by kind and name; None if there is no such method."""
    for each in _plugins().broken:
        if name in (each.name, each.point) and each.kind in (kind.kind, None):
            return SpecError(
                f"{kind.kind}={quoted(name)} of the package {each.package!r} cannot be used: {each.why}"
            )
    return None


def check(cls: Any) -> None:
    """Check that a class fully implements a `Method`, such as a strategy, optimizer, compression or schedule.

    Raises:
        SpecError: A member is missing or invalid; the message names it.
    """
    kind, title = getattr(cls, "kind", None), getattr(cls, "__name__", quoted(cls))
    if not isinstance(cls, type) or kind is None:
        raise SpecError(f"{title} is not a method; derive it from a base class such as ss.LRSchedule")
    if isabstract(cls):
        lacking = sorted(cls.__abstractmethods__)  # type: ignore[attr-defined]  # an abstract class has these
        missing = ", ".join(f"{name}{_arguments(cls, name)}" for name in lacking)
        raise SpecError(f"{title} is not a complete {kind}: it lacks {missing}; define it")
    method: type[Method] = cls
    _check_names(method)
    _check_arguments(method)
    method.check_class()
    for field, info in method.model_fields.items():
        if info.is_required():
            raise SpecError(
                f"{title}.{field} has no default, so {method.name!r} cannot be used by name alone; give it a default"
            )
    try:
        hash(method())
    except TypeError as error:
        raise SpecError(
            f"{title}() is not hashable ({error}); use hashable settings, such as tuples instead of lists"
        ) from None
    except SpecError:
        raise
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        raise SpecError(
            f"{title}() raised an error ({error}); a method must be constructible without arguments"
        ) from None


def _check_names(cls: type[Method]) -> None:
    title, name = cls.__name__, getattr(cls, "name", None)
    for taken in sorted(_RESERVED & cls.model_fields.keys()):
        how = "write it without an annotation, as in name = 'my-own'" if taken == "name" else "rename it"
        raise SpecError(f"{title}.{taken} cannot be a setting; {how}")
    if vars(cls).keys() & {"kind", "folder"} and cls is not cls.base_class():
        raise SpecError(
            f"{title} sets its kind or folder, which it must inherit from {cls.base_class().__name__}; leave them out"
        )
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = "lacks a name" if name is None else f"has name={quoted(name)}"
        raise SpecError(
            f"{title} {what}; give it a name of lower-case letters, digits and hyphens, such as name = 'my-own'"
        )


def _check_arguments(cls: type[Method]) -> None:
    """Check that the class's required members accept the arguments that they will be called with."""
    kind = cls.base_class()
    for name in sorted(getattr(kind, "__abstractmethods__", ())):
        asked, given = getattr(kind, name), getattr(cls, name)
        if not (isfunction(asked) and isfunction(given)):
            continue
        wanted = signature(asked).parameters.values()
        places = [p.name for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD]
        try:
            signature(given).bind(*places, **{p.name: None for p in wanted if p.kind is p.KEYWORD_ONLY})
        except TypeError as error:
            raise SpecError(
                f"{cls.__name__}.{name} does not accept the arguments that it is called with ({error}); write "
                f"def {name}({', '.join(map(str, wanted))})"
            ) from None


def _check_free(cls: type[Method], others: Mapping[tuple[str, str], type[Method]]) -> None:
    if cls.name in _built_in(cls.folder) or (cls.kind, cls.name) in others:
        raise SpecError(
            f"{cls.__name__}.name={cls.name!r} is already the name of another {cls.kind}; choose another name"
        )


def _arguments(cls: type, name: str) -> str:
    """Return the arguments of a function as text, such as ``(step, steps)``."""
    member = getattr(cls, name)
    return "" if isinstance(member, property) else f"({', '.join(list(signature(member).parameters)[1:])})"


@cache
def _built_in(folder: str) -> dict[str, str]:
    """Map the name of each built-in method to the name of its module, without importing any module."""
    package = import_module(f"{GROUP}.{folder}")
    found = (module.name for module in iter_modules(package.__path__) if module.ispkg)
    return {_name_of(name): f"{GROUP}.{folder}.{name}" for name in found}


def _name_of(folder: str) -> str:
    """Return the name of the method in this folder; a folder name has an underscore before a leading digit."""
    return folder.removeprefix("_").replace("_", "-")


@cache
def _class_in(module: str, kind: type[Any]) -> Any:
    """Return the one method class that a built-in folder defines."""
    found = [
        value
        for value in vars(import_module(module)).values()
        if isinstance(value, type) and issubclass(value, kind) and value.__module__ == module
    ]
    if len(found) != 1:
        classes = ", ".join(cls.__name__ for cls in found) or "none"
        raise SpecError(
            f"the folder {module} must define exactly one {kind.__name__}, but it defines {classes}"
        )
    cls: Any = found[0]
    check(cls)
    if cls.name != _name_of(module.rpartition(".")[2]):
        raise SpecError(
            f"{cls.__name__}.name={cls.name!r} does not match its folder {module}; rename one of them"
        )
    return cls


@cache
def _packages() -> dict[str, str]:
    """Map the location ``module:class`` of each installed method to its package's name, without importing it."""
    return {point.value: _package(point) for point in entry_points(group=GROUP)}


@cache
def _modules_of_packages() -> frozenset[str]:
    return frozenset(re.split("[.:]", place)[0] for place in _packages())


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "?"


def _plugins() -> _Plugins:
    """Return the methods of installed packages, usable and broken; none while the packages are being imported."""
    if _loaded:
        return _loaded[0]
    return _Plugins({}, {}, ()) if _is_importing() else _load()


def _is_importing() -> bool:
    """Return whether a package with methods is being imported, by `_load` or by other code."""
    tops = _modules_of_packages()
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in tops]
    unfinished = any(getattr(getattr(each, "__spec__", None), "_initializing", False) for each in modules)
    return unfinished or getattr(_loading, "now", False)


def _load() -> _Plugins:
    """Import the methods of installed packages."""
    found: dict[tuple[str, str], type[Method]] = {}
    packages: dict[type[Method], str] = {}
    broken = []
    _loading.now = True
    try:
        for point in entry_points(group=GROUP):
            cls: Any = None
            try:
                cls = point.load()
                check(cls)
                _check_free(cls, found)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - an installed package may raise anything
                kind, name = getattr(cls, "kind", None), getattr(cls, "name", point.name)
                broken.append(
                    _Broken(_package(point), point.name, kind, name, str(error) or type(error).__name__)
                )
            else:
                found[cls.kind, cls.name] = cls
                packages[cls] = _package(point)
    finally:
        _loading.now = False
    _loaded.append(_Plugins(found, packages, tuple(broken)))
    return _loaded[0]
