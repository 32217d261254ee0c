"""Several nodes on one machine, one of which dies in the middle of an epoch; a Ray that a script starts by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

FULL = os.environ.get("PENSTOCK_FULL") == "1"

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path, for Ray's sockets, whose paths must not be long."""
    folder = tempfile.mkdtemp(prefix="ray-")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


def run(script: str, folder: Path, *arguments: str, timeout_s: float = 500) -> subprocess.CompletedProcess[str]:
    """Run a user's script with its own Ray; fail if it leaves a process behind."""
    source = str(Path(penstock.__file__).parents[1])
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_TMPDIR": str(folder), "PYTHONPATH": source, "PENSTOCK_CACHE": str(folder / "cache")}
    env["RAY_worker_niceness"] = "0"  # see conftest.py
    (folder / "script.py").write_text(textwrap.dedent(script))
    call = [sys.executable, "script.py", *arguments]
    done = subprocess.run(call, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    until = time.monotonic() + 120
    while left := _processes_of(folder):
        assert time.monotonic() < until, f"left behind: {left}"
        time.sleep(0.2)
    return done


def _processes_of(folder: Path) -> list[str]:
    """The command lines of the processes that have the folder among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(folder) in command:
                found.append(command.replace("\0", " ")[:200])
    return found


def test_a_script_without_a_cluster_starts_ray_with_a_warning_and_leaves_nothing_behind(short_folder: Path) -> None:
    done = run(
        """
        import logging

        import penstock as ps


        class Adds:
            def __init__(self, number):
                self.number = number

            def __call__(self, batch):
                return {**batch, "sum": batch["x"] + self.number}


        logging.basicConfig(format="%(name)s: %(message)s")
        ds = ps.from_items([{"x": i} for i in range(1000)]).map_batches(Adds, 100, fn_args=(5,), workers=1)
        rows = ds.on("ray").take_all()
        assert [int(row["sum"]) for row in rows] == list(range(5, 1005))
        run = iter(ds.on("ray"))
        print(int(next(run)["sum"]))
        """,
        short_folder,
    )
    assert done.stdout.split() == ["5"]
    assert done.stderr.count("penstock: no Ray is running: started Ray on this machine") == 1


WRITING = """
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import penstock as ps
from penstock.blobs.stamp import Stamp
from penstock.formats.tar.index import Index
from penstock.testing import numbers
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, s3_server

KILLS = 10
NODE = {"num_cpus": 2, "object_store_memory": 80_000_000}


class Model:
    def __call__(self, batch):
        return {**batch, "cls": [2 * number for number in batch["cls"]]}


def row(sample, rng):
    time.sleep(0.006)
    return {"__key__": f"{sample['x']:05d}", "npy": rng.bytes(3000), "cls": sample["x"]}


def keep(sample):
    return sample["x"] % 5 != 2


def write(url, engine, kind="tar", workers=None, on="threads", endpoint=""):
    ds = numbers((300, 100, 300)).shuffle().filter(keep, workers=workers, on=on).map(row, workers=workers, on=on)
    ds = ds.map_batches(Model, 20, workers=workers and 1, on=on).on(engine)
    storage = ps.S3(endpoint, ACCESS_KEY, SECRET_KEY) if endpoint else None
    getattr(ds, f"write_{kind}")(url, shards=16, storage=storage)


def files(folder):
    found = {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    for name in found:
        if name.endswith(".index"):  # it has the time at which its shard was written
            found[name] = replace(Index.from_bytes(found[name]), stamp=Stamp()).to_bytes()
    return found


def start_cluster(stack, nodes):
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    stack.callback(cluster.shutdown)
    return cluster, [cluster.add_node(**NODE) for _ in range(nodes - 1)]


def connect(cluster_address):
    ray.init(address=cluster_address, log_to_driver=False, logging_level="error")
"""

IDENTITY = """
if __name__ == "__main__":
    ways = {"local": ("local", None, "threads"), "4 threads": ("local", 4, "threads")}
    ways |= {f"{count} processes": ("local", count, "processes") for count in range(1, 5)}
    want = {}
    for kind in ("tar", "parquet"):
        write(f"want-{kind}", "serial", kind)
        want[kind] = files(f"want-{kind}")
        for name, (engine, workers, on) in ways.items():
            write(f"{name}-{kind}", engine, kind, workers, on)
            assert files(f"{name}-{kind}") == want[kind], (name, kind)
    with ExitStack() as stack:
        cluster, _ = start_cluster(stack, 1)
        connect(cluster.address)
        stack.callback(ray.shutdown)
        for count in (1, 3):
            while len(ray.nodes()) < count:
                cluster.add_node(**NODE)
            for kind in want:
                write(f"{count}-{kind}", "ray", kind, 2 * count)
                assert files(f"{count}-{kind}") == want[kind], (count, kind)
    print("equal", len(want["tar"]), len(want["parquet"]))
"""

KILLING = """
def command(pid):
    return (Path("/proc") / pid / "cmdline").read_bytes()


def parent(pid):
    return (Path("/proc") / pid / "stat").read_text().rpartition(")")[2].split()[1]


def actors():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if command(pid).startswith((b"ray::ActorWorker", b"ray::ConsumerActor")):
                found += [int(pid)] * (os.environ["RAY_TMPDIR"].encode() in command(parent(pid)))
        except OSError:  # it has ended
            continue
    return found


def main(kind, where):
    rng, folder = random.Random(f"{kind} {where}"), Path.cwd()
    write("want", "serial")
    want = files("want")
    with ExitStack() as stack:
        endpoint = ""
        if where == "s3":
            (folder / "server" / "bucket").mkdir(parents=True)
            endpoint = f"http://127.0.0.1:{stack.enter_context(s3_server(folder / 'server'))}"
        cluster, nodes = start_cluster(stack, 3)

        def place(name):
            return (f"s3://bucket/{name}", f"server/bucket/{name}") if endpoint else (name, name)

        def driver(url):
            call = [sys.executable, "script.py", "write", url, cluster.address, endpoint]
            process = subprocess.Popen(call, stdout=subprocess.PIPE)
            process.stdout.readline()  # it is connected
            return process

        def whole(url):
            began = time.monotonic()
            if kind == "driver":
                with driver(url) as process:
                    began = time.monotonic()
                    assert process.wait() == 0
            else:
                write(url, "ray", workers=3, endpoint=endpoint)
            return time.monotonic() - began

        def kill_later(delay_s, done, killed):
            if done.wait(delay_s):
                return
            if kind == "worker" and (alive := actors()):
                os.kill(rng.choice(alive), signal.SIGKILL)
                killed.append(delay_s)
            if kind == "node":
                cluster.remove_node(nodes.pop(rng.randrange(len(nodes))), allow_graceful=False)
                killed.append(delay_s)

        if kind != "driver":
            connect(cluster.address)
            stack.callback(ray.shutdown)
        url, path = place("whole")
        whole(url)
        assert files(path) == want
        duration_s = whole(place("again")[0])  # the first run also started Python on each node
        killed = []
        for number in range(100):
            url, path = place(f"out{number}")
            delay_s = rng.random() * duration_s
            if kind == "driver":
                with driver(url) as process:
                    time.sleep(delay_s)
                    if process.poll() is None:
                        process.kill()
                        killed.append(delay_s)
                whole(url)
            else:
                done = threading.Event()
                killer = threading.Thread(target=kill_later, args=(delay_s, done, killed))
                killer.start()
                try:
                    whole(url)
                finally:
                    done.set()
                    killer.join()
                while len(nodes) < 2:
                    nodes.append(cluster.add_node(**NODE))
            assert files(path) == want, (number, delay_s, sorted(files(path)))
            assert endpoint or not [entry for entry in Path(path).iterdir() if entry.is_dir()]
            if len(killed) == KILLS:
                break
    print("killed", len(killed), f"in {duration_s:.1f} s:", *(f"{moment:.1f}" for moment in killed))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        url, address, endpoint = sys.argv[2:]
        connect(address)
        print("connected", flush=True)
        write(url, "ray", workers=3, endpoint=endpoint)
    else:
        main(*sys.argv[1:])
"""

if FULL:  # they start clusters of three nodes, and many workers

    def test_a_node_that_dies_in_the_middle_of_an_epoch_does_not_change_the_stream(short_folder: Path) -> None:
        done = run(
            """
            import hashlib
            import time

            import ray
            from ray.cluster_utils import Cluster

            import penstock as ps
            from penstock.testing import numbers, outputs


            def add_bytes(sample, rng):
                time.sleep(0.001)
                node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else None
                return {**sample, "large": rng.bytes(8000), "node": node}  # large enough for the object store of a node


            def hash_bytes(sample):
                return {**sample, "large": hashlib.md5(sample["large"]).hexdigest()}


            def without_node(sample):
                return {name: value for name, value in sample.items() if name != "node"}


            if __name__ == "__main__":
                node = {"num_cpus": 1, "object_store_memory": 80_000_000}
                cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
                nodes = [cluster.add_node(**node) for _ in range(2)]
                ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
                ds = numbers((700, 800, 900)).shuffle().map(add_bytes, workers=3)
                ds = ds.map(hash_bytes, workers=2, memory=1000)
                got, killed = [], None
                for row in ds.on("ray").epoch(0):
                    got.append(row)
                    busy = [node for node in nodes if node.node_id == row["node"]]
                    if killed is None and len(got) > 300 and busy:
                        cluster.remove_node(busy[0], allow_graceful=False)
                        killed = row["node"]
                want = numbers((700, 800, 900)).shuffle().map(add_bytes).map(hash_bytes).on("serial").epoch(0)
                assert outputs(map(without_node, got)) == outputs(map(without_node, want))
                ray.shutdown()
                cluster.shutdown()
                served = [row["node"] for row in got]
                print("killed", killed in served, killed in served[-300:], len(set(served)) > 1)
            """,
            short_folder,
        )
        assert done.stdout.splitlines()[-1] == "killed True False True", (
            "the node worked until it was killed; others worked too"
        )

    @pytest.mark.timeout(1200)
    def test_every_engine_and_any_number_of_nodes_write_the_same_files(short_folder: Path) -> None:
        done = run(WRITING + IDENTITY, short_folder, timeout_s=1000)
        assert done.stdout.split() == ["equal", "33", "17"]

    @pytest.mark.timeout(1200)
    @pytest.mark.parametrize("where", ["disk", "s3"])
    @pytest.mark.parametrize("kind", ["worker", "node", "driver"])
    def test_what_is_killed_does_not_change_what_is_written(kind: str, where: str, short_folder: Path) -> None:
        done = run(WRITING + KILLING, short_folder, kind, where, timeout_s=1000)
        assert done.stdout.splitlines()[-1].startswith("killed 10 "), done.stdout


if FULL:  # it starts a cluster, and a server between the cluster and the script

    def test_a_cluster_behind_ray_client_yields_the_same(short_folder: Path) -> None:
        done = run(
            """
            import os
            import secrets
            import socket
            import subprocess
            import sys
            import time
            from pathlib import Path

            from penstock.errors import EngineError, StageError
            from penstock.testing import numbers, outputs


            class Adds:
                def __init__(self, number):
                    self.number = number

                def __call__(self, batch):
                    return {**batch, "sum": batch["x"] + self.number}


            def fails(sample):
                return {**sample, "inverse": 1 // (sample["x"] - 20)}


            def ports():
                servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
                found = [server.getsockname()[1] for server in servers]
                [server.close() for server in servers]
                return found


            if __name__ == "__main__":
                os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
                port, client = ports()
                arguments = f"start --head --block --num-cpus=2 --port={port} --ray-client-server-port={client}"
                arguments += " --include-dashboard=false --object-store-memory=100000000 --disable-usage-stats"
                command = [str(Path(sys.executable).with_name("ray")), *arguments.split()]
                head = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
                try:
                    until = time.monotonic() + 300
                    while socket.socket().connect_ex(("127.0.0.1", client)) and time.monotonic() < until:
                        time.sleep(0.2)
                    def on(ds):
                        return ds.on("ray", address=f"ray://127.0.0.1:{client}")
                    ds = numbers((300, 500)).shuffle().epoch(1)
                    added = ds.map(dict, workers=1).map_batches(Adds, 100, fn_args=(5,), workers=(1, 2))
                    assert outputs(on(added)) == outputs(added.on("serial"))
                    try:
                        list(on(ds.map(fails)))
                    except StageError as exc:
                        notes = exc.__cause__.__notes__
                        assert exc.key == "20" and exc.shard and any("in fails" in note for note in notes), exc
                    try:
                        iter(on(ds.map(dict, gpus=1)))
                    except EngineError as exc:
                        print(exc)
                finally:
                    import ray  # not earlier: it reads its mode of authentication when it is imported

                    ray.shutdown()  # the head waits for its clients
                    head.terminate()
                    head.wait(300)
            """,
            short_folder,
        )
        assert "gpus=1 for each worker; the cluster has 2 cores, 0 GPUs" in done.stdout
