"""What moving to the host and its drives costs a step, against the bytes that memory says travel."""

from __future__ import annotations

import numpy as np
import pytest

import shardscope as ss
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import RECIPES, device_memory, offload_traffic
from shardscope.analytic.memory.offload import host_bytes_per_device
from shardscope.calibration.calibration import Calibration
from shardscope.calibration.software import memory_model
from shardscope.prediction.step import StepParts, step_time, time_term
from shardscope.prediction.step.tables import stage_elements
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

MODEL = Transformer(layers=24, hidden=2048, heads=16, vocab=51200, seq=1024)
CLUSTER = Cluster.of("a100-80gb", nodes=8).replace(host_memory_bytes=1e15)
CALIBRATION = Calibration.of("a100-megatron")
SLOW = 1e3
"""Bytes a second, so that computing hides next to nothing."""


def parts(layout: Layout, cluster: Cluster = CLUSTER, calibration: Calibration = CALIBRATION) -> StepParts:
    found = step_time(MODEL, Layouts.of([layout]), cluster, calibration)
    return StepParts(*(float(part[0]) for part in found))  # type: ignore[arg-type]


def with_host(bandwidth: float) -> Cluster:
    return CLUSTER.replace(device=CLUSTER.device.replace(host_bandwidth=bandwidth))


def elements(layout: Layout) -> float:
    dense, experts = stage_elements(
        MODEL, tensor=layout.tensor, pipeline=layout.pipeline, expert=layout.expert
    )
    return float(dense + experts)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", ["states", "activations", "all"])
def test_a_slow_link_takes_what_memory_says_travels_the_busier_way_at_a_time(
    offload: str, zero: int, recompute: str
) -> None:
    """Forward: weights in, activations out. Backward: weights in (and again to recompute), activations in, gradients
    out. Both ways at once, so that only the larger counts."""
    layout = Layout(data=4, zero=zero, offload=offload, recompute=recompute, global_batch=12)
    whole, share = elements(layout), elements(layout) / (4 if zero >= 1 else 1)
    weights, gradients = (whole if zero < least else whole / 4 for least in (3, 2))
    saved = float(device_memory(MODEL, Layouts.of([layout.replace(offload="none")])).activations[0])
    passes = 2 if recompute == "full" else 1
    weights_in = 2 * weights * (offload != "activations")
    out = saved * (offload != "states")
    gradients_out = 2 * gradients * (offload != "activations")
    a_batch = max(weights_in, out) + max(passes * weights_in + out, gradients_out)
    update = share * (2 + 2 + 2 * (4 + 8)) * (offload != "activations")
    found = parts(layout, with_host(SLOW))
    assert found.offload == pytest.approx((3 * a_batch + update) / SLOW, rel=1e-3)
    told = offload_traffic(
        Layouts.of([layout]), parameters=np.array([weights]), gradients=np.array([gradients]), owned=np.array([share]),
        saved=np.array([saved]),
    )  # fmt: skip
    assert float(told.to_device[0]) == pytest.approx(3 * ((1 + passes) * weights_in + out))
    assert float(told.to_host[0]) == pytest.approx(3 * (out + gradients_out))


def test_an_offloaded_optimizer_moves_gradients_out_and_weights_in_once_a_step() -> None:
    layout = Layout(data=4, zero=1, offload="optimizer", global_batch=12)
    recipe = RECIPES["bf16-mixed"]
    states = recipe.parameter + recipe.gradient + 2 * (recipe.master + 8)
    moved = elements(layout) / 4 * (2 + 2 + states)
    assert parts(layout, with_host(SLOW)).offload == pytest.approx(moved / SLOW, rel=1e-6)


def test_a_fast_link_shows_nothing_but_the_update_on_the_host() -> None:
    layout = Layout(tensor=4, micro_batch=8, global_batch=32, offload="activations")
    assert parts(layout, with_host(1e13)).offload == 0


@pytest.mark.parametrize(("zero", "offload"), [(0, "all"), (3, "none"), (3, "all")])
def test_what_a_micro_batch_waits_for_lengthens_the_bubble_too(zero: int, offload: str) -> None:
    """(p - 1) / m of all that the micro-batches take, less output projection and update."""
    layout = Layout(data=2, pipeline=4, zero=zero, offload=offload, global_batch=32)
    slow = with_host(1e9).replace(intra=CLUSTER.intra.replace(bandwidth=1e9), nodes=1)
    calibration = CALIBRATION.replace(gradient_overlap=1.0, step_s=0)
    short, long = (parts(layout.replace(global_batch=batch), slow, calibration) for batch in (32, 64))
    a_batch = (long.total - long.pipeline_comm - short.total + short.pipeline_comm) / 16
    edge = time_term(MODEL, layout, slow, calibration)["embedding and output"].value / 16
    assert short.bubble == pytest.approx(3 * (a_batch - edge))
    assert short.bubble > 1.5 * parts(layout.replace(zero=0, offload="none"), slow, calibration).bubble


def test_drives_slow_down_what_the_host_has_no_room_for() -> None:
    layout = Layout(data=8, zero=3, offload="states", global_batch=8)
    drives = {"nvme_bytes": 1e15, "nvme_bandwidth": 8e6}
    roomy, tight = CLUSTER.replace(**drives), CLUSTER.replace(**drives, host_memory_bytes=8 * 4e8)
    held = device_memory(
        MODEL,
        Layouts.of([layout]),
        framework=memory_model(CALIBRATION.software),
        host_capacity=host_bytes_per_device(tight),
    )
    share = float(held.nvme[0] / (held.host[0] + held.nvme[0]))
    assert 0 < share < 1
    weights = gradients = 2 * elements(layout) / 8
    moved = 2 * weights + gradients
    states = elements(layout) / 8 * (2 + 2 + 24)
    assert parts(layout, tight).offload == pytest.approx(share * (moved + states) / 1e6, rel=1e-2)
    assert parts(layout, roomy) == parts(layout, CLUSTER)


def test_drives_of_unknown_bandwidth_hold_nothing() -> None:
    layout = Layout(data=8, zero=3, offload="states", global_batch=8)
    node = Cluster.of("a100-80gb").replace(host_memory_bytes=8 * 4e8, nvme_bytes=1e15, nvme_bandwidth=0)
    assert not ss.predict(MODEL, node, layout).fits
    assert ss.predict(MODEL, node.replace(nvme_bandwidth=1e9), layout).fits


def test_the_tree_tells_the_rates_to_the_host_and_to_the_drives() -> None:
    layout = Layout(offload="states")
    inputs = time_term(MODEL, layout, CLUSTER, CALIBRATION)["offload"].inputs
    assert inputs["bytes/s to the host"] == CLUSTER.device.host_bandwidth
    assert inputs["bytes/s to a device's share of the drives"] == CLUSTER.nvme_bandwidth / 8


def test_a_table_is_replaced_column_by_column() -> None:
    table = Layouts.of([Layout(), Layout(tensor=2)])
    changed = table._replace(zero=np.array([3, 3]))
    assert isinstance(changed, Layouts)
    assert (changed.zero.tolist(), changed.tensor.tolist(), len(changed)) == ([3, 3], [1, 2], 2)


class TestTiedEmbeddings:
    def test_first_and_last_stage_add_up_their_gradients(self) -> None:
        """An all-reduce of two: V h / t elements of 2 bytes over a device's share of the network."""
        layout = Layout(tensor=8, pipeline=8, data=1, global_batch=8)
        tied, apart = (
            float(
                step_time(model, Layouts.of([layout]), CLUSTER, CALIBRATION).data_comm[0]
            )
            for model in (MODEL, MODEL.replace(tied=False))
        )  # fmt: skip
        bandwidth = CLUSTER.inter.bandwidth * CALIBRATION.inter_efficiency
        size = 51200 * 2048 / 8 * 2
        extra = 2 * CLUSTER.inter.latency_s + CALIBRATION.collective_s
        assert tied - apart == pytest.approx(size / bandwidth + extra)

    @pytest.mark.parametrize("changes", [{"pipeline": 1}, {"schedule": "zbv", "virtual_stages": 2}])
    def test_nothing_is_sent_where_one_rank_holds_both(self, changes: dict[str, object]) -> None:
        layout = Layout(**{"pipeline": 4, "global_batch": 8} | changes)
        tied, apart = (
            float(step_time(model, Layouts.of([layout]), CLUSTER, CALIBRATION).data_comm[0])
            for model in (MODEL, MODEL.replace(tied=False))
        )
        assert tied == apart == 0


class TestNumberFormats:
    def test_eight_bits_are_refused_on_a_device_without_them(self) -> None:
        with pytest.raises(
            ss.SpecError,
            match=r"precision='fp8-mixed' needs .* in fp8, but device 'a100-80gb' supports .*use .*'bf16-mixed'",
        ):
            parts(Layout(precision="fp8-mixed"))

    def test_the_tree_says_in_which_format_products_are_done(self) -> None:
        cluster = Cluster.of("v100-32gb")
        tree = time_term(MODEL, Layout(), cluster, Calibration.of(cluster.device))
        assert tree["forward"].inputs["products in"] == "fp16"
