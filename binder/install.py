"""Install torch or Shardscope, at the pinned versions, into the environment whose Python runs this file.

`make` calls it as ``install.py torch``, ``install.py package`` or ``install.py dev``. It shows what pip is doing and
for how long. The output of pip itself is printed only if pip fails, so that no warning appears that needs no action.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

BINDER = Path(__file__).parent
TORCH_CPU = BINDER / "torch-cpu.txt"
SOURCES = (BINDER.parent / "toolkit", BINDER.parent / "widgets")
"""Ours, which pip leaves where they are: with `PYTHONDONTWRITEBYTECODE` set, each rank would compile them anew."""
_PIP = [
    sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off", "--no-compile",
]  # fmt: skip
_PROBE_S = 5.0
_QUIET_S = 10.0
"""Seconds between two lines of progress where a line cannot be rewritten."""
_DOING = re.compile(
    r"\s*(Collecting|Downloading|Installing collected packages|Building|Preparing|Using cached)\b\s*([^\s(]*)"
)


def main(what: str) -> int:
    """Install one of ``torch``, ``package`` and ``dev``, and return the exit status."""
    status = _install_torch() if what == "torch" else _install_package(what)
    if status == 0:
        compile_all(sysconfig.get_path("purelib"), *map(str, SOURCES))
    return status


def _install_package(what: str) -> int:
    project = tomllib.loads((BINDER.parent / "pyproject.toml").read_text())
    extras, group, words = {
        "package": (["fast"], [], "Shardscope and its pinned dependencies"),
        "dev": (
            project["project"]["optional-dependencies"],
            project["dependency-groups"]["dev"],
            "the test tools",
        ),
    }[what]
    ours = f"{BINDER.parent}[{','.join(extras)}]"
    # `pip install --group` needs pip 25.1, and new environments of Python 3.11 have an older one
    return _install(words, ["-c", str(BINDER / "constraints.txt"), "-e", ours, *group])


def _install_torch() -> int:
    """Install torch alone, so that later installs find it in place and look up nothing on PyTorch's own index."""
    (pin,) = re.findall(r"^torch==\S+$", TORCH_CPU.read_text(), re.MULTILINE)
    if sys.platform != "linux" or _has_nvidia():
        return _install("torch", [pin])
    if index_answers(pin):
        return _install("torch (CPU build)", ["--no-deps", "--retries", "1", "-r", str(TORCH_CPU)])
    print(
        "PyTorch's own index is out of reach, so the default build of torch is used: larger, but it works the same."
    )
    return _install("torch (default build)", ["--no-deps", pin])


def compile_all(*folders: str) -> None:
    """Compile the packages in these folders to bytecode on all cores, where pip would use one.

    Packages may contain files that this version of Python cannot compile, which pip does not report either.
    """
    command = [sys.executable, "-m", "compileall", "-qq", "-j", "0", *folders]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def index_answers(pin: str, timeout_s: float = _PROBE_S) -> bool:
    """Return whether PyTorch's CPU index answers within a few seconds."""
    (index,) = re.findall(r"^--extra-index-url (\S+)$", TORCH_CPU.read_text(), re.MULTILINE)
    page = f"{index.rstrip('/')}/{pin.partition('==')[0]}/"
    try:
        with urllib.request.urlopen(page, timeout=timeout_s) as answer:  # noqa: S310 - the address is in our file
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def _has_nvidia() -> bool:
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0  # noqa: S607
    except OSError:
        return False


def _install(words: str, arguments: list[str]) -> int:
    """Run pip, and show its progress; print its output only if it fails."""
    process = subprocess.Popen(
        [*_PIP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    output, progress = [], Progress(f"Installing {words}")
    try:
        while (line := _next(lines)) is not None:
            output.append(line)
            progress.show(line)
    except KeyboardInterrupt:
        process.terminate()
        print("\nStopped; `make` continues from here.")
        return 130
    status = process.wait()
    progress.end(is_done=status == 0)
    if status:
        print("".join(output), file=sys.stderr)
    return status


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    for line in process.stdout or ():
        lines.put(line)
    lines.put(None)


def _next(lines: queue.Queue[str | None]) -> str | None:
    """Return the next line of output, an empty text if there is none within a second, and None at the end."""
    try:
        return lines.get(timeout=1.0)
    except queue.Empty:
        return ""


class Progress:
    """One line that says what is installed, for how long, and what pip is doing: rewritten on a terminal."""

    def __init__(self, title: str) -> None:
        self._title, self._doing = title, ""
        self._started = self._shown = time.monotonic()
        self._rewrites = sys.stdout.isatty()
        print(self._title, end="" if self._rewrites else "\n", flush=True)

    def show(self, line: str) -> None:
        """Take a line of pip's output, or an empty text, and update the progress."""
        found = _DOING.match(line)
        if found:
            package = re.split(r"[<>=!~;\[:]|-\d", found[2].rpartition("/")[2])[0]
            self._doing = f"{found[1].split()[0].lower()} {package}".strip()
        now = time.monotonic()
        if now - self._shown < (0.2 if self._rewrites else _QUIET_S):
            return
        self._shown = now
        text = f"{now - self._started:.0f} s{f', {self._doing}' if self._doing else ''}"
        print(
            f"\r\x1b[K{self._title}: {text}" if self._rewrites else f"  {text}",
            end="" if self._rewrites else "\n",
        )
        sys.stdout.flush()

    def end(self, *, is_done: bool) -> None:
        """Print the final line."""
        took = f"{time.monotonic() - self._started:.0f} s"
        text = f"{self._title}: {'done' if is_done else 'failed'} after {took}"
        print(
            f"\r\x1b[K{text}" if self._rewrites else f"  {'done' if is_done else 'failed'} after {took}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
