"""Measure served batches between two processes, beside bare Arrow Flight, bare sockets and ZeroMQ, and print a table.

    python benchmarks/serving.py [--rounds 5] [--batches 300]

The rows of a round run one after another, so that noise on the machine affects all rows alike; figures are medians.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

IMAGES, FLOATS = (64, 224, 224, 3), (64,)
PHOTOS = 640  # JPEGs of 500 x 375 that are decoded and cropped, in batches of 64
Rate = tuple[float, float]  # seconds and CPU seconds of the consumer, per batch


def _array(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    dtype = np.uint8 if len(shape) > 1 else np.float32
    return np.random.default_rng(0).integers(0, 255, shape).astype(dtype)


# The servers: each prints its port, or its address, and serves until its standard input is closed


def serve_flight(shape: tuple[int, ...], batches: int) -> None:
    import pyarrow as pa
    import pyarrow.flight as arrow_flight

    array = _array(shape)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(array) if array.ndim > 1 else pa.array(array)
    batch = pa.record_batch([column], ["x"])

    class Server(arrow_flight.FlightServerBase):  # type: ignore[misc]
        def do_get(self, context: Any, ticket: Any) -> Any:
            return arrow_flight.GeneratorStream(batch.schema, (batch for _ in range(batches)))

    server = Server("grpc://127.0.0.1:0")
    print(server.port, flush=True)
    sys.stdin.read()


def serve_socket(shape: tuple[int, ...], batches: int) -> None:
    data = memoryview(_array(shape)).cast("B")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                for _ in range(batches):
                    connection.sendall(data)


def serve_zeromq(shape: tuple[int, ...], batches: int) -> None:
    """Send batches as Tensorcom does: a message of several frames to a PULL socket, without a copy."""
    import zmq

    array, header = _array(shape), b"batch"
    sender = zmq.Context.instance().socket(zmq.PUSH)
    print(sender.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    while True:
        sender.send_multipart([header, array], copy=False)


def serve_penstock(shape: tuple[int, ...], batches: int) -> None:
    import penstock as ps

    array = _array(shape)
    ds = ps.from_items([{"i": i} for i in range(batches)]).map(lambda _: {"x": array}, workers=1)
    with ps.serve(ds, "grpc://127.0.0.1:0") as server:
        print(server.address, flush=True)
        sys.stdin.read()


def _photos() -> Any:
    from PIL import Image

    import penstock as ps
    from penstock import vision

    data, noise = io.BytesIO(), np.random.default_rng(0).normal(0, 12, (375, 500, 3))
    ramp = np.linspace(0, 200, 500)[None, :, None] + noise
    Image.fromarray(ramp.clip(0, 255).astype(np.uint8)).save(data, "JPEG", quality=88)
    items = [{"__key__": str(number), "jpg": data.getvalue()} for number in range(PHOTOS)]
    crop = vision.RandomResizedCrop(224, flip=True)
    return ps.from_items(items).decode(jpg=crop, workers=1).batched(64).on("local", cpus=1)


def serve_photos(shape: tuple[int, ...], batches: int) -> None:
    import penstock as ps

    os.sched_setaffinity(0, {0})
    with ps.serve(_photos(), "grpc://127.0.0.1:0") as server:
        print(server.address, flush=True)
        sys.stdin.read()


SERVERS = {
    "flight": serve_flight,
    "socket": serve_socket,
    "zeromq": serve_zeromq,
    "penstock": serve_penstock,
    "photos": serve_photos,
}


# The consumers: each yields once per batch


def _from_flight(address: str, nbytes: int, batches: int) -> Iterator[Any]:
    import pyarrow.flight as arrow_flight

    reader = arrow_flight.FlightClient(f"grpc://127.0.0.1:{address}").do_get(arrow_flight.Ticket(b""))
    for _ in range(batches):
        column = reader.read_chunk().data.column(0)
        yield column.to_numpy_ndarray() if nbytes > 1000 else column.to_numpy()


def _from_socket(address: str, nbytes: int, batches: int) -> Iterator[Any]:
    with socket.create_connection(("127.0.0.1", int(address))) as connection:
        for _ in range(batches):
            data = memoryview(bytearray(nbytes))
            received = 0
            while received < nbytes:
                received += connection.recv_into(data[received:])
            yield data


def _from_zeromq(address: str, nbytes: int, batches: int) -> Iterator[Any]:
    import zmq

    receiver = zmq.Context.instance().socket(zmq.PULL)
    receiver.connect(f"tcp://127.0.0.1:{address}")
    for _ in range(batches):
        yield receiver.recv_multipart(copy=False)
    receiver.close(0)


def _from_penstock(address: str, nbytes: int, batches: int) -> Iterator[Any]:
    import penstock as ps

    feed = ps.connect(address)
    yield from feed
    feed.close()


CONSUMERS: dict[str, Callable[[str, int, int], Iterator[Any]]] = {
    "flight": _from_flight,
    "socket": _from_socket,
    "zeromq": _from_zeromq,
    "penstock": _from_penstock,
}


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _measure(batches: Iterator[Any]) -> Rate:
    """Return the time and the CPU time of this process per batch, without the first one."""
    next(batches)
    begun, cpu = time.perf_counter(), _cpu_s()
    count = sum(1 for _ in batches)
    return (time.perf_counter() - begun) / count, (_cpu_s() - cpu) / count


def _start(kind: str, size: str, batches: int) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, __file__, "--serve", kind, "--size", size, "--batches", str(batches)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def transport(size: str, rounds: int, batches: int) -> None:
    """Print the rates of all ways to send batches of one size."""
    shape = IMAGES if size == "images" else FLOATS
    nbytes = _array(shape).nbytes
    kinds = ["flight", "socket", "penstock"]
    try:
        import zmq  # noqa: F401

        kinds.append("zeromq")
    except ImportError:
        print("ZeroMQ is not installed")
    servers = {kind: _start(kind, size, batches) for kind in kinds}
    rates: dict[str, list[Rate]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in kinds if number % 2 else kinds[::-1]:
            rates[kind].append(_measure(CONSUMERS[kind](servers[kind][1], nbytes, batches)))
    for process, _ in servers.values():
        process.kill()
        process.wait()
    print(f"\n{size}: {shape}, {nbytes:,} bytes, {rounds} rounds of {batches} batches")
    for kind in kinds:
        seconds = statistics.median(rate[0] for rate in rates[kind])
        cpu = statistics.median(rate[1] for rate in rates[kind])
        pairs = zip(rates["flight"], rates[kind], strict=True)
        ratio = statistics.median(bare[0] / own[0] for bare, own in pairs)
        figures = f"{nbytes / seconds / 1e9:7.3f} GB/s {seconds * 1e6:9.0f} us/batch, consumer {cpu * 1e6:7.0f} us CPU"
        print(f"{kind:10} {figures}, {ratio:.2f}x of bare Flight")


def photos(rounds: int) -> None:
    """Print the consumer's CPU time per photo beside decoding it, and the pace of a server beside the local pace."""
    process, address = _start("photos", "images", 0)
    local, served = [], []
    ds = _photos()
    for _ in range(rounds):
        os.sched_setaffinity(0, {0})  # the core that the server has
        local.append(_measure(iter(ds.loader())))
        os.sched_setaffinity(0, {1})
        served.append(_measure(_from_penstock(address, 0, 0)))
    process.kill()
    process.wait()
    cpu = [statistics.median(rate[1] / 64 * 1e6 for rate in rates) for rates in (local, served)]
    pace = statistics.median(one[0] / other[0] for one, other in zip(local, served, strict=True))
    print(f"\nphotos: decoding and cropping takes {cpu[0]:.0f} us of CPU per photo, receiving it {cpu[1]:.0f} us")
    print(f"that is {cpu[1] / cpu[0]:.1%}; the server's pace is {pace:.2f}x of the local pace on one core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=("images", "floats"), default="images", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        SERVERS[args.serve](IMAGES if args.size == "images" else FLOATS, args.batches)
        return
    transport("images", args.rounds, args.batches)
    transport("floats", args.rounds, 10 * args.batches)
    photos(args.rounds)


if __name__ == "__main__":
    main()
