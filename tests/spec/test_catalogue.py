"""The data files: complete, sourced, and equal to what the makers print."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardscope.errors import SpecError
from shardscope.spec import catalogue
from shardscope.spec.cluster import Device, Link

ROOT = Path(__file__).parents[2]
TABLES = sorted(path.stem for path in (ROOT / "toolkit/shardscope/spec/catalogue").glob("*.json"))
ENTRIES = [(table, name) for table in TABLES for name in catalogue.table(table)]


@pytest.mark.parametrize(("table", "name"), ENTRIES)
def test_every_entry_names_its_source_and_what_was_not_confirmed_in_it(table: str, name: str) -> None:
    entry = catalogue.table(table)[name]
    assert len(entry["source"]) > 15
    assert not entry["source"].endswith(".")
    assert set(entry.get("recalled", ())) <= set(entry)
    assert entry.get("recalled") != []


@pytest.mark.parametrize("table", TABLES)
def test_no_key_is_given_twice(table: str) -> None:
    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in pairs]
        assert len(keys) == len(set(keys)), keys
        return dict(pairs)

    path = ROOT / f"toolkit/shardscope/spec/catalogue/{table}.json"
    json.loads(path.read_text(), object_pairs_hook=once)


def test_every_quantity_in_the_files_carries_its_unit() -> None:
    plain = {"per_node", "ports", "usd_per_device_hour"}
    for table in ("devices", "links", "nodes", "prices"):
        for name, entry in catalogue.table(table).items():
            for field, value in entry.items():
                assert field in plain or not isinstance(value, int | float), f"{name}.{field}={value}"


@pytest.mark.parametrize("name", Device.names())
def test_a_narrower_format_is_never_slower(name: str) -> None:
    rates = Device.of(name).peak_flops
    order = [rates[key] for key in ("fp32", "tf32", "bf16", "fp8") if key in rates]
    assert order == sorted(order)
    assert rates.get("fp16", rates.get("bf16")) == rates.get("bf16", rates.get("fp16"))


@pytest.mark.parametrize("name", Device.names())
def test_memory_is_within_a_tenth_of_the_size_it_is_sold_as(name: str) -> None:
    device = Device.of(name)
    sold = re.search(r"-(\d+)gb", " ".join([name, *catalogue.table("devices")[name].get("aliases", ())]))
    if sold is not None:
        assert 0.98 * float(sold[1]) * 1e9 <= device.memory_bytes <= float(sold[1]) * 2**30


@pytest.mark.parametrize(
    ("device", "bf16", "bandwidth", "watts"),
    [
        ("a100-80gb", 312e12, 2.039e12, 400),
        ("h100-80gb", 989.4e12, 3.35e12, 700),
        ("h100-80gb-pcie", 756.5e12, 2e12, 350),
        ("h200", 989.4e12, 4.8e12, 700),
        ("l4", 121e12, 300e9, 72),
        ("rtx-4090", 165.2e12, 1008e9, 450),
        ("tpu-v5p", 459e12, 2765e9, None),
        ("trainium2", 667e12, 2.9e12, 500),
    ],
)
def test_rates_are_the_dense_ones_of_the_data_sheets(
    device: str, bf16: float, bandwidth: float, watts: float | None
) -> None:
    found = Device.of(device)
    assert found.peak_flops["bf16"] == pytest.approx(bf16)
    assert found.memory_bandwidth == pytest.approx(bandwidth)
    assert found.power_w == watts


@pytest.mark.parametrize(
    ("link", "one_way"),
    [("nvlink-2", 150e9), ("nvlink-3", 300e9), ("nvlink-4", 450e9), ("nvlink-5", 900e9), ("pcie-4", 31.5e9),
     ("infiniband-edr", 12.5e9), ("infiniband-hdr", 25e9), ("infiniband-ndr", 50e9), ("25GbE", 3.125e9)],
)  # fmt: skip
def test_links_are_given_one_way(link: str, one_way: float) -> None:
    assert Link.of(link).bandwidth == pytest.approx(one_way)


@pytest.mark.parametrize(("link", "both_ways_a_chip"), [("ici-v4", 600e9), ("ici-v5p", 1200e9)])
def test_a_ring_in_a_torus_of_three_dimensions_has_a_third_of_the_links(
    link: str, both_ways_a_chip: float
) -> None:
    assert Link.of(link).bandwidth == pytest.approx(both_ways_a_chip / 2 / 3)


@pytest.mark.parametrize("lanes", [3, 4, 5])
def test_pcie_is_its_line_rate_less_its_coding(lanes: int) -> None:
    giga_transfers = {3: 8, 4: 16, 5: 32}[lanes]
    assert Link.of(f"pcie-{lanes}").bandwidth == pytest.approx(
        giga_transfers * 16 / 8 * 128 / 130 * 1e9, rel=1e-3
    )


@pytest.mark.parametrize("spelling", ["A100 80GB", "a100_80gb", "a100-sxm4-80gb", "A100-80GB"])
def test_names_are_found_however_they_are_spelt(spelling: str) -> None:
    assert Device.of(spelling).name == "a100-80gb"


def test_the_start_of_several_names_is_answered_with_them() -> None:
    with pytest.raises(
        SpecError, match=r"^device='a100' is not the full name .* use a100-40gb or a100-80gb$"
    ):
        Device.of("a100")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"link='nvlink4x' is not known; did you mean 'nvlink-4'\?"):
        Link.of("nvlink4x")


def test_prices_have_a_date_and_a_device() -> None:
    for name, entry in catalogue.table("prices").items():
        assert name in Device.names()
        assert re.fullmatch(r"20\d\d(-\d\d){0,2}", entry["date"])
        assert 0 < entry["usd_per_device_hour"] < 50
