"""The headers of members, POSIX or PAX where that cannot say it; which names and values a member can have."""

from __future__ import annotations

import re
from typing import Any

from penstock.errors import DataError
from penstock.formats.tar.members import padded

_MAX_OCTAL = 8**11
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_PLAIN_FIELD = re.compile(r"[a-z0-9_-]+")
_PAX_NAME = b"././@PaxHeader"
_MIDDLE = b"0000644\0" + b"0000000\0" * 2  # mode, user, group
_TIME = b"00000000000\0"
_TAIL = b"ustar\00000" + bytes(64) + b"0000000\0" * 2  # magic, version, names of user and group, device
_FIXED = sum(_MIDDLE) + sum(_TIME) + sum(_TAIL) + 8 * 32  # what is in every header; the checksum counts as spaces
_PLAIN = b"0" + bytes(100) + _TAIL + bytes(155 + 12)


def member_header(name: bytes, size: int) -> bytes:
    """Make the header of a member, with a PAX record before it for what a POSIX header cannot say."""
    if len(name) <= 100 and size < _MAX_OCTAL and name.isascii():  # nearly always
        digits = b"%011o\0" % size
        total = _FIXED + 48 + sum(name) + sum(digits)
        return b"%b%b%b%b%06o\0 %b" % (name.ljust(100, b"\0"), _MIDDLE, digits, _TIME, total, _PLAIN)
    records = []
    place = _placed(name)
    if place is None:
        records.append(_record(b"path", name))
        place = b"", name[:100]
    if size >= _MAX_OCTAL:
        records.append(_record(b"size", b"%d" % size))
    if not records:
        return _header(place[1], size, prefix=place[0])
    body = b"".join(records)
    pax = _header(_PAX_NAME, len(body), b"x") + body + bytes(padded(len(body)) - len(body))
    return pax + _header(place[1], size if size < _MAX_OCTAL else 0, prefix=place[0])


def _header(name: bytes, size: int, kind: bytes = b"0", prefix: bytes = b"") -> bytes:
    """Make a POSIX header block that says nothing but name and size."""
    front = name.ljust(100, b"\0") + _MIDDLE + b"%011o\0" % size + _TIME
    back = kind + bytes(100) + _TAIL + prefix.ljust(155, b"\0") + bytes(12)
    return b"%b%06o\0 %b" % (front, sum(front) + sum(back) + 8 * 32, back)


def _placed(name: bytes) -> tuple[bytes, bytes] | None:
    """Split a name into prefix and name as POSIX headers hold them, if they can."""
    if not name.isascii():
        return None
    if len(name) <= 100:
        return b"", name
    cut = name.rfind(b"/", 0, 156)
    return (name[:cut], name[cut + 1 :]) if cut > 0 and len(name) - cut - 1 <= 100 else None


def _record(name: bytes, value: bytes) -> bytes:
    """Make a PAX record, whose length counts its own digits."""
    length = bare = len(name) + len(value) + 3
    while length != bare + len(str(length)):
        length = bare + len(str(length))
    return b"%d %b=%b\n" % (length, name, value)


def check_key(key: Any) -> None:
    """Refuse keys that would be read back as another one, or lead outside of a folder.

    Raises:
        DataError: It is such a key.
    """
    if isinstance(key, str) and _PLAIN_KEY.fullmatch(key):  # nearly always
        return
    if not isinstance(key, str):
        raise DataError(f"a key must be text, not {type(key).__name__}", key=repr(key))
    folders, _, name = key.rpartition("/")
    problem = None
    if not key:
        problem = "the key is empty"
    elif not name:
        problem = "the key ends with a slash"
    elif "." in name:
        problem = "the key has a dot in its last part, where the field begins"
    elif key.startswith(("/", "./")) or ".." in folders.split("/"):
        problem = "the key is an absolute path or leads out of its folder"
    elif "\0" in key:
        problem = "the key holds a NUL character"
    if problem:
        raise DataError(problem, key=key)


def checked(value: Any, field: str, key: str) -> Any:
    """Give the bytes of a field, refusing names and values that cannot be stored.

    Raises:
        DataError: It is such a field.
    """
    if not _PLAIN_FIELD.fullmatch(field) and (
        not field or field[0] == "." or field != field.lower() or "/" in field or "\0" in field
    ):
        raise DataError(f"{field!r} cannot be the name of a field: lower case, no slash, no leading dot", key=key)
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)  # a copy: the caller may go on with its buffer before it is written
    raise DataError(f"the field {field!r} must be bytes, not {type(value).__name__}", key=key)


def encoded(value: Any, field: str, key: str) -> bytes:
    """A value by its field's extension.

    Raises:
        DataError: It cannot be stored there.
    """
    from penstock.codecs import encode  # whoever writes bytes needs none of it

    try:
        return encode(field, value)
    except (TypeError, ValueError) as exc:
        raise DataError(str(exc), key=key) from exc
