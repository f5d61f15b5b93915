"""Methods in layouts: a user's own is predicted like a built-in one, and what earlier versions wrote is read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shardscope as ss
from shardscope.analytic.memory import model_states, module_memory
from shardscope.spec import registry
from shardscope.spec.layout_optimizer import PUBLISHED, optimizer_names
from shardscope.spec.model import Model

MODEL = Model.transformer(layers=4, hidden=256, heads=4, vocab=1000, seq=128)
CLUSTER = ss.Cluster.of("a100-80gb", nodes=1, per_node=8)


@pytest.fixture(autouse=True)
def no_methods_left() -> Iterator[None]:
    yield
    registry._of_users.clear()


def predicted(**fields: object) -> ss.Prediction:
    return ss.predict(MODEL, CLUSTER, ss.Layout(data=8, global_batch=8, **fields))


class Sparing(ss.Optimizer):
    name = "sparing"

    keeps: int = 1

    @property
    def states(self) -> ss.OptimizerStates:
        return ss.OptimizerStates(tensors=self.keeps, counter_bytes=8)

    def build(self, parameters: object) -> object:
        raise NotImplementedError


class TestOptimizers:
    @pytest.mark.parametrize("given", [Sparing, Sparing(), "sparing", Sparing(keeps=2)])
    def test_a_users_own_is_predicted_by_what_it_says_it_keeps(self, given: object) -> None:
        registry.register(Sparing)
        own = predicted(optimizer=given)
        known = predicted(optimizer="adamw" if given == Sparing(keeps=2) else "nesterov")
        assert (own.step_time_s, own.peak_bytes) == (known.step_time_s, known.peak_bytes)
        assert model_states(100, optimizer=Sparing(keeps=3), num_tensors=7).optimizer == 3 * 400 + 7 * 8

    def test_a_plan_with_a_users_own_shows_it_by_its_label(self) -> None:
        plans = ss.plan(MODEL, CLUSTER, global_batch=8, top=3, optimizer=["adamw", Sparing(keeps=0)])
        assert set(plans.frame["optimizer"]) <= {"adamw", "sparing keeps=0"}
        assert plans.best.layout.optimizer == Sparing(keeps=0)

    @pytest.mark.parametrize("name", optimizer_names())
    def test_every_known_one_is_predicted_and_read_back(self, name: str) -> None:
        layout = ss.Layout(optimizer=name)
        assert ss.Layout.from_json(layout.to_json()) == layout == ss.Layout(**layout.model_dump())
        assert (layout.optimizer.name, layout.axis("optimizer")) == (name, name)
        assert f"optimizer='{name}'" in repr(layout)
        assert hash(layout) == hash(ss.Layout(optimizer=name))
        assert ss.predict(MODEL, CLUSTER.replace(per_node=1), layout).peak_bytes > 0

    def test_settings_that_change_what_is_kept_count(self) -> None:
        plain, moved = (predicted(optimizer=ss.Optimizer("sgd", momentum=m)).peak_bytes for m in (0, 0.9))
        assert moved - plain == 4 * MODEL.num_params

    def test_compression_may_change_what_the_optimizer_keeps(self) -> None:
        lamb = ss.Optimizer("lamb").states
        kept = ss.Compression("onebit-lamb").optimizer_states(lamb)
        assert (kept.tensors, kept.counter_bytes) == (3, 12)
        assert ss.Compression("onebit-adam").optimizer_states(lamb) == lamb
        table = Model.of("resnet-50")
        one, other = (
            module_memory(table, batch=1, scores_bytes=4000, optimizer=each) for each in (lamb, kept)
        )
        assert other.optimizer - one.optimizer == 4 * table.num_params + 8 * table.num_tensors

    def test_unknown_ones_are_refused_with_all_that_a_layout_takes(self) -> None:
        with pytest.raises(ss.SpecError, match="optimizer='adam' is not known; did you mean 'adamw'.*muon"):
            ss.Layout(optimizer="adam")
        with pytest.raises(ss.SpecError, match="optimizer='muon' is not known"):
            ss.Job(model="mlp", data="digits", optimizer="muon")
        assert {each.source for each in PUBLISHED.values()}
