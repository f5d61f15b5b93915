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
# # 3 · Will it fit?
#
# [← Architectures](02-architectures.ipynb) · [Index](00-index.ipynb) · next: [Communication →](04-communication.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/03-memory.html)
#
# A device's memory holds parameters, gradients, optimizer state, activations that are kept for the backward pass, and
# buffers. Each has a formula, and each degree of parallelism divides some of them and not others. This notebook takes a
# model that does not fit on one device and looks for a layout with which it fits. Nothing is trained; everything is
# arithmetic, with the conventions of Megatron-Core.

# %%
import pandas as pd

import shardscope as ss
from shardscope.analytic.memory import memory_term, model_states, tensor_room
from shardscope_widgets import MemoryCalculator, figures, say

GIB = 2**30
# What tensors can take of an A100's 80 GB: the driver's context and free blocks of the allocator take the rest.
DEVICE = tensor_room(ss.Device.of("a100-80gb"), "megatron-core")

model = ss.Model.transformer(name="7.5B", layers=36, hidden=4096, heads=32, vocab=51200, seq=2048)
# Megatron-Core accumulates gradients in fp32: four bytes each.
states = model_states(model.num_params, precision="bf16-mixed", gradient_bytes=4)
per_param = {kind: size / model.num_params for kind, size in states._asdict().items()}
say(
    f"**{model.num_params / 1e9:.2f} billion parameters** at {sum(per_param.values()):.0f} bytes each take "
    f"{sum(states) / GIB:.1f} GiB before a single activation is stored. A device has {DEVICE / GIB:.1f} GiB for "
    "tensors."
)
pd.DataFrame(
    {"bytes per parameter": per_param, "GiB": {kind: size / GIB for kind, size in states._asdict().items()}}
).round(1)


# %% [markdown]
# ## What does ZeRO divide?
#
# Data-parallel replicas hold identical states. With ZeRO, each keeps a shard only: of the optimizer state (stage 1),
# also of the gradients (stage 2), also of the parameters (stage 3). Nothing else is divided.


# %%
def held(layout):
    """Memory of the fullest device, in GiB, by kind."""
    stage = max(memory_term(model, layout).parts, key=lambda stage: stage.value)
    return {**{kind.name: kind.value / GIB for kind in stage.parts}, "total": stage.value / GIB}


stages = [ss.Layout(data=64, zero=zero, global_batch=64) for zero in range(4)]
table = pd.DataFrame({f"ZeRO {layout.zero}": held(layout) for layout in stages}).T
fits = [stage for stage, total in table["total"].items() if total * GIB <= DEVICE]
say(
    f"On {stages[0].data} devices, the model fits with: {', '.join(fits) or 'no stage'}. Memory by kind, in GiB:"
)
table.round(1)

# %% [markdown]
# ZeRO 1, block by block. Hover over a block for its formula, its inputs and the source of the formula.

# %%
tree = memory_term(model, stages[1])
say(figures.caption(figures.memory_plan, tree, capacity_bytes=DEVICE, device="A100 80GB"))
figures.memory_plan(tree, capacity_bytes=DEVICE, device="A100 80GB")

# %% [markdown]
# In code, the same block and where it comes from:

# %%
block = tree["saved by layers"]
say(f"*{block.name}* = {block.formula} = {block.value / GIB:.1f} GiB. Source: {block.source}.")

# %% [markdown]
# ## What does recomputation save?
#
# Activations grow with the micro-batch. Full recomputation keeps only the input of each layer, and computes the rest
# again in the backward pass. Selective recomputation does so for the inner part of attention only, which flash
# attention never stores.

# %%
table = pd.DataFrame(
    {
        f"recompute {recompute}": {
            micro: held(ss.Layout(data=64, zero=1, micro_batch=micro, global_batch=512, recompute=recompute))[
                "total"
            ]
            for micro in (1, 2, 4, 8)
        }
        for recompute in ("none", "full")
    }
).rename_axis("micro-batch")
largest = {name: totals[totals * GIB <= DEVICE].index.max() for name, totals in table.items()}
told = " and ".join(f"{micro} with {name}" for name, micro in largest.items())
say(f"The largest of these micro-batches that fits is {told}. Totals under ZeRO 1, in GiB:")
table.round(1)

# %% [markdown]
# ## What does a pipeline divide?
#
# A pipeline divides the layers. But before a stage can run its first backward pass, other micro-batches enter, and it
# keeps the activations of all of them. How many depends on the schedule, and on the stage.


# %%
def in_stages(schedule):
    chunks = 2 if schedule.startswith("v-") else 1
    return ss.Layout(data=8, pipeline=4, zero=1, global_batch=128, schedule=schedule, virtual_stages=chunks)


table = pd.DataFrame(
    {
        schedule: [
            stage["activations"].value / GIB for stage in memory_term(model, in_stages(schedule)).parts
        ]
        for schedule in ("gpipe", "1f1b", "zb-h2", "v-half", "v-min")
    }
).T.rename(columns="stage {}".format)
worst = table.max(axis=1)
say(
    f"The fullest stage holds the most activations under {worst.idxmax()} ({worst.max():.1f} GiB) and the fewest "
    f"under {worst.idxmin()} ({worst.min():.1f} GiB). Activations by stage, in GiB:"
)
table.round(1)

# %%
tree = memory_term(model, in_stages("1f1b"))
say(figures.caption(figures.memory_plan, tree, capacity_bytes=DEVICE, device="A100 80GB"))
figures.memory_plan(tree, capacity_bytes=DEVICE, device="A100 80GB")

# %% [markdown]
# ## And a trillion parameters?
#
# Megatron's largest model, with tensor parallelism inside nodes and a pipeline across them. No table can hold all
# choices, so use the controls: the verdict above the bars names a change that makes the model fit.

# %%
settings = {
    "model": ss.Model.of("megatron-1t"),
    "data": 6,
    "tensor": 8,
    "pipeline": 64,
    "zero": 0,
    "micro_batch": 1,
    "global_batch": 3072,
    "sequence_parallel": False,
    "flash_attention": False,
    "recompute": "none",
}
calculator = MemoryCalculator(**settings)
calculator

# %% [markdown]
# The verdicts as set above, and with full recomputation:

# %%
for recompute in ("none", "full"):
    verdict = MemoryCalculator(**{**settings, "recompute": recompute}).verdict
    say(f"- **recompute {recompute}**: {verdict.sentence}")

# %% [markdown]
# ## Try next
#
# - Find the smallest `tensor` with which the trillion-parameter model still fits.
# - `ss.Model.from_hf("config.json")` reads your own model; `MemoryCalculator(model=...)` takes it.
# - `ss.Model.from_module(module, example, memory=True)` traces a module of yours, without running it.
# - `shardscope scoreboard --memory` in a terminal compares predicted memory with published peaks and out-of-memory
#   errors.
#
# [← Architectures](02-architectures.ipynb) · [Index](00-index.ipynb) · next: [Communication →](04-communication.ipynb)
