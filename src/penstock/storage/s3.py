"""Objects in S3 and what speaks like it. botocore finds the keys, signs and reads answers; the wire is ours."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from penstock.errors import StorageError
from penstock.storage.http_client import PARALLEL, Answer, Ranged, must_succeed, quiet, send
from penstock.storage.protocol import (
    Forbidden,
    Info,
    Listed,
    NotFound,
    Upload,
    changed,
    needed,
    own,
    redacted,
)
from penstock.storage.retry import DEFAULT, Retry, Temporary, again

_REGION = "us-east-1"  # where nothing says another: servers that are not Amazon's sign with it, Amazon redirects
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_TOLD = (  # what decides about keys and server, and may be another thing a moment later, as in a notebook
    *_ENDPOINTS,
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_REGION",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
)
_SENTENCES = {
    "NoSuchBucket": "there is no such bucket",
    "InvalidAccessKeyId": "the access key is not known there: the keys are wrong",
    "SignatureDoesNotMatch": "the signature does not fit: the secret key is wrong",
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the session token is wrong",
    "AccessDenied": "access denied: these keys may not do this, or the keys are wrong",
    "RequestTimeTooSkewed": "the clock of this machine is wrong: the server refuses the signature",
    "AllAccessDisabled": "access to it is disabled",
    "NoSuchUpload": "somebody else has dropped or completed this upload",
    "InvalidObjectState": "it is archived and has to be restored first",
}
_ASKED = {"Range": "Range", "If-Match": "IfMatch"}  # headers, as botocore names them
_MISSING = frozenset({"NoSuchKey", "404", "NotFound"})
_AGAIN = frozenset(
    {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling", "OperationAborted"}
)


@dataclass(frozen=True, slots=True)
class S3:
    """Reads and writes ``s3://bucket/key``; ``s3://anonymous@bucket/key`` without keys.

    Keys that are not given come from the environment, the profile files, or the identity of the machine or the pod, as
    botocore finds them. The value can be pickled: it then carries the keys it was given.

    Attributes:
        endpoint: The server, where it is not Amazon's; buckets are then named in the path.
        access_key: With ``secret_key``: the keys.
        secret_key: See there.
        region: Where the bucket is.
        anonymous: Sign nothing.
        profile: A profile of the user's AWS files.
        session_token: Belongs to keys that expire.
        retry: How patient to be.
    """

    endpoint: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    region: str | None = None
    anonymous: bool = False
    profile: str | None = None
    session_token: str | None = field(default=None, repr=False)
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
        bucket, key, _ = _place(prefix)
        root = prefix[: len(prefix) - len(key)].rstrip("/")
        folder = key.rstrip("/") + "/" if key.rstrip("/") else ""
        ask: dict[str, Any] = {"Bucket": bucket, "Prefix": folder}
        found: list[tuple[str, int]] = []
        while ask:
            page = self.call("list_objects_v2", prefix, ask)
            found += ((one["Key"], one["Size"]) for one in page.get("Contents", ()) if not one["Key"].endswith("/"))
            token = page.get("NextContinuationToken") if page.get("IsTruncated") else None
            ask = {**ask, "ContinuationToken": token} if token else {}
        return (Listed(f"{root}/{name}", size) for name, size in sorted(found))  # not every server sorts

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        return S3Upload(self, url, _object(url), size_hint)

    def delete(self, url: str) -> None:
        self.call("delete_object", url, _object(url))

    def local_path(self, url: str) -> str | None:
        return None

    def drop_uploads(self, folder: str, ours: Callable[[str], bool]) -> int:
        """Drop uploads in parts that were begun below a folder and never ended: nobody sees them, and they cost room.

        Args:
            folder: The folder.
            ours: Asked by the name of each object below it.

        Returns:
            How many there were.

        Raises:
            StorageError: they cannot be listed or dropped.
        """
        bucket, key, _ = _place(folder)
        prefix = key.rstrip("/") + "/" if key.rstrip("/") else ""
        ask: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
        found: list[dict[str, str]] = []
        with suppress(_NoUpload):  # what some servers say where there are none
            while ask:
                page = self.call("list_multipart_uploads", folder, ask)
                found += ({"Key": one["Key"], "UploadId": one["UploadId"]} for one in page.get("Uploads", ()))
                markers = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
                ask = {**ask, **markers} if page.get("IsTruncated") and all(markers.values()) else {}
        dropped = [one for one in found if ours(one["Key"].removeprefix(prefix))]
        for one in dropped:
            with suppress(_NoUpload):  # it has ended since
                self.call("abort_multipart_upload", folder, {"Bucket": bucket, **one})
        return len(dropped)

    def call(self, operation: str, url: str, ask: Mapping[str, Any]) -> Any:
        """Do one operation of the S3 API, with retries; ``url`` says in messages what it was about.

        Raises:
            StorageError: it failed.
        """
        return again(lambda: self.call_once(operation, url, ask), url, self.retry)

    def call_once(self, operation: str, url: str, ask: Mapping[str, Any]) -> Any:
        """Do one operation without retries.

        Raises:
            StorageError: it failed for good.
            Temporary: it may go well the next time.
        """
        exceptions = needed("botocore.exceptions", "s3:// URLs", "s3")
        storage = replace(self, anonymous=True) if _place(url)[2] else self
        try:
            with quiet():
                return getattr(own((storage, *map(os.environ.get, _TOLD)), storage._client), operation)(**ask)
        except exceptions.ClientError as error:
            raise _refused(error.response, url) from None
        except exceptions.BotoCoreError as error:
            raise _unasked(error, url) from None

    def _object(self, url: str) -> Ranged:
        return Ranged(url, partial(self._get, url), self.retry)

    def _get(self, url: str, headers: Mapping[str, str]) -> Answer:
        ask = {_ASKED[name]: value for name, value in headers.items()}
        with suppress(_Behind):  # the answer says so too
            self.call_once("get_object", url, {**_object(url), **ask})
        answer: Answer = _sent.answer
        return answer

    def _client(self) -> Any:
        session = needed("botocore.session", "s3:// URLs", "s3").Session(profile=self.profile)
        config = needed("botocore.config", "s3:// URLs", "s3").Config
        unsigned = needed("botocore", "s3:// URLs", "s3").UNSIGNED
        session.register_component("data_loader", _models())
        if self.access_key is not None:
            session.set_credentials(self.access_key, self.secret_key, self.session_token)
        elsewhere = self.endpoint or any(os.environ.get(name) for name in _ENDPOINTS)
        client = session.create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region or session.get_config_variable("region") or _REGION,
            config=config(
                signature_version=unsigned if self.anonymous else None,
                s3={"addressing_style": "path" if elsewhere else "auto"},
                retries={"total_max_attempts": 1, "mode": "standard"},
                max_pool_connections=PARALLEL,
                # Servers that are not Amazon's do not know the newer checksums.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
        client.meta.events.register("before-send.s3", _Sender(self.retry))
        return client


_sent = threading.local()


@cache
def _models() -> Any:
    """botocore's description of S3, parsed once for all clients; it is data, so a forked child may keep it."""
    return needed("botocore.loaders", "s3:// URLs", "s3").create_loader()


@dataclass(frozen=True, slots=True)
class _Sender:
    """Sends what botocore has signed over our wire, and keeps this thread's last answer."""

    retry: Retry

    def __call__(self, request: Any, **_: Any) -> Any:
        headers = {name: _text(value) for name, value in request.headers.items()}
        headers.pop("Expect", None)  # the body is sent at once
        body = request.body.read() if hasattr(request.body, "read") else request.body
        patient = request.method not in ("GET", "HEAD") or "list-type=" in request.url
        answer: Answer = send(request.method, request.url, headers, self.retry, body, patient)
        _sent.answer = answer
        respond = needed("botocore.awsrequest", "s3:// URLs", "s3").AWSResponse
        return respond(request.url, answer.status, dict(answer.headers), answer)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class _NoUpload(StorageError):
    """There is no such upload in parts."""


class _Behind(Exception):
    """The range begins behind the end."""


def _place(url: str) -> tuple[str, str, bool]:
    """Bucket, key, and whether to go there without keys.

    Raises:
        StorageError: this is no such URL.
    """
    bucket, _, key = url.partition("://")[2].partition("/")
    user, at, bucket = bucket.rpartition("@")
    if at and user != "anonymous":
        raise StorageError("keys do not belong into a URL: give storage=S3(access_key=, secret_key=)", redacted(url))
    if not url.startswith("s3://") or not bucket:
        raise StorageError("this is no URL like s3://bucket/key", redacted(url))
    return bucket, key, bool(at)


def _object(url: str) -> dict[str, str]:
    bucket, key, _ = _place(url)
    if not key:
        raise StorageError("this names a bucket, not an object in it", redacted(url))
    return {"Bucket": bucket, "Key": key}


def _refused(response: Mapping[str, Any], url: str) -> Exception:
    """What a server's refusal means."""
    code, told = str(response.get("Error", {}).get("Code", "")), response["ResponseMetadata"]
    status = told.get("HTTPStatusCode", 0)
    try:
        must_succeed(status, told.get("HTTPHeaders", {}))
    except Temporary as trouble:
        return trouble
    if code in _AGAIN:
        return Temporary(f"the server answers {code}")
    if status == 416:
        return _Behind()
    if status == 412:
        return changed(url)
    if code in _MISSING:
        return NotFound("there is no such object", redacted(url))
    word = code if code.isalnum() else str(status)
    sentence = _SENTENCES.get(code) or (_SENTENCES["AccessDenied"] if status == 403 else None)
    if code == "NoSuchUpload":
        return _NoUpload(f"{sentence} ({word})", redacted(url))
    kind = Forbidden if code in ("AccessDenied", "Forbidden", "403") else StorageError
    return kind(f"{sentence} ({word})" if sentence else f"the server refuses: {word}", redacted(url))


def _unasked(error: Exception, url: str) -> StorageError:
    """Why nothing was asked: botocore's own words may hold what it was given."""
    kind = type(error).__name__
    if kind in ("NoCredentialsError", "PartialCredentialsError"):
        sentence = "no keys were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, give storage=S3(...), or go "
        return StorageError(f"{sentence}without any by s3://anonymous@bucket/key", redacted(url))
    if kind == "ProfileNotFound":
        return StorageError("there is no such profile in the user's AWS files", redacted(url))
    return StorageError(f"it cannot be asked for ({kind})", redacted(url))


if TYPE_CHECKING:
    from penstock.storage.s3 import S3

_log = logging.getLogger("penstock.storage")
_AT_ONCE = 4  # parts on their way: memory is that many parts and the one being filled
_LEAST, _MOST = 8 << 20, 16 << 20  # a part, in bytes
_PARTS = 10_000  # the most S3 allows


class S3Upload(Upload):
    """Nothing is sent before a part is full; all parts are of one size, as some servers demand."""

    def __init__(self, storage: S3, url: str, place: dict[str, str], size_hint: int | None) -> None:
        super().__init__(url)
        self._storage, self._place = storage, place
        self._at = url  # with "anonymous@", if it was there
        self._part = part_size(size_hint)
        self._buffer = bytearray()
        self._id: str | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._sent: list[Future[str]] = []
        self._running: set[Future[str]] = set()

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            room = self._part - len(self._buffer)
            self._buffer += rest[:room]
            rest = rest[room:]
            if len(self._buffer) == self._part:
                self._send_part()

    def _commit(self) -> Info:
        if self._id is None:
            told = self._ask("put_object", Body=bytes(self._buffer))
        else:
            if self._buffer:
                self._send_part()
            tags = [{"PartNumber": number, "ETag": sent.result()} for number, sent in enumerate(self._sent, 1)]
            self._close_pool()
            told = self._complete(tags)
        if told.get("ETag") is None or self._id is not None:  # not every server tells the tag of joined parts rightly
            return self._storage.info(self._at)
        return Info(self.written, told["ETag"], True)

    def _abort(self) -> None:
        for sent in self._sent:
            sent.cancel()
        self._close_pool()
        self._buffer = bytearray()
        if self._id is not None:
            try:
                self._ask("abort_multipart_upload", UploadId=self._id)
            except StorageError as error:  # what led here matters more; buckets drop such parts by rule
                _log.warning("parts of an upload were left behind: %s", error)

    def _send_part(self) -> None:
        """Hand the buffer to a thread; wait when enough parts are on their way."""
        if len(self._sent) == _PARTS:
            raise StorageError(f"it has more than {_PARTS:,} parts: give size_hint= for larger ones", self.url)
        if self._id is None:
            self._id = self._ask("create_multipart_upload")["UploadId"]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_AT_ONCE, "penstock-upload")
        if len(self._running) == _AT_ONCE:
            done, self._running = wait(self._running, return_when=FIRST_COMPLETED)
            for sent in done:
                sent.result()  # a part that failed ends it here, not at the end
        data, self._buffer = bytes(self._buffer), bytearray()
        sent = self._pool.submit(self._upload, len(self._sent) + 1, data)
        self._sent.append(sent)
        self._running.add(sent)

    def _upload(self, number: int, data: bytes) -> str:
        tag: str = self._ask("upload_part", UploadId=self._id, PartNumber=number, Body=data)["ETag"]
        return tag

    def _complete(self, tags: list[dict[str, Any]]) -> Any:
        """Join the parts; when an answer was lost, the second request may find that it was done."""
        ask = {**self._place, "UploadId": self._id, "MultipartUpload": {"Parts": tags}}
        lost = False

        def once() -> Any:
            nonlocal lost
            try:
                return self._storage.call_once("complete_multipart_upload", self._at, ask)
            except Temporary:
                lost = True
                raise
            except StorageError as error:
                head = self._storage.info(self._at) if lost and "NoSuchUpload" in error.problem else None
                if head is None or head.size != self.written:
                    raise
                return {"ETag": head.tag}

        return again(once, self._at, self._storage.retry)

    def _ask(self, operation: str, **ask: Any) -> Any:
        return self._storage.call(operation, self._at, {**self._place, **ask})

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def part_size(size_hint: int | None) -> int:
    """How large the parts of an object are to be: small ones begin sooner, but there may not be too many.

    >>> [part_size(hint) // 2**20 for hint in (None, 10**9, 10**11, 10**12)]
    [16, 8, 16, 128]
    """
    if size_hint is None:
        return _MOST
    size = _LEAST
    while size * (_PARTS - 1000) < size_hint:  # a hint may be a little wrong
        size *= 2
    return size
