"""Memory of devices by formula: laws, and a plain oracle written apart."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import shardscope as ss
from conformance.plain_memory import plain_stage_memory
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import (
    FRAMEWORKS,
    KINDS,
    MemoryParts,
    device_memory,
    memory_term,
    model_states,
    offload_traffic,
    stage_memory,
)
from shardscope.analytic.memory.rows import held_by, pipeline_of
from shardscope.analytic.memory.weights import weights
from shardscope.analytic.schedules import build, closed
from shardscope.spec.cluster import Device
from shardscope.spec.layout import Layout, schedule_names
from shardscope.spec.model import LatentAttention, Mixture, Transformer
from shardscope.spec.pipeline_schedule import PipelineSchedule

GPT = Transformer(layers=24, hidden=1024, heads=16, vocab=50304, seq=1024)
LLAMA = Transformer(
    layers=16, hidden=2048, heads=16, kv_heads=4, ffn=5632, vocab=32000, seq=4096, gated=True, tied=False,
    positions="rotary", norm="rmsnorm", bias=False,
)  # fmt: skip
EXPERTS = Transformer(
    layers=12, hidden=1024, heads=16, vocab=32000, seq=2048, gated=True, tied=False, positions="rotary",
    norm="rmsnorm", bias=False,
    mixture=Mixture(experts=16, active=2, ffn=1024, shared_ffn=512, dense_layers=2),
    latent=LatentAttention(query_rank=256, kv_rank=128, rope_size=32, nope_size=64, value_size=64),
)  # fmt: skip
MODELS = [GPT, LLAMA, EXPERTS]
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipev"]


@st.composite
def layouts(draw: Any) -> Layout:
    """A layout; degrees are powers of two, as they are in use."""
    degree = st.sampled_from([1, 2, 4])
    data, micro, context = draw(degree), draw(degree), draw(st.sampled_from([1, 2]))
    schedule = draw(st.sampled_from(SCHEDULES))
    return Layout(
        data=data,
        tensor=draw(degree),
        pipeline=draw(st.sampled_from([1, 2, 4, 5])),
        context=context,
        expert=draw(st.sampled_from([1, data * context])),
        zero=draw(st.integers(0, 3)),
        shard=draw(st.sampled_from([0, 1, data])),
        micro_batch=micro,
        global_batch=data * micro * draw(st.sampled_from([1, 4, 16])),
        schedule=schedule,
        virtual_stages=(
            draw(st.sampled_from([1, 2]))
            if schedule == "interleaved"
            else PipelineSchedule(schedule).least_stages
        ),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        flash_attention=draw(st.booleans()),
        sequence_parallel=draw(st.booleans()),
        precision=draw(st.sampled_from(["fp32", "bf16-autocast", "bf16-mixed", "fp8-mixed"])),
        optimizer=draw(st.sampled_from(["sgd", "adamw", "adafactor", "adam8bit", "muon"])),
        offload=draw(st.sampled_from(["none", "none", "optimizer", "states", "activations", "all"])),
    )


models = st.sampled_from(MODELS)
frameworks = st.sampled_from(sorted(FRAMEWORKS))


def one(parts: MemoryParts) -> float:
    return float(parts.total[0])


@settings(max_examples=150, deadline=None)
@given(layouts(), st.sampled_from([GPT, LLAMA]))
def test_every_stage_holds_what_a_plain_count_says(layout: Layout, model: Transformer) -> None:
    layout = layout.replace(precision="bf16-mixed", optimizer="adamw", offload="none")
    expected = [plain_stage_memory(model, layout, stage) for stage in range(layout.pipeline)]
    assert stage_memory(model, layout).total.tolist() == pytest.approx(expected, rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(layouts(), models, frameworks)
def test_memory_never_grows_with_the_zero_stage(layout: Layout, model: Transformer, framework: str) -> None:
    """Where gradients are always allocated, and apart from DeepSpeed's buffers of a fixed size on a single stage.

    Of several stages, these buffers decide which is the fullest, and so whose memory is compared. Whole units are left
    out: in ZeRO 2, FSDP2 holds all gathered weights beside the shards of a rank.
    """
    rows = [layout.replace(zero=zero) for zero in range(4)]
    always = FRAMEWORKS[framework]._replace(keeps_gradients_from=0, float32_update=False, casts=False)
    always = always._replace(gathers_units=False)
    assume(layout.pipeline == 1 or not always.bucket_elements)
    held = device_memory(model, Layouts.of(rows), framework=always)
    on_host = held.host + held.nvme
    kept = held.total - held.buffers if always.bucket_elements else held.total
    assert (np.diff(kept) <= 1e-9 * kept[0]).all()
    assert (np.diff(on_host) <= 1e-9 * (1 + on_host[0])).all()


@settings(max_examples=100, deadline=None)
@given(layouts(), models, frameworks)
def test_the_fullest_device_is_the_fullest_of_all_stages(
    layout: Layout, model: Transformer, framework: str
) -> None:
    held = device_memory(model, Layouts.of([layout]), framework=framework)
    assert one(held) == pytest.approx(stage_memory(model, layout, framework=framework).total.max(), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(layouts(), models, frameworks)
def test_the_tree_of_terms_adds_up_to_the_same_bytes(
    layout: Layout, model: Transformer, framework: str
) -> None:
    held = stage_memory(model, layout, framework=framework)
    tree = memory_term(model, layout, framework=framework)
    assert tree.value == pytest.approx(held.total.max(), rel=1e-12)
    for place, stage in enumerate(tree.parts):
        assert [part.name for part in stage.parts] == list(KINDS)
        expected = [float(getattr(held, kind)[place]) for kind in KINDS]
        assert [part.value for part in stage.parts] == pytest.approx(expected, rel=1e-12, abs=1)
        leaves = [term for part in stage.parts for term in part.parts]
        assert all(leaf.formula and leaf.source for leaf in leaves)


@settings(max_examples=60, deadline=None)
@given(layouts(), models)
def test_offloading_moves_bytes_to_the_host_and_loses_none(layout: Layout, model: Transformer) -> None:
    stays, leaves = layout.replace(offload="none"), layout.replace(offload="all")
    here, away = stage_memory(model, stays), stage_memory(model, leaves)
    states = [here.gradients, here.optimizer, here.activations - away.activations]
    params = here.parameters if layout.precision not in ("bf16-autocast", "fp8-mixed") else None
    if params is not None:
        assert away.host == pytest.approx(sum(states) + params, rel=1e-9)
    assert (away.parameters == 0).all()
    assert (away.optimizer == 0).all()


def test_a_table_of_layouts_gives_what_each_gives_alone() -> None:
    rows = [
        Layout(data=8, tensor=tensor, pipeline=pipeline, zero=zero, global_batch=64, recompute=recompute)
        for tensor in (1, 2, 8)
        for pipeline in (1, 3, 4)
        for zero in range(4)
        for recompute in ("none", "full")
    ]
    together = device_memory(LLAMA, Layouts.of(rows * 300)).total
    alone = [one(device_memory(LLAMA, Layouts.of([row]))) for row in rows]
    assert together.tolist() == alone * 300


def test_optimizer_state_is_divided_by_the_ranks_that_hold_the_same_weights_and_by_no_others() -> None:
    """Tensor and pipeline ranks hold other weights: dividing by all devices counts twice."""
    alone = stage_memory(GPT, Layout(zero=1))
    shared = stage_memory(GPT, Layout(zero=1, data=4, global_batch=4))
    assert shared.optimizer[0] == pytest.approx(alone.optimizer[0] / 4)
    tensor = stage_memory(GPT, Layout(zero=1, data=4, tensor=8, global_batch=4))
    assert tensor.optimizer[0] == pytest.approx(tensor.parameters[0] * 12 / 2 / 4)


def test_experts_have_a_smaller_group_of_their_own() -> None:
    """With as many expert ranks as replicas, nobody holds the same experts, so ZeRO cannot divide their states."""
    layout = Layout(data=4, expert=4, zero=1, global_batch=4)
    tree = memory_term(EXPERTS, layout)
    experts = EXPERTS.num_mixture_layers * EXPERTS.expert_params / 4
    assert tree["optimizer state, experts"].value == pytest.approx(12 * experts)
    others = EXPERTS.num_params - EXPERTS.num_mixture_layers * EXPERTS.expert_params
    assert tree["optimizer state"].value == pytest.approx(12 * others / 4)


def test_hybrid_shards_divide_by_their_own_group() -> None:
    whole = stage_memory(GPT, Layout(data=8, zero=3, global_batch=8))
    hybrid = stage_memory(GPT, Layout(data=8, zero=3, shard=2, global_batch=8))
    assert hybrid.optimizer[0] == pytest.approx(4 * whole.optimizer[0])


@pytest.mark.parametrize(
    ("optimizer", "per_param"),
    [("sgd", 0), ("lars", 4), ("lamb", 8), ("adam8bit", 2 * (1 + 4 / 256)), ("muon", 4), ("adafactor", 0)],
)
def test_optimizers_keep_what_their_papers_say(optimizer: str, per_param: float) -> None:
    assert model_states(1e6, optimizer=optimizer).optimizer == pytest.approx(1e6 * per_param)


def test_adafactor_keeps_rows_and_columns_and_muon_two_moments_of_what_is_no_hidden_matrix() -> None:
    assert model_states(1e6, optimizer="adafactor", num_factors=2000).optimizer == 8000
    assert model_states(1e6, optimizer="muon", num_aside=1e5).optimizer == 4e6 + 4e5


def test_eight_bit_weights_are_kept_beside_the_short_ones() -> None:
    bf16, fp8 = (stage_memory(LLAMA, Layout(precision=name)) for name in ("bf16-mixed", "fp8-mixed"))
    assert fp8.parameters[0] > 1.8 * bf16.parameters[0]
    assert fp8.activations[0] < bf16.activations[0]


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("framework", ["megatron-core", "nemo", "megatron-bridge"])
def test_fp8_weights_have_no_transposes_where_products_read_any_layout(framework: str, zero: int) -> None:
    """TransformerEngine stores one byte less of each weight of a layer's matrix on sm_100, and of no other weight."""
    layout = Layout(data=4, zero=zero, global_batch=4, precision="fp8-mixed")
    hopper, blackwell, blackwell_rtx = (
        stage_memory(LLAMA, layout, framework=framework, device=Device.of("b200").replace(architecture=name))
        for name in ("sm_90", "sm_100", "sm_120")
    )
    assert hopper == blackwell_rtx == stage_memory(LLAMA, layout, framework=framework)
    found = weights(LLAMA)
    layer = found.attention_params + found.dense_params
    is_stored = zero == 1 or FRAMEWORKS[framework].fp8_weights
    shards = 1 if zero == 1 else 4
    stored = LLAMA.layers * layer / shards * is_stored
    assert hopper.parameters[0] - blackwell.parameters[0] == pytest.approx(stored)
    gathered = 0 if zero == 1 else 2 * layer * 3 / 4
    assert hopper.buffers[0] - blackwell.buffers[0] == pytest.approx(gathered, rel=1e-3)
    tree = memory_term(LLAMA, layout, Device.of("gb200"), framework=framework)
    assert tree.value == pytest.approx(blackwell.total[0])


def test_other_precisions_and_frameworks_do_not_depend_on_the_layouts_that_products_read() -> None:
    for framework, precision in (("fsdp2", "fp8-mixed"), ("nemo", "bf16-mixed")):
        layout = Layout(precision=precision)
        held = [
            stage_memory(LLAMA, layout, framework=framework, device=Device.of(name)).total[0]
            for name in ("h100-80gb", "gb200")
        ]
        assert held[0] == held[1]


@pytest.mark.parametrize(
    ("device", "mib"),
    [("v100-32gb", 16.25), ("a100-80gb", 16.25), ("l4", 16.25), ("h200", 64), ("b200", 64), ("mi250x", 64),
     ("mi300x", 256), ("tpu-v4", 64), ("cpu", 0)],
)  # fmt: skip
def test_workspaces_are_those_that_torch_gives_the_devices_architecture(device: str, mib: float) -> None:
    """Each of two threads gets 32 MiB on Hopper and Blackwell, 8 MiB and 128 KiB before, 128 MiB on gfx94x."""
    tree = memory_term(GPT, Layout(), Device.of(device))
    found = {part.name: part.value for part in tree["stage 0"]["buffers"].parts}
    assert found.get("matrix-product workspace", 0) == mib * 2**20


def test_what_the_host_cannot_hold_goes_to_its_drives() -> None:
    layout = Layout(offload="optimizer")
    held = stage_memory(GPT, layout, host_capacity=1e9)
    assert held.host[0] == 1e9
    assert held.nvme[0] == pytest.approx(12 * GPT.num_params - 1e9)


def test_the_traffic_of_an_offloaded_optimizer_is_two_bytes_a_parameter_each_way() -> None:
    rows = Layouts.of(
        [Layout(offload="optimizer"), Layout(offload="none"), Layout(offload="activations", global_batch=3)]
    )
    params = np.full(3, 1e9)
    traffic = offload_traffic(rows, parameters=params, owned=params, saved=np.full(3, 5e8))
    assert traffic.to_host.tolist() == [2e9, 0, 1.5e9]
    assert traffic.to_device.tolist() == [2e9, 0, 1.5e9]


def test_more_of_the_sequence_or_the_batch_never_takes_less() -> None:
    for model in MODELS:
        rows = [Layout(micro_batch=micro, global_batch=8, flash_attention=False) for micro in (1, 2, 4, 8)]
        assert (np.diff(device_memory(model, Layouts.of(rows)).total) > 0).all()


def test_an_unknown_framework_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ss.SpecError, match="did you mean 'megatron-core'"):
        stage_memory(GPT, Layout(), framework="megatron")


def test_habits_of_your_own_can_be_given() -> None:
    frugal = FRAMEWORKS["megatron-core"]._replace(has_workspaces=False, reused_gradient=False)
    usual, own = stage_memory(GPT, Layout()), stage_memory(GPT, Layout(), framework=frugal)
    assert usual.total[0] - own.total[0] > 64 * 2**20
    assert dataclasses.is_dataclass(memory_term(GPT, Layout(), framework=frugal))


@pytest.mark.parametrize("schedule", schedule_names())
def test_micro_batches_in_flight_are_those_that_the_schedules_closed_form_counts(schedule: str) -> None:
    known = PipelineSchedule(schedule)
    held = [known.least_stages] if known.most_stages else [known.least_stages, 3, 4]
    for p, rounds, v in product(range(2, 13), (1, 2, 3, 5), held):
        layout = Layout(pipeline=p, virtual_stages=v, schedule=schedule, global_batch=rounds * p)
        pipeline = pipeline_of(Layouts.of([layout]), layers=p * v)
        for place in range(p):
            ours = held_by(np.array([float(place)]), pipeline, dense=None).in_flight
            closed_form = closed.in_flight(schedule_names().index(schedule), place, p, rounds * p, v)
            assert float(ours[0]) == pytest.approx(float(closed_form)), (p, rounds, v, place)


@pytest.mark.parametrize(
    ("p", "v", "m"), [(4, 2, 4), (4, 2, 8), (4, 3, 12), (8, 8, 16), (3, 2, 9), (6, 3, 12)]
)
@pytest.mark.parametrize("layers", [2, 3])
def test_layers_in_flight_at_short_ends_are_those_of_the_schedules_operations(
    p: int, v: int, m: int, layers: int
) -> None:
    """Stages have `layers` layers, except for the first and the last one, which have the embedding and the output."""
    table = build("interleaved", stages=p, microbatches=m, virtual_stages=v)
    pipeline = pipeline_of(
        Layouts.of([Layout(pipeline=p, virtual_stages=v, schedule="interleaved", global_batch=m)]),
        p * v * layers - 2,
    )
    for rank in (0, p - 1):
        held, most = 0, 0
        for op in table.ranks[rank]:
            stage_layers = layers - (op.stage in {0, p * v - 1})
            held += {"F": stage_layers, "I": 0}.get(op.op, -stage_layers)
            most = max(most, held)
        found = held_by(np.array([float(rank)]), pipeline, dense=None)
        assert float((found.in_flight * found.layers)[0]) == pytest.approx(most), rank


def test_gradients_count_at_the_loss_only_if_an_earlier_micro_batch_left_them() -> None:
    """By hand for FSDP2 on one rank, with all layers recomputed: float32 weights and moments, and autocast's copies."""
    model = Transformer(layers=4, hidden=256, heads=4, vocab=50304, seq=512)
    recompute = Layout(micro_batch=4, global_batch=4, recompute="full")
    again = recompute.replace(global_batch=8)
    one, two = (stage_memory(model, layout, framework="fsdp2") for layout in (recompute, again))
    logits = 4 * 512 * (14 * 50304 + 3 * 2 * 256)
    checkpoints = 4 * 4 * 256 * 4 * 512  # the residual stream is in float32
    copies = 2 * (
        model.layer_params - 13 * 256
    )  # autocast casts biases and norms as well; they are not counted
    expected = 12 * model.num_params + copies + checkpoints + logits + 64 * 2**20
    assert one.total[0] == pytest.approx(expected, rel=1e-4)
    assert one.gradients[0] == 0
    assert two.gradients[0] == pytest.approx(4 * model.num_params)
    assert two.total[0] - one.total[0] == pytest.approx(4 * model.num_params)
    names = {part.name for part in memory_term(model, recompute, framework="fsdp2").walk()}
    assert "logits" in names


def test_a_step_of_few_tokens_is_fullest_as_its_backward_pass_ends_or_in_the_update() -> None:
    model = Transformer(layers=8, hidden=1024, heads=8, vocab=1000, seq=64)
    layout = Layout(precision="fp16-mixed", zero=3, data=2, global_batch=2)
    fsdp2 = memory_term(model, layout, framework="fsdp2")
    deepspeed = memory_term(model, layout, framework="deepspeed")
    # all layers are done: the gradients of the first one are reduced from a buffer, those of the embedding are whole
    layer = model.layer_params
    assert fsdp2["gradients"].value == pytest.approx(8 * 4 * layer / 2)
    assert fsdp2["gathered parameters"].value == pytest.approx(2 * (model.num_params - 8 * layer))
    assert fsdp2["gradient bucket"].value > 6 * layer
    assert fsdp2["saved by layers"].value == 0
    assert "whose backward pass is over" in fsdp2["saved by layers"].formula
    assert deepspeed["activations"].value == 0
    assert deepspeed["gradients during the update"].value == pytest.approx(6 * model.num_params / 2 + 2 * 5e8)


def test_a_pipeline_of_deepspeed_keeps_outputs_until_their_backward_pass() -> None:
    model = Transformer(layers=8, hidden=1024, heads=8, vocab=1000, seq=1024)
    layout = Layout(
        pipeline=4, tensor=2, micro_batch=16, global_batch=128, recompute="full", precision="fp16-mixed"
    )
    tree = memory_term(model, layout, framework="megatron-deepspeed")
    output = 2 * 1024 * 16 * 1024
    assert tree["stage 0"]["outputs of the stage"].value == 4 * output / 2
    assert tree["stage 1"]["outputs of the stage"].value == 3 * output / 2
    with pytest.raises(KeyError):
        tree["stage 3"]["outputs of the stage"]


def test_gathering_a_large_vocabulary_takes_no_short_copies_of_it() -> None:
    """With a layer a stage, ZeRO 3 gathers all that ZeRO 2 holds, but never more."""
    model = Transformer(layers=4, hidden=4096, heads=32, vocab=128256, seq=2048)
    held = [
        one(
            device_memory(
                model,
                Layouts.of([Layout(data=8, pipeline=4, global_batch=32, zero=zero, precision="fp8-mixed")]),
            )
        )
        for zero in (2, 3)
    ]
    assert held[1] <= held[0]


def test_a_v_with_few_micro_batches_may_be_fullest_in_the_middle() -> None:
    layout = Layout(pipeline=10, virtual_stages=2, schedule="zbv", global_batch=10, tensor=8)
    model = LLAMA.replace(layers=24)
    stages = stage_memory(model, layout).total
    assert stages.max() > max(stages[0], stages[-1])
    assert float(device_memory(model, Layouts.of([layout])).total[0]) == pytest.approx(float(stages.max()))


def test_ranks_beyond_the_heads_of_keys_and_values_hold_a_head_each() -> None:
    """With one head of keys, 4 ranks hold 4 copies of its projection, and each saves the keys of all tokens."""
    single = Transformer(layers=2, hidden=1024, heads=16, kv_heads=1, vocab=256, seq=512)
    rows = [Layout(tensor=tensor, micro_batch=2, global_batch=2) for tensor in (1, 4)]
    one_rank, four = (stage_memory(single, row) for row in rows)
    keys = 2 * 64 * 1024
    matrices = single.layers * (1024 * (16 * 64 + 2 * 64) + 1024 * 1024 + 8 * 1024 * 1024) + 256 * 1024
    whole = single.num_params - matrices
    divided = (matrices - single.layers * keys) / 4
    assert four.parameters[0] == pytest.approx(2 * (divided + single.layers * keys + whole))
    assert one_rank.parameters[0] == pytest.approx(2 * single.num_params)
    tokens = 2 * 512
    saved_keys = single.layers * tokens * 2 * 64 * 2
    rest = (
        one_rank.activations[0] - saved_keys - single.layers * tokens * 8 * 1024
    )  # norms and inputs are whole
    assert four.activations[0] == pytest.approx(rest / 4 + saved_keys + single.layers * tokens * 8 * 1024)


@pytest.mark.parametrize("zeros", [(3, 3), (0, 0), (0, 3)])
def test_every_type_of_memory_has_one_number_for_each_layout(zeros: tuple[int, ...]) -> None:
    rows = Layouts.of([Layout(data=4, zero=zero, global_batch=4) for zero in zeros])
    held = device_memory(GPT, rows, framework="fsdp2")
    assert {part.shape for part in held} == {(2,)}
