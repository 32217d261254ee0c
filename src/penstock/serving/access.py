"""Access to servers: addresses, tokens and certificates, checked on both sides before a port is opened."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.errors import PlanError, StorageError

TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "PENSTOCK_TOKEN", "PENSTOCK_TOKEN_FILE"
MIN_TOKEN_CHARACTERS = 16
DEFAULT_PORT = 7070
_TOKEN = re.compile(r"[\x21-\x7e]+")
_SCHEMES = {"grpc": False, "grpc+tcp": False, "grpc+tls": True}


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server.

    Attributes:
        host: A name, or an IP address.
        port: The port; 0 lets the system choose one.
        tls: The connection is encrypted, and the server shows a certificate.
        name: The name that the certificate must have, if ``host`` is an IP address that was found for it.
    """

    host: str
    port: int
    tls: bool = False
    name: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'grpc+tls' if self.tls else 'grpc'}://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def resolved(self) -> list[Address]:
        """Return an address for each IP address that a name has; an address with an IP address is returned unchanged.

        Raises:
            OSError: The name cannot be resolved now.
        """
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            hosts = dict.fromkeys(str(entry[4][0]) for entry in found)
            if self.host == "localhost":  # one server, which may listen on either address
                return [self]
            return [Address(host, self.port, self.tls, self.name or self.host) for host in hosts]
        return [self]


def parse_address(text: Any) -> Address:
    """Parse an address such as ``grpc://127.0.0.1:7070``; scheme and port may be left out.

    Raises:
        PlanError: It is not an address.
    """
    problem = PlanError(f"{text!r:.100} is not an address: expected grpc://HOST:PORT or grpc+tls://HOST:PORT")
    if not isinstance(text, str) or not text.strip():
        raise problem
    text = text.strip()
    try:
        parts = urlsplit(text if "://" in text else f"grpc://{text}")
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        raise problem from None
    if parts.scheme not in _SCHEMES or not parts.hostname or parts.path.strip("/") or parts.query or parts.username:
        raise problem
    return Address(parts.hostname, port, _SCHEMES[parts.scheme])


@dataclass(frozen=True, slots=True)
class Token:
    """A secret that server and consumers share; it is never shown."""

    _value: str = field(repr=False)

    @property
    def header(self) -> tuple[bytes, bytes]:
        """The header of a request that carries the token."""
        return b"authorization", f"Bearer {self._value}".encode()

    def matches(self, header: str) -> bool:
        """Return whether the header of a request has this token; takes the same time wherever it differs."""
        return hmac.compare_digest(header.encode("utf-8", "replace"), f"Bearer {self._value}".encode())


def find_token(token: str | None) -> Token | None:
    """Return the given token, else the one in the environment: ``PENSTOCK_TOKEN``, or the file ``PENSTOCK_TOKEN_FILE``.

    Raises:
        PlanError: The token is too short or has other characters than visible ASCII ones.
        StorageError: The file cannot be read.
    """
    origin = "token="
    if token is None and (path := os.environ.get(TOKEN_FILE_VARIABLE)):
        token, origin = read_token(path), TOKEN_FILE_VARIABLE
    elif token is None and TOKEN_VARIABLE in os.environ:
        token, origin = os.environ[TOKEN_VARIABLE], TOKEN_VARIABLE
    if token is None:
        return None
    if not isinstance(token, str) or len(token) < MIN_TOKEN_CHARACTERS or not _TOKEN.fullmatch(token):
        raise PlanError(
            f"{origin}: a token has at least {MIN_TOKEN_CHARACTERS} visible ASCII characters and no spaces; "
            'create one with: python -c "import secrets; print(secrets.token_urlsafe())"'
        )
    return Token(token)


def read_token(path: str | os.PathLike[str]) -> str:
    """Return the token in a file.

    Raises:
        PlanError: Other users of this machine can read the file.
        StorageError: The file cannot be read.
    """
    text = read_secret_file(path, "the token's file").decode("utf-8", "replace").strip()
    if os.stat(path).st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise PlanError(f"the token's file {os.fspath(path)} can be read by every user: chmod o-rwx {os.fspath(path)}")
    return text


def read_secret_file(path: str | os.PathLike[str], what: str) -> bytes:
    """Return the content of a small file.

    Raises:
        StorageError: It cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise StorageError(f"{what} cannot be read: {exc.strerror or exc}", os.fspath(path)) from exc


def read_certificate(
    certificate: str | os.PathLike[str] | None, key: str | os.PathLike[str] | None
) -> tuple[bytes, bytes] | None:
    """Return a certificate and its private key; None if there is none.

    Raises:
        PlanError: One of both is missing.
        StorageError: A file cannot be read.
    """
    if (certificate is None) != (key is None):
        raise PlanError("certificate= and key= belong together: give both")
    if certificate is None or key is None:
        return None
    return read_secret_file(certificate, "the certificate"), read_secret_file(key, "the private key")


def check_listen(address: Address, token: Token | None, *, tls: bool, insecure: bool) -> None:
    """Check that a server may listen at an address.

    Raises:
        PlanError: Other machines can reach the address, and there is no token, or neither TLS nor ``insecure``.
    """
    if address.is_loopback:
        return
    if token is None:
        raise PlanError(
            f"{address}: other machines can reach this address, so consumers must show a token: set "
            f"{TOKEN_FILE_VARIABLE} or {TOKEN_VARIABLE}, pass token=, or listen on 127.0.0.1"
        )
    if not (tls or insecure):
        raise PlanError(
            f"{address}: batches and the token would cross the network unencrypted: give certificate= and key=, or "
            "insecure=True if the network is private"
        )


def check_connect(address: Address, token: Token | None, insecure: bool) -> None:
    """Check that a consumer may connect to an address.

    Raises:
        PlanError: The connection would not be encrypted, and ``insecure`` is not set.
    """
    if not (address.is_loopback or address.tls or insecure):
        what = "batches would" if token is None else "batches and the token would"
        raise PlanError(
            f"{address}: {what} cross the network unencrypted: use grpc+tls://, or insecure=True if the network is "
            "private"
        )
