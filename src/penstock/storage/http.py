"""Objects behind plain HTTP servers, with or without ranges. They can be read; not listed, not written."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from penstock.errors import StorageError
from penstock.storage.http_client import Answer, Ranged, must_succeed, send
from penstock.storage.protocol import Forbidden, Info, Listed, NotFound, Upload, changed, redacted
from penstock.storage.retry import DEFAULT, Retry

_HOPS = 5  # redirects on the way to an object: more is a circle
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, slots=True)
class Http:
    """Reads ``http://`` and ``https://`` URLs; user and password may stand in them.

    Attributes:
        headers: Sent with each request, as pairs; not to another host that a server redirects to.
        retry: How patient to be.
    """

    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    retry: Retry = DEFAULT

    def info(self, url: str) -> Info:
        return self._object(url).info()

    def read(
        self, url: str, start: int, stop: int, *, into: memoryview | None = None, tag: str | None = None
    ) -> bytes | memoryview:
        return self._object(url).read(start, stop, into, tag)

    def stream(self, url: str) -> Iterator[bytes]:
        return self._object(url).stream()

    def list(self, prefix: str) -> Iterator[Listed]:
        raise StorageError(
            "an HTTP server cannot be listed: spell the names out, as in a-{000..146}.tar", redacted(prefix)
        )

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        raise StorageError("nothing can be written over HTTP", redacted(url))

    def delete(self, url: str) -> None:
        raise StorageError("nothing can be removed over HTTP", redacted(url))

    def local_path(self, url: str) -> str | None:
        return None

    def _object(self, url: str) -> Ranged:
        return Ranged(url, partial(self._get, url), self.retry)

    def _get(self, url: str, headers: Mapping[str, str]) -> Answer:
        """Ask until the answer is no redirect; what is no object is raised."""
        place, own = _without_user(url)
        own = {**dict(self.headers), **own}
        for _ in range(_HOPS + 1):
            answer = send("GET", place, {**own, **headers, "Accept-Encoding": "identity"}, self.retry)
            target = answer.headers.get("location")
            if answer.status not in _REDIRECTS or not target:
                _must_be_object(answer, url)
                return answer
            answer.close()
            place, own = _redirected(place, target, own, url)
        raise StorageError("the server redirects in a circle", redacted(url))


def _redirected(place: str, target: str, own: dict[str, str], url: str) -> tuple[str, dict[str, str]]:
    """Where a redirect leads; what was meant for one server is not told to another."""
    there, given = _without_user(urljoin(place, target))
    before, after = urlsplit(place), urlsplit(there)
    if after.scheme not in ("http", "https"):
        raise StorageError("the server redirects to something that is not HTTP", redacted(url))
    if before.scheme == "https" and after.scheme == "http":
        raise StorageError("the server redirects from https to http, in the clear", redacted(url))
    same = (before.scheme, before.netloc) == (after.scheme, after.netloc)
    return there, {**own, **given} if same else given


def _without_user(url: str) -> tuple[str, dict[str, str]]:
    """The URL without user and password, and the header that says them."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise StorageError("this is no URL of a server", redacted(url)) from None
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return urlunsplit(parts._replace(fragment="")), {}
    said = b64encode(unquote(user).encode()).decode()
    return urlunsplit(parts._replace(netloc=host, fragment="")), {"Authorization": f"Basic {said}"}


def _must_be_object(answer: Answer, url: str) -> None:
    """Let an answer with bytes pass, and 416, which says that there are none.

    Raises:
        StorageError: there is no such object here.
        Temporary: there may be one next time.
    """
    status = answer.status
    if status in (200, 206, 416):
        return
    answer.close()
    must_succeed(status, answer.headers)
    if status == 412:
        raise changed(url)
    if status in (404, 410):
        raise NotFound("there is no such object", redacted(url))
    if status in (401, 407):
        raise StorageError(
            f"the server asks who you are ({status}): user or password is missing or wrong", redacted(url)
        )
    if status == 403:
        raise Forbidden("the server does not let you read it (403)", redacted(url))
    raise StorageError(f"the server answers {status}", redacted(url))
