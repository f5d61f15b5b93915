"""Quantities as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope.errors import SpecError
from shardscope.spec.units import Kind, duration_text, faster_text, gib_text, parse


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("80 GiB", "bytes", 80 * 1024**3),
        ("80GB", "bytes", 80e9),
        ("1.5 TB", "bytes", 1.5e12),
        ("42_405_855_232 B", "bytes", 42405855232),
        ("8 Gbit", "bytes", 1e9),
        ("200 Gbit/s", "bytes/s", 25e9),
        ("25 GB/s", "bytes/s", 25e9),
        ("3.35TB/s", "bytes/s", 3.35e12),
        ("1 GiB/s", "bytes/s", 2**30),
        ("989.4 TFLOP/s", "FLOP/s", 989.4e12),
        ("5 us", "s", 5e-6),
        (" 1e-3 s ", "s", 1e-3),
        ("700 W", "W", 700),
        ("0", "s", 0),
        ("0.0", "bytes/s", 0),
    ],
)
def test_a_quantity_is_read_in_its_base_unit(text: str, kind: Kind, value: float) -> None:
    assert parse(text, kind) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("200 G", "bytes/s", r"inter='200 G' has the unit 'G', .* bits or bytes; write Gbit/s or GB/s"),
        ("200 Gbps", "bytes/s", "write Gbit/s or GB/s"),
        ("200 Gb/s", "bytes/s", "write Gbit/s or GB/s"),
        ("25 gb/s", "bytes/s", "is not a unit for|bits or bytes"),
        ("80 G", "bytes", "write Gbit or GB"),
        ("80 Gi", "bytes", "write Gibit or GiB"),
        ("80 K", "bytes", "write kbit or kB"),
        (
            "200",
            "bytes/s",
            "has no unit; write '25 GB/s' or '200 Gbit/s', or in Python a plain number of bytes per second",
        ),
        ("200 GB", "bytes/s", "is a size, not a rate; write GB/s"),
        ("80 GB/s", "bytes", "is a rate, not a size; write GB"),
        ("312 TFLOPS", "FLOP/s", "write '312 TFLOP/s'"),
        ("fast", "bytes/s", "is not a quantity; write a number and its unit"),
        ("", "bytes", "is not a quantity"),
        ("1.2.3 GB", "bytes", "unit '.3 GB'"),
        ("5", "s", "or in Python a plain number of seconds"),
    ],
)
def test_what_could_mean_two_things_is_refused_with_a_way_out(text: str, kind: Kind, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        parse(text, kind, field="inter")
    assert "\n" not in str(caught.value)


@given(st.floats(1e-3, 1e6), st.sampled_from(["", "k", "M", "G", "T", "Ki", "Mi", "Gi"]))
def test_a_byte_is_eight_bits_under_every_prefix(number: float, prefix: str) -> None:
    as_bits = parse(f"{number!r} {prefix}bit/s", "bytes/s")
    assert 8 * as_bits == pytest.approx(parse(f"{number!r} {prefix}B/s", "bytes/s"))


@given(st.floats(1e3, 1e17))
def test_a_size_written_out_is_read_back_to_its_printed_digits(num_bytes: float) -> None:
    assert parse(gib_text(num_bytes), "bytes") == pytest.approx(num_bytes, rel=6e-3)


def test_sizes_are_written_in_powers_of_1024() -> None:
    assert gib_text(80 * 2**30) == "80 GiB"
    assert gib_text(512) == "512 B"
    assert gib_text(1.5 * 2**40) == "1.5 TiB"


@pytest.mark.parametrize(
    ("seconds", "text"), [(60, "1 min"), (125, "2 min 5 s"), (6 * 3600, "6 h"), (360_000, "100 h")]
)
def test_long_durations_are_written_in_hours(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (1.003, "less than 1%"),
        (169 / 148, "14%"),
        (1.5, "50%"),
        (2, "2 times"),
        (2.44, "2.4 times"),
        (1000, "1000 times"),
    ],
)
def test_slower_is_written_like_faster(factor: float, text: str) -> None:
    assert faster_text(factor) == f"{text} faster"
    assert faster_text(1 / factor) == f"{text} slower"
