"""Step time: one call for many layouts, and the laws that any machine obeys."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardscope.analytic.compute import work
from shardscope.analytic.compute.work import Split
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import device_memory
from shardscope.calibration.calibration import Calibration
from shardscope.prediction.step import StepParts, step_time, time_term
from shardscope.prediction.step.machine import Machine
from shardscope.prediction.step.micro import BACKWARD_KERNELS, COLLECTIVE_KERNELS, FORWARD_KERNELS
from shardscope.prediction.step.tables import Distinct, WeightTimes, stage_elements, weights
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import LatentAttention, Mixture, Transformer

MODEL = Transformer(layers=24, hidden=2048, heads=16, vocab=51200, seq=1024)
SPARSE = MODEL.replace(
    gated=True, mixture=Mixture(experts=16, active=2, ffn=1024, shared_ffn=512, dense_layers=1),
    latent=LatentAttention(query_rank=512, kv_rank=256, rope_size=64, nope_size=128, value_size=128),
)  # fmt: skip
CLUSTER = Cluster.of("a100-80gb", nodes=64)
CALIBRATION = Calibration.of("a100-megatron")

degrees = st.sampled_from([1, 2, 4, 8])
layouts = st.builds(
    lambda data, tensor, pipeline, context, micro, count, zero, recompute, offload, sequence: Layout(
        data=data, tensor=tensor, pipeline=pipeline, context=context, micro_batch=micro,
        global_batch=data * micro * count, zero=zero, recompute=recompute, offload=offload, sequence_parallel=sequence,
    ),
    degrees, degrees, degrees, st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.integers(1, 16),
    st.sampled_from([0, 1, 2, 3]), st.sampled_from(["none", "selective", "full"]),
    st.sampled_from(["none", "optimizer", "all"]), st.booleans(),
)  # fmt: skip


def total(layout: Layout, cluster: Cluster = CLUSTER, calibration: Calibration = CALIBRATION) -> float:
    return float(step_time(MODEL, Layouts.of([layout]), cluster, calibration).total[0])


@settings(max_examples=20, deadline=None)
@given(st.lists(layouts, min_size=1, max_size=6))
def test_a_table_of_layouts_takes_what_each_takes_alone(rows: list[Layout]) -> None:
    many = rows * (300 // len(rows) + 1)  # enough of them that equal combinations are looked up
    together = step_time(SPARSE, Layouts.of(many), CLUSTER, CALIBRATION)
    for at, row in enumerate(rows):
        alone = step_time(SPARSE, Layouts.of([row]), CLUSTER, CALIBRATION)
        for name in StepParts._fields:
            assert getattr(together, name)[at] == pytest.approx(float(getattr(alone, name)[0]), rel=1e-12), (
                name
            )


@settings(max_examples=40, deadline=None)
@given(layouts)
def test_the_parts_add_up_and_none_is_negative(layout: Layout) -> None:
    parts = step_time(MODEL, Layouts.of([layout]), CLUSTER, CALIBRATION)
    assert all(float(part[0]) >= 0 for part in parts)
    assert float(sum(parts[:-1])[0]) == pytest.approx(float(parts.total[0]))


@settings(max_examples=40, deadline=None)
@given(layouts, st.sampled_from(["intra", "inter", "device"]), st.floats(1.1, 10))
def test_more_bandwidth_never_slows_a_step(layout: Layout, which: str, factor: float) -> None:
    if which == "device":
        device = CLUSTER.device
        faster = CLUSTER.replace(device=device.replace(memory_bandwidth=device.memory_bandwidth * factor))
    else:
        link = getattr(CLUSTER, which)
        faster = CLUSTER.replace(**{which: link.replace(bandwidth=link.bandwidth * factor)})
    assert total(layout, faster) <= total(layout) * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    layouts,
    st.sampled_from(["launch_s", "collective_s", "step_s", "half_size", "launch_jitter", "exposed_launch"]),
    st.floats(1, 20),
)
def test_more_overhead_never_speeds_a_step(layout: Layout, name: str, factor: float) -> None:
    slower = CALIBRATION.replace(**{name: getattr(CALIBRATION, name) * factor})
    assert total(layout, calibration=slower) >= total(layout) * (1 - 1e-12)


@settings(max_examples=40, deadline=None)
@given(layouts)
def test_recomputing_more_never_takes_less(layout: Layout) -> None:
    times = [total(layout.replace(recompute=kind, offload="none")) for kind in ("none", "selective", "full")]
    assert times[0] <= times[1] * (1 + 1e-12)
    assert times[1] <= times[2] * (1 + 1e-12)


def test_full_recomputation_adds_a_forward_pass_of_the_blocks() -> None:
    kept, again = (
        step_time(
            MODEL, Layouts.of([Layout(recompute=kind, micro_batch=8, global_batch=64)]), CLUSTER, CALIBRATION
        )
        for kind in ("none", "full")
    )
    tree = time_term(MODEL, Layout(micro_batch=8, global_batch=64), CLUSTER, CALIBRATION)
    assert float(again.recompute[0]) == pytest.approx(tree["forward"].value)
    assert float(kept.recompute[0]) == 0


def test_the_bubble_of_1f1b_is_the_papers_share() -> None:
    """(p - 1) / m of the blocks' ideal time (Narayanan et al. 2021, 2.2.1)."""
    layout = Layout(pipeline=8, micro_batch=8, global_batch=8 * 32, recompute="none")
    tree = time_term(MODEL, layout, CLUSTER, CALIBRATION.replace(launch_s=0.0))  # no waits, which lengthen it
    ideal = tree["forward"].value + tree["backward"].value
    assert tree["pipeline bubble"].value == pytest.approx(ideal * 7 / 32)


def test_small_products_wait_for_the_host() -> None:
    tiny = Transformer(layers=24, hidden=256, heads=4, vocab=51200, seq=256)
    parts = step_time(tiny, Layouts.of([Layout()]), CLUSTER, CALIBRATION)
    assert float(parts.overhead[0]) > float(parts.compute[0])


@pytest.mark.parametrize(("tensor", "layers_wait"), [(1, 0), (4, 24)])
def test_launches_stay_exposed_under_tensor_parallelism_where_computation_takes_much_longer(
    tensor: int, layers_wait: int
) -> None:
    wide = Transformer(layers=24, hidden=16384, heads=128, vocab=51200, seq=4096)
    layout = Layouts.of([Layout(tensor=tensor, data=512 // tensor, global_batch=512)])
    without, exposed = (
        float(step_time(wide, layout, CLUSTER, CALIBRATION.replace(exposed_launch=share)).overhead[0])
        for share in (0.0, 0.5)
    )
    kernels = FORWARD_KERNELS + BACKWARD_KERNELS + 4 * COLLECTIVE_KERNELS
    expected = layers_wait * 0.5 * kernels * CALIBRATION.launch_s * (512 / (512 / tensor))
    assert exposed - without == pytest.approx(expected, rel=0.01)


def test_gradients_that_add_up_compressed_take_less_of_a_slow_network_and_gathered_ones_more() -> None:
    """PowerSGD's factors are reduced; the largest 1 % of W workers are gathered, at 0.0507 bytes an element, which
    is 0.0507 W / (2 x 2) of what is dense in half precision: more from 79 workers on."""
    slow = CLUSTER.replace(inter=CLUSTER.inter.replace(bandwidth=1e8))

    def seconds(workers: int) -> list[float]:
        layout = Layout(data=workers, global_batch=workers)
        kinds = Layouts.of([layout.replace(compression=kind) for kind in ("none", "powersgd", "topk")])
        return list(step_time(MODEL, kinds, slow, CALIBRATION).data_comm)

    whole, factors, largest = seconds(64)
    assert factors < whole / 5
    assert largest / whole == pytest.approx(0.0507 * 64 / 4, rel=0.01)
    whole, _, largest = seconds(128)
    assert largest > whole


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3_000_000), st.integers(1, 3)), min_size=1, max_size=5
    ),
    st.integers(1, 200),
)
def test_looking_up_combinations_gives_back_every_row(rows: list[tuple[int, int, int]], times: int) -> None:
    columns = [np.array(column) for column in zip(*(rows * times), strict=True)]
    found = Distinct.of(*columns)
    for given_column, known in zip(columns, found.columns, strict=True):
        assert (known[found.row] == given_column).all()


def test_a_million_layouts_take_less_than_two_seconds_of_one_core() -> None:
    count, random = 1_000_000, np.random.default_rng(0)
    base = Layouts.of([Layout()])
    table = Layouts(
        **{name: np.zeros(count, np.int64) for name in Layouts._fields[:-3]} | {
            name: getattr(base, name) for name in Layouts._fields[-3:]
        }
    )  # fmt: skip
    drawn = {
        name: random.choice([1, 2, 4, 8], count)
        for name in ("data", "tensor", "pipeline", "micro_batch", "shard")
    }
    ones = np.ones(count, np.int64)
    table = Layouts(
        **{
            **table._asdict(), **drawn, "context": ones, "expert": ones, "virtual_stages": ones,
            "num_micro_batches": random.integers(1, 500, count), "zero": random.integers(0, 4, count),
        }
    )  # fmt: skip

    def took_s() -> float:
        started = time.process_time()
        assert len(step_time(MODEL, table, CLUSTER, CALIBRATION).total) == count
        return time.process_time() - started

    assert any(took_s() < 2 for _ in range(10))  # a core that others share is slower for a while


def test_a_last_stage_with_fewer_layers_hides_the_output_projection() -> None:
    even, uneven = MODEL.replace(layers=24), MODEL.replace(layers=21)
    layout = Layout(pipeline=4, micro_batch=8, global_batch=64)
    edges = [
        time_term(model, layout, CLUSTER, CALIBRATION)["embedding and output"].value
        for model in (even, uneven)
    ]
    assert edges[1] < edges[0] / 2


def test_a_faster_link_inside_the_nodes_never_slows_a_ring_across_them() -> None:
    network = CLUSTER.inter.replace(bandwidth=CLUSTER.intra.bandwidth / 8)
    calibration = CALIBRATION.replace(intra_efficiency=0.8, inter_efficiency=0.4)
    layout = Layout(data=512, global_batch=512)
    slow = CLUSTER.replace(inter=network)
    fast = slow.replace(intra=slow.intra.replace(bandwidth=slow.intra.bandwidth * 1.01))
    assert total(layout, fast, calibration) <= total(layout, slow, calibration)


def test_the_experts_of_a_shard_are_divided_by_the_ranks_in_it_that_hold_the_same_ones() -> None:
    """A shard of 8 ranks over 8 expert ranks has each expert once: nothing is left to divide, gather or scatter."""

    def update(shard: int, expert: int) -> float:
        layout = Layout(data=64, expert=expert, zero=1, shard=shard, global_batch=64)
        return float(step_time(SPARSE, Layouts.of([layout]), CLUSTER, CALIBRATION).optimizer[0])

    none_shared = weights_of(Layout(data=64, expert=8, zero=1, shard=8, global_batch=64))
    dense, experts = none_shared.dense[0], none_shared.experts[0]
    assert update(8, 8) / update(64, 8) == pytest.approx((dense / 8 + experts) / (dense / 64 + experts / 8))


def weights_of(layout: Layout) -> WeightTimes:
    one = [np.array([float(getattr(layout, name))]) for name in ("tensor", "pipeline", "context", "expert")]
    tensor, pipeline, context, expert = one
    return weights(
        SPARSE, Machine.of(CLUSTER, CALIBRATION, layout.precision), tensor=tensor, pipeline=pipeline, context=context,
        expert=expert, data=np.array([float(layout.data)]), shard=np.array([float(layout.shard)]),
        zero=np.array([float(layout.zero)]), compression=np.array([0]), compressions=(layout.compression,),
        precision=layout.precision,
        kept=layout.optimizer.states,
    )  # fmt: skip


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_are_packed_as_often_as_they_are_reduced(zero: int) -> None:
    """On a network that takes no time, what twice the micro-batches add to reducing is the codec's time again."""
    endless = {"bandwidth": 1e30, "latency_s": 1e-30}
    cluster = CLUSTER.replace(intra=CLUSTER.intra.replace(**endless), inter=CLUSTER.inter.replace(**endless))
    calibration = CALIBRATION.replace(collective_s=0)

    def packing(count: int) -> float:
        layout = Layout(data=8, zero=zero, compression="int8", global_batch=8 * count)
        return float(step_time(MODEL, Layouts.of([layout]), cluster, calibration).data_comm[0])

    assert packing(1) > 0
    assert packing(4) == pytest.approx(packing(1) * (4 if zero >= 2 else 1))


def test_an_update_reads_and_writes_as_many_bytes_as_the_optimizer_keeps() -> None:
    def update(optimizer: str) -> float:
        one = Layouts.of([Layout(optimizer=optimizer)])
        return float(step_time(MODEL, one, CLUSTER, CALIBRATION).optimizer[0])

    kept = 2 * (1 + 4 / 256)  # two moments of one byte, and a float32 scale for 256 of them
    assert update("adam8bit") / update("adamw") == pytest.approx(
        (2 + 2 + 2 * (4 + kept)) / (2 + 2 + 2 * (4 + 8))
    )


@pytest.mark.parametrize(("data", "tensor", "offload"), [(1, 1, "none"), (4, 2, "none"), (4, 2, "optimizer")])
def test_muon_orthogonalises_every_hidden_matrix_in_five_steps(data: int, tensor: int, offload: str) -> None:
    """4 n^2 M + 2 n^3 a step of matrices of h x 3h, h x h, h x 4h and 4h x h, shared by the ranks that update."""
    calibration, hidden = CALIBRATION.replace(half_size=0), MODEL.hidden
    layout = Layout(data=data, tensor=tensor, zero=1, optimizer="muon", global_batch=data, offload=offload)
    flops = MODEL.layers * 5 * (4 * (3 + 1 + 4 + 4) + 4 * 2) * hidden**3 / (data * tensor)
    seconds = flops / (312e12 * calibration.matmul_efficiency)
    taken, memory = (
        float(step_time(MODEL, Layouts.of([one]), CLUSTER, calibration).optimizer[0])
        for one in (layout, layout.replace(optimizer="nesterov"))
    )
    assert taken - memory == pytest.approx(seconds)


def test_ranks_beyond_the_heads_of_keys_and_values_repeat_them() -> None:
    """With 2 heads of keys and values, each of 16 ranks computes and moves one, as each of 2 does."""
    grouped = MODEL.replace(kv_heads=2)
    split = Split.of(tensor=[1, 2, 4, 16])
    qkv = work.projections(grouped, split)[0]
    queries = grouped.heads * grouped.head_size / split.tensor
    assert (qkv.n - queries).tolist() == [512, 256, 256, 256]
    moved = work.block_bytes(grouped, split, sequence_parallel=True)
    whole = work.block_bytes(MODEL, split, sequence_parallel=True)
    assert (moved < whole)[:3].all()
    assert moved[3] == whole[3], "one of 16, or one of 2 repeated"


@pytest.mark.parametrize(("zero", "shard", "ranks"), [(0, 0, 1), (1, 0, 16), (3, 4, 4)])
def test_the_tree_says_over_how_many_ranks_the_update_is_divided(zero: int, shard: int, ranks: int) -> None:
    tree = time_term(
        MODEL, Layout(data=8, context=2, zero=zero, shard=shard, global_batch=8), CLUSTER, CALIBRATION
    )
    assert tree["optimizer"].inputs["N"] == ranks
    assert tree["gradients and gathered parameters"].inputs["d × c"] == 16


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (MODEL, {}),
        (MODEL, {"tensor": 8}),
        (MODEL, {"tensor": 8, "sequence_parallel": True, "recompute": "full"}),
        (MODEL, {"precision": "fp32", "flash_attention": False}),
        (SPARSE, {"context": 2}),
    ],
)
def test_what_is_swapped_to_the_host_is_what_memory_says_is_saved(
    model: Transformer, changes: dict[str, object]
) -> None:
    layout = Layout(**changes).replace(data=8, global_batch=8)
    saved = float(device_memory(model, Layouts.of([layout])).activations[0])
    slow = 1e3  # bytes a second, so that computation hides next to nothing
    cluster = CLUSTER.replace(device=CLUSTER.device.replace(host_bandwidth=slow))
    away = Layouts.of([layout.replace(offload="activations")])
    assert float(step_time(model, away, cluster, CALIBRATION).offload[0]) == pytest.approx(
        2 * saved / slow, rel=1e-3
    )


def test_copies_of_sharded_layers_take_the_same_time_on_any_network() -> None:
    layout = Layout(data=64, zero=3, global_batch=256, micro_batch=4)

    def copies_s(inter: str, intra: str) -> float:
        cluster = Cluster.of("a100-80gb", nodes=8, inter=inter, intra=intra)
        known = [CALIBRATION.replace(shard_overlap=0.0, shard_copies=copies) for copies in (0.0, 4.0)]
        bare, copied = (step_time(MODEL, Layouts.of([layout]), cluster, each).data_comm[0] for each in known)
        return float(copied - bare)

    elements = float(stage_elements(MODEL, tensor=1, pipeline=1, expert=1)[0])
    gathered_twice_and_reduced = 3 * 2 * elements
    rate = CLUSTER.device.memory_bandwidth * CALIBRATION.memory_efficiency
    for inter, intra in (("10 GB/s", "300 GB/s"), ("50 GB/s", "300 GB/s"), ("10 GB/s", "20 GB/s")):
        assert copies_s(inter, intra) == pytest.approx(4 * gathered_twice_and_reduced / rate)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_computation_hides_a_share_of_tensor_parallel_messages(recompute: str) -> None:
    layout = Layout(data=8, tensor=2, global_batch=64, micro_batch=8, recompute=recompute)

    def parts(overlap: float) -> StepParts:
        known = CALIBRATION.replace(message_overlap=overlap, launch_s=0.0)
        return step_time(MODEL, Layouts.of([layout]), CLUSTER, known)

    shown, half, none = (float(parts(overlap).tensor_comm[0]) for overlap in (0.0, 0.5, 1.0))
    assert shown - half == pytest.approx(half - none)
    assert 0 <= none < half, "messages of embedding and output are not hidden"
    assert parts(0.5).total < parts(0.0).total


def test_computation_hides_no_more_messages_than_it_takes_time() -> None:
    layout = Layout(data=8, tensor=8, global_batch=8)
    slow = Cluster.of("a100-80gb", nodes=64, intra="1 GB/s")

    def parts(overlap: float) -> StepParts:
        known = CALIBRATION.replace(message_overlap=overlap, launch_s=0.0)
        return step_time(MODEL, Layouts.of([layout]), slow, known)

    assert parts(1.0).tensor_comm[0] == pytest.approx(parts(0.5).tensor_comm[0])
    hidden = parts(0.0).tensor_comm[0] - parts(1.0).tensor_comm[0]
    assert 0 < hidden <= parts(0.0).compute[0]
