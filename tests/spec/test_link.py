"""Links: with units, finite, and part of a job."""

from __future__ import annotations

import re

import pytest

from shardscope.errors import SpecError
from shardscope.spec import Job, Link


def test_a_link_is_read_with_its_units_and_tells_them() -> None:
    link = Link(bandwidth="100 Mbit/s", latency="1.5 ms")
    assert (link.bandwidth, link.latency_s, link.label) == (12.5e6, 1.5e-3, "100 Mbit/s, 1.5 ms")
    assert Link(bandwidth=12.5e6, latency_s=1.5e-3) == link
    assert Link.from_json(link.to_json()) == link
    assert Link(bandwidth="1 Gbit/s", latency="0").latency_s == 0  # the one number that needs no unit


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bandwidth": "100", "latency": 0}, "bandwidth='100' has no unit; write '25 GB/s' or '200 Gbit/s'"),
        ({"bandwidth": "100 Mbps", "latency": 0}, "has the unit 'Mbps', which could mean bits or bytes"),
        ({"bandwidth": 0, "latency": 0}, "bandwidth=0 is not valid: it should be greater than 0"),
        ({"bandwidth": -1, "latency": 0}, "bandwidth=-1 is not valid: it should be greater than 0"),
        ({"bandwidth": float("inf"), "latency": 0}, "bandwidth=inf is not valid: it should be a finite"),
        (
            {"bandwidth": float("nan"), "latency": 0},
            "bandwidth=nan is not valid: it should be a finite number",
        ),
        (
            {"bandwidth": 1e6, "latency": "-1 ms"},
            "latency='-1 ms' is not valid: it should be finite, and 0 or more",
        ),
        (
            {"bandwidth": 1e6, "latency": float("inf")},
            "latency=inf is not valid: it should be finite, and 0 or more",
        ),
        ({"bandwidth": 1e6, "latency": "1"}, "latency='1' has no unit; write '5 us' or '1.5 ms'"),
        ({"bandwidth": 1e6, "latency": ""}, "latency='' is not a quantity"),
        ({"bandwidth": 1e6, "latency": True}, "latency=True is not a quantity"),
        (
            {"bandwidth": 1e6, "latency_s": -1},
            "latency_s=-1 is not valid: it should be greater than or equal to 0",
        ),
        (
            {"bandwidth": 1e6},
            "a link needs a bandwidth and a latency; give the latency as well, such as '1 ms', or 0 for none",
        ),
        (
            {"latency": "1 ms"},
            "a link needs a bandwidth and a latency; give the bandwidth as well, such as '100 Mbit/s'",
        ),
        ({"bandwidth": 1e6, "latency": 0, "latency_s": 0}, "given twice, as latency and as latency_s"),
    ],
)
def test_a_link_that_cannot_be_is_refused_in_one_sentence(fields: dict, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)) as refused:
        Link(**fields)
    assert "\n" not in str(refused.value)


def test_a_job_takes_a_link_or_its_name_and_keeps_it() -> None:
    job = Job(model="mlp", data="digits", link="10GbE")
    assert job.link == Link.of("10GbE")
    assert not job.link.can_be_paced
    slower = job.replace(link=Link(bandwidth="5 Gbit/s", latency="1 ms"))
    assert slower.link.can_be_paced
    assert Job.from_json(slower.to_json()) == slower
    assert Job(model="mlp", data="digits").link is None
    with pytest.raises(SpecError, match="link='100 Mbit/s' is a bandwidth, which needs a latency"):
        Job(model="mlp", data="digits", link="100 Mbit/s")
