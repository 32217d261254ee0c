"""Writing, listing and deleting over HTTP: PUT and DELETE, and WebDAV's methods where a server has them."""

from __future__ import annotations

import os
import secrets
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from penstock.errors import StorageError
from penstock.storage.protocol import Forbidden, Info, Listed, Upload, exists, per_process, redacted

if TYPE_CHECKING:
    from penstock.storage.http import HTTP

_MAX_LISTING_BYTES = 1 << 28  # of one folder: a million names
_NOT_ALLOWED = (405, 501)  # the server does not have this method
_PROPERTIES = b'<?xml version="1.0"?><propfind xmlns="DAV:"><prop><resourcetype/><getcontentlength/></prop></propfind>'


class HttpUpload(Upload):
    """Collects an object in an unnamed temporary file, which is sent at ``commit``: a PUT cannot be resumed.

    On a WebDAV server the object is sent under a temporary name and renamed, so that it appears whole.
    """

    def __init__(self, storage: HTTP, url: str) -> None:
        super().__init__(url)
        self._storage, self._target = storage, url
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the upload ends

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise StorageError(
                f"the upload cannot be collected in a temporary file: {error.strerror}", self.url
            ) from error

    def _commit(self) -> Info:
        self._file.flush()
        if is_webdav(self._storage, self._target):
            draft = _beside(self._target, f".{secrets.token_hex(8)}.draft")
            try:
                self._put(draft)
                while not self._move(draft):
                    self._put(draft)
            except BaseException:
                self._storage.send("DELETE", draft)
                raise
        else:
            self._put(self._target)
        self._file.close()
        info = self._storage.info(self._target)
        if info.size not in (None, self.written):
            raise StorageError(f"the server stored {info.size:,} of {self.written:,} bytes", self.url)
        return info

    def _move(self, draft: str) -> bool:
        """Rename the draft to the target; return whether the target is there."""
        try:
            status = self._storage.send("MOVE", draft, _destination(self._target))
        except Forbidden:  # some servers answer this for an object that does not exist
            status = 403
        if status >= 300 and exists(self._storage, draft):
            raise StorageError(f"the server does not rename objects ({status})", self.url)
        # A draft that is gone was moved by an earlier try, whose answer was lost; the later try may have removed the
        # target to make room for nothing.
        return status < 300 or exists(self._storage, self._target)

    def _put(self, url: str) -> None:
        headers = {"Content-Length": str(self.written), "Content-Type": "application/octet-stream"}
        status = self._storage.send("PUT", url, headers, self._file)
        if status in (404, 409):  # WebDAV does not create folders by itself
            make_folders(self._storage, url)
            status = self._storage.send("PUT", url, headers, self._file)
        if status >= 300:
            raise StorageError(f"the server does not accept uploads ({status})", self.url)

    def _abort(self) -> None:
        self._file.close()


def is_webdav(storage: HTTP, url: str) -> bool:
    """Return whether the server of a URL has WebDAV's methods."""
    host = urlsplit(url)[:2]

    def ask() -> bool:
        response = storage.answer("OPTIONS", url, {}, b"")
        response.close()
        return "dav" in response.headers

    return per_process(("webdav", storage, host), ask)


def _beside(url: str, name: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=parts.path.rpartition("/")[0] + "/" + name))


def _destination(url: str) -> dict[str, str]:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return {"Destination": urlunsplit((parts.scheme, host, quote(parts.path, "/%~"), "", "")), "Overwrite": "T"}


def make_folders(storage: HTTP, url: str) -> None:
    """Create the folders above an object, from the innermost that exists."""
    parts = urlsplit(url)
    folder = parts.path.rpartition("/")[0]
    missing: list[str] = []
    while folder:
        status = storage.send("MKCOL", urlunsplit(parts._replace(path=folder + "/")))
        if status not in (404, 409):
            break
        missing.append(folder)
        folder = folder.rpartition("/")[0]
    for path in reversed(missing):
        storage.send("MKCOL", urlunsplit(parts._replace(path=path + "/")))


def delete_object(storage: HTTP, url: str) -> None:
    """Delete an object; one that does not exist is not an error.

    Raises:
        StorageError: The server does not delete objects.
    """
    if (status := storage.send("DELETE", url)) in _NOT_ALLOWED:
        raise StorageError(f"the server does not delete objects ({status})", redacted(url))


def list_objects(storage: HTTP, prefix: str) -> Iterator[Listed]:
    """List the objects below a folder, recursively and sorted by URL.

    Raises:
        StorageError: The server is not a WebDAV server, or its answer is not a listing.
    """
    root = urlsplit(prefix if prefix.endswith("/") else prefix + "/")
    top = unquote(root.path)

    def url_of(path: str) -> str:  # below the folder as it was written
        return urlunsplit(root._replace(path=root.path + _as_url_path(path.removeprefix(top))))

    found: list[Listed] = []
    folders = [top]
    while folders:
        folder = folders.pop()
        for path, size, is_folder in _members(storage, url_of(folder)):
            if not path.startswith(folder) or path == folder:  # the folder itself, or a name outside of it
                continue
            if is_folder:
                folders.append(path if path.endswith("/") else path + "/")
            else:
                found.append(Listed(url_of(path), size))
    return iter(sorted(found, key=lambda listed: listed.url))


def _members(storage: HTTP, url: str) -> Iterator[tuple[str, int | None, bool]]:
    """Yield the path, the size, and whether it is a folder, of the members of a folder and the folder itself."""
    response = storage.answer("PROPFIND", url, {"Depth": "1", "Content-Type": "application/xml"}, _PROPERTIES)
    try:
        if response.status == 404:
            return
        if response.status != 207:
            raise StorageError(
                "this HTTP server cannot be listed; write out the names, as in a-{000..146}.tar", redacted(url)
            )
        body = bytearray()
        while piece := response.read():
            body += piece
            if len(body) > _MAX_LISTING_BYTES:
                raise StorageError("the listing of the folder is too long", redacted(url))
    finally:
        response.close()
    try:
        entries = ET.fromstring(bytes(body)).findall("{DAV:}response")
    except ET.ParseError:
        raise StorageError("the server's answer is not a listing", redacted(url)) from None
    for entry in entries:
        path = unquote(urlsplit(entry.findtext("{DAV:}href") or "").path)
        length = entry.findtext(".//{DAV:}getcontentlength") or ""
        is_folder = entry.find(".//{DAV:}resourcetype/{DAV:}collection") is not None
        if os.path.basename(path).endswith(".draft") and os.path.basename(path).startswith("."):
            continue
        yield path, int(length) if length.isdigit() and len(length) < 20 else None, is_folder


def _as_url_path(path: str) -> str:
    """Return a decoded path as a part of a URL: as it reads, with only the characters escaped that end a path."""
    return "".join(f"%{ord(char):02X}" if char in "%?#" else char for char in path)
