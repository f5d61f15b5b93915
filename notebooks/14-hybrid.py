# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 · Several axes at once
#
# [← Data](13-data.ipynb) · [Index](00-index.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/14-hybrid.html)
#
# Large models are trained with several kinds of parallelism at once: data parallelism divides the batch, tensor
# parallelism divides each layer, and pipeline parallelism divides the model into stages of layers. Each kind is an axis
# of a mesh of ranks. What does an axis cost, what does it save, and which ranks belong on the same node? Here the ranks
# are real processes, one for each device of the layout.

# %%
from itertools import combinations

import shardscope as ss
from shardscope_widgets import Trace, figures, say

STEPS = 12
layout = ss.Layout(data=2, tensor=2, zero=1, global_batch=16, micro_batch=4)
job = ss.Job(model="gpt-nano", data="python-source", layout=layout, steps=STEPS)
prediction = ss.predict(job)
say(figures.caption(figures.rank_mesh, prediction))
figures.rank_mesh(prediction)

# %% [markdown]
# Each card is a rank. Its upper bars are the layers of the model: dark if the rank holds a part of the layer, light if
# it holds all of it. The lowest bar is the rank's memory by type.
#
# ## Measured
#
# Now the same job is trained. The bytes along each axis are counted separately, and must equal those of the formulas.
# The times are those of the fastest step, which other work on this machine disturbs least; if there are fewer cores
# than ranks, ranks also wait for a core.

# %%
run = ss.launch(job).wait(timeout=240)
rows = [row for row in ss.compare(run).rows if row.group == "bytes" and row.term.endswith(" axis")]
sums = [
    f"{row.term} {row.predicted / 1e6:.2f} MB predicted, {row.measured / 1e6:.2f} MB measured" for row in rows
]
verdict = (
    "The formulas are exact" if all(row.agrees for row in rows) else "The formulas differ from the counters"
)
metrics = run.metrics()
fastest_step = run.step_events(int(metrics.step[metrics.step_time_s.idxmin()]))
say(
    f"Bytes that all ranks together send in a step: {'; '.join(sums)}. {verdict}. "
    + figures.caption(figures.rank_mesh, prediction, fastest_step)
)
figures.timeline(Trace.read(run))

# %% [markdown]
# ## What each axis costs and saves
#
# The same job on the same number of ranks, with more and more tensor parallelism. Data-parallel ranks send gradients,
# as many as the model has parameters; tensor-parallel ranks send activations, which grow with the batch. In return, a
# tensor-parallel rank holds only a part of each layer, and of the activations that are saved for the backward pass.

# %%
predictions = [
    ss.predict(
        ss.Job(
            name=f"data {data} · tensor {tensor}",
            model="gpt-nano",
            data="python-source",
            layout=ss.Layout(data=data, tensor=tensor, global_batch=16, micro_batch=4),
            steps=STEPS,
        )
    )
    for data, tensor in ((4, 1), (2, 2), (1, 4))
]
say(
    "; ".join(
        f"{each.job.label}: a rank sends {each.sent_bytes.max() / 1e6:.2f} MB in a step and holds "
        f"{each.held_bytes / 1e6:.2f} MB"
        for each in predictions
    )
    + "."
)
first, *_, last = predictions
more, less = last.sent_bytes.max() / first.sent_bytes.max(), last.held_bytes / first.held_bytes
say(
    f"With tensor parallelism only, a rank sends {more:.1f} times the bytes that it sends with data parallelism only, "
    f"and holds {less:.0%} of the memory."
)
figures.memory_kinds(predictions)

# %% [markdown]
# ## Why tensor parallelism stays inside a node
#
# Tensor-parallel ranks exchange activations in every pass, and computation waits for them; gradients are exchanged only
# once per step. So a slow link between nodes hurts tensor parallelism most. To measure this, each layout trains on the
# same batch on an emulated cluster, whose ranks compute at a fixed speed and whose nodes have slow links. Neighbouring
# ranks belong to the same tensor group, so a group no larger than a node stays inside it.

# %%
TIMED = 8
why_not = ss.why_not_emulated()
cluster = None if why_not else ss.Cluster.emulated(2, "100 Mbit/s", per_node=2, flops=1e9)
LAYOUTS = {
    "data 4": {"data": 4},
    "data 2 · tensor 2": {"data": 2, "tensor": 2},
    "tensor 4": {"tensor": 4},
    "pipeline 2 · data 2": {"pipeline": 2, "data": 2},
}
timed = []
for name, degrees in LAYOUTS.items():
    each = ss.Job(
        model="gpt-nano",
        data="python-source",
        layout=ss.Layout(**degrees, global_batch=16, micro_batch=4),
        steps=TIMED,
    )
    measured = ss.launch(each, cluster).wait(timeout=240).metrics().step_time_s[2:].median()
    timed.append(figures.StepTimesRow(name, ss.predict(each, cluster).step_time_s, None, float(measured)))
where = f"on {cluster.name}" if cluster else f"on this machine, which cannot emulate a cluster ({why_not})"
by_name = {row.label: row.measured for row in timed}
inside, across = by_name["data 2 · tensor 2"], by_name["tensor 4"]
if cluster is None:
    finding = (
        "Without emulated links, all ranks communicate through memory, and the times say nothing about nodes."
    )
elif across > 1.1 * inside:
    ratio = across / inside
    finding = f"With tensor groups across nodes, a step takes {ratio:.1f} times as long as with groups inside a node."
else:
    finding = "Other work on this machine hides the difference between the layouts: run this cell again."
say(f"Steps {where}. {finding}")
figures.step_times(timed)

# %% [markdown]
# ## Does the predicted order hold?
#
# To choose a layout, a planner needs the right order rather than exact times. A pair of layouts is in the right order
# if the one that is predicted to be faster is also measured to be faster.

# %%
pairs = list(combinations(timed, 2))
agree = sum((a.predicted < b.predicted) == (a.measured < b.measured) for a, b in pairs)
fastest = min(timed, key=lambda row: row.measured)
proposed = min(timed, key=lambda row: row.predicted)
loss = proposed.measured / fastest.measured - 1
say(
    f"{agree} of {len(pairs)} pairs of layouts are in the right order. The layout predicted to be fastest is "
    f"{proposed.label}, which "
    + (
        "is also the fastest measured."
        if proposed is fastest
        else f"takes {loss:.0%} longer than {fastest.label}."
    )
)

# %% [markdown]
# ## Train what the planner proposes
#
# The Planner ranks layouts for a cluster that you may not have. Its button *Train a small version* trains a small model
# with the chosen plan's axes, on real ranks of this machine, and shows which axis costs most, in the plan and as
# measured here. In code, `plans.rehearsal` returns the small job and the emulated cluster: `ss.predict` predicts their
# step, as here, and `ss.launch(rehearsal.job, rehearsal.cluster)` trains it.

# %%
plans = ss.plan(
    model="megatron-7.5b",
    cluster=ss.Cluster.of("a100-80gb", nodes=2),
    fix={"pipeline": 1, "context": 1, "tensor": (2, 4, 8)},
)
rehearsal = plans.rehearsal(world_size=4, step_s=4)
small = ss.predict(rehearsal.job, rehearsal.cluster)
say(
    f"The best of {len(plans):,} plans, on {rehearsal.job.world_size} ranks: {rehearsal.job.strategy.label}. A step "
    f"takes {rehearsal.planned_s:.2f} s in the plan and {rehearsal.step_time_s:.2f} s in the rehearsal."
)
say(figures.caption(figures.rank_mesh, small))
figures.rank_mesh(small)

# %% [markdown]
# ## Try next
#
# - Open `Lab(tab="Plan")` from `shardscope_widgets`, choose a model and a cluster, and press *Train a small version*.
# - Choose *mesh* under Strategy in `TrainingLab()`, and change the number of ranks along each axis: the prediction
#   changes at once.
# - Train on a larger batch: along which axis does a rank send more?
#
# [← Data](13-data.ipynb) · [Index](00-index.ipynb)
