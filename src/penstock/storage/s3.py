"""Objects in S3 and what speaks like it. botocore finds the keys, signs and reads answers; the wire is ours."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from penstock.errors import StorageError
from penstock.storage.protocol import (
    Forbidden,
    Info,
    Listed,
    NotFound,
    Upload,
    changed,
    needed,
    own,
    shown,
)
from penstock.storage.retry import DEFAULT, Retry, Temporary, again
from penstock.storage.s3_upload import S3Upload
from penstock.storage.wire import PARALLEL, Answer, Ranged, must_succeed, quiet, send

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
        raise StorageError("keys do not belong into a URL: give storage=S3(access_key=, secret_key=)", shown(url))
    if not url.startswith("s3://") or not bucket:
        raise StorageError("this is no URL like s3://bucket/key", shown(url))
    return bucket, key, bool(at)


def _object(url: str) -> dict[str, str]:
    bucket, key, _ = _place(url)
    if not key:
        raise StorageError("this names a bucket, not an object in it", shown(url))
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
        return NotFound("there is no such object", shown(url))
    word = code if code.isalnum() else str(status)
    sentence = _SENTENCES.get(code) or (_SENTENCES["AccessDenied"] if status == 403 else None)
    if code == "NoSuchUpload":
        return _NoUpload(f"{sentence} ({word})", shown(url))
    kind = Forbidden if code in ("AccessDenied", "Forbidden", "403") else StorageError
    return kind(f"{sentence} ({word})" if sentence else f"the server refuses: {word}", shown(url))


def _unasked(error: Exception, url: str) -> StorageError:
    """Why nothing was asked: botocore's own words may hold what it was given."""
    kind = type(error).__name__
    if kind in ("NoCredentialsError", "PartialCredentialsError"):
        sentence = "no keys were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, give storage=S3(...), or go "
        return StorageError(f"{sentence}without any by s3://anonymous@bucket/key", shown(url))
    if kind == "ProfileNotFound":
        return StorageError("there is no such profile in the user's AWS files", shown(url))
    return StorageError(f"it cannot be asked for ({kind})", shown(url))
