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
# # 6 · When do compressed gradients pay off?
#
# [← Pipelines](05-pipelines.ipynb) · [Index](00-index.ipynb) · next: [Large batches →](07-large-batch.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/06-compression.html)
#
# Workers that train one model together spend part of every step sending gradients. These can be sent in fewer bytes:
# rounded, reduced to their signs or to their largest elements, or factorised. Each method saves bytes, takes time to
# pack and unpack, and loses information. Here real processes pack and send every byte, over links that are limited to a
# stated bandwidth.

# %%
import pandas as pd

import shardscope as ss
from shardscope.analytic import communication as comm
from shardscope_widgets import Trace, TrainingLab, figures, say

MODEL = "gpt-nano"
LINK = ss.Link(bandwidth="100 Mbit/s", latency="1 ms")  # the link between your own machines
METHODS = ("bf16", "int8", "int4", "topk", "powersgd")
rates = [LINK.bandwidth * factor for factor in (1, 10, 100)]
job = ss.Job(model=MODEL, data="python-source", strategy="ring", batch=16, world_size=2, link=LINK)


def bits(rate):
    """Bytes per second as text."""
    return f"{8e-9 * rate:.3g} Gbit/s" if rate >= 1.25e8 else f"{8e-6 * rate:.3g} Mbit/s"


plain_bytes = ss.predict(job).sent_bytes.max()
times = [f"{1e3 * plain_bytes / rate:,.3g} ms at {bits(rate)}" for rate in rates]
say(
    f"Uncompressed, each of {job.world_size} workers sends {plain_bytes / 1e6:.3g} MB of gradients per step of "
    f"{MODEL}: {', '.join(times)}."
)

# %% [markdown]
# ## On which link does compression pay off, and with which method?
#
# `compression_speedup` predicts the whole step with each method, as `ss.predict` does, with packing times measured
# here; a short probe corrects how fast this machine computes. Then real processes run on the link: uncompressed, with
# the method that is recommended, and with others. Only methods whose loss stays within their tolerance are recommended.


# %%
def train(compression="none", **changes):
    """One run of the common job, to its end."""
    fields = {"steps": 20, **changes}
    return ss.launch(job.replace(compression=compression, **fields)).wait(timeout=120)


probe = ss.launch(job.replace(link=None, steps=8, name="probe")).wait(timeout=120)
whole = ss.compression_speedup(job, methods=METHODS, probe=probe)
best = min((step for step in whole.harmless if step.compression.is_on), key=lambda step: step.step_s)
runs = [
    train(method) for method in dict.fromkeys(("none", best.compression.label, "int8", "topk", "powersgd"))
]
traces = [Trace.read(run) for run in runs]
info = figures.info(figures.compression, traces)
measured = {run.method_label: run.step_s for run in info.runs}
frame = whole.to_frame().set_index("method")
say(f"**{whole.limit}**")
out = [f"{name} ({row['loss']})" for name, row in frame.iterrows() if not row["is_harmless"]]
say(
    f"Not recommended because of its loss: {'; '.join(out) or 'no method'}. "
    f"Losses: {whole.losses.attrs['measured_on']}. Whole steps at {LINK.label}, among {job.world_size} workers:"
)
pd.DataFrame(
    {
        name: {
            "predicted step": f"{1e3 * frame['step_s'][name]:.3g} ms",
            "measured step": f"{1e3 * step_s:.3g} ms",
            "predicted speed-up": f"{frame['speed'][name]:.2f}",
            "measured speed-up": f"{measured['none'] / step_s:.2f}",
            "loss": frame["loss"][name].removeprefix("loss "),
        }
        for name, step_s in measured.items()
    }
).T

# %% [markdown]
# ### On faster links
#
# The same prediction for other bandwidths. Nothing is measured again.

# %%
faster = {bits(rate): whole.at(rate) for rate in rates}
below = {step.compression.label: whole.pays_below(step) for step in whole.harmless if step.compression.is_on}
say(
    "Fastest method within its tolerance: "
    + ", ".join(f"**{at.recommended.compression.label}** at {name}" for name, at in faster.items())
    + ". A whole step is faster by more than the error of predictions below "
    + ", ".join(f"{bits(below[name])} with {name}" for name in sorted(below, key=below.get, reverse=True))
    + ". Predicted speed-ups:"
)
speeds = {name: at.to_frame().set_index("method")["speed"] for name, at in faster.items()}
methods = [step.compression.label for step in whole.steps]
pd.DataFrame(speeds).map("{:.2f}".format).assign(loss=frame["loss"]).loc[methods]

# %% [markdown]
# ## Exchange only
#
# `break_even` leaves computing aside, and shows how the number of workers matters. It packs gradients of the model's
# shapes on this machine and computes the rest by formula. Below a method's line, exchanging gradients is faster
# compressed. Whiskers show how much the packing times varied. The cross is `LINK`.

# %%
found = ss.break_even(job, methods=METHODS, workers=(2, 4, 8, 16, 32), latency_s=LINK.latency_s)
here = (job.world_size, LINK.bandwidth)
say(figures.caption(figures.break_even, found, here=here))
fastest = found.best(*here)
say(
    f"At {LINK.label}, the exchange alone is at most {fastest.speedup:.3g} times faster compressed, with "
    f"{fastest.compression.label}; a whole step, {whole.speedup(whole.best):.3g} times, with "
    f"{whole.best.compression.label}."
)
figures.break_even(found, here=here)

# %% [markdown]
# ## What does it cost in loss?
#
# The table is too long to compute here; it is the output of `tests/benchmarks/convergence.py`, which trains gpt-nano on
# two ranks with three seeds for each pair, at the learning rate of the uncompressed run. An empty cell means that the
# method does not support the optimizer, or that the pair was not run.

# %%
costs = whole.losses
tolerance, increase = costs["tolerance"], costs.drop(columns="tolerance")
over = increase.gt(tolerance, axis=0)
everywhere = increase.index[~over.any(axis=1) & increase.notna().all(axis=1)]
nowhere = increase.index[(over | increase.isna()).all(axis=1)]
limits = pd.Series({name: f"{name} ({percent:g}%)" for name, percent in tolerance.items()})
say(
    f"**Within its tolerance under every optimizer:** {'; '.join(limits[everywhere])}. "
    f"**Under none:** {'; '.join(limits[nowhere])}. "
    f"Methods within it, of {len(increase)}: "
    + ", ".join(f"{name} {(~over[name] & increase[name].notna()).sum()}" for name in increase)
    + ". Percent that the loss is higher than without compression (**bold** above the tolerance, which was fixed "
    "before the first run; `inf`: diverged):"
)
bold = over.map(lambda above: "font-weight: bold" if above else "").assign(tolerance="")
costs.style.format(precision=1, na_rep="").apply(lambda _: bold, axis=None)

# %% [markdown]
# Optimizers that divide by the size of gradients suffer most: to them, the values that error feedback adds later look
# like a large gradient. Under AdamW and LAMB, runs that differ only in rounding drift apart too, so a small bold number
# may be chance. Much of the difference arises in the first steps, in which gradients turn quickly and second moments
# rest on few gradients: hence the rows with a warm-up, in which the first fifth of the steps is not compressed.
#
# ## Is the prediction right?
#
# The predicted step, before any compressed run:

# %%
say(f"{whole}")
sent = frame["sent_bytes"] * job.world_size / 1e3  # by all ranks, as the runs below count it
milliseconds = frame.filter(like="_s").mul(1e3).rename(columns=lambda name: name.removesuffix("_s"))
milliseconds.map("{:.1f} ms".format).assign(**{"sent (all ranks)": sent.map("{:,.0f} kB".format)})

# %% [markdown]
# And the runs. Hover over the bars for the times of computing, packing, and waiting for the network.

# %%
for sentence in figures.caption(figures.compression, traces).splitlines():
    say(f"- {sentence}")
figures.compression(traces)

# %% [markdown]
# Where do they differ, and why?

# %%
REASONS = {
    "computing": ("the machine was less busy than during the probe", "it was busier than during the probe"),
    "packing": ("packing was timed on a busier machine", "the ranks were busier while they packed"),
    "waiting": ("sending overlapped with computing", "a rank also waits for the slower rank"),
}  # less time than predicted, more time
gaps = pd.DataFrame(
    {
        run.method_label: {
            "computing": run.parts[0] - step["compute_s"],
            "packing": run.parts[1] - step["codec_s"],
            "waiting": run.parts[2] - step["communication_s"],
            "predicted": step["step_s"],
            "measured": run.step_s,
        }
        for run, step in ((run, frame.loc[run.method_label]) for run in info.runs)
    }
).T
off = gaps["measured"] / gaps["predicted"] - 1
worst = off.abs().idxmax()
miss = gaps.loc[worst]
is_slower = bool(miss["measured"] > miss["predicted"])
part = (miss[[*REASONS]] * (1 if is_slower else -1)).idxmax()
say(
    f"At {LINK.label}, measured steps differ from predicted ones by {off.abs().min():.0%} to {off.abs().max():.0%}. "
    f"The largest miss is {worst}: {1e3 * miss['predicted']:.3g} ms predicted, {1e3 * miss['measured']:.3g} ms "
    f"measured. The largest part of it is {part} ({1e3 * miss[part]:+.1f} ms): {REASONS[part][is_slower]}. "
    "Measured minus predicted:"
)
gaps.mul(1e3).map("{:+.1f} ms".format).assign(
    predicted=(1e3 * gaps["predicted"]).map("{:.0f} ms".format),
    measured=(1e3 * gaps["measured"]).map("{:.0f} ms".format),
)

# %% [markdown]
# What is not sent need not be lost. With *error feedback* it is kept, as the residual, and added to the next step's
# gradient. The losses show what remains of the damage.

# %%
figures.loss(traces, by_method=True)

# %% [markdown]
# ## How small are the packets?

# %%
SHAPE = (1000, 1000)
methods = ("bf16", "int8", "int4", "qsgd", "terngrad", "sign", "topk", "randomblock", "powersgd")
packets = {method: ss.Compression(method).bucket_bytes([SHAPE], 2).max() for method in methods}
elements = SHAPE[0] * SHAPE[1]
smallest = min(packets, key=packets.get)
say(
    f"The gradient of a matrix with {elements:,} elements takes {4 * elements / 1e3:,.0f} kB in fp32, and "
    f"{packets[smallest] / 1e3:.0f} kB with {smallest}:"
)
pd.DataFrame(
    {
        method: {
            "packet": f"{size / 1e3:,.1f} kB",
            "per element": f"{8 * size / elements:.3f} bits",
            "less than fp32": f"{4 * elements / size:.1f} times",
        }
        for method, size in packets.items()
    }
).T

# %% [markdown]
# ## How are packets summed?
#
# Rounded floats and PowerSGD's factors can be summed as they travel round a ring; other packets cannot. With `gather`,
# every worker sends its packet to all others, so the bytes grow with the number of workers. With `two-phase`, each
# worker receives one share of everybody's gradient, sums it, packs the mean again and sends it to all others: 2(W-1)/W
# of a packet for any W.

# %%
saved = {}
for exchange in ("gather", "two-phase"):
    saved[exchange] = {}
    for workers in (2, 4, 8, 16):
        sent = ss.Compression("int8", exchange=exchange).bucket_bytes([(1024, 1024)], workers).max()
        saved[exchange][workers] = comm.ring_all_reduce_bytes(1024 * 1024, 4, workers).max() / sent
table = pd.DataFrame(saved).rename_axis("workers")
useless = ", ".join(str(workers) for workers in table.index[table["gather"] <= 1])
say(f"Among {useless} workers, gathering int8 saves nothing. Times fewer bytes than the ring in fp32:")
table.round(2)

# %% [markdown]
# ## Where does it fail?
#
# Plain SGD at one learning rate trains a classifier of digits. A majority vote of signs discards the size of a
# gradient; a few of its elements, chosen at random and without error feedback, may retain too little.


# %%
def accuracy(compression):
    """On the held-out digits, after 60 steps."""
    sgd = ss.Optimizer("sgd", lr=0.1)
    run = train(compression, model="mlp", data="digits", batch=64, steps=60, link=None, optimizer=sgd)
    return run.summary().test_accuracy


correct = pd.Series(
    {
        "none": accuracy("none"),
        "int4": accuracy("int4"),
        "randomk, 1%": accuracy(ss.Compression("randomk", ratio=0.01)),
        "randomk, 1%, without feedback": accuracy(ss.Compression("randomk", ratio=0.01, feedback=False)),
        "sign-vote": accuracy("sign-vote"),
    }
).sort_values(ascending=False)
say(f"{correct.index[-1]} does worst. Digits classified correctly:")
correct.map("{:.1%}".format).to_frame("held-out digits")

# %% [markdown]
# ## And under ZeRO?
#
# If each rank holds a shard of every tensor, gradients are reduce-scattered: ranks exchange packets of shards, and the
# second phase is not needed. LAMB's trust ratios use norms of whole tensors, summed over the shards, and stay exact.

# %%
sharded = {
    name: train(name, strategy="zero-3", optimizer="lamb", link=None, steps=12).summary()
    for name in ("none", "int8", "int4")
}
rest = sharded["int4"].bytes_per_step / sharded["none"].bytes_per_step
say(
    f"With int4, {rest:.0%} of the bytes remain: ZeRO-3 also gathers its parameters, which are sent uncompressed."
)
pd.DataFrame(
    {
        name: {"loss": f"{run.loss:.4f}", "sent per step": f"{run.bytes_per_step / 1e6:.2f} MB"}
        for name, run in sharded.items()
    }
).T

# %% [markdown]
# ## The lab
#
# Choose a compression and a link, start a run, and compare it with the runs above.

# %%
lab = TrainingLab(model=MODEL, strategy="ring", world_size=2, steps=30, compression="int8")
lab.bandwidth = LINK.label.partition(",")[0]
lab

# %% [markdown]
# ## Try next
#
# - Set `LINK` in the first cell to the link between your own machines, or `MODEL` to another model of text, and run
#   all cells again.
# - Search compression and learning rate together: [Tuning](08-tuning.ipynb).
# - Write a compressor in a cell: [Bring your own](10-bring-your-own.ipynb).
#
# [← Pipelines](05-pipelines.ipynb) · [Index](00-index.ipynb) · next: [Large batches →](07-large-batch.ipynb)
