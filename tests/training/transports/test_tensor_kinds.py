"""Every kind of tensor through every call of `torch.distributed`: the right values, or a sentence; never a signal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from conformance.ranks import RankPool, RankPools, over_both
from shardscope.errors import ShardscopeError
from shardscope.training.context import RankContext

pytest_generate_tests = over_both
SIZE = 12  # divisible by 2, 3 and 4 ranks


class Wrapper(torch.Tensor):
    """A tensor without storage of its own around another."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return function(*(getattr(arg, "inner", arg) for arg in args), **(kwargs or {}))


class Subclass(torch.Tensor):
    """A subclass with storage, as tensors of many libraries are."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            return function(*args, **(kwargs or {}))


def sharded(plain: Tensor) -> Tensor:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    return DTensor.from_local(plain, mesh, [Shard(0)])


def every_second(plain: Tensor) -> Tensor:
    return torch.stack([plain, plain + plain.new_ones(())], dim=-1)[..., 0]


def a_column_at_an_offset(plain: Tensor) -> Tensor:
    return torch.cat([plain.new_ones(1, 3), plain[:, None].expand(-1, 3)])[1:, 1]


def freed(plain: Tensor) -> Tensor:
    plain.untyped_storage().resize_(0)
    return plain


def cut(plain: Tensor) -> Tensor:
    plain.untyped_storage().resize_(plain.nbytes // 2)
    return plain


def fake(plain: Tensor) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        return mode.from_tensor(plain)


def functional(plain: Tensor) -> Tensor:
    return torch._to_functional_tensor(plain)


def python_functional(plain: Tensor) -> Tensor:
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(plain)


def batched(plain: Tensor) -> Tensor:
    """What a function sees within `torch.vmap`, and may keep."""
    seen: list[Tensor] = []
    torch.vmap(lambda each: (seen.append(each), each)[1])(plain[None])
    return seen[0]


def masked(plain: Tensor) -> Tensor:
    return torch.masked.masked_tensor(plain, plain > 0)


def with_grad(plain: Tensor) -> Tensor:
    return plain.requires_grad_() if plain.is_floating_point() or plain.is_complex() else plain


CARRIED: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda plain: plain,
    "of a functional collective": AsyncCollectiveTensor,
    "of a functional collective in a DTensor": lambda plain: sharded(AsyncCollectiveTensor(plain)),
    "DTensor": sharded,
    "parameter": lambda plain: torch.nn.Parameter(plain, requires_grad=plain.is_floating_point()),
    "with gradient": with_grad,
    "subclass with storage": lambda plain: plain.as_subclass(Subclass),
    "resolved conjugate": lambda plain: plain.conj().resolve_conj(),
    "every second": every_second,
    "a column at an offset": a_column_at_an_offset,
    "parameter of every second": lambda plain: torch.nn.Parameter(
        every_second(plain), plain.is_floating_point()
    ),
}
"""Tensors that stand for the values in their memory: each must give what plain tensors give."""
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "wrapper": Wrapper,
    "meta": lambda plain: plain.to("meta"),
    "fake": fake,
    "functional": functional,
    "functional in Python": python_functional,
    "batched": batched,
    "freed": freed,
    "cut": cut,
    "all zeros without memory": lambda plain: torch._efficientzerotensor(plain.shape),
    "masked": masked,
    "CSR": lambda plain: plain[None].to_sparse_csr(),
    "MKL-DNN": lambda plain: plain.to_mkldnn(),
    "quantized": lambda plain: torch.quantize_per_tensor(plain, 0.5, 0, torch.qint8),
    "nested": lambda plain: torch.nested.nested_tensor([plain, plain[:3]]),
    "jagged": lambda plain: torch.nested.nested_tensor([plain, plain[:3]], layout=torch.jagged),
    "conjugate": lambda plain: plain.to(torch.complex64).conj(),
    "negative": lambda plain: torch.complex(plain, plain).conj().imag,
}
"""Tensors whose values no transport can copy."""
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool,
          torch.float8_e4m3fn]  # fmt: skip
Make = Callable[[Tensor], Tensor]


def inner(tensor: Tensor) -> Tensor:
    """The values behind any of the carried kinds."""
    while isinstance(tensor, DTensor | AsyncCollectiveTensor):
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.trigger_wait()
    return tensor.detach().as_subclass(torch.Tensor)


def calls(
    context: RankContext, make: Make, dtype: torch.dtype, size: int
) -> dict[str, Callable[[], list[Tensor]]]:
    """Every call with tensors of one kind; each returns what it has written."""
    rank, world = context.rank, context.world_size

    def own(count: int = size, shift: int = 0) -> Tensor:
        return make(((torch.arange(count) + 3 * rank + shift) % 5).to(dtype))

    def empty(count: int = size) -> Tensor:
        return make(torch.zeros(count).to(dtype))

    def written(call: Callable[..., Any], outputs: Any, *args: Any, **options: Any) -> list[Tensor]:
        call(outputs, *args, **options)
        return outputs if isinstance(outputs, list) else [outputs]

    def in_place(call: Callable[..., Any], *args: Any) -> list[Tensor]:
        return written(call, own(), *args)

    def swapped(send: Any, receive: Any, *source: int) -> list[Tensor]:
        output = empty()
        sent = send(own(), (rank + 1) % world)
        got = receive(output, *source)
        for work in (sent, got):
            if isinstance(work, dist.Work):
                work.wait()
        return [output]

    def batched_messages() -> list[Tensor]:
        output = empty()
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, own(), (rank + 1) % world),
                                        dist.P2POp(dist.irecv, output, (rank - 1) % world)])  # fmt: skip
        for work in works:
            work.wait()
        return [output]

    def waited(call: Callable[..., Any], outputs: Any, *args: Any) -> list[Tensor]:
        call(outputs, *args, async_op=True).wait()
        return outputs if isinstance(outputs, list) else [outputs]

    def gathered() -> list[Tensor]:
        outputs = [empty() for _ in range(world)] if rank == 0 else []
        dist.gather(own(), outputs or None, dst=0)
        return outputs

    def scattered() -> list[Tensor]:
        output = empty()
        dist.scatter(output, [own(shift=each) for each in range(world)] if rank == 0 else None, src=0)
        return [output]

    several = [own(size // world, shift) for shift in range(world)] if size else [own() for _ in range(world)]
    part = size // world
    return {
        "all_reduce": lambda: in_place(dist.all_reduce),
        "all_reduce of the largest": lambda: in_place(dist.all_reduce, dist.ReduceOp.MAX),
        "asynchronous all_reduce": lambda: waited(dist.all_reduce, own()),
        "all_reduce_coalesced": lambda: written(dist.all_reduce_coalesced, [own(), own(shift=1)]),
        "broadcast": lambda: in_place(dist.broadcast, 0),
        "reduce": lambda: in_place(dist.reduce, 0)[: 1 - min(rank, 1)],
        "all_gather": lambda: written(dist.all_gather, [empty() for _ in range(world)], own()),
        "all_gather_into_tensor": lambda: written(dist.all_gather_into_tensor, empty(size * world), own()),
        "asynchronous all_gather": lambda: waited(dist.all_gather_into_tensor, empty(size * world), own()),
        "gather": gathered,
        "scatter": scattered,
        "reduce_scatter": lambda: written(dist.reduce_scatter, empty(part), several),
        "reduce_scatter_tensor": lambda: written(dist.reduce_scatter_tensor, empty(part), own()),
        "all_to_all": lambda: written(dist.all_to_all, [empty(part) for _ in range(world)], several),
        "all_to_all_single": lambda: written(dist.all_to_all_single, empty(), own()),
        "send and recv": lambda: swapped(dist.isend, dist.recv, (rank - 1) % world),
        "irecv": lambda: swapped(dist.isend, dist.irecv, (rank - 1) % world),
        "recv from any rank": lambda: swapped(dist.isend, dist.recv),
        "batched messages": batched_messages,
    }  # fmt: skip


def outcome(call: Callable[[], list[Tensor]]) -> list[list[Any]] | BaseException:
    try:
        return [inner(each).to(torch.complex64).flatten().tolist() for each in call()]
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return error


def outcomes(kind: str, dtype: torch.dtype = torch.float32, size: int = SIZE) -> Callable[[RankContext], Any]:
    """A function for the ranks: what each call gives with tensors of a kind, values or an error."""

    def of(context: RankContext) -> dict[str, list[list[Any]] | str]:
        make = {**CARRIED, **REFUSED}[kind]
        found: dict[str, Any] = {}
        for name, call in calls(context, make, dtype, size).items():
            got = outcome(call)
            found[name] = f"{type(got).__name__}: {got}" if isinstance(got, BaseException) else got
        dist.barrier()
        return found

    return of


@pytest.mark.sampled
@pytest.mark.parametrize("kind", list(CARRIED)[1:])
def test_tensors_with_values_in_memory_give_what_plain_tensors_give(
    pool: RankPool, tmp_path: Path, kind: str
) -> None:
    for got, expected in zip(
        pool.run(outcomes(kind), tmp_path), pool.run(outcomes("plain"), tmp_path), strict=True
    ):
        for call, values in expected.items():
            assert got[call] == values, call


@pytest.mark.sampled
@pytest.mark.parametrize("kind", list(REFUSED))
def test_tensors_without_values_in_memory_are_refused_in_a_sentence(
    pool: RankPool, tmp_path: Path, kind: str
) -> None:
    for found in pool.run(outcomes(kind), tmp_path):
        for call, got in found.items():
            if call in ("gather", "reduce") or got:  # nothing is written on some ranks
                assert isinstance(got, str), call
                assert "\n" not in got, call
                assert "INTERNAL" not in got, call


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_gives_the_same_over_every_transport(
    pools: RankPools, tmp_path: Path, dtype: torch.dtype
) -> None:
    shared, tcp = (pools.over(each).run(outcomes("plain", dtype), tmp_path) for each in ("auto", "tcp"))
    for over_memory, over_tcp in zip(shared, tcp, strict=True):
        for call, got in over_tcp.items():
            assert over_memory[call] == got or isinstance(got, str), call  # gloo refuses some dtypes


def test_tensors_without_elements_pass_through_every_call(pools: RankPools, tmp_path: Path) -> None:
    for found in pools.over("auto").run(outcomes("plain", size=0), tmp_path):
        for call, got in found.items():
            assert got in ([], [[]], [[], []], [[]] * len(got)), call


def test_shared_memory_never_copies_from_address_zero(pool: RankPool, tmp_path: Path, transport: str) -> None:
    """Whoever calls the transport itself, without passing the door of the process group."""
    if transport == "tcp":
        pytest.skip("gloo's own connections")

    def check(context: RankContext) -> None:
        carrier = context.group.transport(torch.device("cpu"))
        for call in (
            lambda: carrier.send([Wrapper(torch.ones(3))], 1 - min(context.rank, 1), 1),
            lambda: carrier.recv([freed(torch.ones(3))], 1 - min(context.rank, 1), 1),
        ):
            with pytest.raises(ValueError, match=r"shape \(3,\) has no memory of its own"):
                call()

    pool.run(check, tmp_path)


def test_what_lies_beside_the_elements_of_a_tensor_is_not_touched(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        whole = torch.full((3, 4), 7.0)
        dist.all_reduce(whole[:, 1], async_op=True).wait()
        work = dist.all_reduce(whole[1:, 2], async_op=True)
        future = work.get_future()
        future.wait()
        expected = torch.full((3, 4), 7.0)
        expected[:, 1] *= context.world_size
        expected[1:, 2] *= context.world_size
        assert torch.equal(whole, expected)

    pool.run(check, tmp_path)


@pytest.mark.parametrize(
    ("size", "stride"), [((4,), (0,)), ((3, 2), (1, 1)), ((2, 3), (0, 1)), ((2, 4), (2, 1))]
)
def test_elements_that_share_memory_are_read_but_not_written(
    pool: RankPool, tmp_path: Path, size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    def check(context: RankContext) -> None:
        base = torch.arange(6.0)
        shared = base.as_strided(size, stride)
        for call in (dist.all_reduce, lambda each: dist.broadcast(each, 0), lambda each: dist.recv(each, 0)):
            with pytest.raises(ShardscopeError, match="some of its elements share memory"):
                call(shared)
        rows = [torch.empty(size) for _ in range(context.world_size)]
        dist.all_gather(rows, shared)
        assert all(torch.equal(row, shared) for row in rows)
        assert torch.equal(base, torch.arange(6.0))

    pool.run(check, tmp_path)


def test_a_sparse_tensor_is_summed_as_the_dense_one(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        rank, world = context.rank, context.world_size
        for shape, count in (((5,), 2), ((7, 3), 4), ((4, 2), 0)):
            places = (torch.arange(count) * 2 + rank) % shape[0]
            values = torch.randn(count, *shape[1:], generator=torch.Generator().manual_seed(rank))
            tensor = torch.sparse_coo_tensor(places[None], values, shape)  # with duplicates
            dense = [torch.empty(shape) for _ in range(world)]
            dist.all_gather(dense, tensor.to_dense())
            dist.all_reduce(tensor)
            torch.testing.assert_close(tensor.to_dense(), sum(dense))

    pool.run(check, tmp_path)


def test_a_sparse_tensor_is_refused_where_gloo_has_no_sum_of_it(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        for call in (dist.broadcast, dist.reduce):
            with pytest.raises(ShardscopeError, match=r"layout is not strided; pass to_dense\(\)"):
                call(torch.eye(3).to_sparse(), 0)

    pool.run(check, tmp_path)


def test_tensors_without_dimensions_are_gathered_and_scattered_as_one_row(
    pool: RankPool, tmp_path: Path
) -> None:
    def check(context: RankContext) -> None:
        rank, world = context.rank, context.world_size
        own, summed, rows = torch.tensor(float(rank)), torch.tensor(0.0), torch.empty(world)
        dist.all_gather_into_tensor(rows, own)
        dist.reduce_scatter_tensor(summed, torch.arange(float(world)))
        assert rows.tolist() == list(range(world))
        assert float(summed) == rank * world
        with pytest.raises(RuntimeError):
            dist.reduce_scatter_tensor(torch.empty(2), own)  # too few rows: gloo read beyond the shape

    pool.run(check, tmp_path)
