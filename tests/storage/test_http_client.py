from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from penstock.errors import StorageError
from penstock.storage.http_client import if_match_header, raise_if_transient, range_header, response_tag, send_request
from penstock.storage.retry import Retry, TransientError


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_transient_statuses_are_raised(status: int) -> None:
    with pytest.raises(TransientError, match=str(status)):
        raise_if_transient(status, {})


@pytest.mark.parametrize("status", [200, 206, 304, 400, 401, 403, 404, 412, 416, 501])
def test_final_statuses_are_not_raised(status: int) -> None:
    raise_if_transient(status, {})


def test_retry_after_is_a_number_or_a_date() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    for retry_after, low, high in (("7", 7, 7), (soon, 50, 60), ("-3", 0, 0)):
        with pytest.raises(TransientError) as caught:
            raise_if_transient(503, {"retry-after": retry_after})
        assert caught.value.retry_after_s is not None
        assert low <= caught.value.retry_after_s <= high
    with pytest.raises(TransientError) as caught:
        raise_if_transient(503, {"retry-after": "soon"})
    assert caught.value.retry_after_s is None


def test_if_match_is_sent_for_strong_tags_only() -> None:
    assert if_match_header('"a"') == {"If-Match": '"a"'}
    assert if_match_header('W/"a"') == if_match_header("Mon, 16 Nov 2026 03:09:51 GMT 5") == if_match_header(None) == {}


def test_a_tag_is_the_etag_or_last_modified_with_the_size() -> None:
    assert response_tag({"etag": '"a"', "last-modified": "Monday"}, 5) == '"a"'
    assert response_tag({"last-modified": "Monday"}, 5) != response_tag({"last-modified": "Monday"}, 6)
    assert response_tag({}, 5) is None


def test_a_range_header_has_the_last_byte_inclusive() -> None:
    assert range_header(5, 9) == {"Range": "bytes=5-8"}
    assert range_header(5, None) == {"Range": "bytes=5-"}
    assert range_header(0, None) == {}


def test_an_invalid_header_is_a_final_error_that_does_not_show_it() -> None:
    with pytest.raises(StorageError) as caught:
        send_request("GET", "http://127.0.0.1:1/a", {"X": "never\nto-be-seen"}, Retry())
    assert "to-be-seen" not in str(caught.value)


def test_the_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with pytest.raises(TransientError, match="refuses connections"):
        send_request("GET", "http://host.invalid/a", {}, Retry())
    monkeypatch.setenv("no_proxy", "host.invalid")
    with pytest.raises(TransientError, match="name cannot be resolved"):
        send_request("GET", "http://host.invalid/a", {}, Retry())
