"""HTTP requests, and objects that are read by range requests.

Requests go through urllib3. Every broken connection is a ``TransientError``, and no secret is logged.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from http.client import HTTPResponse
from typing import IO, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from penstock.errors import StorageError, import_extra
from penstock.storage.protocol import (
    Info,
    changed_error,
    past_end_error,
    per_process,
    range_size,
    redacted,
)
from penstock.storage.retry import Retry, StallDetector, TransientError, assemble, fetch, with_retries

MAX_CONNECTIONS = 96  # kept open per server: that many concurrent requests need not connect again
PIECE_BYTES = 1 << 18  # the most one read returns: the cost per piece is small, and a piece fits in the CPU cache
_SLOW_FACTOR = 6  # times stall_s that a server may take to answer when it has work to do: storing bytes, listing names
_LENGTH = re.compile(r"[0-9]{1,18}")
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)")
_CA_BUNDLE_VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PROXY_VARIABLES = tuple(
    cased for name in ("http", "https", "all", "no") for cased in (f"{name}_proxy", f"{name.upper()}_PROXY")
)
_LOGGERS = ("urllib3.connectionpool", "botocore.auth", "botocore.endpoint", "botocore.hooks", "botocore.parsers")


class HttpResponse:
    """A response whose status and headers have arrived, and whose body is still arriving."""

    def __init__(self, response: Any, retry: Retry) -> None:
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._stalls, self._stall_s = StallDetector(retry), retry.stall_s
        self._primed: bytes | None = None
        self._ended = False

    def read(self, max_bytes: int = PIECE_BYTES) -> bytes:
        """Wait for bytes, and return what has arrived, at most ``max_bytes``; empty at the end of the body.

        Raises:
            TransientError: The connection broke or stalled.
        """
        if self._primed is not None:
            primed, self._primed = self._primed[:max_bytes], self._primed[max_bytes:] or None
            return primed
        begin = time.monotonic()
        try:
            data: bytes = self._response.read1(max_bytes)
        except Exception as error:
            raise _connection_error(error, self._stall_s) from None
        self._ended = not data
        self._stalls.received(len(data), time.monotonic() - begin)
        return data

    def readinto(self, buffer: memoryview) -> int:
        """Wait for bytes, and receive what has arrived straight into a buffer; return their number, 0 at the end.

        Raises:
            TransientError: The connection broke or stalled.
        """
        plain = None if self._primed is not None else _plain_body(self._response)
        if plain is None:  # sent in chunks, or buffered already
            data = self.read(min(len(buffer), PIECE_BYTES))
            buffer[: len(data)] = data
            return len(data)
        begin = time.monotonic()
        try:
            # One system call: a buffered readinto() would wait until the buffer is full, and not see a stall.
            received: int = plain.fp.readinto1(buffer[: plain.length])
        except Exception as error:
            raise _connection_error(error, self._stall_s) from None
        plain.length -= received
        if self._response.length_remaining is not None:
            self._response.length_remaining -= received
        self._ended = not received
        self._stalls.received(received, time.monotonic() - begin)
        return received

    def prime(self) -> None:
        """Wait for the first bytes, and buffer them for ``read``."""
        self._primed = self.read() or None

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        """Yield the rest of the body and close it. botocore reads short responses this way."""
        try:
            while piece := self.read():
                yield piece
        finally:
            self.close()

    def close(self) -> None:
        """Return the connection to its pool if the body was read to its end, else close it."""
        if self._ended or self._response.length_remaining == 0:
            try:
                self._response.drain_conn()
            except Exception:
                self._response.close()
        else:
            self._response.close()


class RangeBody:
    """The requested byte range of a response, also where the server sends the whole object instead.

    Attributes:
        size: The size of the whole object, if known.
        tag: The tag of the object, if the server sends one.
        ranged: Whether the server sent a range.

    Raises:
        StorageError: The content has another tag, or ends before ``stop``.
        TransientError: The response is not for the requested range.
    """

    def __init__(self, response: HttpResponse, url: str, start: int, stop: int | None, tag: str | None) -> None:
        self._response = response
        try:
            begin, self.size = _body_range(response, start, stop)
            self.tag = response_tag(response.headers, self.size)
            if tag is not None and tag != self.tag:
                raise changed_error(url)
            if stop is not None and self.size is not None and self.size < stop:
                raise past_end_error(url, self.size, stop)
        except BaseException:
            response.close()
            raise
        self.ranged = begin is not None
        self._skip = start - begin if begin is not None else start
        self._left = None if stop is None and self.size is None else (stop or self.size or 0) - start

    def pieces(self) -> Iterator[bytes]:
        self._skip_to_start()
        while self._left is None or self._left > 0:
            piece = self._response.read(PIECE_BYTES if self._left is None else min(PIECE_BYTES, self._left))
            if not piece:
                return
            if self._left is not None:
                self._left -= len(piece)
            yield piece

    def fill(self, into: memoryview) -> Iterator[memoryview]:
        self._skip_to_start()
        at = 0
        while at < len(into) and (received := self._response.readinto(into[at:])):
            yield into[at : at + received]
            at += received

    def _skip_to_start(self) -> None:
        """Drop what a server that ignores ranges sends before the requested bytes."""
        while self._skip and (dropped := self._response.read(min(PIECE_BYTES, self._skip))):
            self._skip -= len(dropped)

    def prime(self) -> None:
        self._response.prime()

    def close(self) -> None:
        self._response.close()


class HttpStorage(ABC):
    """A storage whose objects are read by HTTP requests, by ranges where the server supports them.

    Attributes:
        retry: How persistent to be.
    """

    __slots__ = ()

    retry: Retry

    @abstractmethod
    def _get(self, url: str, headers: Mapping[str, str]) -> HttpResponse:
        """Send one GET request.

        Returns responses with bytes (200, 206) and those that have none in the range (416); raises all others.
        """

    def info(self, url: str) -> Info:
        return with_retries(lambda: self._request_info(url), url, self.retry)

    def read(
        self, url: str, start: int, stop: int, *, into: memoryview | None = None, tag: str | None = None
    ) -> bytes | memoryview:
        range_size(start, stop, into)
        if into is None:
            return assemble(fetch(partial(self._begin, url), url, self.retry, start, stop, tag, restart=True), start)
        flat = into.cast("B")
        self.receive(url, start, stop, lambda: flat, tag)
        return into

    def receive(self, url: str, start: int, stop: int, buffer: Callable[[], memoryview], tag: str | None) -> None:
        for _ in fetch(partial(self._begin, url), url, self.retry, start, stop, tag, restart=True, into=buffer):
            pass

    def stream(self, url: str) -> Iterator[bytes]:
        return (bytes(piece) for _, piece in fetch(partial(self._begin, url), url, self.retry))

    def local_path(self, url: str) -> str | None:
        return None

    def _request_info(self, url: str) -> Info:
        # A GET of one byte, not a HEAD: signed URLs allow only GET, the response shows whether ranges work, and a
        # refusal has a body that explains it.
        response = self._get(url, range_header(0, 1))
        if response.status == 416:  # the object is empty
            response.close()
            with closing(self._whole(url)) as whole:
                return Info(whole.size, whole.tag, True)
        stop = 1 if "content-range" in response.headers else None
        with closing(RangeBody(response, url, 0, stop, None)) as body:
            if body.ranged:
                for _ in body.pieces():  # a connection can be reused once its response has been read
                    pass
            return Info(body.size, body.tag, body.ranged)

    def _begin(self, url: str, start: int, stop: int | None, tag: str | None) -> RangeBody:
        response = self._get(url, {**range_header(start, stop), **if_match_header(tag)})
        if response.status != 416:
            return RangeBody(response, url, start, stop, tag)
        response.close()
        size = total_size(response.headers)
        if size is None:  # not every server sends the size with a 416
            with closing(self._whole(url)) as whole:
                size = whole.size
        raise past_end_error(url, size or 0, stop or start)

    def _whole(self, url: str) -> RangeBody:
        return RangeBody(self._get(url, {}), url, 0, None, None)


def send_request(
    method: str,
    url: str,
    headers: Mapping[str, str],
    retry: Retry,
    body: bytes | IO[bytes] | None = None,
    slow: bool = False,
) -> HttpResponse:
    """Send one request, and return its response, of any status, once the headers have arrived.

    Redirects are not followed.

    Args:
        method: GET, PUT, ...
        url: The target, without user and password.
        headers: All headers but Host and Content-Length.
        retry: Gives the timeouts.
        body: The request body.
        slow: Whether the server has work to do before it answers, and may take longer.

    Raises:
        MissingExtra: urllib3 is not installed.
        StorageError: No retry can help: a malformed URL, an untrusted certificate.
        TransientError: No response arrived.
    """
    urllib3 = import_extra("urllib3", "http:// and s3:// URLs", "http")
    timeout_s = retry.stall_s * (_SLOW_FACTOR if slow else 1)
    with quiet_loggers():
        try:
            response = _pool_manager(url).urlopen(
                method,
                url,
                body=body,
                headers=dict(headers),
                timeout=urllib3.Timeout(connect=retry.connect_s, read=timeout_s),
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
        except Exception as error:
            _raise_if_permanent(error, url)
            raise _connection_error(error, timeout_s) from None
    return HttpResponse(response, retry)


def raise_if_transient(status: int, headers: Mapping[str, str]) -> None:
    """Raise if a later request may get another status; do nothing for final ones, successful or not.

    Raises:
        TransientError: The status is 408, 423 (locked by another request), 425, 429, or 5xx except 501.
    """
    if status in (408, 423, 425, 429) or (status >= 500 and status != 501):
        raise TransientError(f"the server answers {status}", _retry_after_s(headers.get("retry-after")))


def response_tag(headers: Mapping[str, str], size: int | None) -> str | None:
    """Return what identifies the content: the ETag, else Last-Modified with the size."""
    etag, last_modified = headers.get("etag"), headers.get("last-modified")
    return etag or (f"{last_modified} {size}" if last_modified else None)


def if_match_header(tag: str | None) -> dict[str, str]:
    """Return the header that makes a server refuse other content; it exists for strong ETags only."""
    return {"If-Match": tag} if tag is not None and tag.startswith('"') else {}


def range_header(start: int, stop: int | None) -> dict[str, str]:
    """Return the header that requests a range; a request for the whole object has none."""
    if stop is None:
        return {"Range": f"bytes={start}-"} if start else {}
    return {"Range": f"bytes={start}-{stop - 1}"}


def total_size(headers: Mapping[str, str]) -> int | None:
    """Return the size of the whole object, from Content-Range."""
    match = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
    return int(match[3]) if match and match[3] != "*" else None


def _body_range(response: HttpResponse, start: int, stop: int | None) -> tuple[int | None, int | None]:
    """Return where the body begins (``None``: the server ignores the range and sends all), and the object's size."""
    content_range = response.headers.get("content-range")
    if content_range is None:
        if response.status == 206:
            raise TransientError("the server sent a partial response without Content-Range")
        length = response.headers.get("content-length", "")
        return None, int(length) if _LENGTH.fullmatch(length) else None
    match, size = _CONTENT_RANGE.fullmatch(content_range), total_size(response.headers)
    if not match or match[1] is None or int(match[1]) != start:
        raise TransientError(f"the server sent another range than the one requested from byte {start:,}")
    end = int(match[2]) + 1
    if end <= start or (stop is not None and end > stop) or (end < (stop or 0) and (size is None or end < size)):
        raise TransientError(f"the server sent another range: it ends at byte {end:,} instead of {stop or size}")
    return start, size


def _retry_after_s(retry_after: str | None) -> float | None:
    """Return the seconds that a Retry-After header, a number or a date, asks for."""
    if retry_after is None:
        return None
    if re.fullmatch(r"-?[0-9]{1,9}(\.[0-9]{0,9})?", retry_after.strip()):
        return max(0.0, float(retry_after))
    try:
        moment = parsedate_to_datetime(retry_after)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return max(0.0, (moment - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):  # what the parser raises for text that is not a date
        return None


def _raise_if_permanent(error: Exception, url: str) -> None:
    """Raise a ``StorageError`` if no retry can help."""
    causes = list(_causes(error))
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        raise StorageError("the server's certificate is not trusted", redacted(url)) from None
    if any(type(cause).__name__ in ("LocationParseError", "URLSchemeUnknown", "InvalidURL") for cause in causes):
        raise StorageError("this is not the URL of a server", redacted(url)) from None
    if isinstance(error, ValueError | TypeError):
        raise StorageError(f"the request cannot be sent ({type(error).__name__})", redacted(url)) from None


def _connection_error(error: Exception, timeout_s: float) -> TransientError:
    """Describe how a connection failed, without the original message, which may hold parts of the request."""
    names = {type(cause).__name__ for cause in _causes(error)}
    if "NameResolutionError" in names or "gaierror" in names:
        return TransientError("the server's name cannot be resolved")
    if "ConnectionRefusedError" in names:
        return TransientError("the server refuses connections")
    if "ConnectTimeoutError" in names:
        return TransientError("the server cannot be reached")
    if names & {"ReadTimeoutError", "TimeoutError"}:
        return TransientError(f"the connection stalled: nothing arrived for {timeout_s:g} s")
    if names & {"BadStatusLine", "LineTooLong", "UnknownProtocol", "HeaderParsingError"} - {"RemoteDisconnected"}:
        return TransientError("the response is not HTTP")
    if "IncompleteRead" in names:
        return TransientError("the response ended early")
    return TransientError("the connection broke")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        yield from (value for value in error.args if isinstance(value, BaseException))
        reason = getattr(error, "reason", None)  # an exception in urllib3, a string in ssl
        error = reason if isinstance(reason, BaseException) else error.__cause__ or error.__context__


def _plain_body(response: Any) -> Any:
    """Return the standard library's response behind one of urllib3, if its body can be read from its buffered socket.

    That takes a body of a known length which is not sent in chunks. None: it has to be read through urllib3.
    """
    inner = response._fp
    if not isinstance(inner, HTTPResponse) or inner.chunked or not inner.length:
        return None
    return inner if hasattr(inner.fp, "readinto1") else None


def _pool_manager(url: str) -> Any:
    """Return this process's connection pools: direct ones, or those of the proxy that the environment sets."""
    parts = urlsplit(url)
    proxy = _proxy(parts.scheme, parts.hostname, tuple(map(os.environ.get, _PROXY_VARIABLES)))
    secure = parts.scheme == "https" or (proxy or "").startswith("https")
    return per_process(("connections", proxy, secure), lambda: _make_pool_manager(proxy, secure))


@lru_cache(64)
def _proxy(scheme: str, host: str | None, settings: tuple[str | None, ...]) -> str | None:
    """Return the proxy for a host; going through the whole environment costs more than the rest of a request."""
    return getproxies().get(scheme) if host and not proxy_bypass(host) else None


def _make_pool_manager(proxy: str | None, secure: bool) -> Any:
    urllib3 = import_extra("urllib3", "http:// and s3:// URLs", "http")
    settings = {"num_pools": 64, "maxsize": MAX_CONNECTIONS, **({"ssl_context": _tls_context()} if secure else {})}
    return urllib3.ProxyManager(proxy, **settings) if proxy else urllib3.PoolManager(**settings)


def _tls_context() -> ssl.SSLContext:
    bundle = next((os.environ[name] for name in _CA_BUNDLE_VARIABLES if os.environ.get(name)), None)
    context = ssl.create_default_context(cafile=bundle if bundle and os.path.isfile(bundle) else None)
    context.set_alpn_protocols(["http/1.1"])
    return context


class quiet_loggers:
    """A context in which urllib3 and botocore log nothing from this thread: requests hold tokens and signatures."""

    _depth = threading.local()

    def __enter__(self) -> None:
        self._depth.value = getattr(self._depth, "value", 0) + 1

    def __exit__(self, *_: object) -> None:
        self._depth.value -= 1


def _is_not_quiet(record: logging.LogRecord) -> bool:
    return not getattr(quiet_loggers._depth, "value", 0)


for _name in _LOGGERS:
    logging.getLogger(_name).addFilter(_is_not_quiet)
