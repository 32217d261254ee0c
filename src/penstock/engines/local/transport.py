"""Send objects between two processes: small messages by socket, large ones by shared memory.

A message is written to a region of memory that both ends have mapped: a table of buffers, the pickle, the buffers. The
socket carries only the number of the region. The receiver unpickles views of the region; when the last view is gone,
the receiver's next message returns the region, and the sender fills it again: no copy, no fresh pages. Regions have no
name, so nothing remains however a process ends.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np

from penstock.blobs.content import memory_file

MAX_INLINE_BYTES = 16_384  # a message up to this size is sent through the socket itself
MIN_BUFFER_BYTES = 2_048  # a smaller buffer is cheaper inside the pickle, and does not delay the reuse of a region
MAX_LEASES = 8  # regions whose contents may be in use at the receiver; beyond, the receiver copies
_ALIGNMENT = 64
_MIN_REGION_BYTES = 1 << 20
_HEADER = struct.Struct("<qqqqqq")  # region (-1: inline), its capacity, bytes of the pickle, buffers, freed, dropped
_LENGTH = struct.Struct("<i")
_PACKED_HEADER = struct.Struct("<qqqqqqqq")  # buffers, bytes of the pickle; padded so that what follows is aligned

BufferTable = np.ndarray[Any, np.dtype[np.int64]]  # start and size of each buffer
PackedBytes = np.ndarray[Any, np.dtype[np.uint8]]


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value what the other end cannot import, and tensors as arrays."""

    def __init__(self, file: Any, protocol: int | None = None, **options: Any) -> None:
        super().__init__(file, protocol, **options)
        main = sys.modules.get("__mp_main__")
        if main is not None and main.__name__ == "__mp_main__":  # multiprocessing has started this process
            cloudpickle.register_pickle_by_value(main)

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and _is_plain(torch, obj):
            return _tensor, (obj.numpy(),)
        return super().reducer_override(obj)


def _is_plain(torch: Any, tensor: Any) -> bool:
    """Return whether a numpy array can represent the tensor completely."""
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
    """Pickle an object; what the other end cannot import is pickled by value."""
    parts: list[Any] = []
    _Pickler(SimpleNamespace(write=parts.append), 5).dump(obj)
    return b"".join(parts)


class CannotSend(Exception):
    """An object cannot be pickled, or cannot be unpickled in the other process."""


class Connection:
    """One end of a connection between two processes. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._own: dict[int, mmap.mmap] = {}  # regions that this end fills
        self._idle: list[int] = []  # own regions whose contents the other end no longer uses
        self._created = 0
        self._dropped: list[int] = []
        self._received: dict[int, mmap.mmap] = {}  # regions that the other end fills
        self._leases: dict[int, weakref.ref[Any]] = {}
        self._freed: deque[int] = deque()  # appended to by the garbage collector, in any thread

    def send(self, obj: Any) -> None:
        """Send an object.

        Raises:
            OSError: The other end is gone.
            CannotSend: The object cannot be pickled; nothing was sent.
        """
        parts, buffers = _pickled(obj)
        length = sum(map(len, parts))
        if not buffers and length <= MAX_INLINE_BYTES:
            self._post(-1, 0, length, 0, b"".join(parts))
            return
        table, size = _layout(length, buffers)
        region, fd = self._region(size)
        view = memoryview(self._own[region])
        _fill(view, table, parts, buffers)
        view.release()
        self._post(region, len(self._own[region]), length, len(buffers), b"", fd)

    def _region(self, size: int) -> tuple[int, int | None]:
        """Return the number of an idle region of at least ``size`` bytes, and its file if the region is new."""
        fits = [number for number in self._idle if len(self._own[number]) >= size]
        if fits:
            best = min(fits, key=lambda number: len(self._own[number]))
            self._idle.remove(best)
            return best, None
        if self._idle:  # all of them are too small
            self._dropped += self._idle
            for number in self._idle:
                self._own.pop(number).close()
            self._idle = []
        capacity = max(_MIN_REGION_BYTES, 1 << (size - 1).bit_length())
        fd = memory_file(capacity)
        self._created += 1
        self._own[self._created] = mmap.mmap(fd, capacity)
        return self._created, fd

    def _post(
        self, region: int, capacity: int, length: int, buffers: int, inline: bytes, fd: int | None = None
    ) -> None:
        """Write a message to the socket, with the regions freed and dropped since the last one; close ``fd``."""
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        for number in freed:
            self._leases.pop(number, None)
        dropped, self._dropped = self._dropped, []
        numbers = freed + dropped
        header = _HEADER.pack(region, capacity, length, buffers, len(freed), len(dropped))
        body = header + struct.pack(f"<{len(numbers)}q", *numbers) + inline
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
            EOFError: The other end is gone.
            CannotSend: The object cannot be unpickled here; the connection stays usable.
        """
        try:
            first, fds, _, _ = socket.recv_fds(self.sock, _LENGTH.size, 1)
            body = self._read(_LENGTH.unpack(first + self._read(_LENGTH.size - len(first)))[0])
        except ConnectionError:
            raise EOFError from None
        region, capacity, length, buffer_count, freed, dropped = _HEADER.unpack_from(body)
        offset = _HEADER.size
        numbers = struct.unpack_from(f"<{freed + dropped}q", body, offset)
        self._idle += numbers[:freed]
        for number in numbers[freed:]:
            del self._received[number]
        if region == -1:
            return _loads(memoryview(body)[offset + 8 * len(numbers) :], ())
        if fds:
            self._received[region] = mmap.mmap(fds[0], capacity)
            os.close(fds[0])
        return self._loaded(region, length, buffer_count)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = self.sock.recv(size - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    def _loaded(self, region: int, length: int, buffer_count: int) -> Any:
        """Unpickle the message in a region that the other end has filled."""
        whole = np.frombuffer(self._received[region], np.uint8)
        table = whole[: 16 * buffer_count].view(np.int64).reshape(-1, 2).tolist()
        buffers: list[Any] = [whole[start : start + size] for start, size in table]
        if copied := len(self._leases) >= MAX_LEASES:
            buffers = [bytearray(buffer) for buffer in buffers]
        if copied or not buffers:
            self._freed.append(region)
        else:
            # The lease is on the array: every numpy view of a buffer keeps the array that it was sliced from alive.
            freed = self._freed
            self._leases[region] = weakref.ref(whole, lambda _: freed.append(region))
        return _loads(whole[16 * buffer_count : 16 * buffer_count + length].data, buffers)

    def close(self) -> None:
        """Close the socket; received objects stay readable."""
        self.sock.close()


def pack_object(obj: Any) -> PackedBytes:
    """Return an object as one array of bytes: its pickle, then its large buffers.

    For transports other than ``Connection``, such as Ray's object store.

    Raises:
        CannotSend: The object cannot be pickled.
    """
    parts, buffers = _pickled(obj)
    length = sum(map(len, parts))
    table, size = _layout(length, buffers)
    out: PackedBytes = np.empty(_PACKED_HEADER.size + size, np.uint8)
    header = _PACKED_HEADER.pack(len(buffers), length, 0, 0, 0, 0, 0, 0)
    out[: _PACKED_HEADER.size] = np.frombuffer(header, np.uint8)
    _fill(out[_PACKED_HEADER.size :].data, table, parts, buffers)
    return out


def unpack_object(data: PackedBytes) -> Any:
    """Return the object that ``pack_object`` packed; its buffers are a writable copy of the bytes.

    Raises:
        CannotSend: The object cannot be unpickled here.
    """
    buffer_count, length, *_ = _PACKED_HEADER.unpack_from(data.data)
    whole = np.array(data[_PACKED_HEADER.size :])
    table = whole[: 16 * buffer_count].view(np.int64).reshape(-1, 2).tolist()
    buffers = [whole[start : start + size] for start, size in table]
    return _loads(whole[16 * buffer_count : 16 * buffer_count + length].data, buffers)


def _pickled(obj: Any) -> tuple[list[Any], list[memoryview]]:
    """Return the pickle in parts, and the large buffers that are not in it.

    Raises:
        CannotSend: The object cannot be pickled.
    """
    parts: list[Any] = []
    buffers: list[memoryview] = []
    pickler = _Pickler(SimpleNamespace(write=parts.append), 5, buffer_callback=lambda b: _in_band(b, buffers))
    try:
        pickler.dump(obj)
    except Exception as exc:
        raise CannotSend(f"it cannot be sent to another process: {type(exc).__name__}: {exc}") from exc
    return parts, buffers


def _fill(view: memoryview, table: BufferTable, parts: list[Any], buffers: list[memoryview]) -> None:
    """Write a message: the table of buffers, the pickle, the buffers."""
    view[: table.nbytes] = table.tobytes()
    offset = table.nbytes
    for part in parts:
        view[offset : offset + len(part)] = part
        offset += len(part)
    for buffer, (start, size) in zip(buffers, table.tolist(), strict=True):
        view[start : start + size] = buffer


def _loads(data: memoryview, buffers: Sequence[Any]) -> Any:
    try:
        return pickle.loads(data, buffers=buffers)
    except Exception as exc:
        raise CannotSend(f"it cannot be unpickled in another process: {type(exc).__name__}: {exc}") from exc


def _in_band(buffer: pickle.PickleBuffer, large: list[memoryview]) -> bool:
    """Return whether a buffer is stored inside the pickle; a larger one is added to ``large`` instead."""
    raw = buffer.raw()
    if raw.nbytes < MIN_BUFFER_BYTES:
        return True
    large.append(raw)
    return False


def _layout(length: int, buffers: list[memoryview]) -> tuple[BufferTable, int]:
    """Return the table of buffers of a message whose pickle has ``length`` bytes, and the message's size."""
    table = np.zeros((len(buffers), 2), np.int64)
    offset = table.nbytes + length
    for number, buffer in enumerate(buffers):
        offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        table[number] = offset, buffer.nbytes
        offset += buffer.nbytes
    return table, offset
