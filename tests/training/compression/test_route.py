"""Compiled or plain: how the route is chosen, that runs say it, and that compiling stands in nobody's way."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import shardscope as ss
from conformance.codec import back, needs_numba, packed, random_values
from conformance.ranks import RankPool
from shardscope.errors import SpecError
from shardscope.methods.compressors.qsgd._torch import QsgdCodec, round_stochastically
from shardscope.training.compression import ready, route
from shardscope.training.compression.noise import Keys
from shardscope.training.compression.packed import Packed
from shardscope.training.compression.scaled import BlockCodec, inverse_of, peak_scale
from shardscope.training.context import RankContext


def test_the_environment_may_choose_and_is_told_when_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(route.VARIABLE, "torch")
    assert route.choose_route() == "torch"
    monkeypatch.setenv(route.VARIABLE, "fortran")
    with pytest.raises(SpecError, match="'fortran' is not valid; use numba or torch"):
        route.choose_route()
    monkeypatch.setenv(route.VARIABLE, "numba")
    monkeypatch.setattr(route.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match=r"numba is not installed; run pip install numba"):
        route.choose_route()
    monkeypatch.delenv(route.VARIABLE)
    assert route.choose_route() == "torch"


@pytest.mark.slow
@pytest.mark.ranks(4)  # once is enough, with the most ranks
@needs_numba
def test_ranks_may_compile_at_once(pool: RankPool, tmp_path: Path) -> None:
    source = shutil.copy(Path(route.__file__).with_name("loops.py"), tmp_path / "fresh.py")

    def body(context: RankContext) -> list[int]:
        spec = importlib.util.spec_from_file_location("fresh", source)
        fresh = importlib.util.module_from_spec(spec)
        sys.modules["fresh"] = fresh
        spec.loader.exec_module(fresh)
        context.group.barrier().wait()
        words, exponents, signs = np.ones(9, np.int32) << 24, np.zeros(9, np.uint8), np.zeros(2, np.uint8)
        fresh.encode_natural(words, exponents, signs, 8, (np.uint32(1), np.uint32(2)), 0, 2)
        return exponents.tolist()

    assert pool.run(body, tmp_path) == [[2] * 9] * 4
    assert list((tmp_path / "__pycache__").glob("fresh.encode_natural*.nbc"))


@needs_numba
def test_where_nothing_can_be_kept_loops_are_compiled_at_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core import caching

    for locator in caching.CacheImpl._locator_classes:
        monkeypatch.setattr(locator, "from_function", classmethod(lambda cls, *_: None))
    assert route.compiled(lambda x: x + 1)(2) == 3


@needs_numba
def test_numba_is_made_ready_where_it_can_be_and_is_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert (route.choose_route() == "numba") == ready.IS_READY
    with monkeypatch.context() as patch:
        patch.setenv(route.VARIABLE, "torch")
        assert not ready.load()
    with monkeypatch.context() as patch:
        patch.delenv(route.VARIABLE, raising=False)
        assert ready.load()
        patch.setattr(ready.importlib.util, "find_spec", lambda name: True)
        patch.setitem(sys.modules, "numba", None)  # as one that does not go with this NumPy
        assert not ready.load()
        patch.delitem(sys.modules, "numba")
        (tmp_path / "numba").mkdir()
        (tmp_path / "numba" / "__init__.py").write_text(
            "raise SystemError('initialization of _internal failed')"
        )
        patch.syspath_prepend(tmp_path)
        assert not ready.load(), "the server that imports this goes on serving"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_parts_cover_the_whole_once_whatever_the_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route.torch, "get_num_threads", lambda: threads)
    parts: list[tuple[int, int]] = []
    route.share_out(lambda *part: parts.append(part), (), count=1003, at_least=100)
    assert len(parts) == threads
    assert sorted(i for first, stop in parts for i in range(first, stop)) == list(range(1003))
    route.share_out(lambda *part: parts.append(part), (), count=150, at_least=100)
    assert parts[-1] == (0, 150)


def test_a_thread_that_fails_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route.torch, "get_num_threads", lambda: 2)

    def loop(first: int, stop: int) -> None:
        if first:
            raise ValueError("second part")

    with pytest.raises(ValueError, match="second part"):
        route.share_out(loop, (), count=1000, at_least=100)


class Thirds(BlockCodec):
    """Nothing but what a codec must say: -1, 0 or +1 times a block's peak, at random."""

    def __init__(self) -> None:
        super().__init__(2, 16)

    def scale(self, rows: torch.Tensor, scales: torch.Tensor, count: int) -> None:
        peak_scale(rows, scales, 1)

    def quantize(self, rows: torch.Tensor, scales: torch.Tensor, keys: Keys, start: int) -> torch.Tensor:
        return round_stochastically(rows.mul(inverse_of(scales)), 1, keys, start)

    def dequantize(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.float().sub_(1.0)


class HalfCompiled(QsgdCodec):
    """Unpacks in plain torch."""

    unpack_compiled = BlockCodec.unpack_compiled


@needs_numba
@pytest.mark.parametrize("count", [0, 1, 17, 70_001])
def test_a_codec_without_loops_runs_in_plain_torch_and_says_so(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = random_values(count)
    monkeypatch.setenv(route.VARIABLE, "torch")
    plain = QsgdCodec(2, 16)
    packet = packed(plain, values)
    came = back(plain, packet, count)
    monkeypatch.setenv(route.VARIABLE, "numba")
    for codec, is_compiled in ((Thirds(), False), (HalfCompiled(2, 16), True), (QsgdCodec(2, 16), True)):
        assert codec.is_compiled == is_compiled
        assert Packed("thirds", codec).is_compiled == is_compiled
        assert torch.equal(packed(codec, values), packet)
        assert torch.equal(back(codec, packet, count), came)
        codec.subtract(packet, left := values.clone(), 5)
        assert torch.equal(left, values - came)


@pytest.mark.sampled
@pytest.mark.parametrize("method", ["int8", "topk", "fp16", "none"])
def test_a_run_says_how_its_codecs_ran(method: str) -> None:
    job = ss.Job(
        model="mlp", data="digits", batch=24, compression=method, strategy="ring", world_size=2, steps=2
    )
    run = ss.launch(job).wait(60)
    expected = {"fp16": "torch", "none": None}.get(method, route.choose_route())
    assert {event["codecs"] for event in run.events("start")} == {expected}
