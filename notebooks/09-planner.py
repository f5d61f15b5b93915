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
# # 9 · Which layout trains a very large model?
#
# [← Tuning](08-tuning.ipynb) · [Index](00-index.ipynb) · next: [Bring your own →](10-bring-your-own.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/09-planner.html)
#
# Does a Llama fit on your H100s, with which layout, and how long does a step take? A very large model can be placed on
# a cluster in a great many ways: how many replicas, tensor, pipeline and context ranks, which ZeRO stage, which
# schedule, which micro-batch, what to recompute, what to keep in host memory. The planner evaluates **all** of them
# that the framework ships, with the formulas of the other calculators; where memory demands recomputation, it finds the
# fewest layers to recompute. It recommends the first plan that leaves memory for errors of the prediction. Choose
# another model, device or framework; move the sliders, and rows are ranked again at once; click a point or a row to
# compare that plan with the first one.

# %%
from shardscope_widgets import Planner, figures, say

planner = Planner(model="llama-3-70b", device="h100-80gb", nodes=8)
say(figures.plans_text(planner.plans))
planner

# %% [markdown]
# ## In code
#
# `ss.plan` returns the same table; `plans.frame` has it as a DataFrame. Here is GPT-3 on A100s, with the schedules,
# ZeRO stages and other settings that Megatron-Core ships. `software="any"` also searches what none ships.

# %%
import shardscope as ss
from shardscope.analytic import reliability
from shardscope_widgets import duration_text

TOKENS = 300e9  # what GPT-3 was trained on
cluster = ss.Cluster.of("a100-80gb", nodes=128, per_node=8)
plans = ss.plan("gpt3-175b", cluster, global_batch=1536, software="megatron-core")
say(figures.plans_text(plans, tokens=TOKENS))
plans

# %% [markdown]
# Where does each rank run? Hover over a square to see its groups, and the link that each uses.

# %%
say(figures.caption(figures.plan_mesh, plans))
figures.plan_mesh(plans, by="pipeline")

# %% [markdown]
# What do I miss? `plans.beyond` is the fastest layout if the framework shipped everything.

# %%
beyond = plans.beyond
if beyond is None:
    say("No layout that Megatron-Core does not ship is faster.")
else:
    say(
        f"With {beyond.lacking}, a step would take {duration_text(beyond.step_time_s)} instead of "
        f"{duration_text(plans.best.step_time_s)}."
    )

# %% [markdown]
# ## Why are the other layouts not in the table?
#
# The number of combinations that were rejected, by reason. `plans.best.layout` is ready for `ss.predict`.

# %%
most = max(plans.rejected.values())
say(f"Of {plans.considered:,} combinations, {most:,} are rejected for the most frequent reason.")
figures.plan_rejections(plans)

# %% [markdown]
# ## What do I pay for free memory?
#
# A layout is on the Pareto front if no other is faster and also leaves more memory free. Markers show the number of
# pipeline stages, and the star is the fastest layout.

# %%
front = plans.front
near = front[front["step_time_s"] <= 1.2 * plans.best.step_time_s]
roomy = near.loc[near["headroom_bytes"].idxmax()]
longer = roomy["step_time_s"] / plans.best.step_time_s - 1
say(
    f"{len(front)} layouts are on the front. The fastest leaves {plans.best.headroom_bytes / 2**30:.1f} GiB free; for "
    f"{longer:.0%} more time, {roomy['headroom_bytes'] / 2**30:.1f} GiB are free."
)
figures.plans(plans)

# %% [markdown]
# ## Why is the second plan only second?
#
# Each step time is a sum of terms. Two plans are compared term by term, with the largest difference first.

# %%
plans.explain(1, 2)

# %%
figures.plan_terms(plans, 1, 2)

# %% [markdown]
# ## What if I want another trade-off?
#
# The search keeps every layout that can be among the best by *any* objective that prefers less time and more free
# memory. So another objective, or a combination, ranks the same rows again, at once and exactly.

# %%
plans.by({"time": 1, "headroom": 0.5})

# %% [markdown]
# ## Why not my layout?
#
# For a layout of your own, `why` says which rule it breaks, how much memory it lacks, or which layouts are better and
# by how much. If recomputing some of the layers is enough for a layout to fit, it says how many, and the planner has
# tried that too.

# %%
mine = plans.best.layout.replace(
    data=16, tensor=8, pipeline=8, context=1, micro_batch=1, schedule="1f1b", virtual_stages=1, shard=0
)
for layout in (
    mine,
    mine.replace(recompute="full"),
    mine.replace(micro_batch=8),
    mine.replace(tensor=7),
    mine.replace(pipeline=1, data=128),
):
    say(f"- {plans.why(layout)}")

# %% [markdown]
# ## And if nothing fits?
#
# The planner names the layout that comes closest, the memory that it lacks, and the number of nodes that would be
# enough.

# %%
few = ss.Cluster.of("a100-80gb", nodes=2, per_node=8)
ss.plan("gpt3-175b", few, global_batch=64, fix={"offload": "none"})

# %% [markdown]
# ## A trillion parameters
#
# The largest model of Narayanan et al. (2021) on a larger cluster than they had. Every possible layout is scored;
# nothing is sampled. So many devices fail often: the time to train includes checkpoints, restarts and the work that
# failures undo, at a rate computed from the interruptions that Meta reported for the training of Llama 3.

# %%
model = ss.Model.of("megatron-1t")
HOURS = reliability.LLAMA_3_DEVICE_MTBF_S / 3600
cluster = ss.Cluster.of("a100-80gb", nodes=2048, per_node=8, device_mtbf_hours=round(HOURS, -4))
trillion = ss.plan(model, cluster, global_batch=3072)
say(
    f"**{model.num_params / 1e12:.3f} trillion parameters**, with about one interruption per "
    f"{cluster.device_mtbf_hours:,.0f} device-hours. {figures.plans_text(trillion, tokens=TOKENS)}"
)
trillion

# %%
figures.plans(trillion)

# %%
figures.plan_terms(trillion, 1, 2)

# %%
trillion.explain(1, 10)

# %% [markdown]
# ## How do I run the plan?
#
# A plan comes with the settings of its framework: flags of Megatron-LM or torchtitan, or DeepSpeed's JSON. The panel at
# the top of this page shows them beside the devices of the chosen plan. Here are those of a small Llama on one node:

# %%
eight = ss.Cluster.of("h100-80gb", nodes=1, per_node=8)
ready = ss.plan("llama-3-8b", eight, software="megatron-core")
config = ready.trainer_config()
print(config)
say(" ".join(config.remarks))

# %% [markdown]
# ## Plan, measure one step, calibrate, plan again
#
# Constants differ between clusters: another network, another version of a framework. So intervals are wide where no
# step was measured. The remedy is a loop: run the best plan for a few steps, give the time of a step to `ss.calibrate`,
# and plan again. Steps of earlier turns are kept, so the calibration improves with each.
#
# We cannot run so many GPUs here, so a stand-in takes their place: `real` predicts with constants that the planner does
# not see. All steps are slower than expected, above all messages inside a node, and kernels take longer to launch.

# %%
cluster, prior = plans.setting.cluster, plans.setting.calibration
real = prior.moved({"scale": 0.1, "intra_efficiency": -0.4, "launch_s": 0.4})


def measure(layout):
    return ss.predict("gpt3-175b", cluster, layout, calibration=real).step_time_s


rows, calibration = [], None
for turn in range(3):
    found = ss.plan("gpt3-175b", cluster, global_batch=1536, calibration=calibration)
    best = found.best
    seconds = measure(best.layout)
    say(
        f"- Turn {turn + 1}: the best plan is predicted to take {best.step_time_s:.2f} s, and takes {seconds:.2f} s."
    )
    rows.append({**best.layout.model_dump(), "software": best.software, "step_time_s": seconds})
    calibration = ss.calibrate(cluster, rows=rows, model="gpt3-175b")
calibration

# %% [markdown]
# In the panel at the top of this page, choose your model and cluster first. Then choose the plan that you ran,
# enter its *Measured step time (s)*, and press *Calibrate*: all plans are predicted and ranked again. In code, that is
# `planner.measure(60.5)`, and `planner.forget()` undoes it.
#
# `rows` may also be a CSV file, a data frame, or a log of Megatron or torchtitan. From three layouts, the calibration
# has cross-validated errors and names rows that do not fit the others. `calibration.save("cluster.json")` keeps it;
# `shardscope plan --calibration cluster.json` uses it. `shardscope scoreboard --rows steps.csv` says how well steps of
# your own are predicted before any calibration.

# %% [markdown]
# ## Try next
#
# - Plan for another framework: `ss.plan(..., software="fsdp2")`.
# - Plan your own model: `ss.plan(ss.Model.from_hf("config.json"), ss.Cluster.of("h100-80gb", nodes=8))`.
# - Ask for the cheapest layout: `plans.by("dollars")`.
# - `shardscope scoreboard` in a terminal compares predicted step times with published ones, misses included;
#   `shardscope scoreboard --memory` does so for memory.
#
# [← Tuning](08-tuning.ipynb) · [Index](00-index.ipynb) · next: [Bring your own →](10-bring-your-own.ipynb)
