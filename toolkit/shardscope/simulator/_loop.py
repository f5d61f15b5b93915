"""The event loop: operations of a graph start when their dependencies have ended, and messages share links fairly.

Every operation first takes a fixed time, such as the time of a computation or the latency of a message. If it also has
a size, it then sends this many bytes over one or more links. Messages on a link share it max-min fairly (Bertsekas and
Gallager 1992, section 6.5.2): all rates grow together until a link is full; the rates of messages on this link are then
fixed, and the other rates grow further. After a change, only messages that share links with changed messages, directly
or through other messages, get new rates.

The same functions run in two ways: compiled by numba over NumPy arrays, or interpreted over lists. Pending events form
a binary heap with at most one entry per operation, so a changed rate moves an entry instead of adding one.
"""

# Helpers take many columns as separate arguments, because numba compiles plain array arguments fastest.
# ruff: noqa: PLR0912, PLR0915, PLR0917, C901

from __future__ import annotations

from collections.abc import Callable
from typing import Any

IS_COMPILED = __name__.endswith("_compiled")
"""Whether this copy of the module is compiled; `engine` loads it a second time under another name."""


def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled by numba, cached on disk if possible; in the interpreted copy, the function itself."""
    if not IS_COMPILED:
        return loop
    import numba

    try:
        fast: Callable[..., Any] = numba.njit(cache=True)(loop)
    except RuntimeError:  # no directory is writable: numba then refuses to cache
        fast = numba.njit(loop)
    return fast


@_compiled
def _up(keys: Any, ops: Any, place: Any, at: int) -> None:
    """Move the heap entry at index `at` towards the root, to its correct position."""
    key, op = keys[at], ops[at]
    while at > 0:
        parent = (at - 1) >> 1
        if keys[parent] < key or (keys[parent] == key and ops[parent] < op):
            break
        keys[at], ops[at] = keys[parent], ops[parent]
        place[ops[at]] = at
        at = parent
    keys[at], ops[at] = key, op
    place[op] = at


@_compiled
def _down(keys: Any, ops: Any, place: Any, at: int, count: int) -> None:
    """Move the heap entry at index `at` away from the root, to its correct position."""
    key, op = keys[at], ops[at]
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        other = child + 1
        if other < count and (
            keys[other] < keys[child] or (keys[other] == keys[child] and ops[other] < ops[child])
        ):
            child = other
        if key < keys[child] or (key == keys[child] and op < ops[child]):
            break
        keys[at], ops[at] = keys[child], ops[child]
        place[ops[at]] = at
        at = child
    keys[at], ops[at] = key, op
    place[op] = at


@_compiled
def _schedule(keys: Any, ops: Any, place: Any, count: int, op: int, key: float) -> int:
    """Set the time of an operation's next event, and return the number of entries in the heap."""
    at = place[op]
    if at < 0:
        keys[count], ops[count] = key, op
        place[op] = count
        _up(keys, ops, place, count)
        return count + 1
    before = keys[at]
    keys[at] = key
    if key < before:
        _up(keys, ops, place, at)
    else:
        _down(keys, ops, place, at, count)
    return count


@_compiled
def _join(slot: int, link: int, heads: Any, after: Any, before: Any, sharing: Any) -> None:
    """Add a message to a link; `slot` is the index of the link among the links of all messages."""
    first = heads[link]
    after[slot], before[slot] = first, -1
    if first >= 0:
        before[first] = slot
    heads[link] = slot
    sharing[link] += 1


@_compiled
def _leave(slot: int, link: int, heads: Any, after: Any, before: Any, sharing: Any) -> None:
    """Remove a message from a link."""
    previous, following = before[slot], after[slot]
    if previous >= 0:
        after[previous] = following
    else:
        heads[link] = following
    if following >= 0:
        before[following] = previous
    sharing[link] -= 1


@_compiled
def _component(
    link: int,
    stamp: int,
    shift: int,
    links: Any,
    heads: Any,
    after: Any,
    seen_link: Any,
    seen: Any,
    comp: Any,
    flows: Any,
) -> tuple[int, int]:
    """Collect the connected component of links and messages around a link; return the number of each."""
    comp[0] = link
    seen_link[link] = stamp
    num_links, num_flows, at = 1, 0, 0
    while at < num_links:
        slot = heads[comp[at]]
        at += 1
        while slot >= 0:
            op = slot >> shift
            if seen[op] != stamp:
                seen[op] = stamp
                flows[num_flows] = op
                num_flows += 1
                for place in range(op << shift, (op + 1) << shift):
                    other = links[place]
                    if other >= 0 and seen_link[other] != stamp:
                        seen_link[other] = stamp
                        comp[num_links] = other
                        num_links += 1
            slot = after[slot]
    return num_links, num_flows


@_compiled
def _fill(
    num_links: int,
    num_flows: int,
    shift: int,
    links: Any,
    capacity: Any,
    heads: Any,
    after: Any,
    sharing: Any,
    comp: Any,
    left: Any,
    waiting: Any,
    fresh: Any,
    flows: Any,
) -> None:
    """Compute the max-min fair rates of the messages of one component, by filling its links step by step."""
    for k in range(num_links):
        link = comp[k]
        left[link] = capacity[link]
        waiting[link] = sharing[link]
    for k in range(num_flows):
        fresh[flows[k]] = -1.0
    unset = num_flows
    while unset > 0:
        least = -1.0
        for k in range(num_links):
            link = comp[k]
            if waiting[link] > 0:
                share = left[link] / waiting[link]
                if least < 0 or share < least:
                    least = share
        limit = least * (1 + 1e-9)
        for k in range(num_links):
            link = comp[k]
            if waiting[link] == 0 or left[link] / waiting[link] > limit:
                continue
            slot = heads[link]
            while slot >= 0:
                op = slot >> shift
                if fresh[op] < 0:
                    fresh[op] = least
                    unset -= 1
                    for place in range(op << shift, (op + 1) << shift):
                        other = links[place]
                        if other >= 0:
                            left[other] = max(0.0, left[other] - least)
                            waiting[other] -= 1
                slot = after[slot]


@_compiled
def run_loop(
    fixed: Any,
    size: Any,
    links: Any,
    capacity: Any,
    first: Any,
    following: Any,
    missing: Any,
    start: Any,
    end: Any,
    cause: Any,
    state: Any,
    keys: Any,
    ops: Any,
    place: Any,
    rate: Any,
    rest: Any,
    since: Any,
    fresh: Any,
    seen: Any,
    flows: Any,
    ready: Any,
    after: Any,
    before: Any,
    heads: Any,
    sharing: Any,
    left: Any,
    waiting: Any,
    seen_link: Any,
    comp: Any,
    dirty: Any,
    is_dirty: Any,
    sides: Any,
) -> int:
    """Run all operations; fill in `start`, `end` and `cause`, and return the number of events.

    Args:
        fixed: Fixed seconds of each operation.
        size: Bytes that each operation then sends; 0 for none.
        links: Links of operation i, starting at index i << s, where s is in `sides`; -1 for none.
        capacity: Bytes per second of each link.
        first: First index into `following` of each operation, and one more for the end.
        following: Operations that depend on each operation, one operation after another.
        missing: Number of dependencies of each operation that have not ended.
        start: Result: start of each operation.
        end: Result: end of each operation; negative if it never ran.
        cause: Result: the dependency that ended last; -1 for none.
        state: Zeros; this and all following arguments are workspace.
        keys: Times of the entries of the heap.
        ops: Operations of the entries of the heap.
        place: Index of each operation's entry; -1 for none.
        rate: Bytes per second of each message.
        rest: Bytes that each message had left at `since`.
        since: Time at which the rate of each message last changed.
        fresh: New rates.
        seen: Last search that found the message.
        flows: Messages of a component.
        ready: Stack of operations that can start now.
        after: Next message on the same link, by slot.
        before: Previous message on the same link, by slot.
        heads: First slot of each link; -1 for none.
        sharing: Number of messages on each link.
        left: Free capacity of each link.
        waiting: Number of messages without a rate on each link.
        seen_link: Last search that found the link.
        comp: Links of a component.
        dirty: Links whose messages need new rates.
        is_dirty: Whether a link is in `dirty`.
        sides: One number: the binary logarithm of the number of links of each operation.
    """
    num_ops, shift = len(fixed), sides[0]
    count = top = num_dirty = stamp = events = 0
    now = 0.0
    for op in range(num_ops - 1, -1, -1):
        if missing[op] == 0:
            ready[top] = op
            top += 1
    while True:
        while top > 0:  # start what can start now
            top -= 1
            op = ready[top]
            if state[op] == 0:
                start[op] = now
                state[op] = 1
                if fixed[op] > 0:
                    count = _schedule(keys, ops, place, count, op, now + fixed[op])
                    continue
            if state[op] == 1 and size[op] > 0:  # the fixed time is over: send
                state[op] = 2
                rest[op], since[op], rate[op] = size[op], now, 0.0
                alone = True
                most = -1.0
                joined = -1
                for slot in range(op << shift, (op + 1) << shift):
                    link = links[slot]
                    if link >= 0:
                        joined = link
                        alone = alone and sharing[link] == 0
                        if most < 0 or capacity[link] < most:
                            most = capacity[link]
                        _join(slot, link, heads, after, before, sharing)
                if alone:
                    rate[op] = most
                    count = _schedule(keys, ops, place, count, op, now + size[op] / most)
                elif is_dirty[joined] == 0:  # its other links are connected to this one
                    is_dirty[joined] = 1
                    dirty[num_dirty] = joined
                    num_dirty += 1
                continue
            if state[op] == 2:  # all bytes have arrived: leave the links
                for slot in range(op << shift, (op + 1) << shift):
                    link = links[slot]
                    if link >= 0:
                        _leave(slot, link, heads, after, before, sharing)
                        if sharing[link] > 0 and is_dirty[link] == 0:
                            is_dirty[link] = 1
                            dirty[num_dirty] = link
                            num_dirty += 1
            state[op] = 3
            end[op] = now
            for k in range(first[op], first[op + 1]):
                follower = following[k]
                missing[follower] -= 1
                if missing[follower] == 0:
                    cause[follower] = op
                    ready[top] = follower
                    top += 1
        stamp += 1
        for k in range(num_dirty):
            link = dirty[k]
            is_dirty[link] = 0
            if seen_link[link] == stamp or sharing[link] == 0:
                continue
            num_links, num_flows = _component(
                link, stamp, shift, links, heads, after, seen_link, seen, comp, flows
            )
            _fill(
                num_links,
                num_flows,
                shift,
                links,
                capacity,
                heads,
                after,
                sharing,
                comp,
                left,
                waiting,
                fresh,
                flows,
            )
            for j in range(num_flows):
                op = flows[j]
                if abs(fresh[op] - rate[op]) > 1e-12 * rate[op]:
                    rest[op] = max(0.0, rest[op] - rate[op] * (now - since[op]))
                    since[op], rate[op] = now, fresh[op]
                    count = _schedule(keys, ops, place, count, op, now + rest[op] / rate[op])
        num_dirty = 0
        if count == 0:
            break
        now = keys[0]
        limit = now * (1 + 1e-13)
        while count > 0 and keys[0] <= limit:
            op = ops[0]
            place[op] = -1
            count -= 1
            if count > 0:
                keys[0], ops[0] = keys[count], ops[count]
                place[ops[0]] = 0
                _down(keys, ops, place, 0, count)
            events += 1
            ready[top] = op
            top += 1
    return events
