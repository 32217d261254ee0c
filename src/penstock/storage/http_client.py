"""One request over HTTP, and how requests for ranges become objects that can be looked at, read and streamed.

Requests are sent by urllib3; every break is a ``Temporary``, and no secret is logged.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from penstock.errors import StorageError
from penstock.storage.protocol import Info, changed, needed, own, redacted, span, too_short
from penstock.storage.retry import Retry, StallDetector, Temporary, again, fetch, gather

PARALLEL = 32  # requests at once that find a connection waiting
PIECE = 1 << 18  # what is read at once at most: large enough that a piece costs little, small enough to stay in cache
_WORK = 6  # times stall_s that a server may take for what is work: to store bytes, to list names
_CONTENT_RANGE = re.compile(r"^bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)$")
_BUNDLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_LOGGERS = ("urllib3.connectionpool", "botocore.auth", "botocore.endpoint", "botocore.hooks", "botocore.parsers")


class Answer:
    """A server's answer: status and headers are there, the body is arriving."""

    def __init__(self, response: Any, retry: Retry) -> None:
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._pace, self._stall_s = StallDetector(retry), retry.stall_s
        self._held: bytes | None = None
        self._ended = False

    def read(self, most: int = PIECE) -> bytes:
        """What has arrived, up to ``most`` bytes, after waiting for the first; nothing at the end.

        Raises:
            Temporary: the connection broke or stalled.
        """
        if self._held is not None:
            held, self._held = self._held[:most], self._held[most:] or None
            return held
        begin = time.monotonic()
        try:
            data: bytes = self._response.read1(most)
        except Exception as error:
            raise _broken(error, self._stall_s) from None
        self._ended = not data
        self._pace.came(len(data), time.monotonic() - begin)
        return data

    def prime(self) -> None:
        """Wait for the first bytes and keep them for ``read``."""
        self._held = self.read() or None

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        """The rest of the body; botocore reads short answers this way."""
        try:
            while piece := self.read():
                yield piece
        finally:
            self.close()

    def close(self) -> None:
        """Give the connection back when the body was read to its end, else up."""
        if self._ended or self._response.length_remaining == 0:
            try:
                self._response.drain_conn()
            except Exception:
                self._response.close()
        else:
            self._response.close()


class RangeBody:
    """The part of an object that an answer brings: what the request asked for, whatever the server made of it.

    Raises:
        StorageError: it is another content, or ends too early.
        Temporary: the answer does not fit the question.
    """

    def __init__(self, answer: Answer, url: str, start: int, stop: int | None, tag: str | None) -> None:
        self._answer = answer
        try:
            begin, self.size = _extent(answer, start, stop)
            self.tag = tag_of(answer.headers, self.size)
            if tag is not None and tag != self.tag:
                raise changed(url)
            if stop is not None and self.size is not None and self.size < stop:
                raise too_short(url, self.size, stop)
        except BaseException:
            answer.close()
            raise
        self.ranged = begin is not None
        self._skip = start - begin if begin is not None else start
        self._left = None if stop is None and self.size is None else (stop or self.size or 0) - start

    def pieces(self) -> Iterator[bytes]:
        """The bytes asked for, as they arrive; those before them are dropped where the server sent all."""
        while self._skip and (lead := self._answer.read(min(PIECE, self._skip))):
            self._skip -= len(lead)
        while self._left is None or self._left > 0:
            piece = self._answer.read(PIECE if self._left is None else min(PIECE, self._left))
            if not piece:
                return
            if self._left is not None:
                self._left -= len(piece)
            yield piece

    def prime(self) -> None:
        """Wait for the first bytes."""
        self._answer.prime()

    def close(self) -> None:
        """Give the connection back, or up."""
        self._answer.close()


@dataclass(frozen=True, slots=True)
class Ranged:
    """An object that is had by requests for its ranges.

    Attributes:
        url: For messages.
        ask: Sends one request with these headers. The answer brings bytes (200, 206) or says that there are none
            there (416); what else a server may answer is raised.
        retry: How patient to be.
    """

    url: str
    ask: Callable[[Mapping[str, str]], Answer]
    retry: Retry

    def info(self) -> Info:
        """Do what :meth:`Storage.info` promises."""
        return again(self._look, self.url, self.retry)

    def read(self, start: int, stop: int, into: memoryview | None, tag: str | None) -> bytes | memoryview:
        """Do what :meth:`Storage.read` promises."""
        span(start, stop, into)
        return gather(fetch(self._begin, self.url, self.retry, start, stop, tag, restart=True), start, into)

    def stream(self) -> Iterator[bytes]:
        """Do what :meth:`Storage.stream` promises."""
        return (piece for _, piece in fetch(self._begin, self.url, self.retry))

    def _look(self) -> Info:
        # A GET of one byte, not a HEAD: signed URLs allow only the one, it shows whether ranges work, and a refusal
        # comes with words.
        answer = self.ask(range_header(0, 1))
        if answer.status == 416:  # there is no first byte
            answer.close()
            with closing(self._whole()) as whole:
                return Info(whole.size, whole.tag, True)
        with closing(RangeBody(answer, self.url, 0, 1 if "content-range" in answer.headers else None, None)) as part:
            if part.ranged:
                for _ in part.pieces():  # a connection whose answer was read can be used again
                    pass
            return Info(part.size, part.tag, part.ranged)

    def _begin(self, start: int, stop: int | None, tag: str | None) -> RangeBody:
        answer = self.ask({**range_header(start, stop), **condition(tag)})
        if answer.status != 416:
            return RangeBody(answer, self.url, start, stop, tag)
        answer.close()
        size = whole_size(answer.headers)
        if size is None:  # not every server says how large it is instead
            with closing(self._whole()) as whole:
                size = whole.size
        raise too_short(self.url, size or 0, stop or start)

    def _whole(self) -> RangeBody:
        return RangeBody(self.ask({}), self.url, 0, None, None)


def send(
    method: str,
    url: str,
    headers: Mapping[str, str],
    retry: Retry,
    body: bytes | None = None,
    patient: bool = False,
) -> Answer:
    """Send one request and wait for the head of the answer, whatever its status; redirects are not followed.

    Args:
        method: GET and so on.
        url: Without user and password.
        headers: All but Host and Content-Length.
        retry: For how long to wait.
        body: What is sent along.
        patient: Whether the server has work to do before it can answer.

    Raises:
        MissingExtra: urllib3 is not installed.
        StorageError: it can never go well: no such protocol, a certificate nobody trusts.
        Temporary: no answer came.
    """
    urllib3 = needed("urllib3", "http:// and s3:// URLs", "http")
    patience = retry.stall_s * (_WORK if patient else 1)
    with quiet():
        try:
            response = _pools(url).urlopen(
                method,
                url,
                body=body,
                headers=dict(headers),
                timeout=urllib3.Timeout(connect=retry.connect_s, read=patience),
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
        except Exception as error:
            _final(error, url)
            raise _broken(error, patience) from None
    return Answer(response, retry)


def must_succeed(status: int, headers: Mapping[str, str], what: str = "the server") -> None:
    """Let an answer pass, or say that it may be another one next time.

    Raises:
        Temporary: the status is of that kind.
    """
    if status in (408, 425, 429) or (status >= 500 and status != 501):
        raise Temporary(f"{what} answers {status}", _after(headers.get("retry-after")))


def tag_of(headers: Mapping[str, str], size: int | None) -> str | None:
    """What tells contents apart: the ETag, else the time of the last change with the size."""
    tag, day = headers.get("etag"), headers.get("last-modified")
    return tag or (f"{day} {size}" if day else None)


def condition(tag: str | None) -> dict[str, str]:
    """The header that lets a server refuse another content; only strong ETags can be asked for."""
    return {"If-Match": tag} if tag is not None and tag.startswith('"') else {}


def range_header(start: int, stop: int | None) -> dict[str, str]:
    """The header that asks for a part; the whole is asked for without one."""
    if stop is None:
        return {"Range": f"bytes={start}-"} if start else {}
    return {"Range": f"bytes={start}-{stop - 1}"}


def whole_size(headers: Mapping[str, str]) -> int | None:
    """The size of the object that a Content-Range names."""
    match = _CONTENT_RANGE.match(headers.get("content-range", ""))
    return int(match[3]) if match and match[3] != "*" else None


def _extent(answer: Answer, start: int, stop: int | None) -> tuple[int | None, int | None]:
    """Where the body begins (``None``: the server sends all, whatever was asked), and the size of the whole."""
    told = answer.headers.get("content-range")
    if told is None:
        if answer.status == 206:
            raise Temporary("the server sends a part and does not say which")
        length = answer.headers.get("content-length", "")
        return None, int(length) if length.isdigit() else None
    match, size = _CONTENT_RANGE.match(told), whole_size(answer.headers)
    if not match or match[1] is None or int(match[1]) != start:
        raise Temporary(f"the server sends another part than the one from {start:,} on")
    end = int(match[2]) + 1
    if end <= start or (stop is not None and end > stop) or (end < (stop or 0) and (size is None or end < size)):
        raise Temporary(f"the server sends the part up to {end:,} instead of {stop or size}")
    return start, size


def _after(told: str | None) -> float | None:
    """Seconds that Retry-After asks for: a number or a date."""
    if told is None:
        return None
    try:
        return max(0.0, float(told))
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(told)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def _final(error: Exception, url: str) -> None:
    """Raise what no second try can mend."""
    causes = list(_causes(error))
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        raise StorageError("the server's certificate is not trusted", redacted(url)) from None
    if any(type(cause).__name__ in ("LocationParseError", "URLSchemeUnknown", "InvalidURL") for cause in causes):
        raise StorageError("this is no URL of a server", redacted(url)) from None
    if isinstance(error, ValueError | TypeError):
        raise StorageError(f"the request cannot be written ({type(error).__name__})", redacted(url)) from None


def _broken(error: Exception, patience: float) -> Temporary:
    """Say in plain words, without what the request held, how a connection failed."""
    names = {type(cause).__name__ for cause in _causes(error)}
    if "NameResolutionError" in names or "gaierror" in names:
        return Temporary("the server's name is not known")
    if "ConnectionRefusedError" in names:
        return Temporary("the server refuses connections")
    if "ConnectTimeoutError" in names:
        return Temporary("the server cannot be reached")
    if names & {"ReadTimeoutError", "TimeoutError"}:
        return Temporary(f"it stalled: nothing came for {patience:g} s")
    if names & {"BadStatusLine", "LineTooLong", "UnknownProtocol", "HeaderParsingError"} - {"RemoteDisconnected"}:
        return Temporary("the answer is no HTTP")
    if "IncompleteRead" in names:
        return Temporary("the answer ended early")
    return Temporary("the connection broke")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        yield from (part for part in error.args if isinstance(part, BaseException))
        reason = getattr(error, "reason", None)  # urllib3 keeps an exception there, ssl a word
        error = reason if isinstance(reason, BaseException) else error.__cause__ or error.__context__


def _pools(url: str) -> Any:
    """The connections of this process: direct ones, or through the proxy the environment names for this server."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme) if parts.hostname and not proxy_bypass(parts.hostname) else None
    secure = parts.scheme == "https" or (proxy or "").startswith("https")
    return own(("connections", proxy, secure), lambda: _make_pools(proxy, secure))


def _make_pools(proxy: str | None, secure: bool) -> Any:
    urllib3 = needed("urllib3", "http:// and s3:// URLs", "http")
    settings = {"num_pools": 64, "maxsize": PARALLEL, **({"ssl_context": _trust()} if secure else {})}
    return urllib3.ProxyManager(proxy, **settings) if proxy else urllib3.PoolManager(**settings)


def _trust() -> ssl.SSLContext:
    bundle = next((os.environ[name] for name in _BUNDLES if os.environ.get(name)), None)
    context = ssl.create_default_context(cafile=bundle if bundle and os.path.isfile(bundle) else None)
    context.set_alpn_protocols(["http/1.1"])
    return context


class quiet:
    """Within it, urllib3 and botocore do not log what this thread does: requests hold tokens and signatures."""

    _depth = threading.local()

    def __enter__(self) -> None:
        self._depth.value = getattr(self._depth, "value", 0) + 1

    def __exit__(self, *_: object) -> None:
        self._depth.value -= 1


def _not_ours(record: logging.LogRecord) -> bool:
    return not getattr(quiet._depth, "value", 0)


for _name in _LOGGERS:
    logging.getLogger(_name).addFilter(_not_ours)
