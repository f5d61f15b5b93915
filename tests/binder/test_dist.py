"""Archives of a release are refused if a file of the repository is missing, or if their version is not the tag's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dist", ROOT / ".ci/dist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a git checkout")
    return listed.stdout.splitlines()


def place_in_wheel(path: str) -> str | None:
    if path.startswith("notebooks/") and path.endswith(".ipynb"):
        return f"shardscope_widgets/{path}"
    ours = path.startswith(("toolkit/", "widgets/shardscope_widgets/"))
    return path.partition("/")[2] if ours else None


def write_archives(folder: Path, tracked: list[str], *, version: str = "0.1.0") -> tuple[Path, Path]:
    """Write archives with the names of the files, which are empty."""
    wheel, sdist = (
        folder / f"shardscope-{version}-py3-none-any.whl",
        folder / f"shardscope-{version}.tar.gz",
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in filter(None, map(place_in_wheel, tracked)):
            archive.writestr(path, "")
    with tarfile.open(sdist, "w:gz") as archive:
        for path in tracked:
            archive.addfile(tarfile.TarInfo(f"shardscope-{version}/{path}"))
    return wheel, sdist


def test_archives_with_all_files_are_accepted_and_their_version_is_read(
    dist: ModuleType, tracked: list[str], tmp_path: Path
) -> None:
    assert dist.check_contents(*write_archives(tmp_path, tracked, version="1.2.3")) == "1.2.3"


@pytest.mark.parametrize("lost", ["toolkit/shardscope/py.typed", "notebooks/01-tour.ipynb"])
def test_a_missing_file_is_named(dist: ModuleType, tracked: list[str], tmp_path: Path, lost: str) -> None:
    wheel, sdist = write_archives(tmp_path, [path for path in tracked if path != lost])
    with pytest.raises(SystemExit, match=f"the sdist lacks {lost}"):
        dist.check_contents(wheel, sdist)
    (tmp_path / "whole").mkdir()
    _, whole = write_archives(tmp_path / "whole", tracked)
    with pytest.raises(SystemExit, match="the wheel lacks .*" + Path(lost).name):
        dist.check_contents(wheel, whole)


def test_a_tag_of_another_version_ends_the_release(
    dist: ModuleType, tracked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archives(tmp_path, tracked)
    monkeypatch.setattr(dist, "DIST", tmp_path)
    monkeypatch.setattr(sys, "argv", ["dist.py", "--keep", "--build-only", "--tag", "v0.2.0"])
    with pytest.raises(SystemExit, match="the tag is v0.2.0, but _version.py has 0.1.0"):
        dist.main()
    monkeypatch.setattr(sys, "argv", ["dist.py", "--keep", "--build-only", "--tag", "v0.1.0"])
    assert dist.main() == 0
