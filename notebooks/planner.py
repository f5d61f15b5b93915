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
# # Planning a training that no one can try out
#
# A model of a hundred billion parameters can be put on a thousand devices in hundreds of thousands of ways: how many
# replicas, tensor, pipeline and context ranks, which ZeRO stage, which schedule, how large a micro-batch, what to
# recompute and what to keep in the host's memory. Each way has its own step time and its own memory. The planner goes
# through **all** of them, by the same formulas as the other calculators, in about a second.

# %%
import shardscope as ss
from shardscope_widgets import Planner, figures

# %% [markdown]
# ## One call
#
# GPT-3 on 1,024 A100s in nodes of eight. `plans` is a ranked table; its last line of defence is that it can be asked.

# %%
plans = ss.plan("gpt3-175b", ss.Cluster.of("a100-80gb", nodes=128, per_node=8), global_batch=1536)
plans.frame.head(10)

# %% [markdown]
# The best layout, ready for `ss.predict`, and what became of all the other combinations:

# %%
print(plans.best.layout)
figures.plan_rejections(plans)

# %% [markdown]
# ## Time against memory
#
# A layout is on the front if no other is both faster and leaves more memory free. Left of it there is nothing. Colour
# tells the number of pipeline stages; the star is the best by time.

# %%
figures.plans(plans)

# %% [markdown]
# ## Why is the second only second?
#
# Each step time is a sum of terms. What makes one plan faster than another is their difference, the largest first.

# %%
plans.explain(1, 2)

# %%
figures.plan_terms(plans, 1, 2)

# %% [markdown]
# ## What counts is up to you
#
# The search keeps every layout that can be among the best by *any* measure that likes less time and more memory. So
# another objective, or a mix, ranks the same rows anew, at once and exactly.

# %%
balanced = plans.by({"time": 1, "headroom": 0.5})
balanced.frame[["time_s", "headroom_bytes", "pipeline", "tensor", "zero", "offload"]].head()

# %% [markdown]
# ## Why not mine?
#
# A layout of your own: what it breaks, what it lacks, or who beats it and by what.

# %%
mine = plans.best.layout.replace(tensor=8, pipeline=8, data=16, schedule="1f1b", virtual_stages=1, shard=0)
for layout in (
    mine,
    mine.replace(recompute="full"),
    mine.replace(tensor=7),
    mine.replace(pipeline=1, data=128),
):
    print("-", plans.why(layout))

# %% [markdown]
# ## When nothing fits
#
# The planner does not come back empty-handed: it names the layout that comes closest, what it lacks, and how many nodes
# would do.

# %%
ss.plan(
    "gpt3-175b", ss.Cluster.of("a100-80gb", nodes=2, per_node=8), global_batch=64, fix={"offload": "none"}
)

# %% [markdown]
# ## Hands on
#
# Move the sliders: rows are ranked anew within milliseconds. Click a point or a row to lay that plan beside the best.

# %%
planner = Planner(model="gpt3-175b", nodes=128, global_batch=1536)
planner

# %% [markdown]
# ## A trillion parameters on 16,384 devices
#
# The largest model of Narayanan et al. (2021) has 128 layers of width 25,600, and ran on 3,072 A100s. Here it is on
# 2,048 nodes of eight. Every layout that can be is scored; nothing is sampled.

# %%
model = ss.Model.of("megatron-1t")
cluster = ss.Cluster.of("a100-80gb", nodes=2048, per_node=8)
trillion = ss.plan(model, cluster, global_batch=3072)
print(f"{model.num_params / 1e12:.3f} trillion parameters, {trillion.valid:,} layouts that can be")
trillion.frame.head(10)

# %%
figures.plans(trillion)

# %%
best = trillion.best
tokens = 300e9
print(f"one step: {best.time_s:.1f} s, {best.tokens_per_s:,.0f} tokens a second")
print(f"{tokens / 1e9:.0f} billion tokens: {tokens / best.tokens_per_s / 86400:.0f} days")
figures.plan_terms(trillion, 1, 2)

# %%
trillion.explain(1, 10)
