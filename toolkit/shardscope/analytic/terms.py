"""Terms: predicted numbers, explained by a formula with inputs and source, or by the parts of which they consist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Unit = Literal["s", "bytes", "FLOP", "USD", "1"]


@dataclass(frozen=True)
class Term:
    """A predicted number, with either the formula or the parts that explain it.

    Attributes:
        name: Short name for legends, such as ``"optimizer state"``.
        value: The number, in `unit`.
        unit: Unit of the value; ``"1"`` for a number without a unit.
        formula: Formula in a paper's notation, such as ``"KΨ / N"``; empty if there are parts.
        inputs: Inputs of the formula, by symbol.
        source: Paper with section or equation, or name of the calibration.
        parts: Terms whose sum or maximum is `value`.
        how: How `value` follows from the parts: ``"sum"`` or ``"max"``.
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
        """Return a term whose value is the sum or the maximum of `parts`, which must all have the same unit."""
        values = [part.value for part in parts]
        return cls(name, sum(values) if how == "sum" else max(values), parts[0].unit, parts=parts, how=how)

    def __getitem__(self, name: str) -> Term:
        """Return the first term with this name in the tree, at any depth.

        Raises:
            KeyError: No term has this name.
        """
        for term in self.walk():
            if term.name == name:
                return term
        raise KeyError(name)

    def walk(self) -> Iterator[Term]:
        """Yield this term and all terms below it, each before its parts."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def to_dict(self) -> dict[str, object]:
        """Return the tree as nested dictionaries, for JSON."""
        inside: dict[str, object] = {"how": self.how, "parts": [part.to_dict() for part in self.parts]}
        leaf: dict[str, object] = {
            "formula": self.formula,
            "inputs": dict(self.inputs),
            "source": self.source,
        }
        return {"name": self.name, "value": self.value, "unit": self.unit, **(inside if self.parts else leaf)}
