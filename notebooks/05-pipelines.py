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
# # 5 · Pipelines, and what is left of their bubble
#
# [← Communication](04-communication.ipynb) · [Index](00-index.ipynb) · next: [Compression →](06-compression.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/05-pipelines.html)
#
# A model too large for one device is split into stages, and micro-batches follow each other through them. While the
# first enters and the last leaves, devices are idle: the *bubble*. How much of it can a schedule avoid, and at what
# price in memory? Every schedule here is a table of operations. Time and memory are computed from the table, and at the
# end compared with real processes.
#
# Is a pipeline of your own slow? Go straight to [the lab below](#A-slow-pipeline-of-your-own): its cell needs no other.

# %%
from statistics import median

import pandas as pd

import shardscope as ss
from shardscope.analytic.schedules import build
from shardscope_widgets import PipelineExplorer, StepPlayer, Trace, figures, say

STAGES, MICRO_BATCHES = 4, 8


def timeline(schedule, microbatches=MICRO_BATCHES):
    """A schedule whose every pass takes 10 ms for one micro-batch on a whole rank."""
    table = build(schedule, STAGES, microbatches)
    return table.timeline(dict.fromkeys("FIW", 10 * STAGES / table.num_stages))


def peak(schedule, microbatches=MICRO_BATCHES):
    """The most activations that a rank holds, in micro-batches."""
    return max(build(schedule, STAGES, microbatches).peak_activation())


def show(schedule, microbatches=MICRO_BATCHES):
    """The chart of a schedule, with a sentence about it."""
    drawn = timeline(schedule, microbatches)
    say(figures.caption(figures.schedule, drawn, schedule=schedule))
    return figures.schedule(drawn, schedule=schedule)


schedules = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "v-half", "v-min")
say(f"{len(schedules)} schedules of {MICRO_BATCHES} micro-batches on {STAGES} ranks, compared:")
pd.DataFrame(
    {
        schedule: {
            "step": f"{timeline(schedule).end:.0f} ms",
            "bubble": f"{timeline(schedule).bubble_fraction:.1%}",
            "activations": f"{peak(schedule):g} micro-batches",
        }
        for schedule in schedules
    }
).T

# %% [markdown]
# ## A slow pipeline of your own
#
# Press Start: real ranks train with too few micro-batches, and the lab measures why they wait and suggests a change.
# *Run it* tries that change, and the lab says what became of the waiting and of the speed. For a job of your own,
# change the form first.

# %%
from shardscope_widgets import TrainingLab

lab = TrainingLab(preset="Break the bubble")
lab

# %% [markdown]
# ## Explore all schedules
#
# Choose a schedule and move the sliders. Hover over an operation to see what it depends on, and how long its rank was
# idle before it.

# %%
explorer = PipelineExplorer(schedule="1f1b", stages=STAGES, microbatches=MICRO_BATCHES)
explorer

# %% [markdown]
# ## GPipe: all forwards, then all backwards
#
# *Huang et al. 2019.* With p ranks, m micro-batches, and times f and b for a forward and a backward pass, each rank is
# idle for (p-1)(f+b) of a step that takes (m+p-1)(f+b).

# %%
show("gpipe")

# %% [markdown]
# ## 1F1B: does an early backward pass shrink the bubble?
#
# *PipeDream-Flush, Narayanan et al. 2021.* Each rank runs a backward pass as soon as one is ready, so it holds no more
# micro-batches than there are ranks from itself to the end of the pipeline.

# %%
bubbles = {name: f"{timeline(name).bubble_fraction:.1%}" for name in ("1f1b", "gpipe")}
say(
    f"Bubble: {bubbles['1f1b']}, against {bubbles['gpipe']} under GPipe. Activations: {peak('1f1b'):g} micro-batches, "
    f"against {peak('gpipe'):g}."
)
show("1f1b")

# %% [markdown]
# ## Interleaved: shorter stages fill the pipeline sooner
#
# *Narayanan et al. 2021.* Each rank holds several short stages, so the first micro-batch reaches the last rank sooner.
# In return, ranks send more, and hold more activations.

# %%
idle = {
    name: max(figures.info(figures.schedule, timeline(name), schedule=name).idle_ms)
    for name in ("1f1b", "interleaved")
}
say(
    f"The rank that waits longest is idle for {idle['interleaved']:.0f} ms instead of {idle['1f1b']:.0f} ms under "
    f"1F1B, and the fullest rank holds {peak('interleaved'):g} micro-batches instead of {peak('1f1b'):g}."
)
show("interleaved")

# %% [markdown]
# ## Zero bubble: weight gradients can wait
#
# *Qi et al. 2023.* A backward pass has two parts: the gradient of a stage's input, for which the previous rank waits,
# and the gradient of its weights, for which nobody waits. ZB-H1 puts the second part into the bubble. ZB-H2 also runs
# further ahead, at the price of memory.

# %%
show("zb-h1")

# %%
show("zb-h2")

# %% [markdown]
# ## V-shaped schedules: down the ranks and back up
#
# *Qi et al. 2023 and 2024.* Place the second stages of the ranks in reverse order, and the last stage is on the first
# rank: gradients start where they are needed, and all ranks hold the same number of activations. ZB-V goes for the
# bubble; V-Half and V-Min trade some of it for memory.

# %%
held = {name: f"{peak(name) / peak('1f1b'):.0%}" for name in ("zbv", "v-half", "v-min")}
say(f"Activations compared with 1F1B: {', '.join(f'{name} {share}' for name, share in held.items())}.")
show("zbv")

# %%
show("v-half")

# %%
show("v-min")

# %% [markdown]
# ## And when passes are unequal, and sending takes time?
#
# The papers assume that all passes take equally long and that sending is free. Now the gradient of the input takes
# longer than a forward pass, and every message takes time. Does the ranking hold?

# %%
uneven, send_ms = {"F": 10, "I": 20, "W": 8}, 2
rows = {}
for name in (*schedules, "dualpipev"):
    table = build(name, STAGES, 12)
    share = STAGES / table.num_stages
    textbook = table.timeline(dict.fromkeys("FIW", 10 * share))
    slowed = table.timeline({kind: time * share for kind, time in uneven.items()}, send=send_ms)
    rows[name] = {"textbook": textbook.bubble_fraction, "uneven": slowed.bubble_fraction}
bubbles = pd.DataFrame(rows).T
lost = (bubbles["uneven"] - bubbles["textbook"]).sort_values()
say(
    f"With 12 micro-batches, passes of {uneven['F']}, {uneven['I']} and {uneven['W']} ms and {send_ms} ms a "
    f"message, "
    f"{bubbles['uneven'].idxmin()} has the smallest bubble, {lost.index[-1]} loses the most "
    f"({lost.iloc[-1]:+.0%}), and {lost.index[0]} the least ({lost.iloc[0]:+.0%}):"
)
bubbles.sort_values("uneven").map("{:.1%}".format)

# %% [markdown]
# ## On real processes
#
# Ranks on this machine train a small GPT whose layers are split into stages, and record each operation. This is a
# step of typical length.

# %%
job = ss.Job(
    model="gpt-nano",
    data="python-source",
    strategy="pipeline:1f1b",
    world_size=2,
    batch=ss.Batch(global_batch=48, micro_batch=8),
    steps=16,
)
run = ss.launch(job).wait(timeout=120)
trace = Trace.read(run)
lengths = {step: figures.info(figures.gantt, trace, last_step=step).end_ms for step in sorted(trace.ops)[3:]}
typical = sorted(lengths, key=lengths.get)[len(lengths) // 2]
measured = figures.info(figures.gantt, trace, last_step=typical)
say(figures.caption(figures.gantt, trace, last_step=typical))
figures.gantt(trace, last_step=typical)

# %% [markdown]
# The same run, step by step: activations go down the stages, gradients come back up.

# %%
StepPlayer(run)

# %% [markdown]
# ## Can that be predicted?
#
# From the durations of single operations, and from the time between the end of an operation and the start of the next
# one on the other rank where nothing else delayed it. Both are medians over all steps; nothing is fitted to the
# duration of a step.

# %%
took, gaps = {}, []
for step in lengths:
    ends = {(op.op, op.stage, op.microbatch): op.end for op in trace.ops[step]}
    free = [0.0, 0.0]
    for op in sorted(trace.ops[step], key=lambda op: op.start):
        took.setdefault((op.op, op.stage), []).append(1e3 * (op.end - op.start))
        needed = ends.get((op.op, op.stage - 1 if op.op == "F" else op.stage + 1, op.microbatch), 0.0)
        if needed > free[op.rank]:
            gaps.append(1e3 * (op.start - needed))
        free[op.rank] = op.end
took = {key: median(times) for key, times in took.items()}
send = median(gaps)
names = {"F": "forward", "B": "backward"}
passes = [f"{names[kind]} on stage {stage} {time:.1f} ms" for (kind, stage), time in sorted(took.items())]
say(f"Medians: {', '.join(passes)}; sending {send:.1f} ms.")

# %%
whole = [took["F", stage] + took["B", stage] for stage in (0, 1)]
table = build("1f1b", 2, 6)
predicted = table.timeline(
    {kind: took[kind, 0] for kind in "FB"}, stage_cost=[time / whole[0] for time in whole], send=send
)
say(
    f"**Step:** {predicted.end:.1f} ms predicted, {measured.end_ms:.1f} ms measured. **Bubble:** "
    f"{predicted.bubble_fraction:.1%} predicted, {measured.bubble:.1%} measured."
)
figures.schedule(predicted, schedule="1f1b")

# %% [markdown]
# The two differ where a process waited for a core, or an operation took longer than its median. But did each rank do
# what the table says, in its order?

# %%
for ops in trace.ops.values():
    for rank, row in enumerate(table.ranks):
        done = sorted((op for op in ops if op.rank == rank), key=lambda op: op.start)
        assert [(op.op, op.stage, op.microbatch) for op in done] == list(row)
say(f"Yes, in all {len(trace.ops)} steps.")

# %% [markdown]
# ## Try next
#
# - In the explorer, raise the number of micro-batches until the bubble is one that you would accept.
# - Run another schedule above: `strategy="pipeline:zb-h1"`.
# - [Bring your own](10-bring-your-own.ipynb) writes a schedule in a cell.
#
# [← Communication](04-communication.ipynb) · [Index](00-index.ipynb) · next: [Compression →](06-compression.ipynb)
