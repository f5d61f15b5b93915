from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from shardscope.analytic import communication as comm
from shardscope.methods.strategies.parameter_server._torch_messages import HEADER_BYTES

SIZES = st.lists(st.integers(0, 10**6), min_size=1, max_size=30)


@given(st.integers(0, 10**9), st.integers(2, 64))
def test_one_server_beside_a_worker_passes_the_textbooks_bytes_through_its_link(
    size: int, world: int
) -> None:
    pushed, pulled = (
        comm.parameter_server_push_bytes([size], world),
        comm.parameter_server_pull_bytes([size], world),
    )
    assert pushed[1:].sum() + pulled[0] == 2 * (world - 1) * size
    assert (pushed[0], pulled[1:].sum()) == (0, 0)


@given(SIZES, st.integers(1, 8), st.integers(1, 16), st.booleans())
def test_every_worker_gets_back_as_much_as_it_sends(
    sizes: list[int], servers: int, workers: int, dedicated: bool
) -> None:
    world = workers + servers
    spec = ss.ParameterServer(servers=servers, dedicated=dedicated)
    shards = [sum(sizes[i] for i in held) for held in spec.shards(sizes)]
    pushed = comm.parameter_server_push_bytes(shards, world, dedicated=dedicated)
    assert pushed.sum() == comm.parameter_server_pull_bytes(shards, world, dedicated=dedicated).sum()
    assert pushed[servers:].tolist() == [sum(sizes)] * workers


@given(SIZES, st.integers(1, 8))
def test_shards_hold_every_tensor_once_and_none_is_above_the_lightest_by_more_than_one_tensor(
    sizes: list[int], servers: int
) -> None:
    shards = ss.ParameterServer(servers=servers).shards(sizes)
    assert sorted(i for held in shards for i in held) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in held) for held in shards]
    assert max(loads) - min(loads) <= max(sizes)


def test_headers_are_as_long_as_the_formula_says() -> None:
    assert comm.parameter_server.HEADER_BYTES == HEADER_BYTES
