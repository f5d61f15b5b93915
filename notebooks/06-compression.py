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
#
# Workers that train one model together spend part of every step sending gradients. These can be sent in fewer bytes:
# rounded, reduced to their signs or to their largest elements, or factorised. Each method saves bytes, takes time to
# pack and unpack, and loses information. Here real processes pack and send every byte, over links that are limited to a
# stated bandwidth.

# %%
import pandas as pd

import shardscope as ss
from shardscope.analytic import communication as comm
from shardscope.measure.loss_increase import MEASURED_ON, is_within_tolerance, loss_increase, loss_text
from shardscope.spec.models import MODELS
from shardscope.spec.units import bit_rate_text, seconds_text
from shardscope_widgets import Trace, TrainingLab, figures, say

BANDWIDTHS = ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s")
LATENCY = "1 ms"
METHODS = ("bf16", "int8", "int4", "topk", "powersgd")
SLOW = ss.Link(bandwidth=BANDWIDTHS[0], latency=LATENCY)
job = ss.Job(model="gpt-nano", data="python-source", batch=16, world_size=2, link=SLOW)
plain_bytes = comm.ring_all_reduce_bytes(MODELS["gpt-nano"].num_params, 4, job.world_size).max()
times = [
    f"{seconds_text(plain_bytes / ss.Link(bandwidth=bandwidth, latency=0).bandwidth)} at {bandwidth}"
    for bandwidth in BANDWIDTHS
]
say(
    f"Uncompressed, each of {job.world_size} workers sends {plain_bytes / 1e3:,.0f} kB of gradients per step of "
    f"gpt-nano: {', '.join(times)}."
)

# %% [markdown]
# ## Below which bandwidth does it pay off, and with which method?
#
# `break_even` packs gradients of the model's shapes on this machine and computes the rest by formula. Below a method's
# line, exchanging gradients is faster compressed; above it, plain gradients are. Whiskers show how much the packing
# times varied. The cross is the link of the runs below.

# %%
found = ss.break_even(job, methods=METHODS, workers=(2, 4, 8, 16, 32), latency_s=LATENCY)
here = (job.world_size, BANDWIDTHS[0])
say(figures.break_even_text(figures.break_even_info(found, here=here)))
figures.break_even(found, here=here)

# %% [markdown]
# The exchange is one part of a step. `compression_speedup` predicts the whole step: a short probe measures how long it
# computes on this machine.

# %%
from shardscope.measure.compression_speedup import MARGIN

probe = ss.launch(job.replace(link=None, steps=8, name="probe")).wait(timeout=120)
expected = {}
for bandwidth in BANDWIDTHS:
    link = ss.Link(bandwidth=bandwidth, latency=LATENCY)
    whole = expected[bandwidth] = ss.compression_speedup(job, methods=METHODS, link=link, probe=probe)
    steps = {step.compression: step.step_s for step in whole.steps}
    best, plain = found.best(job.world_size, bandwidth), whole.plain.step_s
    if not best.compression.is_on:
        say(f"- **{bandwidth}: no compression**")
        continue
    allowed = {method: s for method, s in steps.items() if is_within_tolerance(method, job.optimizer.name)}
    harmless = min(allowed, key=allowed.get)
    gain = plain / steps[harmless]
    answer = harmless.label if gain >= MARGIN else "not worth it"
    say(
        f"- **{bandwidth}: {answer}**. The best method whose loss stays within the tolerance is {harmless.label}: a "
        f"whole step takes {seconds_text(steps[harmless])} instead of {seconds_text(plain)}, {gain:.2f} times faster"
        f"{'' if gain >= MARGIN else ', which is within the prediction error'}. The shortest exchange is that of "
        f"{best.compression.label}, {best.speedup:.3g} times faster; a step with it is "
        f"{plain / steps[best.compression]:.2f} times faster; {best.loss}."
    )
whole, rate = expected[BANDWIDTHS[0]], ss.Link(bandwidth=BANDWIDTHS[0], latency=0).bandwidth
for one in (step for step in whole.steps if is_within_tolerance(step.compression, job.optimizer.name)):
    fixed, plain_fixed = (step.step_s - step.sent_bytes / rate for step in (one, whole.plain))
    saved, lost = whole.plain.sent_bytes - MARGIN * one.sent_bytes, MARGIN * fixed - plain_fixed
    if one.compression.is_on and saved > 0 and lost > 0:
        below = bit_rate_text(saved / lost)
        say(
            f"- A whole step with **{one.compression.label}** is at least {MARGIN - 1:.0%} faster below **{below}**."
        )
say(f"Losses: {MEASURED_ON}. Predicted speed-up of a whole step among {job.world_size} workers:")
speeds = {bandwidth: each.to_frame().set_index("method")["speed"] for bandwidth, each in expected.items()}
losses = {name: loss_text(ss.Compression(name), job.optimizer.name) for name in ("none", *METHODS)}
pd.DataFrame(speeds).map("{:.2f}".format).assign(loss=pd.Series(losses)).loc[list(losses)]

# %% [markdown]
# ## What does it cost in loss?
#
# The table is too long to compute here; it is the output of `tests/benchmarks/convergence.py`, which trains gpt-nano on
# two ranks with three seeds for each pair, at the learning rate of the uncompressed run. An empty cell means that the
# method does not support the optimizer, or that the pair was not run.

# %%
measured = loss_increase()
tolerance, increase = measured["tolerance"], measured.drop(columns="tolerance")
over = increase.gt(tolerance, axis=0)
everywhere = increase.index[~over.any(axis=1) & increase.notna().all(axis=1)]
nowhere = increase.index[(over | increase.isna()).all(axis=1)]
say(
    f"**Within the tolerance under every optimizer:** {'; '.join(everywhere)}. "
    f"**Under none:** {'; '.join(nowhere)}. "
    f"Methods within it, of {len(increase)}: "
    + ", ".join(f"{name} {(~over[name] & increase[name].notna()).sum()}" for name in increase)
    + ". Percent that the loss is higher than without compression (**bold** above the tolerance, which was fixed "
    "before the first run):"
)
bold = over.map(lambda above: "font-weight: bold" if above else "").assign(tolerance="")
measured.style.format(precision=1, na_rep="").apply(lambda _: bold, axis=None)

# %% [markdown]
# Optimizers that divide by the size of gradients suffer most: to them, the values that error feedback adds later look
# like a large gradient. Under AdamW and LAMB, runs that differ only in rounding drift apart too, so a small bold number
# may be chance. Much of the difference arises in the first steps, in which gradients turn quickly and second moments
# rest on few gradients: hence the rows with a warm-up, in which the first fifth of the steps is not compressed.
#
# ## Is the prediction right?
#
# The predicted step on the slow link, before any compressed run:

# %%
frame = expected[BANDWIDTHS[0]].to_frame().set_index("method")
say(f"{expected[BANDWIDTHS[0]]}")
sent = frame["sent_bytes"] * job.world_size / 1e3  # by all ranks, as the runs below count it
milliseconds = frame.filter(like="_s").mul(1e3).rename(columns=lambda name: name.removesuffix("_s"))
milliseconds.map("{:.1f} ms".format).assign(sent=sent.map("{:,.0f} kB".format))

# %% [markdown]
# Then the runs, in which real processes pack and send every byte. Hover over the bars for the times of computing,
# packing, and waiting for the network.


# %%
def train(compression="none", **changes):
    """One run of the common job, to its end."""
    fields = {"strategy": "ring", "steps": 20, **changes}
    return ss.launch(job.replace(compression=compression, **fields)).wait(timeout=120)


runs = [train(method) for method in ("none", "int8", "topk", "powersgd")]
traces = [Trace.read(run) for run in runs]
info = figures.compression_info(traces)
for sentence in figures.compression_text(info).splitlines():
    say(f"- {sentence}")
figures.compression(traces)

# %% [markdown]
# Where do they differ, and why?

# %%
REASONS = {
    "computing": ("the machine was less busy than during the probe", "it was busier than during the probe"),
    "packing": ("packing was timed on a busier machine", "the ranks share the cores while they pack"),
    "waiting": ("sending overlapped with computing", "a rank also waits for the slower rank"),
}  # less time than predicted, more time
gaps = pd.DataFrame(
    {
        run.method_label: {
            "computing": run.parts[0] - step["compute_s"],
            "packing": run.parts[1] - step["codec_s"],
            "waiting": run.parts[2] - step["wire_s"] - step["software_s"],
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
    f"At {BANDWIDTHS[0]}, measured steps differ from predicted ones by {off.abs().min():.0%} to {off.abs().max():.0%}. "
    f"The largest miss is {worst}: {seconds_text(miss['predicted'])} predicted, {seconds_text(miss['measured'])} "
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
        "randomk, 1 %": accuracy(ss.Compression("randomk", ratio=0.01)),
        "randomk, 1 %, without feedback": accuracy(ss.Compression("randomk", ratio=0.01, feedback=False)),
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
lab = TrainingLab(model="gpt-nano", strategy="ring", world_size=2, steps=30, compression="int8")
lab.bandwidth = "100 Mbit/s"
lab

# %% [markdown]
# ## Try next
#
# - Set `SLOW` to the link between your own machines, and run again.
# - Search compression and learning rate together: [Tuning](08-tuning.ipynb).
# - Write a compressor in a cell: [Bring your own](10-bring-your-own.ipynb).
#
# [← Pipelines](05-pipelines.ipynb) · [Index](00-index.ipynb) · next: [Large batches →](07-large-batch.ipynb)
