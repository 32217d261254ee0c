"""Fixtures and hooks of all tests: a separate cache, a hypothesis profile, small shards, a check for leaked threads."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import logging
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from PIL import Image

from penstock.testing import UnorderedEngineTests

RunScript = Callable[..., tuple[int, str]]

FULL = os.environ.get("PENSTOCK_FULL") == "1"
EXAMPLES = 20
SHARDS, SAMPLES_PER_SHARD = 4, 25
CLASSES = ("cat", "dog", "fox")
PHOTOS_PER_CLASS = 8
PHOTO_SIZE = (48, 32)

# How long a thread may take to end after the test, and how long before garbage is collected, which takes long.
THREAD_GRACE_S, THREAD_SOON_S = 60.0, 0.5

WARM = "PENSTOCK_WARM_PYTHON"  # the variable with the socket of warm_python.py; the command beside it is "python"
COMPILED = "PENSTOCK_COMPILED"  # the variable with a file that exists when the tests are compiled
COLD = "PENSTOCK_COLD_PYTHON"  # the variable with the interpreter for options that the command does not know

settings.register_profile("penstock", derandomize=True, deadline=None, max_examples=1000 if FULL else EXAMPLES)
settings.load_profile("penstock")

HAS_JPEGTRAN = shutil.which("jpegtran") is not None
HAS_CHROMIUM = shutil.which("chromium") is not None and shutil.which("chromedriver") is not None
collect_ignore = [] if HAS_JPEGTRAN else ["vision/test_tiles.py"]
collect_ignore += [] if HAS_CHROMIUM else ["view/test_in_chromium.py"]

_cache = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
_warm = pytest.StashKey[list[subprocess.Popen[bytes]]]()


def pytest_configure(config: pytest.Config) -> None:
    """Use a temporary cache instead of the user's, and start the interpreters of ``run_script``.

    A fixture would not apply to the doctests, which are outside of this folder.
    """
    gc.disable()  # until everything is imported: a third of the time of the collection
    if not HAS_JPEGTRAN and os.environ.get("CI") == "true":
        raise pytest.UsageError("jpegtran is not installed: apt-get install libjpeg-turbo-progs")
    if not HAS_CHROMIUM and os.environ.get("CI") == "true":
        raise pytest.UsageError("chromium is not installed: apt-get install chromium chromium-driver")
    # A shell makes background jobs and their children ignore SIGINT, which some tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # With Ray's own niceness of 15, other busy processes keep its workers from running.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    config.stash[_cache] = tempfile.TemporaryDirectory(prefix="penstock-cache-")
    os.environ["PENSTOCK_CACHE"] = config.stash[_cache].name
    if not hasattr(config, "workerinput"):  # all workers share the interpreters
        config.stash[_warm] = _start_warm_python(Path(config.stash[_cache].name))
        os.environ[COMPILED] = str(Path(config.stash[_cache].name) / "compiled")
    elif config.workerinput["workerid"] != "gw0":
        _wait_until_compiled()


def _wait_until_compiled() -> None:
    """Wait until the first worker has compiled and collected the tests: the others would do the same work beside it."""
    deadline = time.monotonic() + 120
    while not os.path.exists(os.environ[COMPILED]) and time.monotonic() < deadline:
        time.sleep(0.1)


def _start_warm_python(folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start the interpreters of warm_python.py, and write a command ``python`` that runs programs in them."""
    os.environ |= {WARM: str(folder / "warm"), COLD: sys.executable}
    client = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).with_name("warm_client.py")), os.environ[WARM]])
    command = folder / "python"
    command.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
    command.chmod(0o755)
    call = [sys.executable, str(Path(__file__).with_name("warm_python.py"))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # programs run beside each other
    started = []
    for address, large in (("warm", []), ("warm-large", ["large"])):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / address))
            listener.listen(64)
            fd = listener.fileno()
            started.append(subprocess.Popen([*call, str(fd), *large], stdin=subprocess.DEVNULL, pass_fds=[fd], env=env))
    return started


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what could not be tested."""
    if not HAS_CHROMIUM:
        terminalreporter.write_line(
            "The pages of penstock view were tested without a browser: apt-get install chromium chromium-driver"
        )
    if not HAS_JPEGTRAN:
        terminalreporter.write_line("Tiles were tested without jpegtran: apt-get install libjpeg-turbo-progs")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Kill the interpreters, and remove the cache."""
    atexit.register(gc.unfreeze)  # extension modules complain of what is left at the exit
    for process in config.stash.get(_warm, []):
        process.kill()
        process.wait()
    if _cache in config.stash:
        config.stash[_cache].cleanup()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for doctests in the sources only, not in the modules of this folder."""
    return [found for found in (yield) if type(found) is pytest.Module]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one process run all tests that use Ray, one all that use the browser, one most of those that run programs.

    Each process begins with an equal part of the list, and takes tests from the ends of the others when it is done.
    """
    if not FULL:
        items[:] = _sample_laws(items)
    together = ("shared_ray", "chromium_process", "run_script")
    firsts: list[list[pytest.Item]] = [[item for item in items if _uses(item, name)] for name in together]
    rest = [item for item in items if not any(_uses(item, name) for name in together)]
    part = len(items) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) + 1
    items.clear()
    for first in firsts:
        filling = max(0, part - len(first))
        items += first + rest[:filling]
        rest = rest[filling:]
    items += rest


def _sample_laws(items: list[pytest.Item]) -> list[pytest.Item]:
    """Keep some random laws for each plan, and of each law one of the cases that differ in the cut or seed."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        plan = _plan(item)
        case = f"{item.nodeid.partition('[')[0]} {plan}" if plan else item.nodeid
        if not plan or random.Random(f"some {case}").random() < 0.4:
            groups.setdefault(case, []).append(item)
    return [random.Random(case).choice(group) for case, group in groups.items()]


def _plan(item: pytest.Item) -> str | None:
    """Return the plan of the corpus that a law is tested on; None for other tests."""
    if not isinstance(item, pytest.Function) or not issubclass(item.cls or object, UnorderedEngineTests):
        return None
    return str(item.callspec.params["name"]) if "name" in item.fixturenames else None


def pytest_collection_finish() -> None:
    """Collect garbage again, but never look at the imported libraries: that takes half a second each time.

    A logger that does not propagate, as torch has forty, gets pytest's handlers six times in every test.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()
    gc.enable()
    Path(os.environ[COMPILED]).touch()


@pytest.fixture
def shared_ray() -> None:
    """Ray with two cores and two fake devices, shared by all tests that use it; see the hooks below."""


def _uses(item: pytest.Item | None, fixture: str) -> bool:
    return fixture in getattr(item, "fixturenames", ())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start Ray before the first test that uses it, and before ``_no_thread_left`` records its threads."""
    if not _uses(item, "shared_ray"):
        return
    import ray
    from ray._private.node import Node

    if ray.is_initialized():
        return
    # The tests neither read logs nor open the dashboard, whose processes take time to start and while they wait.
    with patch.object(Node, "start_log_monitor"), patch.object(Node, "start_api_server"):
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=200_000_000,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop Ray after the last test that uses it, since an idle Ray takes a third of a core.

    What stays after the last test of a module is not looked at again by collections of garbage.
    """
    if _uses(item, "shared_ray") and not _uses(nextitem, "shared_ray"):
        import ray

        ray.shutdown()
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    """Fail a test that leaves a thread behind, and name the thread."""
    before = set(threading.enumerate())
    yield
    if _threads_left(before, THREAD_SOON_S):
        gc.collect()  # an unfinished iteration ends when it is collected
        if left := _threads_left(before, THREAD_GRACE_S):
            pytest.fail(f"threads left behind: {', '.join(sorted(thread.name for thread in left))}")


def _threads_left(before: set[threading.Thread], within_s: float) -> list[threading.Thread]:
    """Wait for the threads that were started since; return those that have not ended."""
    deadline = time.monotonic() + within_s
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in threading.enumerate() if thread not in before]


@pytest.fixture
def interrupt_at() -> Callable[[int], AbstractContextManager[list[int]]]:
    """Raises KeyboardInterrupt before the n-th line of Python code that is called in a block, as Ctrl-C may.

    The context manager yields a list with the number of lines so far; line 0 interrupts nothing.
    """

    @contextmanager
    def interrupt(line: int) -> Iterator[list[int]]:
        count = [0]

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename == __file__ or frame.f_code.co_filename == contextlib.__file__:
                return None
            if event == "line":
                count[0] += 1
                if count[0] == line:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            yield count
        finally:
            sys.settrace(before)

    return interrupt


@pytest.fixture(scope="session")
def warm_python() -> str:
    """A command like ``python`` whose processes have large libraries imported already; see warm_python.py.

    To kill a program, send SIGRTMIN: the end of a process that gets SIGKILL may be seen before that of its program.
    """
    return str(Path(os.environ[WARM]).with_name("python"))


@pytest.fixture(scope="session")
def run_script() -> RunScript:
    """Runs scripts as ``warm_python`` does; the function returns the status, and output and errors in one text."""
    spec = spec_from_file_location("warm_client", Path(__file__).with_name("warm_client.py"))
    assert spec is not None
    assert spec.loader is not None
    client = module_from_spec(spec)
    spec.loader.exec_module(client)

    def run(*arguments: str | Path, folder: Path, env: dict[str, str]) -> tuple[int, str]:
        with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile() as output:
            streams = (nothing.fileno(), output.fileno(), output.fileno())
            status = client.run(os.environ[WARM], [str(each) for each in arguments], str(folder), env, streams)
            output.seek(0)
            return status, output.read().decode(errors="replace")

    return run


@pytest.fixture(scope="session")
def photo_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ``train-{0000..0003}.tar`` and ``photos/<class>/*.jpg`` that tests must not change.

    A shard has 25 samples; each has a ``jpg`` (RGB), a ``png`` (grayscale), a ``cls`` and a ``json``.
    """
    folder = tmp_path_factory.mktemp("photo-shards")
    for shard in range(SHARDS):
        _write_shard(folder / f"train-{shard:04}.tar", first=shard * SAMPLES_PER_SHARD)
    for label, name in enumerate(CLASSES):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(PHOTOS_PER_CLASS):
            photo = _photo("RGB", "JPEG", seed=label * PHOTOS_PER_CLASS + number)
            (folder / "photos" / name / f"{number:03}.jpg").write_bytes(photo)
    return folder


@pytest.fixture(scope="session")
def tiny_shards(photo_shards: Path) -> list[Path]:
    """The paths of the shards in ``photo_shards``, in order."""
    return sorted(photo_shards.glob("train-*.tar"))


def _write_shard(path: Path, first: int) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(first, first + SAMPLES_PER_SHARD):
            for extension, data in _fields(number).items():
                member = tarfile.TarInfo(f"{number:06}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def _fields(number: int) -> dict[str, bytes]:
    label = number % len(CLASSES)
    return {
        "jpg": _photo("RGB", "JPEG", seed=number),
        "png": _photo("L", "PNG", seed=number),
        "cls": str(label).encode(),
        "json": json.dumps({"number": number, "class": CLASSES[label]}).encode(),
    }


def _photo(mode: str, format: str, seed: int) -> bytes:
    """Encode a gradient that depends on the seed."""
    width, height = PHOTO_SIZE
    pixels = bytes((seed * 7 + x * 2 + y * 3) % 256 for y in range(height) for x in range(width * len(mode)))
    out = io.BytesIO()
    Image.frombytes(mode, PHOTO_SIZE, pixels).save(out, format)
    return out.getvalue()
