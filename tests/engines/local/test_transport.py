from __future__ import annotations

import gc
import os
import resource
import socket
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engines.local.transport import (
    MAX_LEASES,
    MIN_BUFFER_BYTES,
    CannotSend,
    Connection,
    dumps,
    pack_object,
    unpack_object,
)
from penstock.testing import fingerprint

Pair = tuple[Connection, Connection]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = socket.socketpair()
    connections = Connection(ends[0]), Connection(ends[1])
    yield connections
    for connection in connections:
        connection.close()


def across(pair: Pair, obj: Any) -> Any:
    """Send an object from the first end and return what the second receives."""
    pair[0].send(obj)
    return pair[1].recv()


def array(number: int, nbytes: int = 100_000) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


class Reduced:
    """Pickles as a call of the given function with the given arguments."""

    def __init__(self, *reduction: Any) -> None:
        self.reduction = reduction

    def __reduce__(self) -> Any:
        return self.reduction


def fails(*_: Any) -> Any:
    raise RuntimeError("cannot be constructed")


@pytest.mark.parametrize(
    "obj",
    [
        None,
        {"a": [1, 2.5, "text", (b"bytes", None)]},
        b"x" * 3_000_000,
        "y" * 200_000,
        bytearray(b"z" * 100_000),
        list(range(100_000)),
        {f"k{i}": array(i, 5000) for i in range(40)},
        [array(1, 10), array(2, MIN_BUFFER_BYTES - 1), array(3, MIN_BUFFER_BYTES), array(4, 7_000_000)],
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_objects_of_every_size_arrive_equal(pair: Pair, obj: Any) -> None:
    for _ in range(3):  # the later ones use regions that exist already
        thread = threading.Thread(target=pair[0].send, args=(obj,))
        thread.start()
        got = pair[1].recv()
        thread.join(60)
        assert fingerprint(got) == fingerprint(obj)
        assert type(got) is type(obj)


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", ">i4", "f2", "f8", "c16", "S7", "U5", "M8[s]", "i4,f8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (40, 50), (0, 5)])
def test_arrays_keep_dtype_and_shape_and_can_be_written(pair: Pair, dtype: str, shape: tuple[int, ...]) -> None:
    sent = np.zeros(shape, dtype)
    got = across(pair, sent)
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert got.tobytes() == sent.tobytes()
    assert got.flags.writeable
    got[...] = got


@pytest.mark.parametrize(
    "sent",
    [
        array(1).reshape(100, 1000).T,
        array(2).reshape(100, 1000)[::3, ::-2],
        np.asfortranarray(array(3).reshape(100, 1000)),
        np.broadcast_to(array(4, 1000), (50, 1000)),
    ],
    ids=["transposed", "strided", "fortran", "broadcast"],
)
def test_arrays_of_every_layout_arrive_equal_and_writable(pair: Pair, sent: np.ndarray[Any, Any]) -> None:
    got = across(pair, sent)
    np.testing.assert_array_equal(got, sent)
    got += 1
    np.testing.assert_array_equal(got, sent + 1)


def test_a_read_only_array_arrives_equal(pair: Pair) -> None:
    sent = array(1)
    sent.flags.writeable = False
    np.testing.assert_array_equal(across(pair, sent), sent)


TENSORS = {
    "bool": torch.arange(9000) % 2 == 0,
    "float16": torch.arange(9000).to(torch.float16),
    "bfloat16": torch.arange(9000).to(torch.bfloat16),
    "complex64": torch.arange(9000).to(torch.complex64),
    "conjugated": torch.arange(9000).to(torch.complex64).conj(),
    "requires_grad": torch.arange(9000.0, requires_grad=True),
    "transposed": torch.arange(9000).reshape(90, 100).T,
    "strided": torch.arange(9000)[::7],
    "empty": torch.zeros(0, 5),
    "scalar": torch.tensor(3.5),
    "small": torch.arange(5),
    "sparse": torch.eye(50).to_sparse(),
    "parameter": torch.nn.Parameter(torch.arange(9000.0)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_equal(pair: Pair, name: str) -> None:
    sent = TENSORS[name]
    got = across(pair, {"t": sent})["t"]
    assert (type(got), got.dtype, got.shape, got.layout) == (type(sent), sent.dtype, sent.shape, sent.layout)
    assert got.requires_grad == sent.requires_grad
    assert bool((got.to_dense() == sent.to_dense()).all()) if got.numel() else True
    if not got.requires_grad and got.layout is torch.strided and got.numel():
        got.zero_()
        assert not bool(got.any())


def test_received_objects_that_are_kept_are_never_overwritten(pair: Pair) -> None:
    kept: list[tuple[Any, int]] = []
    for number in range(10 * MAX_LEASES):
        sent = array(number, 40_000 + 17_000 * (number % 9))
        got = across(pair, [sent, torch.from_numpy(sent)])
        item = got[number % 2]  # sometimes only the tensor is kept
        kept.append((item[5:] if number % 3 else item, zlib.crc32((sent[5:] if number % 3 else sent).tobytes())))
        del got, item
        pair[1].send(None)  # the next message, which reports the regions that were freed
        pair[0].recv()
    assert [zlib.crc32(np.asarray(item).tobytes()) for item, _ in kept] == [check for _, check in kept]


@pytest.mark.parametrize("keep", [memoryview, lambda a: a.view(np.int16), lambda a: a[10:20], torch.from_numpy])
def test_a_view_of_a_received_array_keeps_its_memory(pair: Pair, keep: Any) -> None:
    views = [keep(across(pair, array(0)))]
    want = bytes(np.asarray(views[0]).tobytes())
    for number in range(1, 30):
        across(pair, array(number))
        pair[1].send(None)
        pair[0].recv()
    assert np.asarray(views[0]).tobytes() == want


def test_memory_that_is_no_longer_used_is_reused(pair: Pair) -> None:
    def once(number: int) -> None:
        got = across(pair, array(number, 5_000_000))
        assert got[0] == array(number, 1)[0]
        del got
        pair[1].send(None)
        pair[0].recv()

    others = mapped()  # of earlier tests
    for number in range(3):
        once(number)
    files = len(os.listdir("/proc/self/fd"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(60):
        once(number)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000, "KB"
    assert len(os.listdir("/proc/self/fd")) == files
    assert mapped() - others <= 3


def mapped() -> int:
    """The regions of a connection whose ends are both in this process, which maps each region twice."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:penstock" in line for line in maps) // 2


def test_regions_that_became_too_small_are_released(pair: Pair) -> None:
    gc.collect()
    others = mapped()  # of earlier tests
    for power in range(17, 24):
        across(pair, array(power, 1 << power))
        pair[1].send(None)
        pair[0].recv()
    gc.collect()
    assert mapped() - others <= 2


def test_an_object_that_cannot_be_unpickled_does_not_affect_later_ones(pair: Pair) -> None:
    for padding in (b"", array(1)):
        pair[0].send([padding, Reduced(fails, ())])
        with pytest.raises(CannotSend, match="RuntimeError: cannot be constructed"):
            pair[1].recv()
    for number in range(3):
        np.testing.assert_array_equal(across(pair, array(number)), array(number))


def test_an_object_that_cannot_be_pickled_does_not_affect_later_ones(pair: Pair) -> None:
    for padding in (b"", array(1)):
        with pytest.raises(CannotSend, match="lock"):
            pair[0].send([padding, threading.Lock()])
    np.testing.assert_array_equal(across(pair, array(5)), array(5))


def test_the_end_of_the_other_side_is_detected(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(EOFError):
        pair[1].recv()
    with pytest.raises(OSError, match=r"pipe|reset"):
        pair[1].send(1)


def test_an_end_in_the_middle_of_a_message_is_detected() -> None:
    own_sock, other_sock = socket.socketpair()
    connection = Connection(own_sock)
    other_sock.sendall(b"\x50\0\0\0half")
    other_sock.close()
    with pytest.raises(EOFError):
        connection.recv()
    connection.close()


def test_received_objects_stay_readable_after_the_close(pair: Pair) -> None:
    got = across(pair, array(7))
    for connection in pair:
        connection.close()
    np.testing.assert_array_equal(got, array(7))


def test_a_packed_object_is_unpacked_equal_and_writable() -> None:
    sent = [{"image": array(3), "small": np.arange(3), "t": torch.arange(5000)}, (b"x" * 9000, 1.5), "text"]
    data = pack_object(sent)
    data.flags.writeable = False  # as Ray's object store returns it
    got = unpack_object(data)
    assert fingerprint(got) == fingerprint(sent)
    got[0]["image"][:] = 0
    assert got[0]["image"].ctypes.data % 16 == 0
    assert fingerprint(unpack_object(data)) == fingerprint(sent), "the packed bytes did not change"


def test_packing_an_object_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(CannotSend, match="cannot be sent"):
        pack_object(threading.Lock())


def test_functions_are_pickled_by_value() -> None:
    import pickle

    factor = 3
    assert pickle.loads(dumps(lambda x: x * factor))(4) == 12
