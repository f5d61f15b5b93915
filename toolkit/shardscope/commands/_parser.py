"""The argument parser of all commands; its error messages are one line and suggest the nearest command or option."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from shardscope.errors import SpecError


class Parser(argparse.ArgumentParser):
    """A parser with one-line error messages, whose subcommands report their own unknown options."""

    def parse_known_args(  # type: ignore[override]  # argparse types the namespace as a type variable
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse the arguments; reject unknown options here, because this parser knows the options of its command."""
        found, extras = super().parse_known_args(args, namespace)
        if extras and self._subparsers is None:
            self.error(_unknown(extras, self._option_string_actions))
        return found, extras

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Reject a value that is not among the choices, and suggest the nearest choice."""
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        kind = "command" if isinstance(action, argparse._SubParsersAction) else "value"  # noqa: SLF001
        near = _suggestion(str(value), names) or f"valid names are {', '.join(names)}"
        raise argparse.ArgumentError(
            None if kind == "command" else action, f"unknown {kind} {value!r}; {near}"
        )

    def error(self, message: str) -> NoReturn:
        """Print the message and where to find help, and exit with status 2."""
        message = str(SpecError(message))  # in short, if a value is very long
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: {message}{end} Options and examples: {self.prog} --help\n")


def _unknown(extras: Sequence[str], options: Iterable[str]) -> str:
    given = extras[0].partition("=")[0]
    if not given.startswith("-"):
        return f"unexpected argument {given!r}"
    near = _suggestion(given, options)
    return f"unknown option {given}{f'; {near}' if near else ''}"


def _suggestion(given: str, names: Iterable[str]) -> str:
    found = get_close_matches(given, list(names), n=1, cutoff=0.5)
    return f"did you mean {found[0]}?" if found else ""
