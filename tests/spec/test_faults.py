"""Plans of faults and recoveries: text, JSON and errors, without a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from shardscope.spec.fault_kinds import DropLink, Kill, Slow

JOB = ss.Job(model="mlp", data="digits", world_size=4, steps=50, checkpoint=ss.Checkpoint(every=10))
CLUSTER = ss.Cluster.emulated(nodes=4)
WHOLE = (
    ss.Faults()
    .kill(2, step=40)
    .kill(node=1, at="12 s")
    .kill(0, step=20, during="checkpoint")
    .slow(node=1, factor=3, steps=(20, 60))
    .slow(rank=0, factor=1.5, steps=(5, None))
    .drop_link("n0-n3", at="1.5 s", lasts="5 s")
    .drop_link("n2", step=7)
    .fill_disk(1, step=30)
)
TEXT = (
    "kill rank=2 step=40; kill node=1 at=12s; kill rank=0 step=20 during=checkpoint; slow node=1 factor=3 steps=20-60; "
    "slow rank=0 factor=1.5 steps=5-; drop_link at=1.5s link=n0-n3 lasts=5s; drop_link step=7 link=n2; "
    "fill_disk rank=1 step=30"
)


def test_a_plan_is_written_as_text_and_as_json_and_read_back() -> None:
    assert str(WHOLE) == TEXT
    assert ss.Faults.of(TEXT) == WHOLE
    assert ss.Faults.from_json(WHOLE.to_json()) == WHOLE
    assert [fault.kind for fault in WHOLE][-3:] == ["drop-link", "drop-link", "fill-disk"]
    WHOLE.check(JOB, CLUSTER)


def test_a_plan_is_not_changed_by_a_longer_one() -> None:
    short = ss.Faults().kill(1, step=3)
    assert len(short.slow(1, factor=2)) == 2
    assert len(short) == 1
    assert not ss.Faults.of(None)
    assert not ss.Faults.of("")


def test_faults_say_in_words_what_happens() -> None:
    assert WHOLE.text.split("; ") == [
        "rank 2 killed before step 40",
        "node 1 killed 12 s after the start",
        "rank 0 killed while saving the first checkpoint from step 20 on",
        "node 1 computes 3 times slower in steps 20 to 60",
        "rank 0 computes 1.5 times slower from step 5 on",
        "link n0-n3 dropped 1.5 s after the start for 5 s",
        "link n2 dropped before step 7",
        "disk of rank 1 full at the first checkpoint from step 30 on",
    ]
    assert ss.Faults().text == "no faults"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ss.Faults().kill(step=3), "kill gives neither a rank nor a node; give one, for example rank=1"),
        (lambda: ss.Faults().kill(1, node=2, step=3), "kill gives both a rank and a node"),
        (lambda: ss.Faults().kill(1), "kill gives neither a step nor a time; give one, for example step=40"),
        (lambda: ss.Faults().kill(1, step=3, at="1 s"), "kill gives both a step and a time"),
        (lambda: ss.Faults().kill(1, at="3 m"), "at='3 m' has the unit 'm', which is not a unit for seconds"),
        (lambda: ss.Faults().kill(node=1, step=3, during="checkpoint"), "needs a rank and a step"),
        (lambda: ss.Faults().slow(1, factor=1), "slow: factor=1 is not valid"),
        (lambda: ss.Faults().slow(1, factor=2, steps=(9, 3)), r"end before they begin; write \(3, 9\)"),
        (lambda: ss.Faults().drop_link("0-3", step=1), "link='0-3' is not valid; write 'n3'"),
        (lambda: ss.Faults().drop_link("n1-n1", step=1), "link='n1-n1' is not valid"),
        (lambda: ss.Faults.of("kil rank=1"), "did you mean 'kill'"),
        (lambda: ss.Faults.of("kill rank=1 rank=2"), "kill has rank twice"),
        (lambda: ss.Faults.of("kill 1"), "kill: '1' is not KEY=VALUE; write for example 'kill rank=2 step=40'"),
        (lambda: ss.Faults.of("slow rank=1 factor=2 steps=five"), "steps='five' is not valid; write for example 20-60"),
        (lambda: ss.Faults.of(3), "faults=3 is not valid"),
        (lambda: ss.Faults.of("kill rank=1 at_s=3"), "did you mean 'at'. valid names are at, during, node, rank, step"),
        (lambda: ss.Faults.of("slow rank=1"), "slow needs factor; write for example 'slow rank=1 factor=3"),
        (lambda: ss.Faults().slow(1, factor=3, steps=20), "steps=20 is not valid; give the first and the last step"),
        (lambda: ss.Faults.random(world_size=4, duration_s="1 hour", mtbf_s=9), "duration_s='1 hour' has .* write h"),
        (lambda: ss.Faults.random(world_size=4, steps=9), "needs either steps and mtbf_steps"),
        (lambda: ss.Faults.random(world_size=4, steps=9, mtbf_steps=0), "is not valid: give at least 1 rank"),
        (lambda: ss.Recovery(-1), "restarts=-1 is not valid"),
        (lambda: JOB.replace(recovery="often"), "recovery='often' is not valid; give the number of restarts"),
        (lambda: JOB.replace(recovery=3.5), "recovery=3.5 is not valid; give the number of restarts"),
        (lambda: ss.Recovery(1, replica_every="x"), "replica_every='x' is not valid; give a whole number"),
        (lambda: ss.Recovery(0, replica_every=1), "replica_every=1 needs restarts of at least 1"),
    ],
)  # fmt: skip
def test_a_wrong_fault_is_refused_with_the_way_out(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ss.SpecError, match=told):
        make()


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        (ss.Faults().kill(4, step=3), "kill names rank 4, but the job's ranks are 0 to 3"),
        (ss.Faults().kill(1, step=51), "kill names step 51, but the job ends after step 50"),
        (
            ss.Faults().kill(node=1, step=3),
            "which is one node; give a rank, or launch the job on ss.Cluster.emulated",
        ),
        (ss.Faults().slow(9, factor=2), "slow names rank 9"),
        (ss.Faults().drop_link("n0", step=1), "only emulated clusters have links that can be dropped"),
        (ss.Faults().fill_disk(4, step=1), "fill_disk names rank 4"),
    ],
)
def test_a_fault_that_cannot_occur_in_the_job_is_refused(faults: ss.Faults, told: str) -> None:
    with pytest.raises(ss.SpecError, match=told):
        faults.check(JOB)


def test_faults_of_checkpoints_need_checkpoints_and_those_of_nodes_need_nodes() -> None:
    without = JOB.replace(checkpoint=ss.Checkpoint())
    for faults in (ss.Faults().fill_disk(1, step=1), ss.Faults().kill(1, step=1, during="checkpoint")):
        faults.check(JOB)
        with pytest.raises(ss.SpecError, match="saves no checkpoints; set for example checkpoint=Checkpoint"):
            faults.check(without)
    for faults in (ss.Faults().kill(node=4, step=1), ss.Faults().drop_link("n0-n4", step=1)):
        with pytest.raises(ss.SpecError, match="names node 4, but the nodes are 0 to 3"):
            faults.check(JOB, CLUSTER)
    ss.Faults().kill(node=1, step=1).check(JOB, nodes=2)


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 200))
def test_a_random_plan_fits_the_job_and_depends_on_its_seed_only(
    seed: int, world_size: int, steps: int
) -> None:
    drawn = [ss.Faults.random(world_size=world_size, steps=steps, mtbf_steps=50, seed=seed) for _ in "ab"]
    assert drawn[0] == drawn[1]
    for fault in drawn[0]:
        assert isinstance(fault, Kill)
        assert fault.rank in range(world_size)
        assert fault.step in range(1, steps + 1)


def test_failures_are_as_frequent_as_ranks_are_many() -> None:
    """Within three standard deviations of a Poisson process."""
    for ranks in (1, 8):
        found = ss.Faults.random(world_size=ranks, duration_s="1000 s", mtbf_s=10.0, seed=1)
        assert abs(len(found) - 100 * ranks) < 3 * (100 * ranks) ** 0.5


def test_recovery_may_be_a_number() -> None:
    assert JOB.recovery is None
    assert JOB.replace(recovery=2).recovery == JOB.replace(recovery="2").recovery == ss.Recovery(2)
    assert JOB.replace(recovery="none").recovery is None
    job = JOB.replace(recovery=ss.Recovery(restarts=5))
    assert ss.Job.from_json(job.to_json()) == job


def test_slow_and_links_say_when_and_where() -> None:
    slow = Slow(rank=1, factor=2.0, steps=(3, None))
    assert [slow.is_on(step) for step in (2, 3, 99)] == [False, True, True]
    assert DropLink(link="n10-n2", step=1).nodes == (10, 2)


def test_an_elastic_job_may_lose_a_rank_that_it_gets_by_a_resize() -> None:
    job = JOB.replace(world_size=2, elastic="2:4")
    ss.Faults().kill(3, step=5).check(job)
    with pytest.raises(ss.SpecError, match="kill names rank 4, but the job's ranks are 0 to 3"):
        ss.Faults().kill(4, step=5).check(job)


def test_a_checkpoint_may_be_a_number_of_steps_and_is_refused_if_it_saves_nothing() -> None:
    assert JOB.replace(checkpoint=10) == JOB
    with pytest.raises(
        ss.SpecError, match=r"checkpoint.asynchronous=True has no effect .* set for example every"
    ):
        JOB.replace(checkpoint=ss.Checkpoint(asynchronous=True))
    assert JOB.replace(checkpoint=ss.Checkpoint(incremental=True), until=20).saves_checkpoints


def test_a_job_with_a_link_of_its_own_is_not_predicted_on_an_emulated_cluster() -> None:
    linked = JOB.replace(link=ss.Link(bandwidth="1 Gbit/s", latency="1 ms"))
    for ask in (ss.predict, ss.simulate):
        with pytest.raises(ss.SpecError, match="cannot be combined with an emulated cluster.*use link=None"):
            ask(linked, CLUSTER)  # type: ignore[operator]
