"""What a whole trial is expected to come to, told from its first steps, against runs that go to their end."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.tuning.measured import Measured
from shardscope.tuning.pruning.outlook import expected, is_steady

STEPS, EARLY = 20, 3
JOB = ss.Job(
    model="mlp", data="digits", strategy="ring", world_size=2, steps=STEPS, eval_every=STEPS,
    record=ss.Record(memory_first=0, memory_every=None),
)  # fmt: skip
UNSTEADY = [
    JOB.replace(optimizer="adamw", compression=ss.Compression("onebit-adam", warmup_steps=5)),
    JOB.replace(compression=ss.Compression("local-sgd", every=4)),
    JOB.replace(compression=ss.Compression("powersgd", rank=4, warmup_steps=6)),
    JOB.replace(
        optimizer=ss.Optimizer("sgd", momentum=0.0), compression=ss.Compression("dgc", warmup_steps=4)
    ),
]


def measured_by(run: ss.Run, until: int) -> Measured:
    """What a run had sent by a step."""
    sent = [
        row["sent_bytes"]
        for event in run.events("step")
        if event["step"] <= until
        for row in event["traffic"].values()
    ]
    return Measured(until, None, None, 0.0, sum(sent), 0, 0, ())


@pytest.mark.sampled
@pytest.mark.parametrize("job", UNSTEADY, ids=lambda job: job.compression.name)
def test_bytes_that_the_first_steps_do_not_show_are_told_by_formula(job: ss.Job) -> None:
    run = ss.launch(job).wait(100)
    early, whole = measured_by(run, EARLY), measured_by(run, STEPS)
    assert not is_steady(job.compression)
    # of low-rank methods the whole model counts as one matrix, whatever its layers
    near = 0.15 if job.compression.name == "powersgd" else 0.02
    assert expected("bytes", early, job) == pytest.approx(whole.bytes, rel=near)
    assert expected("bytes", whole, job) == whole.bytes
    assert not 0.7 < early.bytes / EARLY * STEPS / whole.bytes < 1.4, (
        "the first steps are not like the others"
    )


def test_on_a_link_later_steps_take_as_much_less_as_they_send_less() -> None:
    rate = 1e6
    job = UNSTEADY[0].replace(link=ss.Link(bandwidth=rate, latency=0))
    dense = 2 * 4 * 100_000  # bytes of a step of two ranks
    early = Measured(4, None, None, 0.0, 4 * dense, 0, 0, (), plain_s=1.0)
    bytes_s = expected("bytes", early, job) / (2 * rate)
    assert expected("seconds", early, job) == pytest.approx(
        1.0 * STEPS - (STEPS * dense / (2 * rate) - bytes_s)
    )
    assert expected("seconds", early, UNSTEADY[0]) == 1.0 * STEPS  # what a byte costs is not known


def test_a_module_of_the_users_that_has_not_averaged_yet_is_held_to_what_it_has_sent() -> None:
    job = JOB.replace(model=len, data="digits", compression=ss.Compression("local-sgd", every=8))
    nothing = Measured(2, None, None, 0.0, 0, 0, 0, (), plain_s=0.01)
    assert expected("bytes", nothing, job) == 0.0
    assert expected("seconds", nothing, job) == pytest.approx(0.01 * STEPS)


def test_steady_methods_go_on_at_their_pace() -> None:
    job = JOB.replace(compression="int8")
    measured = Measured(4, 0.5, None, 0.0, 400, 0, 7, ())
    assert is_steady(job.compression)
    assert [expected(name, measured, job) for name in ("bytes", "seconds", "memory")] == [2000, 10.0, 7.0]


def test_a_rank_that_moves_is_not_taken_for_the_warm_up_before_it() -> None:
    job = JOB.replace(compression=ss.Compression("adaptive-rank", rank=4, warmup_steps=6))
    early = Measured(3, None, None, 0.0, 3000, 0, 0, ())
    told = expected("bytes", early, job)
    assert told is not None
    assert 6000 < told < 0.6 * 1000 * STEPS
