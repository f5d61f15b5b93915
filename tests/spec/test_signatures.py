"""What `help` and a notebook's `?` show of a job and its parts."""

from __future__ import annotations

import inspect
import re

import pytest

import shardscope as ss
from shardscope.spec._base import Spec


def subclasses(cls: type) -> list[type]:
    return [found for each in cls.__subclasses__() for found in (each, *subclasses(each))]


def test_a_jobs_signature_has_plain_types_and_defaults() -> None:
    text = str(inspect.signature(ss.Job))
    assert text.startswith(
        "(*, model: str | Callable, data: str | Callable | Shards, strategy: str | Strategy = 'ring',"
    )
    assert "world_size: int = 2" in text
    assert "batch: Batch = Batch(64), compression: str | Compression = 'none'" in text
    assert text.endswith("link: Link | None = None, name: str | None = None, layout: Layout | None = None)")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            ss.Batch,
            (
                "(global_batch: int = 64, *, micro_batch: int | None = None, "
                "shares: tuple[int, ...] | Literal['measured'] | None = None, rebalance_every: int | None = None)"
            ),
        ),
        (ss.Strategy, "(name: str, **settings)"),
        (
            ss.Checkpoint,
            (
                "(every: int | Literal['auto'] | None = None, *, at_end: bool = False, keep: int = 2, "
                "asynchronous: bool = False, incremental: bool = False, mtbf_s: float | None = None)"
            ),
        ),
        (type(ss.LRSchedule("constant")), "(*, warmup_steps: int = 0)"),
    ],
)
def test_a_signature_is_called_as_it_reads(spec: type[Spec], text: str) -> None:
    assert str(inspect.signature(spec)) == text


def test_no_signature_shows_how_a_value_is_checked() -> None:
    shown = {cls: str(inspect.signature(cls)) for cls in subclasses(Spec)}
    assert {cls: text for cls, text in shown.items() if re.search(r"Annotated|FieldInfo|<|args", text)} == {}


def test_a_docstring_lists_the_fields() -> None:
    text = inspect.getdoc(ss.Job) or ""
    assert text.startswith("One training job.")
    assert "\n    model: The network to train: a built-in name" in text
    assert "a callable that\n        returns an `nn.Module`" in text
    assert (
        "\n    data: What to train on: a built-in name, a path, `Shards` with settings, or a callable."
        in text
    )


def test_a_users_own_method_is_shown_in_the_same_way() -> None:
    class Halving(ss.LRSchedule):
        """Halve it again and again."""

        name = "halving"
        every: int = 10
        """Steps between two halvings."""

        def factor_after_warmup(self, step: int, steps: int) -> float:
            return 0.5 ** (step // self.every)

    assert str(inspect.signature(Halving)) == "(*, warmup_steps: int = 0, every: int = 10)"
    assert (inspect.getdoc(Halving) or "").endswith("\n    every: Steps between two halvings.")


def test_a_json_schema_has_the_descriptions_of_fields() -> None:
    schema = ss.Job.model_json_schema()
    told = {name: about.get("description") for name, about in schema["properties"].items()}
    assert told == {name: field.description for name, field in ss.Job.model_fields.items()}
    assert all(told.values())
    assert schema["$defs"]["Batch"]["properties"]["micro_batch"]["description"]
