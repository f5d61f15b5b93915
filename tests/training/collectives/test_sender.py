"""The sending thread: in order, and nothing after a failure."""

from __future__ import annotations

import pytest

from shardscope.training.collectives.sender import Sender


def test_what_is_handed_over_is_sent_in_its_order() -> None:
    sender, sent = Sender("test"), []
    for done in [sender.submit(lambda i=i: sent.append(i)) for i in range(20)]:  # type: ignore[misc]
        assert done.result() is None
    sender.close()
    assert sent == list(range(20))
    assert sender.failure is None


def test_nothing_is_sent_after_a_failure_and_all_that_was_to_be_fails_alike() -> None:
    sender, sent = Sender("test"), []

    def fail() -> None:
        raise ValueError("no number")

    futures = [sender.submit(send) for send in (lambda: sent.append(0), fail, lambda: sent.append(1), fail)]
    assert futures[0].result() is None
    raised = []
    for future in futures[1:]:
        with pytest.raises(ValueError, match="no number") as caught:
            future.result()
        raised.append(caught.value)
    assert sent == [0]
    assert all(error is sender.failure for error in raised)
    sender.close()
