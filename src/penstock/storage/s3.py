"""Objects in S3 and compatible stores.

botocore finds the credentials, makes and signs requests and parses responses; ``http_client`` sends the requests. What
botocore does for a request takes a millisecond. So the objects of a bucket are requested as it requested the first one,
with its signatures but without the rest; unless that succeeds, botocore repeats the request and explains the error.
"""

from __future__ import annotations

import builtins
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from queue import SimpleQueue
from typing import Any
from urllib.parse import quote

from penstock.errors import PlanError, StorageError, import_extra
from penstock.plan import check_flag
from penstock.storage.http_client import (
    MAX_CONNECTIONS,
    HttpResponse,
    HttpStorage,
    quiet_loggers,
    raise_if_transient,
    send_request,
)
from penstock.storage.protocol import (
    Forbidden,
    Info,
    Listed,
    NotFound,
    Upload,
    changed_error,
    per_process,
    redacted,
)
from penstock.storage.retry import DEFAULT, Retry, TransientError, check_retry, with_retries

_log = logging.getLogger("penstock.storage")

_DEFAULT_REGION = "us-east-1"  # other servers than Amazon's expect it in signatures, and Amazon's redirect from it
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_CLIENT_VARIABLES = (  # they select credentials and server, and may change during a process, as in a notebook
    *_ENDPOINT_VARIABLES,
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_REGION",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
)
_EXPLANATIONS = {
    "NoSuchBucket": "there is no such bucket",
    "InvalidAccessKeyId": "the server does not know the access key: the keys are wrong",
    "SignatureDoesNotMatch": "the signature does not match: the secret key is wrong",
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the session token is wrong",
    "AccessDenied": "access denied: these keys lack the permission, or the keys are wrong",
    "RequestTimeTooSkewed": "the clock of this machine is wrong: the server refuses the signature",
    "AllAccessDisabled": "access to the object is disabled",
    "NoSuchUpload": "the upload was already aborted or completed",
    "InvalidObjectState": "the object is archived and must be restored first",
}
_PARAMETERS = {"Range": "Range", "If-Match": "IfMatch"}  # headers, and botocore's names for them
_SIGNATURE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^,]*/([^/,]+)/s3/aws4_request,")  # its group is the region
_GOT = (200, 206, 416)  # statuses that HttpStorage expects
_NOT_FOUND_CODES = frozenset({"NoSuchKey", "404", "NotFound"})
_TRANSIENT_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling", "OperationAborted"}
)

_CONCURRENT_PARTS = 4  # an upload holds this many parts in memory, and the one being filled
_Found = tuple[str, int, str | None]  # the key, size and tag of an object in a listing
_CONCURRENT_LISTINGS = 16  # folders that are listed at a time: each page is a round trip
_MIN_PART_BYTES, _DEFAULT_PART_BYTES = 8 << 20, 16 << 20
_MAX_PARTS = 10_000  # a limit of S3


@dataclass(frozen=True, slots=True)
class S3(HttpStorage):
    """Reads and writes ``s3://bucket/key``; ``s3://anonymous@bucket/key`` is accessed without credentials.

    Credentials that are not given here come from the environment, the profile files, or the identity of the machine or
    pod, as botocore finds them. A pickle of the value contains the credentials that were given.

    Attributes:
        endpoint: The URL of a server other than Amazon's; bucket names then go into the path.
        access_key: The access key; needs ``secret_key``.
        secret_key: The secret key; needs ``access_key``.
        region: The region of the bucket.
        anonymous: Send unsigned requests.
        profile: A profile in the user's AWS files.
        session_token: The token of temporary keys.
        retry: How persistent to be.

    Raises:
        PlanError: A value is not of its type, or keys are incomplete.
    """

    endpoint: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    region: str | None = None
    anonymous: bool = False
    profile: str | None = None
    session_token: str | None = field(default=None, repr=False)
    retry: Retry = DEFAULT

    def __post_init__(self) -> None:
        for name in ("endpoint", "access_key", "secret_key", "region", "profile", "session_token"):
            if not isinstance(getattr(self, name), str | None):
                raise PlanError(f"S3({name}=): expected text")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            problem = "it must begin with http:// or https://, as in http://localhost:9000"
            raise PlanError(f"S3(endpoint={redacted(self.endpoint)!r}): {problem}")
        check_flag("anonymous", self.anonymous)
        check_retry(self.retry)
        if (self.access_key is None) != (self.secret_key is None):
            raise PlanError("S3(): access_key= and secret_key= belong together: give both, or neither")
        if self.session_token is not None and self.access_key is None:
            raise PlanError("S3(): session_token= needs access_key= and secret_key=")

    def __repr__(self) -> str:
        shown = {own.name: getattr(self, own.name) for own in fields(self) if own.repr}
        shown["endpoint"] = self.endpoint and redacted(self.endpoint)
        return f"S3({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def list(self, prefix: str) -> Iterator[Listed]:
        bucket, key, _ = _split_url(prefix)
        root = prefix[: len(prefix) - len(key)].rstrip("/")
        params = {"Bucket": bucket, "Prefix": _folder_prefix(key)}
        pages = self._pages(prefix, params)
        first = next(pages)
        found = _listed(first)
        if first.get("IsTruncated") and any("/" in name[len(params["Prefix"]) :] for name, _, _ in found):
            found = self._list_folders(prefix, params)  # side by side: a page arrives only after the one before it
        else:
            found += (entry for page in pages for entry in _listed(page))
        return (Listed(f"{root}/{name}", size, tag) for name, size, tag in sorted(found))  # not every server sorts

    def _list_folders(self, url: str, params: Mapping[str, Any]) -> builtins.list[_Found]:
        """List the objects of a folder, and those of each folder in it, at the same time."""
        top = builtins.list(self._pages(url, {**params, "Delimiter": "/"}))
        found = [entry for page in top for entry in _listed(page)]
        folders = [folder["Prefix"] for page in top for folder in page.get("CommonPrefixes", ())]

        def list_folder(folder: str) -> builtins.list[_Found]:
            return [entry for page in self._pages(url, {**params, "Prefix": folder}) for entry in _listed(page)]

        with ThreadPoolExecutor(_CONCURRENT_LISTINGS, "penstock-list") as pool:
            return [*found, *(entry for entries in pool.map(list_folder, folders) for entry in entries)]

    def _pages(self, url: str, params: Mapping[str, Any]) -> Iterator[Any]:
        token: str | None = None
        while True:
            try:
                page = self.call("list_objects_v2", url, {**params, **({"ContinuationToken": token} if token else {})})
            except Forbidden as error:
                advice = "listing needs s3:ListBucket; without it, write out the names, as in a-{000..146}.tar"
                raise Forbidden(f"{error.problem}; {advice}", error.url) from error
            yield page
            token = page.get("NextContinuationToken") if page.get("IsTruncated") else None
            if not token:
                return

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        return S3Upload(self, url, _object_params(url), size_hint)

    def delete(self, url: str) -> None:
        self.call("delete_object", url, _object_params(url))

    def drop_uploads(self, folder: str, should_abort: Callable[[str], bool]) -> int:
        """Abort multipart uploads below a folder that were never completed: they are invisible and take up space.

        Args:
            folder: The folder.
            should_abort: Called with the name, relative to the folder, of each object being uploaded.

        Returns:
            The number of uploads aborted.

        Raises:
            StorageError: The uploads cannot be listed or aborted.
        """
        bucket, key, _ = _split_url(folder)
        prefix = _folder_prefix(key)
        params: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
        found: list[dict[str, str]] = []
        with suppress(_NoSuchUpload):  # some servers answer this if there are no uploads
            while params:
                page = self.call("list_multipart_uploads", folder, params)
                found += ({"Key": entry["Key"], "UploadId": entry["UploadId"]} for entry in page.get("Uploads", ()))
                markers = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
                params = {**params, **markers} if page.get("IsTruncated") and all(markers.values()) else {}
        dropped = [upload for upload in found if should_abort(upload["Key"].removeprefix(prefix))]
        for upload in dropped:
            with suppress(_NoSuchUpload):  # it ended in the meantime
                self.call("abort_multipart_upload", folder, {"Bucket": bucket, **upload})
        return len(dropped)

    def call(self, operation: str, url: str, params: Mapping[str, Any]) -> Any:
        """Call an operation of the S3 API, with retries. ``url`` is what messages name.

        Raises:
            StorageError: The operation failed.
        """
        return with_retries(lambda: self.call_once(operation, url, params), url, self.retry)

    def call_once(self, operation: str, url: str, params: Mapping[str, Any]) -> Any:
        """Call an operation of the S3 API, without retries.

        Raises:
            StorageError: The operation failed for good.
            TransientError: A retry may succeed.
        """
        with _explained(url):
            return getattr(self._access(url).client, operation)(**params)

    def _access(self, url: str) -> _Access:
        storage = replace(self, anonymous=True) if _split_url(url)[2] else self
        return per_process((storage, *map(os.environ.get, _CLIENT_VARIABLES)), storage._new_access)

    def _get(self, url: str, headers: Mapping[str, str]) -> HttpResponse:
        target = _object_params(url)
        with _explained(url):
            access = self._access(url)
            request = access.request(target["Bucket"], target["Key"], headers)
        if request is not None:
            response = send_request("GET", *request, self.retry)
            if response.status in _GOT:
                return response
            _close_failed(response, url)
        params = {_PARAMETERS[name]: value for name, value in headers.items()}
        with suppress(_RangeNotSatisfiable):  # HttpStorage expects the response
            self.call_once("get_object", url, {**target, **params})
        access.learn(target["Bucket"], target["Key"], _last.request)
        received: HttpResponse = _last.response
        return received

    def _new_access(self) -> _Access:
        session = import_extra("botocore.session", "s3:// URLs", "s3").Session(profile=self.profile)
        config = import_extra("botocore.config", "s3:// URLs", "s3").Config
        unsigned = import_extra("botocore", "s3:// URLs", "s3").UNSIGNED
        session.register_component("data_loader", _data_loader())
        if self.access_key is not None:
            session.set_credentials(self.access_key, self.secret_key, self.session_token)
        other_server = self.endpoint or any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
        client = session.create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region or session.get_config_variable("region") or _DEFAULT_REGION,
            config=config(
                signature_version=unsigned if self.anonymous else None,
                s3={"addressing_style": "path" if other_server else "auto"},
                retries={"total_max_attempts": 1, "mode": "standard"},
                max_pool_connections=MAX_CONNECTIONS,
                # Servers other than Amazon's do not support the newer checksums.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
        client.meta.events.register("before-send.s3", _SignedSender(self.retry))
        return _Access(client, None if self.anonymous else session.get_credentials())


_last = threading.local()  # its "request" and "response" are the last ones that botocore made in the thread


@dataclass(frozen=True, slots=True)
class _Access:
    """botocore's client, and how it requests the objects of each bucket.

    Attributes:
        client: The client.
        credentials: Those that it signs with; None if requests are not signed.
        buckets: The URL that the keys of a bucket are appended to, and the region in its signatures.
    """

    client: Any
    credentials: Any
    buckets: dict[str, tuple[str, str]] = field(default_factory=dict)

    def learn(self, bucket: str, key: str, request: Any) -> None:
        """Keep how an object was requested, if others can be requested in the same way."""
        path = quote(key)
        signature = _SIGNATURE.match(_text(request.headers.get("Authorization", "")))
        if request.url.endswith("/" + path) and (signature or self.credentials is None):
            self.buckets[bucket] = request.url[: -len(path)], signature[1] if signature else ""

    def request(self, bucket: str, key: str, headers: Mapping[str, str]) -> tuple[str, Mapping[str, str]] | None:
        """Return the URL and headers of a request for an object; None if it is not known how they are made."""
        if bucket not in self.buckets:
            return None
        root, region = self.buckets[bucket]
        if self.credentials is None:
            return root + quote(key), headers
        auth = import_extra("botocore.auth", "s3:// URLs", "s3").S3SigV4Auth
        request = import_extra("botocore.awsrequest", "s3:// URLs", "s3").AWSRequest("GET", root + quote(key), headers)
        auth(self.credentials.get_frozen_credentials(), "s3", region).add_auth(request)
        return request.url, {name: _text(value) for name, value in request.headers.items()}


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turn botocore's exceptions into ``StorageError`` and ``TransientError``."""
    exceptions = import_extra("botocore.exceptions", "s3:// URLs", "s3")
    try:
        with quiet_loggers():
            yield
    except exceptions.ClientError as error:
        raise _server_error(error.response, url) from None
    except exceptions.BotoCoreError as error:
        raise _client_error(error, url) from None
    except ValueError as error:
        if not str(error).startswith("Invalid endpoint"):
            raise
        problem = "the endpoint in the environment or the profile is not a URL, such as http://localhost:9000"
        raise StorageError(problem, redacted(url)) from None


def _close_failed(response: HttpResponse, url: str) -> None:
    """Close a response that is not an object, and return if botocore should make the request again.

    Raises:
        NotFound: There is no such object.
        TransientError: A retry may succeed.
    """
    body = response.read() if response.status == 404 else b""
    response.close()
    raise_if_transient(response.status, response.headers)
    if b"<Code>NoSuchKey</Code>" in body:
        raise NotFound("there is no such object", redacted(url))


@cache
def _data_loader() -> Any:
    """Return the loader of botocore's S3 API description, which is parsed once; data that a forked child may keep."""
    return import_extra("botocore.loaders", "s3:// URLs", "s3").create_loader()


@dataclass(frozen=True, slots=True)
class _SignedSender:
    """Sends the requests that botocore has signed by ``send_request``, and keeps this thread's last response."""

    retry: Retry

    def __call__(self, request: Any, **_: Any) -> Any:
        headers = {name: _text(value) for name, value in request.headers.items()}
        headers.pop("Expect", None)  # the body follows at once, without waiting for "100 Continue"
        body = request.body.read() if hasattr(request.body, "read") else request.body
        slow = request.method not in ("GET", "HEAD") or "list-type=" in request.url
        response: HttpResponse = send_request(request.method, request.url, headers, self.retry, body, slow)
        _last.request, _last.response = request, response
        aws_response = import_extra("botocore.awsrequest", "s3:// URLs", "s3").AWSResponse
        return aws_response(request.url, response.status, dict(response.headers), response)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class _NoSuchUpload(StorageError):
    """There is no such multipart upload."""


class _RangeNotSatisfiable(Exception):
    """The requested range starts at or after the end of the object."""


def _split_url(url: str) -> tuple[str, str, bool]:
    """Return the bucket, the key, and whether the URL asks for anonymous access.

    Raises:
        StorageError: ``url`` is not an S3 URL, or contains keys.
    """
    bucket, _, key = url.partition("://")[2].partition("/")
    user, at, bucket = bucket.rpartition("@")
    if at and user != "anonymous":
        raise StorageError("keys do not belong in a URL; pass storage=S3(access_key=, secret_key=)", redacted(url))
    if not url.startswith("s3://") or not bucket:
        raise StorageError("this is not a URL of the form s3://bucket/key", redacted(url))
    return bucket, key, bool(at)


def _object_params(url: str) -> dict[str, str]:
    bucket, key, _ = _split_url(url)
    if not key:
        raise StorageError("the URL names a bucket, not an object in it", redacted(url))
    return {"Bucket": bucket, "Key": key}


def _listed(page: Mapping[str, Any]) -> list[_Found]:
    """Return the keys, sizes and tags in a page of a listing, without the empty objects that stand for folders."""
    contents = page.get("Contents", ())
    return [(entry["Key"], entry["Size"], entry.get("ETag")) for entry in contents if not entry["Key"].endswith("/")]


def _folder_prefix(key: str) -> str:
    return key.rstrip("/") + "/" if key.rstrip("/") else ""


def _server_error(response: Mapping[str, Any], url: str) -> Exception:
    """Return the exception for a response that reports an error."""
    code, metadata = str(response.get("Error", {}).get("Code", "")), response["ResponseMetadata"]
    status = metadata.get("HTTPStatusCode", 0)
    try:
        raise_if_transient(status, metadata.get("HTTPHeaders", {}))
    except TransientError as error:
        return error
    if code in _TRANSIENT_CODES:
        return TransientError(f"the server answers {code}")
    if status == 416:
        return _RangeNotSatisfiable()
    if status == 412:
        return changed_error(url)
    if code in _NOT_FOUND_CODES:
        return NotFound("there is no such object", redacted(url))
    printable_code = code if code.isalnum() else str(status)
    explanation = _EXPLANATIONS.get(code) or (_EXPLANATIONS["AccessDenied"] if status == 403 else None)
    if code == "NoSuchUpload":
        return _NoSuchUpload(f"{explanation} ({printable_code})", redacted(url))
    error_type = Forbidden if code in ("AccessDenied", "Forbidden", "403") else StorageError
    problem = f"{explanation} ({printable_code})" if explanation else f"the server refuses: {printable_code}"
    return error_type(problem, redacted(url))


def _client_error(error: Exception, url: str) -> StorageError:
    """Return the error for a request that botocore could not make, without its message, which may hold secrets."""
    kind = type(error).__name__
    if kind in ("NoCredentialsError", "PartialCredentialsError"):
        return StorageError(
            "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, pass storage=S3(...), or use "
            "s3://anonymous@bucket/key for anonymous access",
            redacted(url),
        )
    if kind == "ProfileNotFound":
        return StorageError("there is no such profile in the user's AWS files", redacted(url))
    return StorageError(f"the request cannot be made ({kind})", redacted(url))


class S3Upload(Upload):
    """Uploads an object, in parts if it is larger than one. Parts have one size, which some servers require."""

    def __init__(self, storage: S3, url: str, params: dict[str, str], size_hint: int | None) -> None:
        super().__init__(url)
        self._storage, self._params = storage, params
        self._target = url  # includes "anonymous@", unlike self.url
        self._part_bytes = part_size(size_hint)
        self._buffer = bytearray()
        self._upload_id: str | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._parts: list[Future[str]] = []
        self._running: set[Future[str]] = set()
        self._uploaded: SimpleQueue[Future[str]] = SimpleQueue()  # Ctrl-C in futures.wait() may leave a future locked

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            room = self._part_bytes - len(self._buffer)
            self._buffer += rest[:room]
            rest = rest[room:]
            if len(self._buffer) == self._part_bytes:
                self._send_part()

    def _commit(self) -> Info:
        if self._upload_id is None:
            result = self._call("put_object", Body=bytes(self._buffer))
        else:
            if self._buffer:
                self._send_part()
            tags = [{"PartNumber": number, "ETag": part.result()} for number, part in enumerate(self._parts, 1)]
            self._close_pool()
            result = self._complete(tags)
        # Some servers return a wrong ETag when they join parts.
        if result.get("ETag") is None or self._upload_id is not None:
            return self._storage.info(self._target)
        return Info(self.written, result["ETag"], True)

    def _abort(self) -> None:
        for part in self._parts:
            part.cancel()
        self._close_pool()
        self._buffer = bytearray()
        if self._upload_id is not None:
            try:
                self._call("abort_multipart_upload", UploadId=self._upload_id)
            except StorageError as error:  # logged only, because the error that led here matters more
                _log.warning("an upload could not be aborted, and its parts remain on the server: %s", error)

    def _send_part(self) -> None:
        """Upload the buffer in a thread; wait while enough parts are being uploaded."""
        if len(self._parts) == _MAX_PARTS:
            raise StorageError(
                f"the object has more than {_MAX_PARTS:,} parts; pass size_hint= for larger ones", self.url
            )
        if self._upload_id is None:
            self._upload_id = self._call("create_multipart_upload")["UploadId"]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_CONCURRENT_PARTS, "penstock-upload")
        if len(self._running) == _CONCURRENT_PARTS:
            part = self._uploaded.get()
            self._running.remove(part)
            part.result()  # raises here, not only at commit, if a part failed
        data, self._buffer = bytes(self._buffer), bytearray()
        part = self._pool.submit(self._upload, len(self._parts) + 1, data)
        self._parts.append(part)
        self._running.add(part)
        part.add_done_callback(self._uploaded.put)

    def _upload(self, number: int, data: bytes) -> str:
        tag: str = self._call("upload_part", UploadId=self._upload_id, PartNumber=number, Body=data)["ETag"]
        return tag

    def _complete(self, tags: list[dict[str, Any]]) -> Any:
        """Join the parts. If a response is lost, the retry may find that the upload is complete."""
        params = {**self._params, "UploadId": self._upload_id, "MultipartUpload": {"Parts": tags}}
        response_lost = False

        def attempt() -> Any:
            nonlocal response_lost
            try:
                return self._storage.call_once("complete_multipart_upload", self._target, params)
            except TransientError:
                response_lost = True
                raise
            except StorageError as error:
                info = self._storage.info(self._target) if response_lost and "NoSuchUpload" in error.problem else None
                if info is None or info.size != self.written:
                    raise
                return {"ETag": info.tag}

        return with_retries(attempt, self._target, self._storage.retry)

    def _call(self, operation: str, **params: Any) -> Any:
        return self._storage.call(operation, self._target, {**self._params, **params})

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def part_size(size_hint: int | None) -> int:
    """Return the part size for an object: small, so that uploading starts early, but within the number of parts.

    >>> [part_size(hint) // 2**20 for hint in (None, 10**9, 10**11, 10**12)]
    [16, 8, 16, 128]
    """
    if size_hint is None:
        return _DEFAULT_PART_BYTES
    size = _MIN_PART_BYTES
    while size * (_MAX_PARTS - 1000) < size_hint:  # the object may be 10% larger than the hint
        size *= 2
    return size
