"""Explain in sentences why one layout is faster than another, part by part, largest difference first."""

from __future__ import annotations

from typing import NamedTuple

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.terms import Term
from shardscope.planner.setting import SearchSettings, memory_parts, time_of
from shardscope.show import Sentences
from shardscope.spec.layout import Layout
from shardscope.spec.units import gib_text, work_text

WORDS: dict[str, str] = {
    "compute": "computation",
    "recompute": "recomputation of activations",
    "tensor_comm": "collectives between tensor ranks",
    "context_comm": "gathering of keys and values over context ranks",
    "expert_comm": "sending of tokens to experts",
    "pipeline_comm": "messages between pipeline stages",
    "bubble": "pipeline bubble",
    "data_comm": "reduction of gradients and gathering of parameters",
    "optimizer": "optimizer update",
    "offload": "offloading of states and activations to the host and back",
    "overhead": "kernel launches and fixed costs",
}
"""Description of each part of a step, as used in sentences."""
_NAMES = {
    "micro_batch": "micro-batch", "virtual_stages": "stages per rank", "recompute_layers": "recomputed layers",
    "recompute": "recomputation", "zero": "ZeRO", "shard": "shards",
}  # fmt: skip
"""Names of settings in sentences, if not those of their fields."""
_CAUSES: dict[str, tuple[str, ...]] = {
    "compute": ("micro_batch", "tensor", "pipeline", "context", "expert"),
    "recompute": ("recompute", "recompute_layers", "pipeline", "micro_batch"),
    "tensor_comm": ("tensor", "recompute", "recompute_layers", "micro_batch", "context", "pipeline"),
    "context_comm": ("context", "tensor", "pipeline"),
    "expert_comm": ("expert", "tensor", "pipeline"),
    "pipeline_comm": ("pipeline", "virtual_stages", "micro_batch", "schedule"),
    "bubble": (
        "schedule",
        "pipeline",
        "virtual_stages",
        "data",
        "micro_batch",
        "recompute",
        "recompute_layers",
        "zero",
        "offload",
    ),
    "data_comm": ("zero", "shard", "data", "compression", "tensor", "pipeline", "context"),
    "optimizer": ("zero", "shard", "offload", "data", "tensor", "pipeline"),
    "offload": ("offload", "zero", "recompute", "recompute_layers", "micro_batch"),
    "overhead": ("micro_batch", "pipeline", "tensor", "data"),
}
"""Settings that affect each part, in decreasing order of their effect."""


class Difference(NamedTuple):
    """Time of one part of a step under two layouts."""

    part: str
    first_s: float
    second_s: float
    because: tuple[str, ...]
    """Settings that differ between the layouts and affect this part."""

    @property
    def gain_s(self) -> float:
        """Seconds that the first layout saves; negative if it is slower."""
        return self.second_s - self.first_s


class PlanComparison(NamedTuple):
    """Comparison of two layouts."""

    first: Layout
    second: Layout
    differences: tuple[Difference, ...]
    """All parts that differ, largest difference first."""
    time: tuple[float, float]
    """Step times of the first and the second layout, in seconds."""
    memory_bytes: tuple[float, float]
    """Highest peak memory of any device under the first and the second layout, in bytes."""
    seq: int
    """Tokens in a sequence."""
    names: tuple[str, str] = ("the first", "the second")

    @property
    def term(self) -> Term:
        """Seconds that the first layout saves over the second, as a sum of terms."""
        parts = tuple(
            Term(
                WORDS[each.part], each.gain_s, "s", formula="t_second - t_first",
                inputs={"t_first": each.first_s, "t_second": each.second_s},
            )
            for each in self.differences
        )  # fmt: skip
        return Term("time saved", sum(part.value for part in parts), "s", parts=parts)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The comparison in sentences, most important first."""
        return (self._headline(), *map(self._sentence, self.differences), self._memory())

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def _repr_html_(self) -> str:
        return Sentences(self.sentences).html()

    def _headline(self) -> str:
        (one, other), (name, against) = self.time, self.names
        work = work_text(self.first.global_batch, self.seq)
        if not self.differences:
            return f"{_capital(name)} and {against} take the same {seconds(one)} per step ({work})."
        word, by = ("faster", other - one) if one < other else ("slower", one - other)
        share = abs(other / one - 1)
        return (
            f"{_capital(name)} takes {seconds(one)} per step and {against} {seconds(other)}: {seconds(by)} "
            f"({share:.1%}) {word} ({work})."
        )

    def _sentence(self, each: Difference) -> str:
        gain = f"{seconds(abs(each.gain_s))} {'less' if each.gain_s > 0 else 'more'}"
        why = ", ".join(
            f"{_NAMES.get(name, name)} {_value(self.first, name)} instead of {_value(self.second, name)}"
            for name in each.because[:2]
        )
        both = f"{seconds(each.first_s)} instead of {seconds(each.second_s)}, "
        told = f"{both if each.first_s and each.second_s else ''}{gain}"
        return f"{_capital(WORDS[each.part])}: {told}{f' ({why})' if why else ''}."

    def _memory(self) -> str:
        one, other = self.memory_bytes
        more = f"{gib_text(abs(one - other))} {'more' if one > other else 'less'} than"
        than = "the same as" if gib_text(one) == gib_text(other) else more
        return f"Peak memory per device: {self.names[0]} needs {gib_text(one)}, {than} {self.names[1]}."


def explain(
    settings: tuple[SearchSettings, SearchSettings], first: Layout, second: Layout, names: tuple[str, str]
) -> PlanComparison:
    """Compare two layouts part by part, each with its own calibration."""
    tables = [Layouts.of([layout]) for layout in (first, second)]
    times = [time_of(*each) for each in zip(settings, tables, strict=True)]
    memory = [float(memory_parts(*each).total[0]) for each in zip(settings, tables, strict=True)]
    one, other = ({name: float(value[0]) for name, value in each._asdict().items()} for each in times)
    total = one.pop("total"), other.pop("total")
    differences = [
        Difference(part, one[part], other[part], _because(part, first, second))
        for part in one
        if abs(one[part] - other[part]) > 1e-9 * max(total)
    ]
    differences.sort(key=lambda each: -abs(each.gain_s))
    return PlanComparison(
        first, second, tuple(differences), total, (memory[0], memory[1]), settings[0].model.seq, names
    )


def _because(part: str, first: Layout, second: Layout) -> tuple[str, ...]:
    differing = (name for name in _CAUSES[part] if getattr(first, name) != getattr(second, name))
    both_full = first.recompute == second.recompute == "full"  # otherwise, the numbers cannot be compared
    return tuple(name for name in differing if both_full or name != "recompute_layers")


def _value(layout: Layout, name: str) -> str:
    value = layout.axis(name)
    if name == "recompute_layers" and value == 0:
        return "all"
    return "over all replicas" if name == "shard" and value == 0 else str(value)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def seconds(value: float) -> str:
    """Format a duration with four digits, so that adjacent plans differ: ``14.10 s``, ``230.1 ms`` or ``41.00 µs``."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if value * factor >= 1:
            return f"{value * factor:#.4g}".rstrip(".") + f" {unit}"
    return f"{value * 1e6:#.4g} µs" if value else "0 s"
