"""Check the features of this machine, and explain the effect of each missing feature: `shardscope doctor`,
`ss.doctor()`.

`doctor` probes the machine with `shardscope.machine`, evaluates each result, and returns a `DoctorReport` of plain
values. Nothing is changed or downloaded. The report is `ok` unless a feature is missing that every run requires.
"""

from __future__ import annotations

import html
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardscope import machine
from shardscope.runtime.emulated import why_not_emulated
from shardscope.spec import registry
from shardscope.spec.units import gib_text, plural

GIB = 2**30
PACKAGES = ("jupyterlab", "ipywidgets", "plotly", "anywidget", "optuna")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check."""

    group: str
    name: str
    ok: bool
    text: str
    """Human-readable result."""
    value: Any = None
    """Machine-readable result: a number, a version, a list; None if nothing was found."""
    cost: str = ""
    """Consequence if the check fails, in one sentence; empty if it passes."""
    remedy: str = ""
    """How to make the check pass; empty if it passes, or if there is no remedy."""
    required: bool = False
    """Whether every run needs this check to pass."""

    @property
    def mark(self) -> str:
        """Mark of the result: ✓ if the check passes, – if it fails but is optional, ✗ if it fails and is required."""
        return "✓" if self.ok else "✗" if self.required else "–"


@dataclass(frozen=True)
class DoctorReport:
    """All findings, in reading order."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether runs are possible on this machine."""
        return all(finding.ok or not finding.required for finding in self.findings)

    def __getitem__(self, name: str) -> Finding:
        """Return the finding with this name, for example ``report["cores"].value``."""
        return next(finding for finding in self.findings if finding.name == name)

    def to_text(self) -> str:
        """Return the findings as aligned lines, by group; below each failed check, its consequence and remedy."""
        width = max(len(finding.name) for finding in self.findings)
        lines: list[str] = []
        for group in dict.fromkeys(finding.group for finding in self.findings):
            lines += ["", group]
            for finding in (each for each in self.findings if each.group == group):
                lines.append(f"  {finding.mark} {finding.name:<{width}}  {finding.text}")
                lines += [f"    {'':<{width}}  {note}" for note in (finding.cost, finding.remedy) if note]
        return "\n".join([*lines, "", self._verdict()]).lstrip("\n")

    def to_json(self) -> str:
        """Return the findings as indented JSON."""
        return json.dumps({"ok": self.ok, "findings": [asdict(each) for each in self.findings]}, indent=2)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"DoctorReport(ok={self.ok}, {len(self.findings)} findings, {len(self._missing())} missing)"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.to_text())}</pre>"

    def _missing(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.ok]

    def _verdict(self) -> str:
        if not self.ok:
            return "Runs are not possible here until the items marked ✗ are fixed."
        missing = len(self._missing())
        return f"Ready to run; {plural(missing, 'optional item')} missing." if missing else "Ready."


def doctor() -> DoctorReport:
    """Check this machine and return the findings. Takes a few seconds, mostly to import torch in a second process.

    On Linux, that process also measures how fast 2 and 4 to 8 real ranks exchange messages, in about one second.
    """
    torch = machine.probe_torch()
    return DoctorReport(
        (
            *_software(torch),
            *_machine(),
            *_accelerators(torch),
            *_network(torch),
            *_messages(torch.get("messages", [])),
            _calibration(),
            *_extras(),
            *_methods(),
        )
    )


def _judge(
    group: str, name: str, text: str, *, ok: bool, cost: str = "", remedy: str = "", **rest: Any
) -> Finding:
    """Return a finding that includes cost and remedy only if `ok` is false."""
    cost, remedy = ("", "") if ok else (cost, remedy)
    return Finding(group=group, name=name, text=text, ok=ok, cost=cost, remedy=remedy, **rest)


def _software(torch: dict[str, Any]) -> Iterator[Finding]:
    python = platform.python_version()
    yield _judge("Software", "python", python, ok=True, value=python)
    yield _judge(
        "Software",
        "torch",
        torch.get("error") or torch["version"],
        ok="error" not in torch,
        value=torch.get("version"),
        required=True,
        cost="No job can run; only features that do not need torch work.",
        remedy="Reinstall it: pip install 'torch>=2.11,<2.14'",
    )
    yield from map(_package, PACKAGES)
    if "error" not in torch:
        yield _codecs(torch["codecs"])
        yield from (_precision(*each) for each in torch["uncomputable"].items())


def _precision(name: str, uncomputable: list[str]) -> Finding:
    """Return a finding on whether CPU ranks can compute all layers in a mixed precision."""
    return _judge(
        "Software",
        name,
        f"all layers on CPUs, but not {', '.join(uncomputable)}" if uncomputable else "all layers on CPUs",
        ok=not uncomputable,
        value=uncomputable,
        cost="Torch cannot compute them on this processor; a job on CPUs with such a layer is refused.",
        remedy="Use precision fp32 for models with these layers.",
    )


def _codecs(route: str) -> Finding:
    """Return a finding on whether compression uses compiled code."""
    texts = {"numba": f"compiled by numba {_version_of('numba')}", "torch": "plain torch"}
    asked = os.environ.get("SHARDSCOPE_CODECS")
    return _judge(
        "Software",
        "codecs",
        texts.get(route, route),
        ok=route == "numba",
        value=route,
        cost="Compression, LAMB on large shards and large simulations are slower; the results are the same.",
        remedy="Unset SHARDSCOPE_CODECS." if asked else "pip install numba",
    )


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _package(name: str) -> Finding:
    found = _version_of(name)
    if found is None:
        cost, remedy = "The notebooks or their widgets do not work.", f"pip install {name}"
        return _judge("Software", name, "not installed", ok=False, cost=cost, remedy=remedy)
    return _judge("Software", name, found, ok=True, value=found)


def _machine() -> Iterator[Finding]:
    yield _judge("Machine", "system", platform.platform(), ok=True, value=platform.platform())
    yield _cores(machine.usable_cores(), os.cpu_count() or 1)
    yield _memory(machine.usable_memory_bytes())
    yield _shared_memory(machine.shared_memory_bytes())
    yield _disk(machine.free_disk_bytes(Path(os.environ.get("SHARDSCOPE_RUNS", "runs"))))


def _cores(usable: float, present: int) -> Finding:
    return _judge(
        "Machine",
        "cores",
        f"{usable:g} of {present} usable" if usable < present else f"{usable:g}",
        ok=usable >= 4,
        value=usable,
        cost="With more ranks than cores, ranks share cores: a step takes longer than it would on a cluster.",
        remedy="Results are the same; for speed, use no more ranks than cores.",
    )


def _memory(usable: int) -> Finding:
    return _judge(
        "Machine",
        "memory",
        f"{gib_text(usable)} usable",
        ok=usable >= 2 * GIB,
        value=usable,
        cost="The notebook and more than 2 ranks of a small model may not fit in memory.",
        remedy="Stay at 2 ranks and the smallest models.",
    )


def _shared_memory(size: int | None) -> Finding:
    return _judge(
        "Machine",
        "shared memory",
        "not on this system" if size is None else f"{gib_text(size)}",
        ok=size is None or size >= GIB // 2,
        value=size,
        cost="NCCL between the GPUs of this machine may fail to start.",
        remedy="In a container: start it with --shm-size=1g or --ipc=host.",
    )


def _disk(free: int) -> Finding:
    return _judge(
        "Machine",
        "disk",
        f"{gib_text(free)} free for runs",
        ok=free >= GIB,
        value=free,
        cost="Checkpoints of a larger model may not fit, and a run fails if the disk is full.",
        remedy="Free some space, or set SHARDSCOPE_RUNS to a folder on a larger disk.",
    )


def _accelerators(torch: dict[str, Any]) -> Iterator[Finding]:
    gpus, nccl = torch.get("gpus", []), torch.get("nccl")
    named = ", ".join(f"{gpu['name']} ({gib_text(gpu['memory_bytes'])})" for gpu in gpus)
    yield _judge(
        "Accelerators",
        "GPUs",
        named or "none that torch can use",
        ok=bool(gpus),
        value=gpus,
        cost="Ranks run on CPU cores: with the same results, but in reasonable time only for small models.",
        remedy="With an NVIDIA GPU: install its driver and a CUDA build of torch.",
    )
    yield _judge(
        "Accelerators",
        "NCCL",
        nccl or "not in use",
        ok=bool(nccl),
        value=nccl,
        cost="Ranks communicate through gloo, over the CPU.",
        remedy="Install a CUDA build of torch, which includes NCCL." if gpus else "",
    )
    if torch.get("no_triton") is not None:
        yield _kernels(torch["no_triton"])


def _kernels(why_not: str) -> Finding:
    """Return a finding on whether LAMB can run on a GPU in a kernel compiled by Triton."""
    return _judge(
        "Accelerators",
        "kernels",
        why_not or f"compiled by Triton {_version_of('triton')}",
        ok=not why_not,
        value="torch" if why_not else "triton",
        cost="LAMB's steps on a GPU take several times as long; the results are the same.",
        remedy="Unset SHARDSCOPE_CODECS, or install Triton, a C compiler and Python's headers.",
    )


def _network(torch: dict[str, Any]) -> Iterator[Finding]:
    loopback, gloo = machine.loopback_works(), bool(torch.get("gloo"))
    yield _needed("loopback", ok=loopback, remedy="Bring up lo and allow connections to 127.0.0.1.")
    yield _needed("gloo", ok=gloo, remedy="Install a build of torch with torch.distributed and gloo.")
    if "no_shm" in torch:
        yield _transport(torch["no_shm"])
    yield _emulation(why_not_emulated())


def _transport(why_not_shm: str) -> Finding:
    """Return a finding on which transport carries messages between CPU ranks of this machine."""
    return _judge(
        "Network",
        "transport",
        f"TCP: {why_not_shm}" if why_not_shm else "shared memory between CPU ranks, TCP between hosts",
        ok=not why_not_shm,
        value="tcp" if why_not_shm else "shm",
        cost="CPU ranks communicate through gloo's connections, which takes several times as long.",
        remedy="In a container: allow memfd_create, and /proc or Unix sockets between processes.",
    )


def _emulation(why_not: str) -> Finding:
    """Return a finding on whether clusters can be emulated on this machine."""
    return _judge(
        "Network",
        "emulated clusters",
        why_not or "one network namespace per node, with links of limited rate",
        ok=not why_not,
        value=not why_not,
        cost="ss.Cluster.emulated describes a cluster that ss.launch cannot start here; everything else works.",
        remedy="Install iproute2, and allow user namespaces.",
    )


_MESSAGES = "Messages between CPU ranks"
_PREDICTIONS = "Predictions"


def _messages(measured: list[dict[str, Any]] | str) -> Iterator[Finding]:
    """Yield a finding for the speed of each transport, measured with real ranks; if a rank failed, only its error.

    These numbers are only shown. Predictions use the constants of a calibration, which are fitted to steps of whole
    jobs, and whose time per message therefore includes waits for ranks that still compute.
    """
    from shardscope.calibration.host_calibration import chosen

    if isinstance(measured, str):
        cost = "A job with several ranks may end with the same error."
        yield _judge(_MESSAGES, "messages", f"not measured: {measured}", ok=False, cost=cost)
        return
    host = chosen().calibration
    for speed in measured:
        transport, message_s, bandwidth = speed["transport"], speed["message_s"], speed["bandwidth"]
        assumed_bandwidth, assumed_s = (
            host.value(constant, ranks=speed["world_size"], transport=transport)
            for constant in ("message_bandwidth", "message_s")
        )
        text = (
            f"{_short(1e3 * message_s)} ms a message and {_short(bandwidth / 1e9)} GB/s; predictions assume "
            f"{_short(1e3 * assumed_s)} ms ({_short(assumed_s / message_s)} x) and "
            f"{_short(assumed_bandwidth / 1e9)} GB/s ({_short(assumed_bandwidth / bandwidth)} x)"
        )
        assumed = {"assumed_message_s": assumed_s, "assumed_bandwidth": assumed_bandwidth}
        name = f"{transport}, {speed['world_size']} ranks"
        yield _judge(_MESSAGES, name, text, ok=True, value={**speed, **assumed})


def _calibration() -> Finding:
    """Return a finding on the constants that predictions for this machine use."""
    from shardscope.calibration.host_calibration import chosen

    host, is_saved, ignored = chosen()
    if is_saved:
        error = "not known" if host.error is None else f"{host.error:.0%}"
        text = f"{host.label}; median error {error}"
    else:
        text = (
            ignored or "not calibrated: predictions use constants of another machine, scaled by NumPy's speed"
        )
    return _judge(
        _PREDICTIONS, "calibration", text, ok=is_saved, value=host.measured_at if is_saved else None,
        cost="Predicted step times may be off by half.", remedy="Run shardscope calibrate, on a quiet machine.",
    )  # fmt: skip


def _short(figure: float) -> str:
    return f"{figure:.2g}" if figure < 100 else f"{figure:.0f}"


def _needed(name: str, *, ok: bool, remedy: str) -> Finding:
    cost = "Ranks cannot communicate, so no job runs."
    text = "works" if ok else "does not work"
    return _judge("Network", name, text, ok=ok, value=ok, required=True, cost=cost, remedy=remedy)


def _extras() -> Iterator[Finding]:
    namespaces, chromium = machine.namespaces_work(), machine.chromium_path()
    yield _judge(
        "Extras",
        "namespaces",
        "usable without root" if namespaces else "not usable",
        ok=namespaces,
        value=namespaces,
        cost="Only for developers: tests and benchmarks that need a separate network or a small disk are skipped.",
        remedy="On Linux: install util-linux and allow unprivileged user namespaces.",
    )
    yield _judge(
        "Extras",
        "Chromium",
        chromium or "not installed",
        ok=bool(chromium),
        value=chromium,
        cost="Only for developers: the browser tests are skipped.",
        remedy="On Debian: apt-get install chromium",
    )


def _methods() -> Iterator[Finding]:
    """Yield a finding for each method of an installed package that cannot be loaded."""
    for point, why in sorted(registry.broken_plugins().items()):
        yield _judge(
            "Methods from packages",
            point,
            why,
            ok=False,
            cost="Jobs cannot use this method; everything else works.",
            remedy="Fix the package, or uninstall it.",
        )
