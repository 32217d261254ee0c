"""The way of objects between two processes: a few words by socket, everything large by shared memory.

A message lies in a segment of memory that both ends have mapped: a table of buffers, the pickle, the buffers. The
socket only says which segment. What is unpickled are views of the segment; when the last of them is gone the receiver
says so with its next message, and the sender fills the segment again: no copy, no fresh pages. Segments have no name,
so nothing stays behind however a process ends.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np

INLINE = 16_384  # a message up to this size goes through the socket itself
SMALL = 2_048  # a buffer below this is cheaper inside the pickle, and keeps no segment from being used again
LEASES = 8  # segments whose contents may be in use at the other end; beyond, the receiver copies
_ALIGN = 64
_LEAST = 1 << 20
_HEAD = struct.Struct("<qqqqqq")  # segment (-1: in line), its capacity, pickle's bytes, buffers, freed, dropped
_LENGTH = struct.Struct("<i")
_FOLD = struct.Struct("<qqqqqqqq")  # buffers, the pickle's bytes; as long as keeps what follows aligned

Table = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes anything: what cannot be imported at the other end travels by value, tensors as arrays."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and _is_plain(torch, obj):
            return _tensor, (obj.numpy(),)
        return super().reducer_override(obj)


def _is_plain(torch: Any, tensor: Any) -> bool:
    """Whether an array says all there is to say about it."""
    return bool(
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.dtype not in (torch.bfloat16, torch.complex32)
        and not str(tensor.dtype).startswith(("torch.float8", "torch.q"))
    )


def dumps(obj: Any) -> bytes:
    """Pickle by value what the other end cannot import."""
    parts: list[Any] = []
    _Pickler(SimpleNamespace(write=parts.append), 5).dump(obj)
    return b"".join(parts)


def memory_file(size: int) -> int:
    """A file without a name, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("penstock", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd


class CannotSend(Exception):
    """What the other end sent cannot be made again at this one."""


class Connection:
    """One end of a connection. One thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._ours: dict[int, mmap.mmap] = {}
        self._idle: list[int] = []
        self._made = 0
        self._dropped: list[int] = []
        self._theirs: dict[int, mmap.mmap] = {}
        self._leases: dict[int, weakref.ref[Any]] = {}
        self._freed: deque[int] = deque()  # written by the collector, in any thread

    def send(self, obj: Any) -> None:
        """Send an object.

        Raises:
            OSError: the other end is gone.
            CannotSend: it cannot be pickled; nothing was sent.
        """
        parts, buffers = _pickled(obj)
        length = sum(map(len, parts))
        if not buffers and length <= INLINE:
            self._post(-1, 0, length, 0, b"".join(parts))
            return
        table, size = _layout(length, buffers)
        segment, fd = self._segment(size)
        view = memoryview(self._ours[segment])
        _fill(view, table, parts, buffers)
        view.release()
        self._post(segment, len(self._ours[segment]), length, len(buffers), b"", fd)

    def _segment(self, size: int) -> tuple[int, int | None]:
        """The number of a segment of ours that nobody reads and that is large enough; with its file if it is new."""
        fits = [number for number in self._idle if len(self._ours[number]) >= size]
        if fits:
            best = min(fits, key=lambda number: len(self._ours[number]))
            self._idle.remove(best)
            return best, None
        if self._idle:  # they have become too small
            self._dropped += self._idle
            for number in self._idle:
                self._ours.pop(number).close()
            self._idle = []
        capacity = max(_LEAST, 1 << (size - 1).bit_length())
        fd = memory_file(capacity)
        self._made += 1
        self._ours[self._made] = mmap.mmap(fd, capacity)
        return self._made, fd

    def _post(
        self, segment: int, capacity: int, length: int, buffers: int, inline: bytes, fd: int | None = None
    ) -> None:
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        for number in freed:
            self._leases.pop(number, None)
        dropped, self._dropped = self._dropped, []
        numbers = freed + dropped
        head = _HEAD.pack(segment, capacity, length, buffers, len(freed), len(dropped))
        body = head + struct.pack(f"<{len(numbers)}q", *numbers) + inline
        message = _LENGTH.pack(len(body)) + body
        try:
            sent = socket.send_fds(self.sock, [message], [fd]) if fd is not None else self.sock.send(message)
            if sent < len(message):
                self.sock.sendall(message[sent:])
        finally:
            if fd is not None:
                os.close(fd)

    def recv(self) -> Any:
        """Wait for an object.

        Raises:
            EOFError: the other end is gone.
            CannotSend: the object cannot be made again here; the connection is as good as before.
        """
        try:
            first, fds, _, _ = socket.recv_fds(self.sock, _LENGTH.size, 1)
            body = self._read(_LENGTH.unpack(first + self._read(_LENGTH.size - len(first)))[0])
        except ConnectionError:
            raise EOFError from None
        segment, capacity, length, many, freed, dropped = _HEAD.unpack_from(body)
        at = _HEAD.size
        numbers = struct.unpack_from(f"<{freed + dropped}q", body, at)
        self._idle += numbers[:freed]
        for number in numbers[freed:]:
            del self._theirs[number]
        if segment == -1:
            return _loads(memoryview(body)[at + 8 * len(numbers) :], ())
        if fds:
            self._theirs[segment] = mmap.mmap(fds[0], capacity)
            os.close(fds[0])
        return self._loaded(segment, length, many)

    def _read(self, many: int) -> bytes:
        data = bytearray()
        while len(data) < many:
            got = self.sock.recv(many - len(data))
            if not got:
                raise EOFError
            data += got
        return bytes(data)

    def _loaded(self, segment: int, length: int, many: int) -> Any:
        whole = np.frombuffer(self._theirs[segment], np.uint8)
        table = whole[: 16 * many].view(np.int64).reshape(-1, 2).tolist()
        buffers: list[Any] = [whole[start : start + size] for start, size in table]
        if copied := len(self._leases) >= LEASES:
            buffers = [bytearray(buffer) for buffer in buffers]
        if copied or not buffers:
            self._freed.append(segment)
        else:
            # An array, since whatever numpy makes of a buffer keeps the array it was cut from.
            freed = self._freed
            self._leases[segment] = weakref.ref(whole, lambda _: freed.append(segment))
        return _loads(whole[16 * many : 16 * many + length].data, buffers)

    def close(self) -> None:
        """End the connection; what was received stays readable."""
        self.sock.close()


def folded(obj: Any) -> Bytes:
    """An object as one run of bytes, its large buffers behind its pickle, for ways that are not ours.

    Raises:
        CannotSend: it cannot be pickled.
    """
    parts, buffers = _pickled(obj)
    length = sum(map(len, parts))
    table, size = _layout(length, buffers)
    out: Bytes = np.empty(_FOLD.size + size, np.uint8)
    out[: _FOLD.size] = np.frombuffer(_FOLD.pack(len(buffers), length, 0, 0, 0, 0, 0, 0), np.uint8)
    _fill(out[_FOLD.size :].data, table, parts, buffers)
    return out


def unfolded(data: Bytes) -> Any:
    """The object again; its buffers are a copy of the bytes, which may be changed.

    Raises:
        CannotSend: it cannot be made again here.
    """
    many, length, *_ = _FOLD.unpack_from(data.data)
    whole = np.array(data[_FOLD.size :])
    table = whole[: 16 * many].view(np.int64).reshape(-1, 2).tolist()
    buffers = [whole[start : start + size] for start, size in table]
    return _loads(whole[16 * many : 16 * many + length].data, buffers)


def _pickled(obj: Any) -> tuple[list[Any], list[memoryview]]:
    """The pickle in parts, and the large buffers that are left out of it.

    Raises:
        CannotSend: it cannot be pickled.
    """
    parts: list[Any] = []
    buffers: list[memoryview] = []
    pickler = _Pickler(SimpleNamespace(write=parts.append), 5, buffer_callback=lambda b: _in_band(b, buffers))
    try:
        pickler.dump(obj)
    except Exception as exc:
        raise CannotSend(f"it cannot be sent to another process: {type(exc).__name__}: {exc}") from exc
    return parts, buffers


def _fill(view: memoryview, table: Table, parts: list[Any], buffers: list[memoryview]) -> None:
    """Write a message: the table of buffers, the pickle, the buffers."""
    view[: table.nbytes] = table.tobytes()
    at = table.nbytes
    for part in parts:
        view[at : at + len(part)] = part
        at += len(part)
    for buffer, (start, many) in zip(buffers, table.tolist(), strict=True):
        view[start : start + many] = buffer


def _loads(data: memoryview, buffers: Sequence[Any]) -> Any:
    try:
        return pickle.loads(data, buffers=buffers)
    except Exception as exc:
        raise CannotSend(f"it cannot be made again in another process: {type(exc).__name__}: {exc}") from exc


def _in_band(buffer: pickle.PickleBuffer, large: list[memoryview]) -> bool:
    """Note a large buffer; say whether it is a small one."""
    raw = buffer.raw()
    if raw.nbytes < SMALL:
        return True
    large.append(raw)
    return False


def _layout(length: int, buffers: list[memoryview]) -> tuple[Table, int]:
    """Where each buffer begins and how long it is, behind the table itself and the pickle; and the end of all."""
    table = np.zeros((len(buffers), 2), np.int64)
    at = table.nbytes + length
    for number, buffer in enumerate(buffers):
        at = -(-at // _ALIGN) * _ALIGN
        table[number] = at, buffer.nbytes
        at += buffer.nbytes
    return table, at
