"""Resources that this process may use on the machine: cores, memory, disk, devices. Read-only; imports no torch.

`os.cpu_count()` and total memory describe the hardware. In a container or on Binder the process may use less, and a
run planned for more is slow or is killed. Every number here is therefore the smaller of the hardware's capacity and the
container's limit.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (measured, never written)
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def usable_cores() -> float:
    """Return the number of cores that this process may use: the smaller of its affinity mask and its cgroup's quota."""
    return min(float(_affinity()), cgroup_cores())


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def running_processes() -> int | None:
    """Return the number of other threads that are now running or waiting for a core; None if the system does not report
    it.

    In a container, the threads of the whole host are counted. A reported 0 is ignored: some sandboxes report it,
    although the calling thread is running.
    """
    counts = (line.split()[1] for line in _lines(Path("/proc/stat")) if line.startswith("procs_running "))
    running = next(counts, None)
    return None if running is None or int(running) < 1 else int(running) - 1


def cpu_model() -> str:
    """Return the model of the processor, or its architecture if the system does not report the model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def usable_memory_bytes() -> int:
    """Return the bytes of memory that this process may use: the smaller of total memory and its cgroup's limit."""
    return int(min(float(psutil.virtual_memory().total), cgroup_memory_bytes()))


def cgroup_cores(root: Path = CGROUP_ROOT) -> float:
    """Return the CPU quota of the control group (cgroup v1 or v2), in cores; infinity if there is none."""
    quotas = [_quota_v2(_words(folder / "cpu.max")) for folder in _cgroup_folders(root)]
    return min([*quotas, _quota_v1(root)])


def cgroup_memory_bytes(root: Path = CGROUP_ROOT) -> float:
    """Return the memory limit of the control group (cgroup v1 or v2), in bytes; infinity if there is none."""
    limits = [_words(folder / "memory.max") for folder in _cgroup_folders(root)]
    limits.append(_words(root / "memory" / "memory.limit_in_bytes"))
    numbers = [float(limit[0]) for limit in limits if limit and limit[0].isdigit()]
    return min(numbers, default=math.inf)


def shared_memory_bytes() -> int | None:
    """Return the size of the shared-memory file system, in bytes; None if the machine has none, as on macOS."""
    return shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None


def free_disk_bytes(path: Path) -> int:
    """Return the free bytes on the file system of `path`, which need not exist yet."""
    existing = next(folder for folder in [path.absolute(), *path.absolute().parents] if folder.is_dir())
    return shutil.disk_usage(existing).free


def loopback_works() -> bool:
    """Return whether this machine can open a TCP connection to itself over the loopback interface."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), 2),
        ):
            return True
    except OSError:
        return False


def namespaces_work() -> bool:
    """Return whether an unprivileged process may create its own network and mount namespaces (Linux only)."""
    return sys.platform == "linux" and _succeeds(["unshare", "-Urnm", "true"])


FUTEX_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
"""Linux system-call number of `futex`, by processor architecture."""


def can_share_memory() -> bool:
    """Return whether this machine has the Linux futexes that ranks need to communicate through shared memory."""
    return sys.platform == "linux" and platform.machine() in FUTEX_CALLS and sys.maxsize > 1 << 32


class Place(NamedTuple):
    """Resources that the ranks of a job share on a machine."""

    cores: float
    """Number of cores that they may use."""
    shares_memory: bool
    """Whether they can send messages through shared memory."""

    @classmethod
    def here(cls) -> Place:
        """Return the resources of this process."""
        return cls(usable_cores(), can_share_memory())


def num_gpus() -> int:
    """Return the number of GPUs that CUDA programs may use. Asks NVIDIA's management library and imports no torch.

    Torch may find fewer: it finds none if it was built for CPUs only.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if library.nvmlInit_v2() != 0:
        return 0
    count = ctypes.c_uint()
    failed = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    library.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if failed or visible is None:
        return 0 if failed else count.value
    # CUDA ignores the first invalid index and all after it
    return min(
        count.value, len([*takewhile(lambda index: index.strip() not in ("", "-1"), visible.split(","))])
    )


def chromium_path() -> str | None:
    """Return the path of the system's Chromium, under any name that distributions use; None if not installed."""
    return next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


def probe_torch(timeout_s: float = 120.0) -> dict[str, Any]:
    """Find out in a separate process what torch supports on this machine: version, gloo, NCCL version, GPUs.

    The caller therefore never loads torch (200 MB), never opens a CUDA context, and survives a crash of torch.

    Returns:
        ``version``, ``gloo`` (whether a process group could be created), ``nccl`` (version or None), ``gpus`` (name and
        memory_bytes of each), ``codecs`` (implementation of the compression codecs: ``numba`` or ``torch``, or the
        error message if the requested one is unavailable), ``uncomputable`` (the kinds of layers that torch cannot
        compute on this processor in each mixed precision), ``no_shm`` (why CPU ranks cannot share memory; empty if they
        can) and ``messages`` (the speed of each transport between real ranks, as dictionaries of `TransportSpeed`, or
        the error message of a rank; empty if the system is not Linux). If the probe fails, only ``error``: the last
        line of its error output.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch took more than {timeout_s:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"the torch process exited with status {done.returncode}"}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


_TORCH_PROBE = """
import json, os, sys
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
import torch
import torch.distributed as dist

def gloo():
    if not (dist.is_available() and dist.is_gloo_available()):
        return False
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    except RuntimeError:  # no such interface, no address, no socket
        return False
    return True

def nccl():
    if not (dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))

def gpus():
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in found]

def codecs():
    from shardscope.training.compression.route import choose_route
    try:
        return choose_route()
    except ValueError as error:
        return str(error)

def uncomputable():
    from shardscope.training.computable import uncomputable_kinds
    return {"bf16-mixed": uncomputable_kinds(torch.bfloat16), "fp16-mixed": uncomputable_kinds(torch.float16)}

def triton():
    if not torch.cuda.is_available():
        return None
    from shardscope.training.optim.route import why_not_triton
    return why_not_triton() or ""

def transport():
    from shardscope.training.transports.choice import why_not_shm
    return why_not_shm()

def messages():
    if sys.platform != "linux":
        return []
    from shardscope.runtime.tools.transport_speed import measure, world_sizes
    try:
        return [speed._asdict() for size in world_sizes() for speed in measure(size)]
    except (RuntimeError, OSError) as error:
        return str(error).splitlines()[0]

speeds = messages()  # first: its ranks are forks, so no thread may be running yet
found = {"version": torch.__version__, "gloo": gloo(), "nccl": nccl(), "gpus": gpus(), "codecs": codecs(),
         "uncomputable": uncomputable(), "no_triton": triton(), "no_shm": transport(), "messages": speeds}
print(json.dumps(found))
"""


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup v2 and of all its ancestors, each of which may set a limit."""
    lines = _lines(Path("/proc/self/cgroup"))
    relative = next((line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")), "")
    folder = root / relative
    while folder != root and root in folder.parents:
        yield folder
        folder = folder.parent
    yield root


def _quota_v2(words: list[str]) -> float:
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else math.inf


def _quota_v1(root: Path) -> float:
    quota, period = (_words(root / "cpu" / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return int(quota[0]) / int(period[0]) if quota and period and quota[0].isdigit() else math.inf


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=5, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
