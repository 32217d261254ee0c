"""Several nodes on one machine, one of which dies in the middle of an epoch; Ray that a script starts by itself."""

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
def place() -> Iterator[Path]:
    """A folder with a short name: Ray's sockets lie in it, and their paths must not be long."""
    folder = tempfile.mkdtemp(prefix="ray-")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


def run(script: str, place: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of a user's, with a Ray of its own; no process of it may be left."""
    source = str(Path(penstock.__file__).parents[1])
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_TMPDIR": str(place), "PYTHONPATH": source, "PENSTOCK_CACHE": str(place / "cache")}
    (place / "script.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=place, env=env, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    until = time.monotonic() + 10
    while left := _processes_of(place):
        assert time.monotonic() < until, f"left behind: {left}"
        time.sleep(0.2)
    return done


def _processes_of(place: Path) -> list[str]:
    """The processes that know of the folder by their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(place) in words:
                found.append(words.replace("\0", " ")[:200])
    return found


def test_a_node_that_dies_in_mid_epoch_changes_nothing(place: Path) -> None:
    done = run(
        """
        import hashlib
        import time

        import ray
        from ray.cluster_utils import Cluster

        import penstock as ps
        from penstock.testing import numbers, outputs


        def here(sample, rng):
            time.sleep(0.001)
            node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else None
            return {**sample, "large": rng.bytes(8000), "node": node}  # large enough to lie in a node's store


        def there(sample):
            return {**sample, "large": hashlib.md5(sample["large"]).hexdigest()}


        def without_node(sample):
            return {name: value for name, value in sample.items() if name != "node"}


        if __name__ == "__main__":
            one = {"num_cpus": 1, "object_store_memory": 80_000_000}
            cluster = Cluster(initialize_head=True, head_node_args={**one, "include_dashboard": False})
            nodes = [cluster.add_node(**one) for _ in range(2)]
            ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
            ds = numbers((700, 800, 900)).shuffle().map(here, workers=3).map(there, workers=2, memory=1000)
            got, killed = [], None
            for row in ds.on("ray").epoch(0):
                got.append(row)
                busy = [node for node in nodes if node.node_id == row["node"]]
                if killed is None and len(got) > 300 and busy:
                    cluster.remove_node(busy[0], allow_graceful=False)
                    killed = row["node"]
            want = numbers((700, 800, 900)).shuffle().map(here).map(there).on("serial").epoch(0)
            assert outputs(map(without_node, got)) == outputs(map(without_node, want))
            ray.shutdown()
            cluster.shutdown()
            served = [row["node"] for row in got]
            print("killed", killed in served, killed in served[-300:], len(set(served)) > 1)
        """,
        place,
    )
    assert done.stdout.splitlines()[-1] == "killed True False True", "a node that worked, then did not; others did"


def test_a_script_without_a_cluster_starts_ray_says_so_and_leaves_nothing(place: Path) -> None:
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
        place,
    )
    assert done.stdout.split() == ["5"]
    assert done.stderr.count("penstock: no Ray is running: started one on this machine") == 1


if FULL:  # a cluster of its own, and a server between it and the script

    def test_a_cluster_behind_ray_client_gives_the_same(place: Path) -> None:
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
                words = f"start --head --block --num-cpus=2 --port={port} --ray-client-server-port={client}"
                words += " --include-dashboard=false --object-store-memory=100000000 --disable-usage-stats"
                program = str(Path(sys.executable).with_name("ray"))
                head = subprocess.Popen([program, *words.split()], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
                try:
                    until = time.monotonic() + 60
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
                    import ray  # not before: it looks for its mode of authentication when it is imported

                    ray.shutdown()  # the head waits for its clients
                    head.terminate()
                    head.wait(60)
            """,
            place,
        )
        assert "gpus=1 for each worker; the cluster has 2 cores, 0 GPUs" in done.stdout
