"""Strategies and pipeline schedules of the user's own, as a notebook cell defines them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardscope as ss
from shardscope.conformance import PipelineScheduleConformance, StrategyConformance
from shardscope.spec import registry


def job_of(**changes: Any) -> ss.Job:
    fields = {"model": "mlp", "data": "digits", "strategy": "ring", "batch": 24, "steps": 6}
    return ss.Job(**{**fields, **changes})


STRATEGY = """
class Gathered(ss.BucketedStrategy):
    "Every rank gathers the buckets of all, and adds them up itself."

    name = "gathered"
    carries = frozenset({"sums"})

    scale: float = 1.0

    def exchanged_bytes(self, gradient_bytes, world_size, *, micro_batches=1):
        return world_size * (world_size - 1) * gradient_bytes

    def build(self, job, context):
        return OnOneRank(job, context)


class OnOneRank(ss.OwnAllReduce):
    def prepare(self):
        self.parts = []

    def reduce_(self, buffer):
        parts = [torch.empty_like(buffer) for _ in range(self.context.world_size)]
        torch.distributed.all_gather(parts, buffer)
        return buffer.copy_(self.settings.scale * torch.stack(parts).sum(0))
"""


SCHEDULE = """
class Patient(ss.PipelineSchedule):
    "1F1B that lets one more forward pass go ahead."

    name = "patient"

    ahead: int = 1

    def order(self, rank, ranks, microbatches, held):
        warm = min(microbatches, ranks - rank + self.ahead)
        ops = [("F", rank, i) for i in range(warm)]
        for i in range(microbatches):
            ops += [("B", rank, i)] + [("F", rank, warm + i)] * (warm + i < microbatches)
        return ops
"""


def run_strategy_cell() -> type[ss.Strategy]:
    cell: dict[str, Any] = {"ss": ss, "torch": torch, "__name__": "__main__"}
    exec(STRATEGY, cell)
    return cell["Gathered"]


def run_schedule_cell() -> type[ss.PipelineSchedule]:
    cell: dict[str, Any] = {"ss": ss, "__name__": "__main__"}
    exec(SCHEDULE, cell)
    return cell["Patient"]


class TestGathered(StrategyConformance):
    method = run_strategy_cell()


@pytest.mark.slow  # `TestOrders` runs an own schedule in the quick tier
class TestPatient(PipelineScheduleConformance):
    method = run_schedule_cell()


def test_a_strategy_that_builds_something_else_is_refused() -> None:
    class Builds(ss.BucketedStrategy):
        name = "builds"

        def build(self, job: object, context: object) -> object:
            return job

    with pytest.raises(
        ss.RunFailed, match="strategy='builds': its build method returned .*; return an object"
    ):
        ss.launch(job_of(strategy=Builds, world_size=2)).wait(60)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (lambda rank, ranks, n, held: [("F", rank, i) for i in range(n)], "passes 'F' for micro-batch 0 on stage 0"),
        (lambda rank, ranks, n, held: [(kind, rank, 0) for kind in "FB" for _ in range(n)], "passes 'BBBBFFFF'"),
        (
            lambda rank, ranks, n, held: [(kind, at, i) for at in range(ranks) for kind in "FB" for i in range(n)],
            "schedules ScheduledOp.* on rank 0, which does not hold that stage; use its stages: 0",
        ),
        (lambda rank, ranks, n, held: [(kind, rank, i) for kind in "BF" for i in range(n)], "deadlocks"),
    ],
    ids=["no backward", "one twice", "another rank's", "deadlock"],
)  # fmt: skip
def test_an_order_that_cannot_be_carried_out_is_refused_before_anything_starts(order: Any, says: str) -> None:
    class Odd(ss.PipelineSchedule):
        name = "odd"

        def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Any:
            return order(rank, ranks, microbatches, held)

    with pytest.raises(ss.SpecError, match=says):
        job_of(
            strategy=ss.Pipeline(schedule=Odd, split="even"), world_size=2, batch=ss.Batch(24, micro_batch=6)
        )


def odd_first(rank: int, ranks: int, n: int, held: int) -> list[tuple[str, int, int]]:
    batches = [*range(1, n, 2), *range(0, n, 2)]
    return [(kind, rank, i) for kind in "FB" for i in batches]


class TestOrders:
    def made(self, order: Any, base: Any = ss.PipelineSchedule, **members: Any) -> Any:
        return type("Mine", (base,), {"name": "mine", "order": order, "__module__": "__main__", **members})

    def test_micro_batches_may_come_in_any_order(self) -> None:
        mine = self.made(lambda self, *numbers: odd_first(*numbers))
        job = job_of(
            strategy=ss.Pipeline(schedule=mine, split="even"), world_size=2, batch=ss.Batch(24, micro_batch=6),
            precision="fp64",
        )  # fmt: skip
        report = ss.check(job, steps=3)
        assert report.passed, report

    @pytest.mark.slow
    def test_one_that_is_derived_from_a_built_in_one_runs_in_its_own_order(self) -> None:
        base = registry.require_known(ss.PipelineSchedule, "gpipe")
        mine = self.made(lambda self, *numbers: odd_first(*numbers), base)
        assert (mine.torch_class, mine.held_terms) == (None, None)
        strategy = ss.Pipeline(schedule=mine, split="even")
        run = ss.launch(job_of(strategy=strategy, world_size=2, batch=ss.Batch(24, micro_batch=6))).wait(60)
        ops = [(kind, batch) for kind, _, batch, *_ in run.events("schedule", rank=0)[0]["ops"]]
        assert ops == [("F", 1), ("F", 3), ("F", 0), ("F", 2), ("B", 1), ("B", 3), ("B", 0), ("B", 2)]

    @pytest.mark.parametrize(
        ("order", "says"),
        [
            (lambda self, *_: None, "schedule='mine': order.rank=0, ranks=2.* failed .TypeError"),
            (lambda self, *_: [("F", 0)], "make it return triples such as"),
            (lambda self, *_: [("F", 0.0, 1)], "cannot be interpreted as an integer"),
            (
                lambda self, rank, ranks, n: [],
                "Mine.order does not accept the arguments that it is called with",
            ),
        ],
    )
    def test_what_order_returns_is_looked_at(self, order: Any, says: str) -> None:
        with pytest.raises(ss.SpecError, match=says):
            job_of(strategy=ss.Pipeline(schedule=self.made(order), split="even"), world_size=2, batch=8)

    @pytest.mark.parametrize(
        ("members", "says"),
        [
            ({"default_stages": 2}, "default_stages=2 and most_stages=1; these must be in ascending order"),
            ({"v_shaped": True}, "v_shaped=True needs two stages on each rank"),
            ({"held_terms": (1.0, 0.0)}, "held_terms=.* is not a HeldTerms"),
            ({"name": "2"}, "give it a name of lower-case letters, digits and hyphens"),
        ],
    )
    def test_members_that_cannot_be_are_refused(self, members: dict[str, Any], says: str) -> None:
        with pytest.raises(ss.SpecError, match=says):
            ss.register(self.made(lambda self, *numbers: odd_first(*numbers), **members))

    def test_another_schedule_does_not_shift_those_that_are_known(self) -> None:
        from shardscope.spec.layout import schedule_names

        ss.register(run_schedule_cell())
        place = schedule_names().index("patient")
        ss.register(self.made(lambda self, *numbers: odd_first(*numbers), year=1990))
        assert schedule_names().index("patient") == place


class TestSums:
    def job(self, summed: Any) -> ss.Job:
        class OnRank(ss.OwnAllReduce):
            def reduce_(self, buffer: torch.Tensor) -> Any:
                return summed(buffer)

        class Mine(ss.BucketedStrategy):
            name = "mine"
            carries = frozenset({"sums"})

            def build(self, job: ss.Job, context: Any) -> Any:
                return OnRank(job, context)

        return job_of(strategy=Mine(), world_size=2, precision="fp64")

    def test_a_sum_may_be_another_tensor(self) -> None:
        def summed(buffer: torch.Tensor) -> torch.Tensor:
            parts = [torch.empty_like(buffer) for _ in range(2)]
            torch.distributed.all_gather(parts, buffer)
            return parts[0] + parts[1]

        report = ss.check(self.job(summed), steps=3)
        assert report.passed, report

    def test_what_is_no_sum_is_refused(self) -> None:
        with pytest.raises(ss.RunFailed, match="OnRank.reduce_ returned None; return the sum"):
            ss.launch(self.job(lambda buffer: None)).wait(60)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"look": "#ff0000"}, "look='#ff0000' is not a MethodStyle"),
        ({"variant": "nope"}, "variant='nope' is not one of its settings"),
        (
            {"carries": frozenset({"sum"})},
            "carries contains 'sum', which is not valid; use none, sums, packets",
        ),
        ({"build": lambda self, job: None}, "build does not accept the arguments that it is called with"),
    ],
)
def test_members_of_a_strategy_that_cannot_be_are_refused(members: dict[str, Any], says: str) -> None:
    build = {"build": lambda self, job, context: None}
    with pytest.raises(ss.SpecError, match=says):
        ss.register(type("Mine", (ss.BucketedStrategy,), {"name": "mine", **build, **members}))


def test_a_setting_is_not_said_twice() -> None:
    with pytest.raises(ss.SpecError, match="'ring:2' already sets directions, which is also given as 1"):
        ss.Strategy("ring:2", directions=1)


class TestASchedulesJob:
    def job(self, **settings: Any) -> ss.Job:
        strategy = ss.Pipeline(schedule=run_schedule_cell()(**settings), split="even")
        return job_of(strategy=strategy, world_size=2, batch=ss.Batch(24, micro_batch=3))

    def test_it_is_read_where_the_class_is_not_and_loaded_on_the_users_word(self) -> None:
        run = ss.launch(self.job(ahead=2)).wait(60)
        assert run.state == "completed", run.error
        registry._of_users.clear()
        elsewhere = ss.Job.from_json((run.path / "job.json").read_text())
        assert elsewhere.strategy.label == "pipeline:patient"
        assert elsewhere.to_json() == run.job.to_json()
        assert [*elsewhere.user_code] == ["strategy.schedule"]
        with pytest.raises(ss.SpecError, match="the code of 'patient' is not part of this job.json"):
            ss.launch(elsewhere)
        loaded = ss.load_job(run)
        assert loaded.strategy.schedule.settings == {"ahead": 2}
        assert ss.PipelineSchedule("patient").settings == {"ahead": 1}

    def test_its_bubble_and_memory_are_counted(self) -> None:
        from shardscope.analytic.schedules import closed
        from shardscope.spec.layout import schedule_names

        assert ss.register(run_schedule_cell())
        place = schedule_names().index("patient")
        assert closed.in_flight(place, 0, 4, 8, 1) == 5
        assert closed.bubble_time(place, 4, 8, 1, 1.0, 1.0, 1.0) == 9
        assert ss.analytic.schedules.build("patient", 4, 8).bubble_fraction == pytest.approx(3 / 11)
        with pytest.raises(ss.SpecError, match="schedule='patient' has no closed form for the micro-batches"):
            ss.Layout(pipeline=2, schedule="patient")

    def test_searches_look_up_the_class_that_was_defined_last(self) -> None:
        from shardscope.analytic.schedules.closed import columns
        from shardscope.spec.layout import schedule_names

        def define(**members: Any) -> None:
            order = {"order": lambda self, *numbers: odd_first(*numbers)}
            ss.register(type("Mine", (ss.PipelineSchedule,), {"name": "mine", **order, **members}))

        usual = columns()
        define()
        assert (len(columns().v_shaped), bool(columns().v_shaped[-1])) == (len(usual.v_shaped) + 1, False)
        define(v_shaped=True, default_stages=2, least_stages=2, most_stages=2)
        assert columns().v_shaped[schedule_names().index("mine")]
        registry._of_users.clear()
        assert columns() is usual

    def test_one_that_cannot_be_counted_spoils_only_its_own_row_of_the_explorer(self) -> None:
        from shardscope_widgets.pipeline_explorer._comparison import comparison_info

        case = {"virtual_stages": 2, "t_f": 1.0, "t_input": 1.0, "t_weight": 1.0}
        usual = comparison_info(4, 8, **case)
        ss.register(type("Mine", (ss.PipelineSchedule,), {"name": "mine", "order": lambda self, *_: None}))
        *others, mine = comparison_info(4, 8, **case)
        assert tuple(others) == usual
        assert "order(rank=" in mine.problem
