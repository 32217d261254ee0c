"""Objects behind plain HTTP servers, with or without range requests. They can be read, but not listed or written."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from penstock.errors import StorageError
from penstock.storage.http_client import HttpObject, HttpResponse, raise_if_transient, send_request
from penstock.storage.protocol import Forbidden, Info, Listed, NotFound, Upload, changed_error, redacted
from penstock.storage.retry import DEFAULT, Retry

_MAX_REDIRECTS = 5  # more of them are a loop
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, slots=True)
class Http:
    """Reads ``http://`` and ``https://`` URLs, which may contain a user and password.

    Attributes:
        headers: Sent with each request, as (name, value) pairs, but not to other hosts that a server redirects to.
        retry: How persistent to be.
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
            "an HTTP server cannot be listed; write out the names, as in a-{000..146}.tar", redacted(prefix)
        )

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        raise StorageError("HTTP URLs are read-only: nothing can be written", redacted(url))

    def delete(self, url: str) -> None:
        raise StorageError("HTTP URLs are read-only: nothing can be deleted", redacted(url))

    def local_path(self, url: str) -> str | None:
        return None

    def _object(self, url: str) -> HttpObject:
        return HttpObject(url, partial(self._get, url), self.retry)

    def _get(self, url: str, headers: Mapping[str, str]) -> HttpResponse:
        """Send a GET request, and follow redirects."""
        target, private_headers = _split_credentials(url)
        private_headers = {**dict(self.headers), **private_headers}
        for _ in range(_MAX_REDIRECTS + 1):
            sent = {**private_headers, **headers, "Accept-Encoding": "identity"}
            response = send_request("GET", target, sent, self.retry)
            location = response.headers.get("location")
            if response.status not in _REDIRECTS or not location:
                _raise_for_status(response, url)
                return response
            response.close()
            target, private_headers = _redirected(target, location, private_headers, url)
        raise StorageError(f"the server redirects more than {_MAX_REDIRECTS} times", redacted(url))


def _redirected(target: str, location: str, private_headers: dict[str, str], url: str) -> tuple[str, dict[str, str]]:
    """Return the URL that a redirect leads to, and its headers; those of the user are not sent to another host."""
    try:
        new_target, credentials = _split_credentials(urljoin(target, location))
    except ValueError:
        raise StorageError("the server redirects to a URL that is not HTTP", redacted(url)) from None
    before, after = urlsplit(target), urlsplit(new_target)
    if after.scheme not in ("http", "https"):
        raise StorageError("the server redirects to a URL that is not HTTP", redacted(url))
    if before.scheme == "https" and after.scheme == "http":
        raise StorageError("the server redirects from https to http, which is not encrypted", redacted(url))
    same_host = (before.scheme, before.netloc) == (after.scheme, after.netloc)
    return new_target, {**private_headers, **credentials} if same_host else credentials


def _split_credentials(url: str) -> tuple[str, dict[str, str]]:
    """Return a URL without user, password and fragment, and the Authorization header built from user and password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise StorageError("this is not the URL of a server", redacted(url)) from None
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return urlunsplit(parts._replace(fragment="")), {}
    credentials = b64encode(unquote(user).encode()).decode()
    return urlunsplit(parts._replace(netloc=host, fragment="")), {"Authorization": f"Basic {credentials}"}


def _raise_for_status(response: HttpResponse, url: str) -> None:
    """Return for responses with bytes, and for 416, which has none in the range; raise for all others.

    Raises:
        NotFound: The object does not exist.
        StorageError: The object cannot be read.
        TransientError: A later request may succeed.
    """
    status = response.status
    if status in (200, 206, 416):
        return
    response.close()
    raise_if_transient(status, response.headers)
    if status == 412:
        raise changed_error(url)
    if status in (404, 410):
        raise NotFound("there is no such object", redacted(url))
    if status in (401, 407):
        raise StorageError(
            f"the server requires authentication ({status}): the user or password is missing or wrong", redacted(url)
        )
    if status == 403:
        raise Forbidden("the server denies access to the object (403)", redacted(url))
    raise StorageError(f"the server answers {status}", redacted(url))
