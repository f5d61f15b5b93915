"""Jobs from layouts: what a layout stands for, that `Job.layout` returns it, and what no job can be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardscope as ss
from shardscope.methods.strategies.mesh import Mesh

TEXT: dict[str, Any] = {"model": "gpt-nano", "data": "python-source"}
TWO_BY_TWO = ss.Layout(data=2, tensor=2)


def job_of(**fields: Any) -> ss.Job:
    return ss.Job(**{**TEXT, **fields})


@pytest.mark.parametrize(
    ("layout", "strategy", "world_size"),
    [
        (ss.Layout(), "single", 1),
        (ss.Layout(data=4), "ring", 4),
        (ss.Layout(data=4, zero=3), "zero-3", 4),
        (ss.Layout(data=4, zero=2, shard=2), ss.Zero2(replicas=2), 4),
        (ss.Layout(pipeline=2, schedule="gpipe"), ss.Pipeline(schedule="gpipe", virtual_stages=1), 2),
        (ss.Layout(tensor=2), Mesh(data="ring", tensor=2), 2),
        (ss.Layout(data=2, tensor=2, zero=1), Mesh(data="zero-1", tensor=2), 4),
        (ss.Layout(data=4, tensor=2, zero=3, shard=2), Mesh(data=ss.Zero3(replicas=2), tensor=2), 8),
        (ss.Layout(tensor=2, sequence_parallel=True), Mesh(tensor=2, sequence_parallel=True), 2),
        (ss.Layout(tensor=2, zero=3), Mesh(tensor=2), 2),  # one rank has nothing to share
        (
            ss.Layout(data=2, tensor=2, pipeline=2, zero=1, schedule="gpipe"),
            Mesh(data="zero-1", tensor=2, pipeline=2, stages=ss.Pipeline(schedule="gpipe", virtual_stages=1)), 8,
        ),
        (
            ss.Layout(data=2, pipeline=2, schedule="interleaved", virtual_stages=2),
            Mesh(pipeline=2, stages=ss.Pipeline(schedule="interleaved", virtual_stages=2)), 4,
        ),
    ],
)  # fmt: skip
def test_a_layout_is_a_strategy_and_a_number_of_ranks(
    layout: ss.Layout, strategy: Any, world_size: int
) -> None:
    job = job_of(layout=layout)
    assert job == job_of(strategy=strategy, world_size=world_size)
    assert ss.Job.from_json(job.to_json()) == job


def test_fields_that_the_layout_leaves_out_are_the_jobs_own() -> None:
    own: dict[str, Any] = {"batch": 32, "optimizer": "lamb", "precision": "fp64", "recompute": "full"}
    job = job_of(layout=ss.Layout(data=2, tensor=2), **own)
    assert (job.batch.global_batch, job.optimizer.name, job.precision) == (32, "lamb", "fp64")
    stated = job_of(
        layout=ss.Layout(data=2, global_batch=16, micro_batch=4, optimizer="sgd", precision="bf16-autocast")
    )
    assert stated.batch == ss.Batch(16, micro_batch=4)
    assert (stated.optimizer.name, stated.precision) == ("sgd", "bf16-mixed")
    assert job_of(layout=TWO_BY_TWO.replace(micro_batch=4)).batch == ss.Batch(64, micro_batch=4)


def test_the_strategy_names_the_data_axis() -> None:
    assert job_of(layout=TWO_BY_TWO, strategy="tree").strategy == Mesh(data="tree", tensor=2)
    assert job_of(layout={"data": 2, "tensor": 2, "zero": 1}).strategy == Mesh(data="zero-1", tensor=2)
    plan = {"*.qkv": "columns:3"}
    assert job_of(layout=TWO_BY_TWO, strategy=Mesh(tensor_plan=plan)).strategy == Mesh(
        tensor=2, tensor_plan=plan
    )
    assert job_of(layout=None).strategy.name == "ring"


def test_replace_changes_the_layout_and_keeps_the_rest() -> None:
    own: dict[str, Any] = {"batch": 32, "optimizer": "lamb", "seed": 3}
    job = job_of(strategy="zero-3", world_size=8, **own)
    assert job.replace(layout=TWO_BY_TWO) == job_of(layout=TWO_BY_TWO, strategy="zero-3", **own)
    assert job.replace(layout=None) == job
    assert job.replace(layout=ss.Layout(data=2, global_batch=4)).batch.global_batch == 4


PLAN = {"*.qkv": "columns:3", "*.project": "rows"}
TREE_WITH_PLAN = Mesh(data="tree", tensor=2, tensor_plan=PLAN)


@pytest.mark.parametrize(
    ("own", "world_size", "changes", "expected"),
    [
        (ss.Ring(bucket_mb=0.1), 4, {"data": 2, "tensor": 2}, Mesh(data=ss.Ring(bucket_mb=0.1), tensor=2)),
        ("zero-3", 2, {"data": 4}, "zero-3"),
        ("zero-3", 2, {"data": 4, "zero": 0}, "ring"),
        ("zero-3", 2, {"tensor": 2}, Mesh(tensor=2)),  # one rank has nothing to share
        (ss.Zero3(offload=True), 2, {"data": 4, "zero": 3}, ss.Zero3(offload=True)),
        (ss.Zero3(replicas=2), 4, {"data": 4, "zero": 3, "shard": 0}, "zero-3"),
        ("zero-3", 4, {"data": 8, "zero": 3, "shard": 2}, ss.Zero3(replicas=4)),
        (TREE_WITH_PLAN, 4, {"data": 4, "tensor": 2}, TREE_WITH_PLAN),
        (TREE_WITH_PLAN, 4, {"data": 4, "tensor": 2, "zero": 1}, TREE_WITH_PLAN.replace(data="zero-1")),
        (TREE_WITH_PLAN, 4, {"data": 4}, "tree"),
        (
            Mesh(tensor=2, sequence_parallel=True), 4, {"data": 4, "tensor": 2},
            Mesh(tensor=2, sequence_parallel=True),
        ),
        (Mesh(tensor=2, sequence_parallel=True), 4, {"tensor": 2, "sequence_parallel": False}, Mesh(tensor=2)),
        ("gossip", 4, {"data": 2, "tensor": 2}, Mesh(tensor=2)),  # cannot be an axis
        (ss.Pipeline(schedule="gpipe", split="even"), 2, {"pipeline": 4}, ss.Pipeline(schedule="gpipe", split="even")),
        (
            ss.Pipeline(split="even"), 2, {"pipeline": 2, "schedule": "gpipe"},
            ss.Pipeline(schedule="gpipe", virtual_stages=1, split="even"),
        ),
        (
            ss.Pipeline(split="even"), 2, {"data": 2, "pipeline": 2},
            Mesh(pipeline=2, stages=ss.Pipeline(split="even")),
        ),
        (
            Mesh(data="zero-1", pipeline=2, stages=ss.Pipeline(split="even")), 4,
            {"data": 2, "pipeline": 2, "schedule": "gpipe"},
            Mesh(data="zero-1", pipeline=2, stages=ss.Pipeline(split="even", schedule="gpipe", virtual_stages=1)),
        ),
        (Mesh(data="tree", pipeline=2), 4, {"data": 2}, "tree"),
    ],
)  # fmt: skip
def test_replace_keeps_what_the_layout_leaves_out(
    own: Any, world_size: int, changes: dict[str, Any], expected: Any
) -> None:
    changed = job_of(strategy=own, world_size=world_size).replace(layout=ss.Layout(**changes))
    assert changed.strategy == ss.Strategy.resolve(expected)


def test_plans_with_another_order_of_rules_are_other_plans() -> None:
    """The first rule that matches decides, so caches must not take one plan for the other."""
    plan = ss.TensorPlan({"up": "columns", "u*": "rows"})
    other = ss.TensorPlan({"u*": "rows", "up": "columns"})
    assert plan != other
    assert {plan: 1, other: 2} == {ss.TensorPlan(plan.rules): 1, other: 2}
    for each, kind in [(plan, "columns"), (other, "rows")]:
        job = job_of(strategy=Mesh(tensor=2, tensor_plan=each), world_size=2)
        read = ss.Job.from_json(job.to_json())
        assert (read, hash(read)) == (job, hash(job))
        assert read.strategy.tensor_plan.division("up").kind == kind


def test_replace_takes_a_strategy_beside_the_layout() -> None:
    job = job_of(strategy=TREE_WITH_PLAN, world_size=4)
    found = job.replace(layout=ss.Layout(data=4, tensor=2), strategy="ring").strategy
    assert found == Mesh(data="ring", tensor=2, tensor_plan=PLAN)


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a layout that has a job: any that it may also leave out."""
    data, tensor, context = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 2, 4], [1, 2]))
    fields: dict[str, Any] = {"data": data, "tensor": tensor, "context": context}
    if context == 1 and draw(st.booleans()):
        fields["pipeline"] = 2
        fields["schedule"] = draw(st.sampled_from(["1f1b", "gpipe"]))
    if data * context > 1:
        fields["zero"] = draw(st.sampled_from([0, 1, 2, 3]))
    if fields.get("zero", 0) > 1 and data == 4 and "pipeline" not in fields and draw(st.booleans()):
        fields["shard"] = 2
    if tensor > 1 and draw(st.booleans()):
        fields["sequence_parallel"] = draw(st.booleans())
    if draw(st.booleans()):
        fields["micro_batch"] = draw(st.sampled_from([1, 2, 4]))
        fields["global_batch"] = data * fields["micro_batch"] * draw(st.sampled_from([4, 8]))
    optional = {
        "recompute": ["none", "selective", "full"], "precision": ["fp32", "bf16-autocast", "fp16-autocast"],
        "optimizer": ["adamw", "lamb", "sgd"],
    }  # fmt: skip
    return fields | {
        name: draw(st.sampled_from(some)) for name, some in optional.items() if draw(st.booleans())
    }


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_a_job_returns_the_layout_that_it_was_given(fields: dict[str, Any]) -> None:
    asked = ss.Layout(**fields)
    job = job_of(layout=asked)
    assert {name: getattr(job.layout(), name) for name in fields} == {
        name: getattr(asked, name) for name in fields
    }
    whole = ss.Batch(job.batch.global_batch, micro_batch=job.layout().micro_batch)
    assert job_of(layout=job.layout()) == job.replace(batch=whole)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"data": 4, "tensor": 2}, {"world_size": 4}, "world_size=4 is not the 8 ranks of layout (data=4 x tensor=2)"),
    ({"data": 2, "recompute": "full"}, {"recompute": "none"}, "is given twice, as 'none' and, in layout, 'full'"),
    ({"data": 2, "global_batch": 16}, {"batch": 32}, "batch.global_batch=32 is given twice, as 32 and, in layout, 16"),
    ({"data": 2, "optimizer": "lamb"}, {"optimizer": "sgd"}, "optimizer='sgd' is given twice"),
    ({"data": 2, "zero": 2}, {"strategy": "ring"}, "is ZeRO 0, but layout.zero=2; use strategy='zero-2'"),
    ({"data": 2}, {"strategy": "pipeline"}, "strategy='pipeline:1f1b' has data=1, but layout.data=2"),
    ({"data": 2}, {"strategy": "gossip"}, "has no corresponding layout; give world_size=2 instead of layout"),
    ({"data": 2, "tensor": 2}, {"strategy": "gossip"}, "'gossip' cannot be the data axis of a mesh"),
    ({"data": 2, "tensor": 2}, {"strategy": Mesh(tensor=4)}, "strategy.tensor=4 is not layout.tensor=2"),
    ({"data": 2, "precision": "bf16"}, {}, "layout.precision='bf16-mixed' keeps weights in 2 bytes, which jobs do not"),
    ({"data": 2, "offload": "states"}, {}, "layout.offload='states' has no counterpart in a job"),
    ({"recompute": "full", "recompute_layers": 2}, {}, "layout.recompute_layers=2 has no counterpart"),
    ({"flash_attention": False}, {}, "layout.flash_attention=False has no counterpart"),
    ({"optimizer": "muon"}, {}, "layout.optimizer='muon' is not available in jobs"),
    ({"data": 4, "zero": 1, "shard": 2}, {}, "layout.shard=2 with zero=1 is not available in jobs yet"),
    ({"context": 2}, {"model": "mlp", "data": "digits"}, "context=2 divides sequences, and model='mlp' has none"),
    ({"context": 3}, {}, "context=3 does not divide seq="),
    ({"context": 2}, {"strategy": Mesh(context=4)}, "strategy.context=4 is not layout.context=2"),
    ({"context": 8}, {"strategy": Mesh(context_comm="ulysses")}, "context=8 does not divide the 4 heads of a rank"),
    ({"context": 2}, {"compression": "local-sgd"}, "compression='local-sgd' cannot be combined with strategy."),
    ({"data": 2, "expert": 2}, {}, "expert=2, but gpt-nano has no experts; use expert=1"),
    ({"data": 2, "pipeline": 2}, {"strategy": Mesh(pipeline=4)}, "strategy.pipeline=4 is not layout.pipeline=2"),
    ({"data": 2, "pipeline": 2, "schedule": "gpipe"}, {"strategy": "pipeline"}, "but layout.schedule='gpipe'"),
    ({"data": 2, "pipeline": 2}, {"strategy": {"name": "mesh", "stages": "ring"}}, "does not spread layers over ranks"),
    ({"data": 2, "pipeline": 2}, {"compression": "adaptive-bits"}, "because it depends on the model as a whole"),
    ({"data": 2, "pipeline": 2, "zero": 1}, {"compression": "int8"}, "is not available with strategy.data='zero-1'"),
    ({"data": 2, "pipeline": 2}, {"batch": ss.Batch(48, micro_batch=4, shares=(2, 1))}, "same number of micro-batches"),
    ({"tensor": 2, "sequence_parallel": True}, {"strategy": Mesh(sequence_parallel=False)}, "is not layout.sequence"),
    ({"data": 2, "sequence_parallel": True}, {}, "sequence_parallel=True"),
    ({"tensor": 2}, {"strategy": "gossip"}, "'gossip' cannot be the data axis of a mesh"),
    ({"tensor": 2}, {"strategy": Mesh(data="pipeline")}, "'pipeline:1f1b' cannot be the data axis of a mesh"),
    ({"tensor": 2}, {"strategy": Mesh(data=Mesh())}, "cannot be the data axis of a mesh"),
    ({"data": 2, "tensor": 2}, {"strategy": "single"}, "'single' cannot be the data axis of a mesh"),
    ({"tensor": 3}, {}, "tensor=3 does not divide heads=4 of gpt-nano; use one of 1, 2, 4"),
    ({"data": 3}, {}, "global_batch=64 is not a multiple of data=3"),
    ({"tensor": 2}, {"model": "mlp", "data": "digits"}, "a plan that says which layers are divided, but model='mlp'"),
    ({"data": 2, "tensor": 2}, {"compression": "adaptive-bits"}, "it depends on all tensors together"),
    ({"data": 2, "tensor": 2, "zero": 1}, {"compression": "int8"}, "shards mix divided and whole tensors"),
    ({"data": 2, "tensor": 2}, {"batch": ss.Batch(48, shares=(2, 1))}, "pass through the model together"),
    ({"data": 2, "tensor": 2}, {"record": ss.Record(noise_scale=True)}, "a part of its samples' gradient"),
    ({"data": 2, "tensor": 2}, {"strategy": ss.Zero3(replicas=2)}, "strategy.replicas=2 does not divide world_size=2"),
    ({"data": 2, "tensor": 2}, {"strategy": ss.Zero1(shards=(2, 1))}, "strategy.data.shards=(2, 1) is not"),
    ({"dta": 2}, {}, "Layout field='dta' is not known; did you mean 'data'?"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "fields", "told"), REFUSED, ids=[told[:40] for *_, told in REFUSED])
def test_what_no_job_can_be_is_refused_in_one_sentence(
    layout: dict[str, Any], fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ss.SpecError) as refused:
        job_of(layout=layout, **fields)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_mesh_says_which_numbers_of_ranks_it_has() -> None:
    with pytest.raises(ss.SpecError, match="sequence_parallel=True has no effect with tensor=1"):
        job_of(strategy=Mesh(sequence_parallel=True), world_size=2)
    for fields, told in [
        ({"world_size": 3}, "strategy.tensor=2 does not divide world_size=3; use one of 1, 3"),
        ({"world_size": 6}, "not divisible by the 3 replicas of world_size=6; use 63 or 66"),
    ]:
        with pytest.raises(ss.SpecError, match=told):
            job_of(strategy=Mesh(tensor=2), **fields)
    with pytest.raises(ss.SpecError, match="'zero-1' has no other ranks to share states with"):
        job_of(strategy=Mesh(data="zero-1", tensor=2), world_size=2)
    with pytest.raises(ss.SpecError, match="layout=4 is not a Layout"):
        job_of(layout=4)


@pytest.mark.parametrize("read", [ss.Job.from_json, ss.Job.from_history])
def test_a_mesh_of_a_strategy_whose_code_is_elsewhere_can_be_read(read: Any) -> None:
    fields = json.loads(job_of(layout=TWO_BY_TWO).to_json())
    fields["strategy"]["data"] = {"name": "my-own", "code": "0123", "pace": 3}
    job = read(json.dumps(fields))
    assert (job.strategy.label, job.num_data_ranks) == ("my-own+tensor2", 2)
    assert json.loads(job.to_json()) == fields
    assert ss.predict(job).traffic is None
    with pytest.raises(ss.SpecError, match="my-own"):
        job.require_code()


def test_one_replica_has_no_strategy_of_a_data_axis() -> None:
    job = job_of(layout=ss.Layout(tensor=2), strategy="single")
    assert job.strategy == Mesh(data="single", tensor=2)
    assert job.strategy.differs_because is None
    assert job.layout().data == 1
