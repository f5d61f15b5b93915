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
# # Will it fit?
#
# A device's memory holds parameters, gradients, the optimizer's state, activations that wait for their backward pass,
# and room to work in. Each has a formula, and every degree of parallelism divides some of them and not others. This
# notebook takes one model from a single device, where it does not fit, to a layout where it does, and ends with a
# trillion parameters. Nothing here runs a model: it is arithmetic, and takes milliseconds.

# %%
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import device_memory, memory_term, model_states, stage_memory
from shardscope.spec.layout import Layout
from shardscope.spec.model import Model
from shardscope_widgets import MemoryCalculator, figures

GIB = 2**30
A100 = 79.25 * GIB  # what torch can allocate of 80 GB

# %% [markdown]
# ## One model, sixteen bytes a parameter
#
# A model of 7.5 billion parameters. Mixed precision keeps each weight in 2 bytes, its gradient in 2, and for Adam a
# master copy and two moments in 4 bytes each: 16 bytes a parameter, 120 GB. That is before a single activation.

# %%
model = Model.transformer(name="7.5B", layers=36, hidden=4096, heads=32, vocab=51200, seq=2048)
states = model_states(model.num_params, precision="bf16-mixed")
{kind: f"{float(size) / GIB:.1f} GiB" for kind, size in states._asdict().items()}

# %% [markdown]
# ## ZeRO, from 0 to 3
#
# Replicas hold the same states. ZeRO lets each keep a part: of the optimizer's state (stage 1), of gradients (2),
# of parameters (3). Here on 64 devices, as in figure 1 of the ZeRO paper; what it does not divide are activations.

# %%
stages = [Layout(data=64, zero=zero, global_batch=64) for zero in range(4)]
held = device_memory(model, Layouts.of(stages), framework="paper")
for layout, total in zip(stages, held.total, strict=True):
    print(f"ZeRO {layout.zero}: {total / GIB:6.1f} GiB, {'fits' if total <= A100 else 'does not fit'}")

# %%
tree = memory_term(model, stages[1])
figures.memory_plan(tree, capacity_bytes=A100, device="A100 80GB")

# %% [markdown]
# Hover over a block for its formula, what went into it, and where the formula comes from. The same in code:

# %%
tree["saved by layers"]

# %% [markdown]
# ## Recomputation
#
# Activations grow with the batch. Full recomputation keeps each layer's input alone and computes the rest again in the
# backward pass; selective recomputation does so for attention's inside only, which flash attention never stores.

# %%
for recompute in ("none", "full"):
    for micro_batch in (1, 2, 4, 8):
        layout = Layout(data=64, zero=1, micro_batch=micro_batch, global_batch=512, recompute=recompute)
        total = stage_memory(model, layout).total.max()
        print(f"recompute {recompute}, micro-batch {micro_batch}: {total / GIB:6.1f} GiB")

# %% [markdown]
# ## A pipeline
#
# A pipeline divides the layers, but under 1F1B its first stage keeps activations of as many micro-batches as there
# are stages. What it saves in states it partly pays back; the schedule decides how much.

# %%
for schedule in ("gpipe", "1f1b", "zb-h2", "v-half", "v-min"):
    chunks = 2 if schedule.startswith("v-") else 1
    layout = Layout(data=8, pipeline=4, zero=1, global_batch=128, schedule=schedule, virtual_stages=chunks)
    by_stage = stage_memory(model, layout).activations / GIB
    print(
        f"{schedule:7}", " ".join(f"{size:6.1f}" for size in by_stage), "GiB of activations, stage by stage"
    )

# %%
figures.memory_plan(
    memory_term(model, Layout(data=8, pipeline=4, zero=1, global_batch=128)),
    capacity_bytes=A100,
    device="A100 80GB",
)

# %% [markdown]
# ## A trillion parameters
#
# Megatron's model of a trillion parameters: eight tensor ranks inside a node, 64 pipeline stages across nodes. All its
# choices at once, as table and curve cannot show them, so drag.

# %%
calculator = MemoryCalculator(
    model=Model.transformer(name="1T", layers=128, hidden=25600, heads=160, vocab=51200, seq=2048),
    data=6, tensor=8, pipeline=64, zero=0, micro_batch=1, global_batch=3072,
    sequence_parallel=False, flash_attention=False, recompute="none",
)  # fmt: skip
calculator

# %% [markdown]
# It does not fit as it stands, and the sentence says what would make it. Do that:

# %%
calculator.recompute = "full"
calculator.verdict.sentence
