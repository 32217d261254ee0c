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


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a user's script with its own Ray; fail if it leaves a process behind."""
    source = str(Path(penstock.__file__).parents[1])
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_TMPDIR": str(folder), "PYTHONPATH": source, "PENSTOCK_CACHE": str(folder / "cache")}
    env["RAY_worker_niceness"] = "0"  # see conftest.py
    (folder / "script.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False
    )
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
            ds = numbers((700, 800, 900)).shuffle().map(add_bytes, workers=3).map(hash_bytes, workers=2, memory=1000)
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
