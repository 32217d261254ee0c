from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from penstock.errors import StorageError
from penstock.storage.http_client import condition, must_succeed, range_header, send, tag_of
from penstock.storage.retry import Retry, Temporary


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_some_answers_may_be_others_next_time(status: int) -> None:
    with pytest.raises(Temporary, match=str(status)):
        must_succeed(status, {})


@pytest.mark.parametrize("status", [200, 206, 304, 400, 401, 403, 404, 412, 416, 501])
def test_other_answers_are_final(status: int) -> None:
    must_succeed(status, {})


def test_the_wish_to_wait_is_a_number_or_a_date() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    for told, least, most in (("7", 7, 7), (soon, 50, 60), ("-3", 0, 0)):
        with pytest.raises(Temporary) as caught:
            must_succeed(503, {"retry-after": told})
        assert caught.value.after_s is not None
        assert least <= caught.value.after_s <= most
    with pytest.raises(Temporary) as caught:
        must_succeed(503, {"retry-after": "soon"})
    assert caught.value.after_s is None


def test_only_strong_tags_are_asked_for() -> None:
    assert condition('"a"') == {"If-Match": '"a"'}
    assert condition('W/"a"') == condition("Mon, 16 Nov 2026 03:09:51 GMT 5") == condition(None) == {}


def test_a_tag_is_the_etag_or_the_last_change_with_the_size() -> None:
    assert tag_of({"etag": '"a"', "last-modified": "Monday"}, 5) == '"a"'
    assert tag_of({"last-modified": "Monday"}, 5) != tag_of({"last-modified": "Monday"}, 6)
    assert tag_of({}, 5) is None


def test_a_range_names_its_last_byte() -> None:
    assert range_header(5, 9) == {"Range": "bytes=5-8"}
    assert range_header(5, None) == {"Range": "bytes=5-"}
    assert range_header(0, None) == {}


def test_a_header_that_cannot_be_written_is_final_and_not_shown() -> None:
    with pytest.raises(StorageError) as caught:
        send("GET", "http://127.0.0.1:1/a", {"X": "never\nto-be-seen"}, Retry())
    assert "to-be-seen" not in str(caught.value)


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with pytest.raises(Temporary, match="refuses connections"):
        send("GET", "http://host.invalid/a", {}, Retry())
    monkeypatch.setenv("no_proxy", "host.invalid")
    with pytest.raises(Temporary, match="name is not known"):
        send("GET", "http://host.invalid/a", {}, Retry())
