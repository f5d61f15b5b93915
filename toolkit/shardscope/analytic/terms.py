"""A figure that can be opened: its parts, the formula of each, what went in, and where the formula comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Unit = Literal["s", "bytes", "FLOP", "USD", "1"]


@dataclass(frozen=True)
class Term:
    """A number, and either the formula it comes from or the parts it is made of.

    Attributes:
        name: Short, as in a legend: ``"optimizer state"``.
        value: In `unit`.
        formula: As in a paper: ``"KΨ / N"``; for a sum of parts, empty.
        inputs: What the formula took, by symbol.
        source: Paper, section or equation; or the calibration.
        parts: Terms that add up to `value` (`how` is ``"sum"``), or of which it is the largest (``"max"``).
    """

    name: str
    value: float
    unit: Unit
    formula: str = ""
    inputs: Mapping[str, float | str] = field(default_factory=dict)
    source: str = ""
    parts: tuple[Term, ...] = ()
    how: Literal["sum", "max"] = "sum"

    @classmethod
    def total(cls, name: str, parts: tuple[Term, ...], *, how: Literal["sum", "max"] = "sum") -> Term:
        """The term of its parts, which share a unit."""
        values = [part.value for part in parts]
        return cls(name, sum(values) if how == "sum" else max(values), parts[0].unit, parts=parts, how=how)

    def __getitem__(self, name: str) -> Term:
        """The part of that name, at any depth."""
        for term in self.walk():
            if term.name == name:
                return term
        raise KeyError(name)

    def walk(self) -> Iterator[Term]:
        """This term and all below it, a parent before its parts."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def to_dict(self) -> dict[str, object]:
        """The tree, for JSON."""
        inside: dict[str, object] = {"how": self.how, "parts": [part.to_dict() for part in self.parts]}
        leaf: dict[str, object] = {
            "formula": self.formula,
            "inputs": dict(self.inputs),
            "source": self.source,
        }
        return {"name": self.name, "value": self.value, "unit": self.unit, **(inside if self.parts else leaf)}
