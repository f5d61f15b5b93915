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
# # Pipelines and what is left of their bubble
#
# A model too large for one device is cut into stages, and micro-batches follow each other through them. While the
# first comes in and the last goes out, devices wait. Ten schedules below fight over that *bubble*, and over how many
# activations a device must hold meanwhile. Each is an explicit table of operations: time and memory are counted from
# it, held against the closed form, and, at the end, against real processes on this machine.

# %%
from statistics import median

import shardscope as ss
from shardscope.analytic.schedules import build
from shardscope_widgets import PipelineExplorer, Trace, figures

# %% [markdown]
# ## All of them by hand
#
# Choose a schedule and pull the sliders. Hovering over an operation says what it needs and how long its rank waited.

# %%
explorer = PipelineExplorer(schedule="1f1b", stages=4, microbatches=8)
explorer

# %% [markdown]
# ## GPipe: all forwards, then all backwards
#
# *Huang et al. 2019.* With p ranks, m micro-batches and times f and b of a forward and a backward pass, each rank
# waits (p-1)(f+b) of a step that takes (m+p-1)(f+b).


# %%
def predicted(schedule, stages=4, microbatches=8):
    """The chart of a schedule whose every part takes 10 ms of one micro-batch on a whole rank."""
    table = build(schedule, stages, microbatches)
    timeline = table.timeline(dict.fromkeys("FIW", 10 * stages / table.num_stages))
    print(figures.schedule_text(figures.schedule_info(timeline, schedule=schedule)))
    return figures.schedule(timeline, schedule=schedule)


predicted("gpipe")

# %% [markdown]
# ## 1F1B: the same bubble in less memory
#
# *PipeDream-Flush, Narayanan et al. 2021.* A backward pass as soon as there is one. No rank holds more micro-batches
# than there are ranks from here to the end, however many there are in all.

# %%
predicted("1f1b")

# %% [markdown]
# ## Interleaved: fill sooner with shorter stages
#
# *Narayanan et al. 2021.* Each rank holds several short stages. The first micro-batch is through the ranks in a part
# of the time, and the bubble shrinks by the number of stages a rank; sends and activations grow.

# %%
predicted("interleaved")

# %% [markdown]
# **What to see:** the curve of activations is higher than under 1F1B, the grey hills of waiting ranks are half as
# wide.

# %% [markdown]
# ## Zero bubble: weights can wait
#
# *Qi et al. 2023.* The backward pass is two: the gradient of a stage's input, for which the rank before waits, and
# that of its weights, for which no one does. ZB-H1 puts the second into the bubble and costs no memory, ZB-H2 runs
# further ahead and lets no rank wait at all between its first operation and its last.

# %%
predicted("zb-h1")

# %%
predicted("zb-h2")

# %% [markdown]
# ## Down the ranks and back up: the V
#
# *Qi et al. 2023 and 2024.* If the second stages of the ranks lie in reverse order, the last stage is on the first
# rank: gradients start where they are needed, and all ranks hold equally much. ZB-V lets no rank wait between its
# first operation and its last, in the memory of 1F1B. V-Half and V-Min wait again, for what tends to a half and a third
# of the memory as ranks become many; of four, it is three and two micro-batches instead of four.

# %%
predicted("zbv")

# %%
predicted("v-half")

# %%
predicted("v-min", microbatches=12)

# %% [markdown]
# ## Where the textbook stops
#
# All parts equally long, sending free: so the papers draw it. Let the input's gradient take twice a forward, and
# sending 2 ms. ZB-H1, which had less bubble than interleaved, falls behind it; V-Min loses most, because every
# micro-batch of its tight block now waits for a gradient.

# %%
uneven = {"F": 10, "I": 20, "W": 8}
for name in ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min", "dualpipev"):
    table = build(name, 4, 12)
    share = 4 / table.num_stages
    timeline = table.timeline({kind: time * share for kind, time in uneven.items()}, send=2)
    peak = max(table.peak_activation())
    bubble = timeline.bubble_fraction
    print(f"{name:12} step {timeline.end:6.1f} ms   bubble {bubble:6.1%}   holds {peak:4.1f} micro-batches")

# %% [markdown]
# ## Really
#
# Two ranks of this machine train a small GPT, its layers cut into stages, and write down each operation.

# %%
job = ss.Job(
    model="gpt-nano",
    data="python-source",
    strategy="pipeline:1f1b",
    world_size=2,
    batch=ss.Batch(global_batch=48, micro_batch=8),
    steps=16,
)
trace = Trace.read(ss.launch(job).wait(timeout=120))
lengths = {step: figures.gantt_info(trace, last_step=step).end_ms for step in sorted(trace.ops)[3:]}
typical = sorted(lengths, key=lengths.get)[len(lengths) // 2]
measured = figures.gantt_info(trace, last_step=typical)
print(figures.gantt_text(measured))
figures.gantt(trace, last_step=typical)

# %% [markdown]
# What the prediction needs is how long single operations take, and how long it takes from the end of one to the start
# of the next on the other rank, where nothing else held that rank up. Both are medians over all steps, not fitted to
# the length of a step. The stages are not alike, since the last one has the output layer and the loss; `stage_cost`
# says so.

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
print({f"{kind} of stage {stage}": f"{time:.1f} ms" for (kind, stage), time in sorted(took.items())})
print(f"sending: {send:.1f} ms")

# %%
whole = [took["F", stage] + took["B", stage] for stage in (0, 1)]
table = build("1f1b", 2, 6)
timeline = table.timeline(
    {kind: took[kind, 0] for kind in "FB"}, stage_cost=[time / whole[0] for time in whole], send=send
)
print(f"bubble: {timeline.bubble_fraction:.1%} predicted, {measured.bubble:.1%} measured")
print(f"step: {timeline.end:.1f} ms predicted, {measured.end_ms:.1f} ms measured")
figures.schedule(timeline, schedule="1f1b")

# %% [markdown]
# **What to see:** the same bars in the same order, apart from what the machine does besides: processes that wait for a
# core. The order itself is exactly that of the table, and this is checked:

# %%
for ops in trace.ops.values():
    for rank, row in enumerate(table.ranks):
        done = sorted((op for op in ops if op.rank == rank), key=lambda op: op.start)
        assert [(op.op, op.stage, op.microbatch) for op in done] == list(row)
print(f"in all {len(trace.ops)} steps each rank did what the table says, in its order")
