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
# Large models are trained along several axes at once: replicas share the batch, tensor ranks share each layer, stages
# share the depth. What does each axis cost, what does it save, and which ranks belong on one node? Here the ranks are
# real: one process for each device of the layout.

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
# A card is a rank. Its upper bars are the layers of the model: dark where the rank holds a part, light where it holds a
# copy of the whole layer. The lowest bar is its memory by type.
#
# ## Measured
#
# The same job, trained. Each axis has its own meter, and the bytes must be those of the formulas. Times include waiting
# for slower ranks; on a machine with few cores, ranks also take turns.

# %%
run = ss.launch(job).wait(timeout=240)
rows = [row for row in ss.compare(run).rows if row.group == "bytes" and row.term.endswith(" axis")]
told = [
    f"{row.term} {row.predicted / 1e6:.2f} MB predicted, {row.measured / 1e6:.2f} MB measured" for row in rows
]
verdict = (
    "The formulas are exact" if all(row.agrees for row in rows) else "The formulas differ from the counters"
)
say(
    f"Bytes of a step over all ranks: {'; '.join(told)}. {verdict}. "
    + figures.caption(figures.rank_mesh, prediction, run.step_events())
)
figures.timeline(Trace.read(run))

# %% [markdown]
# ## What each axis costs and saves
#
# The same job on equally many ranks, from data ranks only to tensor ranks only. A data rank sends gradients, whose size
# is that of the model; a tensor rank sends activations, which grow with the batch. In return, a tensor rank holds only
# a part of each layer, and of what the layers store for the backward pass.

# %%
DEGREES = (1, 2, 4)
divided = {
    f"data {4 // tensor} · tensor {tensor}": ss.predict(
        ss.Job(
            model="gpt-nano",
            data="python-source",
            layout=ss.Layout(data=4 // tensor, tensor=tensor, global_batch=16, micro_batch=4),
            steps=STEPS,
        )
    )
    for tensor in DEGREES
}
for name, each in divided.items():
    say(
        f"{name}: a rank sends {each.sent_bytes.max() / 1e6:.2f} MB in a step and holds "
        f"{each.held_bytes / 1e6:.2f} MB."
    )
first, last = list(divided.values())[:: len(divided) - 1]
more, less = last.sent_bytes.max() / first.sent_bytes.max(), last.held_bytes / first.held_bytes
say(
    f"Here tensor ranks only, instead of data ranks only, send {more:.1f} times the bytes and hold {less:.0%} of the "
    "memory."
)
figures.memory_kinds(list(divided.values()))

# %% [markdown]
# ## Why tensor parallelism stays inside a node
#
# In each pass, computation waits for the exchanges of tensor ranks, but gradients are exchanged once a step. So a slow
# link between nodes hurts tensor ranks most. On an emulated cluster, whose ranks compute at a fixed speed and whose
# nodes have slow links, the same batch is trained by each layout. The layout's innermost axis has neighbouring ranks: a
# tensor group that is not larger than a node stays inside it.

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
        "Without emulated links, ranks of all layouts share memory, and the times say nothing about nodes."
    )
elif across > 1.1 * inside:
    ratio = across / inside
    finding = f"Tensor groups across both nodes make a step {ratio:.1f} times as long as those inside a node."
else:
    finding = "Other work on this machine hides the difference between the layouts: run this cell again."
say(f"Steps {where}. {finding}")
figures.step_times(timed)

# %% [markdown]
# ## Does the predicted order hold?
#
# A planner needs the order of layouts rather than their exact times. Two layouts are in order if the one that is
# predicted to be faster is also measured to be faster.

# %%
pairs = list(combinations(timed, 2))
agree = sum((a.predicted < b.predicted) == (a.measured < b.measured) for a, b in pairs)
fastest = min(timed, key=lambda row: row.measured)
proposed = min(timed, key=lambda row: row.predicted)
loss = proposed.measured / fastest.measured - 1
say(
    f"{agree} of {len(pairs)} pairs of layouts are in the predicted order. The formulas propose {proposed.label}, "
    "which "
    + ("is also the fastest." if proposed is fastest else f"takes {loss:.0%} longer than {fastest.label}.")
)

# %% [markdown]
# ## Train what the planner proposes
#
# The Planner ranks layouts for a cluster that you may not have. Its button *Train this plan small* trains a small model
# with the chosen plan's axes, as real ranks on this machine; `plans.rehearsal` does the same in code. The tab *Mesh* of
# the Training Lab then says which axis costs most.

# %%
plans = ss.plan(
    model="megatron-7.5b",
    cluster=ss.Cluster.of("a100-80gb", nodes=2),
    fix={"pipeline": 1, "context": 1, "tensor": (2, 4, 8)},
)
rehearsal = plans.rehearsal(world_size=4, step_s=4)
small = ss.predict(rehearsal.job, rehearsal.cluster)
say(
    f"The first of {len(plans):,} plans, with its axes kept on {rehearsal.job.world_size} ranks: "
    f"{rehearsal.job.strategy.label}. A planned step of {rehearsal.planned_s:.2f} s takes "
    f"{rehearsal.step_time_s:.2f} s here."
)
say(figures.caption(figures.rank_mesh, small))
figures.rank_mesh(small)

# %% [markdown]
# ## Try next
#
# - Open `Lab(tab="Plan")` from `shardscope_widgets`, choose a model and a cluster, and press *Train this plan small*.
# - Choose *mesh* under Strategy in `TrainingLab()`, and move a rank from one axis to the other: the prediction changes
#   at once.
# - Give the tensor ranks a larger batch: which of the axes grows?
#
# [← Data](13-data.ipynb) · [Index](00-index.ipynb)
