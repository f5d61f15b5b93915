"""The doctor: reads limits rightly, says what each missing thing costs, and changes nothing."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.processes import marked
from shardscope import machine
from shardscope.calibration.host_calibration import chosen
from shardscope.runtime.tools import doctor
from shardscope.runtime.tools.doctor import DoctorReport, Finding


@pytest.fixture(scope="module")
def report() -> DoctorReport:
    return doctor.doctor()


def finding(name: str, *, ok: bool = True, required: bool = False) -> Finding:
    return Finding(group="G", name=name, ok=ok, text=name, required=required, cost="" if ok else "It costs.")


def test_it_looks_for_all_that_a_run_depends_on(report: DoctorReport) -> None:
    names = {each.name for each in report.findings}
    assert names >= {"python", "torch", "jupyterlab", "ipywidgets", "plotly", "anywidget", "optuna"}
    assert names >= {
        "cores",
        "memory",
        "shared memory",
        "disk",
        "GPUs",
        "NCCL",
        "loopback",
        "gloo",
        "transport",
        "emulated clusters",
        "namespaces",
        "Chromium",
    }


@pytest.mark.skipif(sys.platform != "linux", reason="messages are measured on Linux only")
def test_real_ranks_time_their_messages_over_each_transport(report: DoctorReport) -> None:
    found = {name: report[name] for name in _measured(report)}
    transports = [report["transport"].value, "tcp"]
    assert set(found) == {f"{name}, {size} ranks" for name in transports for size in (2, _most_ranks())}
    for name, each in found.items():
        assert each.value["transport"] == name.partition(",")[0]
        assert math.isfinite(each.value["message_s"]) and each.value["message_s"] > 0
        assert math.isfinite(each.value["bandwidth"]) and each.value["bandwidth"] > 0
        bandwidth, message_s = _assumed(each.value["transport"], each.value["world_size"])
        assert each.value["assumed_bandwidth"] == bandwidth
        assert each.value["assumed_message_s"] == message_s
        assert f"predictions assume {1e3 * message_s:.2g} ms" in each.text


def _measured(report: DoctorReport) -> list[str]:
    return [each.name for each in report.findings if each.group == "Messages between CPU ranks"]


def _assumed(transport: str, ranks: int) -> tuple[float, float]:
    """Bandwidth and time per message that predictions use."""
    host = chosen().calibration
    bandwidth, message_s = (
        host.value(name, ranks=ranks, transport=transport) for name in ("message_bandwidth", "message_s")
    )
    return bandwidth, message_s


def _most_ranks() -> int:
    return int(min(max(machine.usable_cores(), 4), 8))


def test_the_text_says_how_far_measured_messages_are_from_those_of_predictions() -> None:
    bandwidth, message_s = _assumed("tcp", 2)
    fast = {"transport": "tcp", "world_size": 2, "message_s": message_s / 500, "bandwidth": 2 * bandwidth}
    (found,) = doctor._messages([fast])
    assert found.name == "tcp, 2 ranks"
    assert f"{1e3 * message_s:.2g} ms (500 x)" in found.text
    assert "GB/s (0.5 x)" in found.text


@pytest.mark.skipif(sys.platform != "linux", reason="messages are measured on Linux only")
@pytest.mark.slow
def test_ranks_that_cannot_communicate_say_why_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("DOCTOR_TEST", mark)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    (found,) = doctor._messages(machine.probe_torch()["messages"])
    assert "no-such-interface" in found.text
    assert not found.ok
    assert not [*marked("DOCTOR_TEST", mark)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="messages are measured on Linux only")
def test_measuring_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("DOCTOR_TEST", mark)
    assert machine.probe_torch()["messages"]
    assert not [*marked("DOCTOR_TEST", mark)]


def test_it_says_which_constants_predictions_use(report: DoctorReport) -> None:
    assert "not calibrated" in report["calibration"].text


def test_it_asks_for_no_energy_counters_as_no_run_reads_them(report: DoctorReport) -> None:
    assert {each.name for each in report.findings}.isdisjoint({"RAPL", "NVML"})
    assert "energy" not in report.to_text()


def test_without_namespaces_links_are_emulated_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "namespaces_work", lambda: False)
    missing = DoctorReport(tuple(doctor._extras()))["namespaces"]
    assert missing.cost.startswith("Only for developers: ")
    assert "emulate" not in DoctorReport(tuple(doctor._extras())).to_text()
    assert not missing.required


def test_it_says_why_clusters_cannot_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "why_not_emulated", lambda: "it is forbidden here; emulate links instead")
    found = {each.name: each for each in doctor._network({"gloo": True})}["emulated clusters"]
    assert (found.text, found.value, found.mark) == (
        "it is forbidden here; emulate links instead",
        False,
        "–",
    )


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3,4,5", 4)]
)
def test_gpus_are_those_that_cuda_programs_may_use(
    visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def device_count(result: Any) -> int:
        result._obj.value = 4
        return 0

    nvml = SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlShutdown=lambda: 0, nvmlDeviceGetCount_v2=device_count)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: nvml)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.num_gpus() == count
    monkeypatch.setattr(nvml, "nvmlInit_v2", lambda: 9)
    assert machine.num_gpus() == 0


def test_this_machine_can_run_jobs(report: DoctorReport) -> None:
    assert report.ok, report.to_text()
    assert report["gloo"].ok


@pytest.mark.slow
def test_it_says_how_codecs_run(report: DoctorReport, monkeypatch: pytest.MonkeyPatch) -> None:
    assert report["codecs"].value in {"numba", "torch"}
    assert report["codecs"].ok == (report["codecs"].value == "numba")
    monkeypatch.setenv("SHARDSCOPE_CODECS", "fortran")
    assert "use numba or torch" in machine.probe_torch()["codecs"]


@pytest.mark.parametrize("why_not", ["", "Triton is not installed"])
def test_it_says_how_lamb_runs_on_gpus(why_not: str) -> None:
    found = {each.name: each for each in doctor._accelerators({"no_triton": why_not})}["kernels"]
    assert found.ok == (not why_not) and found.value == ("torch" if why_not else "triton")
    assert why_not in found.text
    without = doctor._accelerators({"no_triton": None})
    assert "kernels" not in {each.name for each in without}


def test_whatever_is_missing_says_what_it_costs_and_only_that(report: DoctorReport) -> None:
    for each in report.findings:
        assert each.ok == (not each.cost), each
        assert each.ok or each.cost.endswith("."), each


def test_json_reads_back_as_plain_values(report: DoctorReport) -> None:
    values = json.loads(report.to_json())
    cores = next(each for each in values["findings"] if each["name"] == "cores")
    assert values["ok"] is report.ok
    assert cores["value"] == report["cores"].value > 0


def test_text_columns_are_aligned() -> None:
    text = DoctorReport((finding("a"), finding("a longer name", ok=False))).to_text()
    assert text.splitlines()[:4] == [
        "G",
        "  ✓ a              a",
        "  – a longer name  a longer name",
        "                   It costs.",
    ]


def test_only_a_missing_required_thing_makes_runs_impossible() -> None:
    assert DoctorReport((finding("a", ok=False),)).ok
    broken = DoctorReport((finding("a", ok=False, required=True),))
    assert not broken.ok
    assert "✗ a" in broken.to_text()
    assert "not possible" in broken.to_text()


def test_the_notebook_form_is_escaped() -> None:
    assert "&lt;b&gt;" in DoctorReport((finding("<b>"),))._repr_html_()


def test_a_torch_that_cannot_be_imported_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_TORCH_PROBE", "raise ImportError('libcudart.so.12: cannot open')")
    report = doctor.doctor()
    assert not report.ok
    assert "libcudart.so.12" in report["torch"].text
    assert not report["gloo"].ok


@pytest.mark.slow
def test_a_group_that_cannot_be_formed_is_told_and_any_other_mistake_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    assert machine.probe_torch()["gloo"] is False
    broken = machine._TORCH_PROBE.replace("dist.HashStore()", "dist.no_such_store()")
    monkeypatch.setattr(machine, "_TORCH_PROBE", broken)
    assert "no_such_store" in machine.probe_torch()["error"]


def test_a_torch_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_TORCH_PROBE", "import time; time.sleep(60)")
    assert "more than 1 s" in machine.probe_torch(timeout_s=1.0)["error"]


def test_a_missing_package_names_the_way_to_get_it() -> None:
    missing = doctor._package("no-such-package-here")
    assert not missing.ok
    assert missing.remedy == "pip install no-such-package-here"


def test_few_cores_and_little_memory_are_told() -> None:
    assert "1 of 8 usable" in doctor._cores(1.0, 8).text
    assert not doctor._cores(1.0, 8).ok
    assert doctor._cores(8.0, 8).cost == ""
    assert not doctor._memory(10**9).ok
    assert not doctor._shared_memory(64 * 2**20).ok
    assert doctor._shared_memory(None).ok
    assert not doctor._disk(0).ok


def test_version_two_control_group_limits_are_read(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert machine.cgroup_cores(tmp_path) == 1.5
    assert machine.cgroup_memory_bytes(tmp_path) == 2**30


def test_version_one_control_group_limits_are_read(tmp_path: Path) -> None:
    for name, text in (("cpu/cpu.cfs_quota_us", "50000"), ("cpu/cpu.cfs_period_us", "100000")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("2147483648")
    assert machine.cgroup_cores(tmp_path) == 0.5
    assert machine.cgroup_memory_bytes(tmp_path) == 2**31


@pytest.mark.parametrize("text", ["max 100000", "", "max"])
def test_no_limit_is_infinite(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpu.max").write_text(text)
    (tmp_path / "memory.max").write_text("max")
    assert machine.cgroup_cores(tmp_path) == math.inf
    assert machine.cgroup_memory_bytes(tmp_path) == math.inf


def test_free_disk_of_a_folder_that_does_not_exist_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    assert machine.free_disk_bytes(tmp_path / "a/b/c") > 0


@pytest.mark.slow
def test_asking_loads_no_torch_into_the_caller() -> None:
    code = "import sys, shardscope; shardscope.doctor(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.strip() == "False"
