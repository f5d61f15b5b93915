"""Run directories as they may come from outside: whole ones that no process made, and seeded damage to them."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.runs import small_job
from shardscope.runlog.writer import encode
from shardscope.runtime.record.processes import process_started
from shardscope.runtime.record.rundir import RunDir
from widgets.fake_runs import memory_events, start_event, step_events

TERABYTE = 2**40
NAMES = (
    "<img src=x onerror=alert(1)>", "two\nlines", "-rf", "a b", "\udcff", "x" * 255, "..hidden", "$(touch x)", "%s{0}",
    "\x1b[31mred", "\u202egnp",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**18, 10**400, 1e308, -0.5, "", "x", "<script>alert(1)</script>", "a\nb", "\ud800", "\x1b[2J",
    "nan", "../../../etc/passwd", "x" * 100_000, [], {}, [[]], {"": {}}, [None] * 3,
)  # fmt: skip
TEXTS = (
    "NaN",
    "Infinity",
    "1e999",
    "[" * 100_000,
    "9" * 10_000,
    "{",
    '"',
    "\ufeff{}",
    "null",
    "[]",
    "{}",
    "0",
)


def recorded_run(root: Path, name: str = "good", **changes: Any) -> Path:
    """A completed run of two ranks and five steps, and everything that one leaves behind."""
    run = RunDir.create(small_job(steps=5, name=name, **changes), root)
    run.write_status("completed", pid=os.getpid(), process_started=process_started())
    world_size = 2
    told = [start_event("ring", world_size, rank) for rank in range(world_size)]
    told += [event for step in range(1, 6) for event in step_events("ring", world_size, step)]
    told += memory_events(world_size, step=3)
    for rank in range(world_size):
        own = [event for event in told if event["rank"] == rank]
        own.append(
            {"event": "eval", "t": own[-1]["t"], "rank": rank, "step": 5, "loss": 1.0, "accuracy": 0.5}
        )
        own.append({"event": "end", "t": own[-1]["t"], "rank": rank, "state": "completed", "steps": 5})
        run.rank_file(rank).write_bytes(b"".join(map(encode, own)))
    (run.path / "logs" / "agent.log").write_text("said\n")
    return run.path


class Bomb:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.mark,)


def plant_code(path: Path, mark: Path) -> None:
    """Put code that leaves a mark wherever a reader might load or import it from."""
    bomb = pickle.dumps({"model": Bomb(mark), "data": Bomb(mark)})
    for name in (
        "user_code.pkl",
        "parameters.npz",
        "summary.pkl",
        "checkpoints/step-5/.metadata",
        "checkpoints/step-5/__0_0.distcp",
    ):
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(bomb)
    for name in ("sitecustomize", "usercustomize", "json", "torch", "queue", "pandas"):
        (path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\n")


def damage(path: Path, dice: random.Random, outside: Path) -> str:
    """Do one seeded thing to a run directory; says what. `outside` is a folder that nothing may write to."""
    kind = dice.choice(
        [_damage_bytes, _damage_json, _damage_json, _damage_lines, _damage_lines, _replace, _replace, _rename]
    )
    return kind(path, dice, outside)


def _file(path: Path, dice: random.Random) -> Path:
    return path / dice.choice(["job.json", "status.json", "rank-0.jsonl", "rank-1.jsonl", "logs/agent.log"])


def _damage_bytes(path: Path, dice: random.Random, _outside: Path) -> str:
    file = _file(path, dice)
    content = bytearray(file.read_bytes())
    how = dice.choice(["truncated", "flipped", "random", "empty", "sparse", "doubled"])
    if how == "truncated":
        content = content[: dice.randrange(len(content))]
    elif how == "flipped":
        for _ in range(dice.randint(1, 50)):
            content[dice.randrange(len(content))] = dice.randrange(256)
    elif how == "random":
        content = bytearray(dice.randbytes(dice.choice([10, 10_000])))
    elif how == "doubled":
        content = content + content
    file.write_bytes(b"" if how in ("empty", "sparse") else content)
    if how == "sparse":
        os.truncate(file, TERABYTE)
    return f"{file.name} {how}"


def _damage_json(path: Path, dice: random.Random, _outside: Path) -> str:
    file = path / dice.choice(["job.json", "job.json", "status.json"])
    if dice.random() < 0.2:
        text = dice.choice(TEXTS)
        file.write_text(text)
        return f"{file.name} is {text[:20]!r}"
    value = json.loads(file.read_text())
    told = _mutate(value, dice)
    file.write_text(json.dumps(value))
    return f"{file.name}: {told}"


def _damage_lines(path: Path, dice: random.Random, _outside: Path) -> str:
    """Change events of one log: one of them, or one field of all of a kind."""
    file = path / dice.choice(["rank-0.jsonl", "rank-1.jsonl"])
    lines = file.read_text().splitlines()
    if dice.random() < 0.2:
        place, text = dice.randrange(len(lines)), dice.choice(TEXTS)
        lines[place] = text
        file.write_text("\n".join(lines) + "\n")
        return f"{file.name} line {place} is {text[:20]!r}"
    kind = json.loads(dice.choice(lines))["event"]
    seed, told = dice.random(), ""
    for place, line in enumerate(lines):
        event = json.loads(line)
        if event["event"] == kind:
            told = _mutate(event, random.Random(seed))
            lines[place] = json.dumps(event)
    file.write_text("\n".join(lines) + "\n")
    return f"{file.name}: every {kind}: {told}"


def _mutate(value: Any, dice: random.Random) -> str:
    """Change something somewhere in a JSON value, in place."""
    where = value
    while True:
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        key = dice.choice(keys)
        if not (isinstance(where[key], dict | list) and where[key] and dice.random() < 0.7):
            break
        where = where[key]
    how = dice.random()
    if how < 0.2:
        del where[key]
        return f"without {key}"
    if how < 0.3 and isinstance(where, dict):
        where["of another version"] = dice.choice(VALUES)
        return "another field"
    where[key] = dice.choice(VALUES)
    return f"{key}={str(where[key])[:30].encode('ascii', 'backslashreplace').decode()}"


def _replace(path: Path, dice: random.Random, outside: Path) -> str:
    """Put something else in the place of a file or folder."""
    target = path / dice.choice(
        ["job.json", "status.json", "rank-0.jsonl", "rank-1.jsonl", "control", "logs", "checkpoints"]
    )
    how = dice.choice(
        ["gone", "folder", "pipe", "socket", "loop", "dangling", "passwd", "outside", "zero", "many"]
    )
    if how == "many":  # logs of ranks that there cannot be
        for rank in dice.sample(range(20_000), 20):
            (path / f"rank-{rank}.jsonl").write_text("{}\n")
        (path / "rank-x.jsonl").touch()
        return "logs of many ranks"
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    links = {
        "loop": target,
        "dangling": path / "nowhere",
        "passwd": Path("/etc/passwd"),
        "outside": outside,
        "zero": Path("/dev/zero"),
    }
    if how == "folder":
        target.mkdir()
        (target / "inside").mkdir()
    elif how == "pipe":
        os.mkfifo(target)
    elif how == "socket":
        _bind(target)
    elif how in links:
        target.symlink_to(links[how])
    return f"{target.name} is {how}"


def _bind(target: Path) -> None:
    """A socket; bound by a relative name, since addresses are short."""
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(target.parent)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(target.name)
    finally:
        os.fchdir(here)
        os.close(here)


def _rename(path: Path, dice: random.Random, _outside: Path) -> str:
    name = dice.choice(NAMES)
    path.rename(path.with_name(name))
    return f"named {ascii(name)[:40]}"
