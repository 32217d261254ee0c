"""Objects behind HTTP servers, with or without range requests; those that accept PUT, or are WebDAV, can be written."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from penstock.errors import PlanError, StorageError
from penstock.storage.http_client import HttpResponse, HttpStorage, raise_if_transient, send_request
from penstock.storage.http_write import HttpUpload, delete_object, list_objects
from penstock.storage.protocol import Forbidden, Listed, NotFound, Upload, changed_error, pairs_of, redacted
from penstock.storage.retry import DEFAULT, Retry, check_retry, with_retries

_MAX_REDIRECTS = 5  # more of them are a loop
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MEANINGFUL = frozenset({200, 201, 202, 204, 207, 404, 405, 409, 410, 501})  # what writing looks at itself

Sent = bytes | IO[bytes]


@dataclass(frozen=True, slots=True)
class HTTP(HttpStorage):
    """Reads and writes ``http://`` and ``https://`` URLs, which may contain a user and password.

    Attributes:
        user: The user, for servers that ask for a user and password.
        password: The password.
        token: Sent as a bearer token.
        headers: Sent with each request, as (name, value) pairs, but not to other hosts that a server redirects to.
        retry: How persistent to be.
    """

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    retry: Retry = DEFAULT

    def __post_init__(self) -> None:
        for name in ("user", "password", "token"):
            if not isinstance(getattr(self, name), str | None):
                raise PlanError(f"HTTP({name}=): expected text")
        object.__setattr__(self, "headers", pairs_of("HTTP(headers=)", self.headers))
        if not all(isinstance(value, str) for _, value in self.headers):
            raise PlanError("HTTP(headers=): the values must be text")
        check_retry(self.retry)
        if (self.user is None) != (self.password is None):
            raise PlanError("HTTP: give both user and password, or neither")
        if self.user is not None and self.token is not None:
            raise PlanError("HTTP: give a user and password, or a token, not both")

    def list(self, prefix: str) -> Iterator[Listed]:
        return list_objects(self, prefix)

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        return HttpUpload(self, url)

    def delete(self, url: str) -> None:
        delete_object(self, url)

    def send(self, method: str, url: str, headers: Mapping[str, str] | None = None, body: Sent = b"") -> int:
        """Send a request that changes something, with retries; return its status, which may be one of ``_MEANINGFUL``.

        Raises:
            StorageError: The server refuses the request.
        """
        response = self.answer(method, url, headers or {}, body)
        response.close()
        return response.status

    def answer(self, method: str, url: str, headers: Mapping[str, str], body: Sent) -> HttpResponse:
        """Send a request, with retries; return its response: successful, or with a status that the caller handles."""

        def attempt() -> HttpResponse:
            if not isinstance(body, bytes):
                body.seek(0)
            response = self._request(method, url, headers, body)
            if response.status not in _MEANINGFUL:
                _raise_for_status(response, url)
            return response

        return with_retries(attempt, url, self.retry)

    def _get(self, url: str, headers: Mapping[str, str]) -> HttpResponse:
        response = self._request("GET", url, headers)
        _raise_for_status(response, url)
        return response

    def _request(self, method: str, url: str, headers: Mapping[str, str], body: Sent | None = None) -> HttpResponse:
        """Send a request, and follow redirects."""
        target, private_headers = _split_credentials(url)
        private_headers = {**dict(self.headers), **self._authorization(), **private_headers}
        for _ in range(_MAX_REDIRECTS + 1):
            sent = {**private_headers, **headers, "Accept-Encoding": "identity"}
            response = send_request(method, target, sent, self.retry, body, slow=body is not None)
            location = response.headers.get("location")
            if response.status not in _REDIRECTS or not location:
                return response
            response.close()
            target, private_headers = _redirected(target, location, private_headers, url)
            if body is not None and not isinstance(body, bytes):
                body.seek(0)
        raise StorageError(f"the server redirects more than {_MAX_REDIRECTS} times", redacted(url))

    def _authorization(self) -> dict[str, str]:
        if self.token is not None:
            return {"Authorization": f"Bearer {self.token}"}
        return {} if self.user is None else _basic(f"{self.user}:{self.password}")


def _basic(credentials: str) -> dict[str, str]:
    return {"Authorization": f"Basic {b64encode(credentials.encode()).decode()}"}


def _redirected(target: str, location: str, private_headers: dict[str, str], url: str) -> tuple[str, dict[str, str]]:
    """Return the URL that a redirect leads to, and its headers; the user's headers are not sent to another host."""
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
    return urlunsplit(parts._replace(netloc=host, fragment="")), _basic(unquote(user))


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
