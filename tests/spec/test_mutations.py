"""Descriptions with values that no field expects are made or refused in a sentence, quickly."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import pytest

import shardscope as ss
from shardscope.errors import SpecError, quoted

CAMPAIGNS = Path(__file__).parents[1] / "campaigns"


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CAMPAIGNS))
    import specs

    return specs


def test_mutated_descriptions_are_made_or_refused(specs: ModuleType) -> None:
    outcomes = [specs.case(number, random.Random(number)) for number in range(400)]
    assert not [outcome for outcome in outcomes if outcome.violation]
    names = {outcome.name for outcome in outcomes}
    assert {
        f"describe {what}: {fate}" for what in ("job", "space") for fate in ("accepted", "refused")
    } <= names


@pytest.mark.parametrize(
    "text", ["null", "[]", '""', "1", "true", '{"model": {}}', "{" * 100_000, "nan", '{"self": 1}']
)
def test_json_that_is_not_a_job_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        ss.Job.from_json(text)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("batch", [10**9, 2 * 10**9, 2**31 - 1])
def test_no_batch_takes_long_to_check(batch: int) -> None:
    ss.Job(model="mlp", data="digits", strategy="pipeline", world_size=2, batch=batch)
    with pytest.raises(SpecError, match="does not divide"):
        ss.Job(model="mlp", data="digits", batch=ss.Batch(2 * 10**9, micro_batch=3), world_size=2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"clip_norm": float("inf")}, "clip_norm=inf is not valid: it should be a finite number"),
        ({"clip_norm": float("nan")}, "clip_norm=nan is not valid"),
        ({"seed": 2**63}, "seed=9223372036854775808 is not valid: .* 9223372036854775807"),
        ({"steps": 10**30}, "steps=1.* is not valid"),
        ({"steps": True}, "steps=True is a bool"),
        ({"timeout_s": float("inf")}, "timeout_s=inf is not valid"),
        ({"strategy": {"name": "ring", "slice_mb": 1e-9}}, "slice_mb=1e-09 is not valid: .*0.00001"),
        ({"strategy": {"name": []}}, r"strategy=\[\] is not known"),
        ({"strategy": {1: 2}}, "Strategy must be a JSON object with field names as keys"),
        ({"strategy": {"name": "ring", 1: 2}}, "Strategy must be a JSON object with field names as keys"),
        ({"strategy": {"name": "ring", "self": 1}}, "ring setting='self' is not known"),
        ({"checkpoint": {1: 2}}, "checkpoint=.* has keys that are not strings"),
        ({"batch": {1: 2}}, "Batch must be a JSON object with field names|batch=.* has keys that are not strings"),
        ({"strategy": "ring:²"}, "directions='²' is not valid"),
        ({"name": "x" * 10**6}, "name='xxx"),
    ],
)  # fmt: skip
def test_what_no_run_can_take_is_refused_where_it_is_described(fields: dict, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        ss.Job(**{"model": "mlp", "data": "digits", **fields})
    assert len(str(caught.value)) < 600


class Failing:
    def __repr__(self) -> str:
        raise RuntimeError


def test_a_quote_is_short_whatever_it_quotes() -> None:
    endless: list = []
    endless.append(endless)
    for value in (
        "x" * 10**6,
        10**5000,
        [[1] * 1000] * 1000,
        endless,
        Failing(),
        {"a": Failing()},
        b"x" * 10**6,
    ):
        assert len(quoted(value)) <= 80
    assert quoted(Failing()) == "<Failing>"
