"""Methods in layouts: a user's own is predicted like a built-in one."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.analytic import communication as comm
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import model_states, module_memory
from shardscope.planner import SearchAxes
from shardscope.prediction.layout import Prediction
from shardscope.spec import registry
from shardscope.spec.compression import compression_names
from shardscope.spec.layout_optimizer import PUBLISHED, optimizer_names
from shardscope.spec.model import Model

MODEL = Model.transformer(layers=4, hidden=256, heads=4, vocab=1000, seq=128)
CLUSTER = ss.Cluster.of("a100-80gb", nodes=1, per_node=8)


def predicted(**fields: object) -> Prediction:
    return ss.predict(MODEL, CLUSTER, ss.Layout(data=8, global_batch=8, **fields))


class Sparing(ss.Optimizer):
    name = "sparing"

    keeps: int = 1

    @property
    def states(self) -> ss.OptimizerStates:
        return ss.OptimizerStates(tensors=self.keeps, counter_bytes=8)

    def build(self, parameters: object) -> object:
        raise NotImplementedError


class Halves(ss.PackedCompression):
    """As ``fp16``, by all accounts."""

    name = "halves"
    carriage = "sums"
    summed_width = 2
    codec_passes = 1.0

    share: float = 1.0

    def packet_bytes(self, num_elements: int) -> int:
        return 2 * int(self.share * num_elements)

    def codec(self) -> object:
        raise NotImplementedError


class Unsaid(Halves):
    name = "unsaid"
    codec_passes = None


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

    def test_one_whose_code_is_not_here_is_read_and_not_predicted(self) -> None:
        text = ss.Layout(optimizer=Sparing(), data=8, global_batch=8).to_json()
        registry._of_users.clear()
        layout = ss.Layout.from_json(text)
        assert layout.to_json() == text
        with pytest.raises(ss.SpecError, match="sparing"):
            ss.predict(MODEL, CLUSTER, layout)


class TestCompression:
    @pytest.mark.parametrize("given", [Halves, Halves(), "halves", Halves(share=0.5)])
    def test_a_users_own_is_predicted_by_its_packets_and_passes(self, given: object) -> None:
        registry.register(Halves)
        own, known = predicted(compression=given), predicted(compression="fp16")
        assert own.peak_bytes == known.peak_bytes
        if given == Halves(share=0.5):
            assert own.step_time_s < known.step_time_s
        else:
            assert own.time.value == known.time.value

    def test_a_plan_tries_it_beside_others_and_shows_it_by_its_label(self) -> None:
        tried = [
            "none",
            ss.Compression("topk"),
            ss.Compression("topk", ratio=0.05),
            Halves(share=0.1),
            "topk",
        ]
        fix = {"tensor": 1, "pipeline": 1, "context": 1, "compression": tried}
        plans = ss.plan(MODEL, CLUSTER, global_batch=8, top=None, fix=fix)
        assert {*plans.frame["compression"]} == {"none", "topk", "topk ratio=0.05", "halves share=0.1"}
        assert len({*(plan.layout for plan in plans)}) == len(plans)
        best = plans.best
        assert best.step_time_s == pytest.approx(ss.predict(MODEL, CLUSTER, best.layout).step_time_s)
        assert all(row["layout"]["compression"]["name"] for row in plans.to_dict()["plans"])

    def test_without_passes_it_is_refused_with_those_that_have_them(self) -> None:
        for refuse in (
            lambda: ss.Layout(compression=Unsaid),
            lambda: SearchAxes().fixed({"compression": Unsaid()}),
            lambda: comm.compression_cost(Unsaid(), 1e6, 8, 1e9),
        ):
            with pytest.raises(
                ss.SpecError,
                match="compression='unsaid' does not state how often .* codec_passes in its class, or use one of none",
            ):
                refuse()
        with pytest.raises(
            ss.SpecError, match="compression='dgc' does not state how often compression reads"
        ):
            ss.Layout(compression="dgc", data=8, global_batch=8)

    @pytest.mark.parametrize("name", compression_names())
    def test_every_one_that_a_layout_takes_is_predicted_and_read_back(self, name: str) -> None:
        layout = ss.Layout(data=8, global_batch=8, compression=name)
        assert ss.Layout.from_json(layout.to_json()) == layout
        assert layout.axis("compression") == name
        assert predicted(compression=name).step_time_s > 0

    def test_a_table_has_each_method_once_and_none_first(self) -> None:
        rows = [predicted(compression=name).layout for name in ("topk", "int8", "topk", "none")]
        table = Layouts.of(rows)
        assert [method.name for method in table.compressions] == ["none", "topk", "int8"]
        assert table.compression.tolist() == [1, 2, 1, 0]
