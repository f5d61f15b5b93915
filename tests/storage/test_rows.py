"""Tests of the numbers of rows that are known before a job starts, and of jobs whose batch is larger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardscope as ss
from shardscope.cli import main
from shardscope.runtime.launcher.preflight import preflight
from shardscope.spec.data import DATA
from shardscope.spec.models import GPTConfig, model_config
from shardscope.storage.rows import training_rows
from shardscope.training.data import load_data

GPT = model_config("gpt-nano")
assert isinstance(GPT, GPTConfig)


def tokens(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.uint16) % 200


def rows(count: int) -> dict[str, np.ndarray[Any, Any]]:
    source = np.random.default_rng(0)
    return {"x": source.normal(size=(count, 1, 8, 8)).astype("f4"), "y": np.arange(count) % 10}


def made(folder: Path, kind: str, count: int = 1000) -> Any:
    """Return data of a kind, with about `count` rows."""
    match kind:
        case "digits" | "python-source":
            return kind
        case "npz":
            np.savez(folder / "a.npz", **rows(count))
        case "packed npz":
            np.savez_compressed(folder / "a.npz", **rows(count))
        case "npz with test rows":
            x_test, y_test = rows(7).values()
            np.savez(folder / "a.npz", **rows(count), x_test=x_test, y_test=y_test)
        case "npy":
            np.save(folder / "a.npy", tokens(count * GPT.seq))
        case "bin":
            tokens(count * GPT.seq).tofile(folder / "a.bin")
        case "text":
            (folder / "a.txt").write_text("hello " * (count * GPT.seq // 6))
        case "shards" | "shards of tokens" | "many shards":
            held = tokens(count * GPT.seq) if kind == "shards of tokens" else tuple(rows(count).values())
            size = sum(part.nbytes for part in (held if isinstance(held, tuple) else (held,)))
            ss.write_shards(folder / "shards", held, shard_size=size / (3 if kind == "shards" else 12))
            return str(folder / "shards")
    return str(next(folder.glob("a.*")))


KINDS = {
    "digits": "mlp", "npz": "mlp", "packed npz": "mlp", "npz with test rows": "mlp", "shards": "mlp",
    "many shards": "mlp", "npy": "gpt-nano", "bin": "gpt-nano", "text": "gpt-nano", "python-source": "gpt-nano",
    "shards of tokens": "gpt-nano",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "model"), KINDS.items())
@pytest.mark.parametrize("count", [1000, 23])
def test_the_number_of_training_rows_is_known_before_data_are_opened(
    kind: str, model: str, count: int, tmp_path: Path
) -> None:
    data = made(tmp_path, kind, count)
    job = ss.Job(model=model, data=data)
    assert training_rows(job) == len(load_data(data, seq=GPT.seq).train)


@pytest.mark.parametrize("count", [2, 3, 9, 10, 11, 19])
def test_of_few_rows_the_last_is_held_out(count: int, tmp_path: Path) -> None:
    data = made(tmp_path, "npz", count)
    assert training_rows(ss.Job(model="mlp", data=data)) == len(load_data(data).train)


def test_a_data_set_states_the_rows_that_it_has() -> None:
    found = load_data("digits")
    assert found.validation is not None
    assert sum(map(len, (found.train, found.validation, found.test))) == DATA["digits"].num_rows
    assert len(found.train) == DATA["digits"].num_training_rows


@pytest.mark.parametrize("kind", ["npz", "npy", "text", "shards"])
def test_what_cannot_be_known_is_left_to_the_ranks(kind: str, tmp_path: Path) -> None:
    data = made(tmp_path, kind)
    path = Path(data) if kind != "shards" else next(Path(data).glob("*.npy"))
    path.write_bytes(b"")
    counted = training_rows(ss.Job(model=KINDS[kind], data=data))
    assert counted in (None, 0)
    assert training_rows(ss.Job(model="mlp", data=str(tmp_path / "none.npz"))) is None
    assert training_rows(ss.Job(model="mlp", data=lambda: None)) is None


@pytest.mark.parametrize("kind", ["digits", "npz", "shards", "text"])
def test_a_batch_larger_than_the_data_is_refused_before_anything_starts(kind: str, tmp_path: Path) -> None:
    data = made(tmp_path, kind, 100)
    known = training_rows(ss.Job(model=KINDS[kind], data=data))
    assert known is not None
    allowed, job = (ss.Job(model=KINDS[kind], data=data, batch=size, world_size=1, strategy="single", steps=2)
                    for size in (known, known + 1))  # fmt: skip
    sentence = (
        f"global_batch={known + 1} is out of range for data with {known} rows; use a size from 1 to {known}"
    )
    for check in (True, False):
        with pytest.raises(ss.errors.DataError, match=sentence):
            ss.launch(job, root=tmp_path / "runs", preflight=check)
    assert not (tmp_path / "runs").exists()
    assert preflight(job).refusal == sentence
    assert preflight(allowed).refusal is None


def test_the_command_line_refuses_it_in_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--model", "mlp", "--data", "digits", "--batch", "2000", "--root", str(tmp_path / "runs")]
    assert main(["run", *options]) != 0
    assert "global_batch=2000 is out of range for data with 1442 rows" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_study_refuses_a_space_with_such_a_batch(tmp_path: Path) -> None:
    job = ss.Job(model="mlp", data="digits", steps=4)
    for batches in ([64, 2000], (64, 2048, "log2")):
        with pytest.raises(ss.SpecError, match=r"space\['batch'\]: 20.. is not possible: .* with 1442 rows"):
            ss.tune(job, {"batch": batches}, name="large", root=tmp_path)
    with pytest.raises(ss.SpecError, match="with 1442 rows"):
        ss.tune(job.replace(batch=2000), {"optimizer.lr": (0.01, 0.1)}, name="large", root=tmp_path)
    assert not list(tmp_path.rglob("*.db"))


def packed(folder: Path, *, damaged: int = 0, flag: int | None = None, method: int | None = None) -> Path:
    """An ``.npz`` file, with bytes of its first array changed, or with another flag or method in its headers."""
    path = folder / "a.npz"
    np.savez_compressed(path, **rows(100))
    content = bytearray(path.read_bytes())
    for place in range(damaged):
        content[content.index(b"x.npy") + 40 + 5 * place] ^= 255
    for signature, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        start = -1
        while (start := content.find(signature, start + 1)) >= 0:
            content[start + at] |= flag or 0
            content[start + at + 2] = content[start + at + 2] if method is None else method
    path.write_bytes(content)
    return path


def saved(folder: Path, array: Any, *changes: bytes) -> Path:
    """A ``.npy`` file in which the first of two texts is replaced by the second."""
    path = folder / "a.npy"
    np.save(path, array)
    path.write_bytes(path.read_bytes().replace(*changes) if changes else path.read_bytes())
    return path


def text(folder: Path, length: int) -> Path:
    path = folder / "a.txt"
    path.write_text("h" * length)
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: packed(folder, damaged=2), "cannot be read as .npz"),
        (lambda folder: packed(folder, flag=1), "cannot be read as .npz: File 'x.npy' is encrypted"),
        (lambda folder: packed(folder, method=97), "cannot be read as .npz: That compression method is not supported"),
        (lambda folder: saved(folder, np.int64(3)), "1 tokens are too few"),
        (lambda folder: saved(folder, np.zeros((90, 90), "u2")), "give a one-dimensional array of integers"),
        (lambda folder: saved(folder, tokens(900), b"(900,)", b"((((("), "cannot be read as .npy"),
        (lambda folder: saved(folder, tokens(900), b"(900,)", b"(9**9,"), "cannot be read as .npy"),
        (lambda folder: text(folder, 5), "5 tokens are too few"),
        (lambda folder: text(folder, GPT.seq), "too few"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_read_do_not_end_the_launch_but_are_named_by_the_ranks(
    make: Any, why: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    assert training_rows(ss.Job(model="mlp" if path.suffix == ".npz" else "gpt-nano", data=str(path))) is None
    with pytest.raises(ss.errors.DataError, match=r"data='.*'") as refused:
        load_data(str(path), seq=GPT.seq)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
