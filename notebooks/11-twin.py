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
# # 11 · The twin: predicted, simulated and measured
#
# [← Bring your own](10-bring-your-own.ipynb) · [Index](00-index.ipynb) · [Faults →](12-faults.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/11-twin.html)
#
# Every claim about distributed training is a claim about time, bytes or memory. Here each is predicted by a formula,
# simulated event by event, and then measured: on a cluster of several nodes with slow links, which this machine
# emulates. The prediction is always drawn before anything runs, and the verdict is computed from the runs.

# %%
import shardscope as ss
from shardscope.analytic.communication import collective_time
from shardscope_widgets import Trace, Twin, figures, say

SLOW, MEGABYTE = "100 Mbit/s", 1e6


def sum_ms(algorithm, workers):
    """Milliseconds in which workers sum a megabyte of gradients over slow links, by the textbook's formula."""
    link = {"bandwidth": ss.Link(bandwidth=SLOW, latency=0.0).bandwidth, "latency": 0.0}
    return 1e3 * float(
        collective_time(op="all_reduce", algorithm=algorithm, num_bytes=MEGABYTE, workers=workers, **link)
    )


few, many = 2, 8
say(
    f"By the formula, one parameter server sums {MEGABYTE / 1e6:.0f} MB of gradients over {SLOW} links in "
    f"{sum_ms('parameter-server', few):.0f} ms with {few} workers and in {sum_ms('parameter-server', many):.0f} ms "
    f"with {many}; a ring takes {sum_ms('ring', few):.0f} ms and {sum_ms('ring', many):.0f} ms."
)

# %% [markdown]
# ## A cluster on one machine
#
# Each node is a network namespace with a link of its own, and its ranks send real TCP over it. Processors are emulated
# too: ranks really compute, and then sleep until the time has passed that a slower processor would take. So there can
# be more ranks than cores. Where the system forbids namespaces, ranks run on this machine, and pace what they send.

# %%
WHY_NOT = ss.why_not_emulated()
STEPS = 4
USUAL = {"model": "gpt-nano", "data": "python-source", "steps": STEPS, "record": ss.Record(memory_first=0)}


def on(job, bandwidth=SLOW, latency=0.0, flops="4 GFLOP/s"):
    """The job and the cluster on which to predict and run it, with one rank per node."""
    if WHY_NOT:
        return job.replace(link=ss.Link(bandwidth=bandwidth, latency=latency)), None
    speed = {"flops": flops, "memory_bandwidth": "2 GB/s"}
    return job, ss.Cluster.emulated(job.world_size, bandwidth, latency, **speed)


def expected(jobs):
    """Step times before anything runs, by name of the job."""
    return [
        figures.StepTimesRow(name, ss.predict(*placed).step_time_s, ss.simulate(*placed).step_time_s)
        for name, placed in jobs.items()
    ]


def measured(jobs, rows):
    """Run the jobs; return each run's comparison with its prediction, and the rows with measured step times."""
    runs = {name: ss.launch(*placed).wait(timeout=300) for name, placed in jobs.items()}
    found = {name: ss.compare(run) for name, run in runs.items()}
    return (
        runs,
        found,
        [row._replace(measured=found[row.label]["time", found[row.label].per].measured) for row in rows],
    )


def seconds(comparison, term="communication"):
    """Predicted, simulated and measured seconds of a part of the step."""
    row = comparison["time", term]
    return row.predicted, row.simulated, row.measured


example, cluster = on(ss.Job(**USUAL, strategy="ring", world_size=4))
say(
    f"The runs below are on {cluster.name}, unless a cell says otherwise."
    if cluster is not None
    else f"The runs below are on this machine, over paced links, because {WHY_NOT}"
)

# %% [markdown]
# ## One server is a bottleneck, a ring is not
#
# A parameter server receives the gradients of all workers over its one link, so its time grows with the workers. In a
# ring, each rank sends 2(W-1)/W of the gradients, whatever W. The batch per worker stays the same.

# %%
servers = {
    f"{strategy}, W={workers}": on(ss.Job(**USUAL, strategy=strategy, world_size=workers, batch=8 * workers))
    for strategy in ("parameter-server", "ring")
    for workers in (2, 4)
}
servers_expected = expected(servers)
figures.step_times(servers_expected)

# %%
servers_runs, servers_found, servers_measured = measured(servers, servers_expected)


def growth(strategy, column):
    """Factor by which communication takes longer with more workers; columns: predicted, simulated, measured."""
    less, more = (seconds(servers_found[f"{strategy}, W={workers}"])[column] for workers in (2, 4))
    return more / less


say(
    f"From {2} to {4} workers, the server's communication took {growth('parameter-server', 2):.1f} times as long "
    f"(predicted {growth('parameter-server', 0):.1f}, simulated {growth('parameter-server', 1):.1f}), and the ring's "
    f"{growth('ring', 2):.1f} times (predicted {growth('ring', 0):.1f}). "
    + (
        "The claim holds."
        if growth("parameter-server", 2) > 1.2 * growth("ring", 2)
        else "The claim does not hold here."
    )
)
figures.step_times(servers_measured)

# %% [markdown]
# ## What the difference is made of
#
# The panel lays the three beside each other: every term with its errors, what explains the difference in step time, and
# one step of each rank with the simulated step below it. Choose another run, or another step, to see its twin.

# %%
twin = Twin(servers_runs["parameter-server, W=4"])
twin

# %% [markdown]
# ## The bubble of a pipeline shrinks with more micro-batches
#
# With p stages and m micro-batches, GPipe leaves a rank idle for (p-1)/(m+p-1) of a step, if all stages take equally
# long, as these equal layers do. The batch is the same in both jobs, only the number of micro-batches differs.

# %%
STAGES, BATCH, WIDTH = 4, 64, 64


def layers():
    """Equal layers, two for each stage; the loss takes the first ten outputs for the digits."""
    from torch import nn

    rest = (nn.Linear(WIDTH, WIDTH) for _ in range(2 * STAGES - 1))
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, WIDTH)), *rest)


pipelines = {
    f"{count} micro-batches": on(
        ss.Job(
            **{**USUAL, "model": layers, "data": "digits"},
            strategy=ss.Pipeline(schedule="gpipe", split="even"),
            world_size=STAGES,
            batch=ss.Batch(global_batch=BATCH, micro_batch=BATCH // count),
        ),
        "1 Gbit/s",
        flops=2 * 2 * 8 * WIDTH**2 / 0.02,  # 20 ms for the forward pass of 8 samples on two layers
    )
    for count in (2, 8)
}
pipelines_expected = expected(pipelines)
figures.step_times(pipelines_expected)

# %%
pipelines_runs, pipelines_found, pipelines_measured = measured(pipelines, pipelines_expected)
bubbles = {}
for count in (2, 8):
    run = pipelines_runs[f"{count} micro-batches"]
    step = figures.info(figures.gantt, Trace.read(run))
    bubbles[count] = (step.ideal, step.usual.waiting if step.usual else step.bubble)
told = "; ".join(
    f"{count} micro-batches: {counted:.0%} counted in the schedule, {share:.0%} measured"
    for count, (counted, share) in bubbles.items()
)
shrinks = "shrinks" if bubbles[8][1] < bubbles[2][1] else "does not shrink here"
say(f"Idle time of a rank with {told}. The bubble {shrinks}.")
figures.step_times(pipelines_measured)

# %% [markdown]
# ## ZeRO-3 saves memory and sends more
#
# ZeRO-1 exchanges as many bytes as an all-reduce: a reduce-scatter of gradients and an all-gather of parameters. ZeRO-3
# gathers the parameters again for the backward pass.

# %%
shards = {
    strategy: on(ss.Job(**USUAL, strategy=strategy, world_size=4, batch=16))
    for strategy in ("zero-1", "zero-3")
}
shards_expected = expected(shards)
figures.step_times(shards_expected)

# %%
_, shards_found, shards_measured = measured(shards, shards_expected)
sent = {
    name: sum(
        row.measured
        for row in found.rows
        if row.group == "bytes" and row.term not in ("all collectives", "agreement")
    )
    for name, found in shards_found.items()
}
exact = all(not found.disagreeing for found in shards_found.values())
first, third = shards_measured
say(
    f"ZeRO-3 sent {sent['zero-3'] / sent['zero-1']:.3f} times the bytes of ZeRO-1, and its step took "
    f"{third.measured / first.measured:.2f} times as long on {SLOW} links (predicted "
    f"{third.predicted / first.predicted:.2f}). Bytes "
    f"{'are exactly as predicted' if exact else 'differ from the prediction'}."
)
figures.step_times(shards_measured)

# %% [markdown]
# ## Compression pays off on slow links
#
# Compressed gradients travel faster, but compressing them takes time. On a fast link there is little to save.

# %%
packed = {
    f"{compression}, {bandwidth}": on(
        ss.Job(**USUAL, strategy="ring", world_size=2, batch=8, compression=compression), bandwidth
    )
    for bandwidth in ("50 Mbit/s", "2 Gbit/s")
    for compression in ("none", "int8")
}
packed_expected = expected(packed)
figures.step_times(packed_expected)

# %%
_, _, packed_measured = measured(packed, packed_expected)
by_name = {row.label: row for row in packed_measured}


def saved(bandwidth, column):
    """Share of the step that compression saves; negative if it costs time."""
    plain, small = (getattr(by_name[f"{name}, {bandwidth}"], column) for name in ("none", "int8"))
    return 1 - small / plain


gains = {bandwidth: saved(bandwidth, "measured") for bandwidth in ("50 Mbit/s", "2 Gbit/s")}
told = " and ".join(
    f"{gain:+.0%} of the step at {bandwidth} (predicted {saved(bandwidth, 'predicted'):+.0%})"
    for bandwidth, gain in gains.items()
)
say(
    f"INT8 saved {told}. "
    + ("The slower the link, the more it pays." if gains["50 Mbit/s"] > gains["2 Gbit/s"] else "Not so here.")
)
figures.step_times(packed_measured)

# %% [markdown]
# ## Near-linear scaling, and where it ends
#
# With a fixed batch per worker, a ring sends almost the same bytes whatever W, but 2(W-1) messages, each with the
# latency of the link. First the prediction, far beyond what this machine could run.

# %%
scaled, network = on(ss.Job(**USUAL, strategy="ring", world_size=4, batch=64), "1 Gbit/s", "1 ms")
far = ss.extrapolate(scaled, network, workers=(1, 2, 4, 8, 16, 32, 64, 100), kind="weak")
say(figures.caption(figures.scaling, far))
figures.scaling(far)

# %%
near = ss.scaling(scaled, workers=(1, 4), kind="weak", cluster=network)
here = near.efficiencies("measured_s")[-1]
formula = near.efficiencies("predicted_s")[-1]
shares = dict(zip([point.workers for point in far], far.efficiencies("predicted_s"), strict=True))
good = max(workers for workers, share in shares.items() if share is not None and share >= 0.9)
late = ss.Run.attach(near.points[-1].run).summary().late_s_per_step or 0.0
delayed = f" Other work on this machine delayed its steps by {1e3 * late:.0f} ms." if late > 1e-3 else ""
say(
    f"On {near.points[-1].workers} workers, efficiency is {here:.0%} measured and {formula:.0%} predicted.{delayed} "
    f"By the formula, it is 90% or more up to {good} workers, and {shares[max(shares)]:.0%} with {max(shares)}."
)
figures.scaling(near)

# %% [markdown]
# ## Try next
#
# - Give the cluster a slow node (`slowdown={3: 2.0}`) or a slow uplink (`upload={0: "20 Mbit/s"}`), and open its twin.
# - Profile your own training step with `torch.profiler` on each rank, and simulate it on other links with
#   `ss.simulate.kineto`. `run.export("step", format="chakra")` writes a run for other simulators.
# - Plan a layout for a cluster that nobody can rent for an afternoon, with the [planner](09-planner.ipynb).
#
# [← Bring your own](10-bring-your-own.ipynb) · [Index](00-index.ipynb) · [Faults →](12-faults.ipynb)
