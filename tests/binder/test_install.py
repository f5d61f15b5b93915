"""The set-up that `make` runs: quiet where nothing is wrong, and pip's own words where something is."""

from __future__ import annotations

import importlib.util
import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "binder" / "install.py"


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pip_that(install: ModuleType, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(install, "_PIP", [sys.executable, "-c", code])
    monkeypatch.setattr(install, "compile_all", lambda *folders: None)


def test_an_index_that_does_not_answer_is_found_out_quietly(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/whl"
        listed = tmp_path / "torch.txt"
        listed.write_text(f"--extra-index-url {address}\ntorch==2.13.0\n")
        monkeypatch.setattr(install, "TORCH_CPU", listed)
        assert not install.index_answers("torch==2.13.0", timeout_s=0.2)
    assert not install.index_answers("torch==2.13.0", timeout_s=0.2)
    assert capsys.readouterr() == ("", "")


def test_without_the_index_the_default_build_is_installed_and_no_error_is_printed(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip_that(
        install, monkeypatch, "import sys; print('WARNING: Retrying'); sys.exit('torch==' not in sys.argv[2])"
    )
    monkeypatch.setattr(install.sys, "platform", "linux")
    monkeypatch.setattr(install, "_has_nvidia", lambda: False)
    monkeypatch.setattr(install, "index_answers", lambda pin: False)
    assert install.main("torch") == 0
    said = capsys.readouterr()
    assert "out of reach, so the default build of torch is used" in said.out
    assert "Retrying" not in said.out + said.err


def test_a_failure_prints_what_pip_said_and_its_status(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pip_that(install, monkeypatch, "import sys; print('ERROR: no space left'); sys.exit(3)")
    assert install.main("package") == 3
    said = capfd.readouterr()
    assert "failed after" in said.out
    assert "ERROR: no space left" in said.err


def test_progress_says_what_pip_is_doing(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "_QUIET_S", 0.0)
    progress = install.Progress("Installing torch")
    progress.show("Collecting jupyterlab<5,>=4.4 (from shardscope==0.1.0)\n")
    progress.show("  Downloading https://host/a/jupyterlab-4.6.6-py3-none-any.whl (12 MB)\n")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Installing torch"
    progress.show("Installing collected packages: a, b\n")
    said += capsys.readouterr().out.splitlines()
    assert [line.split(", ")[1] for line in said[1:]] == [
        "collecting jupyterlab",
        "downloading jupyterlab",
        "installing",
    ]


def test_what_can_be_compiled_is_compiled_quietly(
    install: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "old.py").write_text("print 1\n")
    install.compile_all(str(tmp_path))
    assert [path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")] == ["good"]
    assert capfd.readouterr() == ("", "")
