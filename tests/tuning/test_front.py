"""The front of a study, and what is on it by the noise of measured times alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardscope.tuning.front import front_of

VALUES = st.fixed_dictionaries({
    "loss": st.sampled_from([0.5, 0.6, 0.7]), "seconds": st.sampled_from([0.8, 0.9, 0.95, 1.0, 1.1, 1.3]),
    "bytes": st.sampled_from([1.0, 2.0]),
})  # fmt: skip


def trials(*rows: tuple[float, float, float]) -> dict[int, dict[str, float]]:
    return {
        number: dict(zip(("loss", "seconds", "bytes"), row, strict=True)) for number, row in enumerate(rows)
    }


def test_less_than_a_tenth_of_time_puts_no_trial_on_the_front() -> None:
    found = front_of(trials((0.5, 1.0, 9.0), (0.6, 0.95, 9.0), (0.7, 0.85, 9.0), (0.8, 1.0, 1.0)))
    assert found.clear == (0, 2, 3)
    assert found.by_noise == (1,)
    assert found.note == (
        "Trial 1 is not on the front: it is only faster, by less than the noise of measured times (10%)."
    )


def test_exactly_a_tenth_of_time_is_a_lead() -> None:
    assert front_of(trials((0.5, 1.0, 9.0), (0.6, 0.9, 9.0))).clear == (0, 1)


def test_small_steps_do_not_add_up_to_a_lead_that_nobody_shows() -> None:
    found = front_of(trials((0.5, 1.0, 1.0), (0.6, 0.95, 1.0), (0.7, 0.88, 1.0)))
    assert found.clear == (
        0,
        2,
    )  # a tenth quicker than what is on the front, though not than what is left out


def test_without_time_all_counts_and_of_nothing_there_is_no_front() -> None:
    assert front_of({0: {"loss": 0.5, "bytes": 2.0}, 1: {"loss": 0.5001, "bytes": 1.99}}).clear == (0, 1)
    assert front_of({}) == ((), ())
    assert front_of({}).note is None


def covers(one: dict[str, float], other: dict[str, float], slack: float) -> bool:
    """Whether one is nowhere worse, its time with some slack, and somewhere better but in time."""
    rest = ("loss", "bytes")
    return (
        all(one[k] <= other[k] for k in rest)
        and any(one[k] < other[k] for k in rest)
        and one["seconds"] * slack < other["seconds"]
    )


@given(st.lists(VALUES, max_size=12))
def test_whoever_is_left_out_has_somebody_on_the_front_who_stands_for_it(
    rows: list[dict[str, float]],
) -> None:
    values = dict(enumerate(rows))
    found = front_of(values)
    beaten = {
        a
        for a in values
        for b in values
        if values[a] != values[b] and all(values[b][k] <= values[a][k] for k in values[a])
    }
    assert {*found.clear, *found.by_noise} == {*values} - beaten
    assert all(any(covers(values[b], values[a], 0.9) for b in found.clear) for a in found.by_noise)
    assert not any(covers(values[b], values[a], 0.9) for a in found.clear for b in found.clear)
