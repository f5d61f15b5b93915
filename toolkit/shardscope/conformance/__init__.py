"""Conformance tests for built-in and user-defined methods: test classes for pytest, and `check_method`.

    class TestSawtooth(LRScheduleConformance):
        method = Sawtooth

Some of the tests train on real ranks. `check_method(Sawtooth)` runs the same tests without pytest.
"""

from __future__ import annotations

from shardscope.conformance.compression import CompressionConformance
from shardscope.conformance.lr_schedule import LRScheduleConformance
from shardscope.conformance.method import MethodConformance
from shardscope.conformance.optimizer import OptimizerConformance
from shardscope.conformance.pipeline_schedule import PipelineScheduleConformance
from shardscope.conformance.strategy import StrategyConformance
from shardscope.errors import RunFailed
from shardscope.spec.method import Method

_CLASSES: tuple[type[MethodConformance], ...] = (
    CompressionConformance, LRScheduleConformance, OptimizerConformance, PipelineScheduleConformance,
    StrategyConformance,
)  # fmt: skip


def check_method(method: type[Method]) -> None:
    """Run the conformance tests that apply to a method, such as those for optimizers; raise an error if a test fails.

    Args:
        method: The class of the method, such as one defined in a notebook cell.

    Raises:
        TypeError: `method` is not a method class.
        SpecError: The class lacks a required member, or its name is already in use.
        AssertionError: The method fails a test; the message names the test.

    Example:
        >>> check_method(Sawtooth)  # doctest: +SKIP
    """
    is_class = isinstance(method, type)
    base = next((cls for cls in _CLASSES if is_class and issubclass(method, cls.kind)), None)
    if base is None:
        raise TypeError(
            f"{method!r} is not a method class; derive it from a method base class, such as ss.LRSchedule"
        )
    tests = type(f"Test{method.__name__}", (base,), {"method": method})()
    for name in sorted(name for name in dir(tests) if name.startswith("test_")):
        try:
            getattr(tests, name)()
        except (AssertionError, RunFailed) as error:
            raise AssertionError(f"{method.__name__} fails {name}: {error}") from error


__all__ = [
    "CompressionConformance",
    "LRScheduleConformance",
    "MethodConformance",
    "OptimizerConformance",
    "PipelineScheduleConformance",
    "StrategyConformance",
    "check_method",
]
