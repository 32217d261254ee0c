"""A text expression is interpreted by its own rules; no part of it is ever executed as code."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.errors import DataError, PlanError
from penstock.plan.expression_text import TextExpression


@dataclass
class FakeSample:
    fields: dict[str, bytes]
    key: str = "d/k1"
    shard: str = "a.tar"

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(self.fields)

    def value(self, field: str) -> bytes | None:
        return self.fields.get(field)


DOG = FakeSample(
    {"cls": b"3\n", "txt": b"a dog\n", "json": b'{"n": 2, "tags": ["x"]}', "jpg": b"\xff\xd8", "seg.png": b"12345"}
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("cls == 3 and 'dog' in txt", True),
        ("cls != 3 or txt == 'a cat'", False),
        ("0 < cls <= 3", True),
        ("cls in [1, 2, 3]", True),
        ("cls not in (1, 2)", True),
        ("json['n'] * 2 + 1", 5),
        ("json['none']", None),
        ("'x' in json['tags']", True),
        ('size("jpg") % 2 == 0 and has("jpg") and not has("png")', True),
        ('len(_["seg.png"])', 5),
        ("key == 'd/k1' and startswith(key, 'd/') and endswith(shard, '.tar')", True),
        ("jpg == b'\\xff\\xd8'", True),
        ("png > 3", False),
        ("png == None", True),
        ("'yes' if -cls < 0 else 'no'", "yes"),
        ("int(json['n']) // 2 - float('0.5')", 0.5),
        ("upper(txt) == 'A DOG'", True),
        ("max(1, min(cls, 2))", 2),
    ],
)
def test_an_allowed_expression_has_the_expected_value(text: str, value: object) -> None:
    assert TextExpression(text).of(DOG) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cls ==",
        "__import__('os').system('true')",
        "open('/etc/passwd')",
        "(lambda: 1)()",
        "[x for x in txt]",
        "cls.__class__",
        "txt.format(1)",
        "f'{cls}'",
        "cls := 3",
        "2 ** 1000000",
        "1 << 99",
        "txt[0:1]",
        "len(*txt)",
        "str(object=cls)",
        "yield_",
        "(" * 300 + ")" * 300,
        "not " * 90 + "cls",
        "cls + " * 1000 + "cls",
        "...",
        "1j",
        "await x",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    if text == "yield_":  # a field that the sample does not have
        assert TextExpression(text).of(DOG) is None
        return
    with pytest.raises(PlanError):
        TextExpression(text)


@pytest.mark.parametrize(
    "text", ["txt < 3", "cls / 0", "'x' * 9999999", "'%9999999d' % 3", "json['tags'][9]", "int(txt)", "len(cls)"]
)
def test_a_failing_evaluation_is_an_error_with_shard_and_key(text: str) -> None:
    with pytest.raises(DataError, match=r"cannot be evaluated.*shard: a\.tar, key: d/k1"):
        TextExpression(text).of(DOG)
