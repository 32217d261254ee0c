"""A shell command for every sample, in a private folder: its files go in, what is there afterwards comes out."""

from __future__ import annotations

import errno
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from weakref import WeakSet

from penstock.errors import DataError, EngineError, StorageError
from penstock.formats.tar.archive import EncodedSamples, encode_sample
from penstock.formats.tar.walker import MAX_MEMBER
from penstock.tarstream.raw import RawSample

_SHM = "/dev/shm"
_ROOM = 1 << 30  # bytes that must be free in memory before folders are put there
_LOG = 64 << 10  # bytes of a command's output that are kept: the last ones
_STALE = re.compile(r"penstock-proc-(\d+)-")
_NAME = "sample"
_RENAMED = "__key__"  # a file sample.__key__ that the command writes holds another key


@dataclass(frozen=True, slots=True)
class Command:
    """What is done with every sample.

    Attributes:
        words: The program and its arguments.
        timeout_s: How long it may take.
        log: The field that gets what it printed.
    """

    words: tuple[str, ...]
    timeout_s: float | None = None
    log: str | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a sample.

    Attributes:
        raw: The sample as it was.
        encoded: The sample as it is now; None where nothing is left of it.
        printed: What the command printed, the last of it.
        problem: Why it failed, if it did.
    """

    raw: RawSample
    encoded: EncodedSamples | None
    printed: bytes
    problem: str | None = None


_places: WeakSet[Workplace] = WeakSet()


def stop_all() -> None:
    """End all commands of this process, whoever runs them."""
    for place in list(_places):
        place.stop()


def each(stream: Iterable[RawSample], place: Workplace, parallel: int, ordered: bool = True) -> Iterator[Done]:
    """Run the command of a workplace on samples, ``parallel`` at a time; what comes of them in order, or as it is done.

    Raises:
        StorageError: The files of a sample cannot be written.
        EngineError: The workplace was stopped.
    """
    pool = ThreadPoolExecutor(parallel, thread_name_prefix="penstock-proc")
    waiting: deque[Future[Done]] = deque()
    try:
        for number, raw in enumerate(stream):
            waiting.append(pool.submit(place.do, number, raw))
            while len(waiting) >= parallel * 2 or (waiting and waiting[0].done()):
                yield _next(waiting, ordered).result()
        while waiting:
            yield _next(waiting, ordered).result()
    finally:
        place.stop()  # whoever leaves early does not wait for commands
        pool.shutdown(wait=True, cancel_futures=True)


def _next(waiting: deque[Future[Done]], ordered: bool) -> Future[Done]:
    if ordered:
        return waiting.popleft()
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    chosen = next(iter(done))
    waiting.remove(chosen)
    return chosen


class Workplace:
    """A folder with one private folder for each sample that is being worked on, and the commands that run there.

    Leaving the ``with`` block ends those commands and removes the folder.

    Args:
        command: What is done with every sample.
        folder: Where it is made; in memory by default where there is room, else where temporary files go.

    Raises:
        StorageError: It cannot be made.
    """

    def __init__(self, command: Command, folder: str | None = None) -> None:
        self._command = command
        parent = folder or _parent()
        _remove_stale(parent)
        try:
            os.makedirs(parent, exist_ok=True)
            self._root = tempfile.mkdtemp(prefix=f"penstock-proc-{os.getpid()}-", dir=parent)
        except OSError as exc:
            raise StorageError(f"the work folder cannot be made: {exc.strerror or exc}", parent) from exc
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self._stopped = False
        _places.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        _remove(self._root)

    def stop(self) -> None:
        """End all commands that run, and let none begin."""
        with self._lock:
            self._stopped = True
            for pid in self._running:
                _kill(pid)

    def do(self, number: int, raw: RawSample) -> Done:
        """Run the command on a sample.

        Raises:
            StorageError: The files of the sample cannot be written.
            EngineError: The workplace was stopped.
        """
        place = os.path.join(self._root, f"_{number:08d}")
        try:
            try:
                _put(place, raw)
            except OSError as exc:
                if exc.errno == errno.ENAMETOOLONG:  # a field whose name is too long for a file
                    return Done(raw, None, b"", f"its fields cannot be files: {exc.strerror}")
                raise StorageError(f"the files of {raw.key!r} cannot be written: {exc.strerror}", self._root) from exc
            code, printed = self._run(place, number, raw)
            if self._stopped:  # it may have been ended, which is no failure of the sample's
                raise EngineError("the command was stopped")
            problem = self._problem(code)
            if problem is not None:
                return Done(raw, None, printed, problem)
            try:
                return Done(raw, self._result(place, raw, printed), printed)
            except DataError as exc:
                return Done(raw, None, printed, exc.problem)
            except OSError as exc:
                return Done(raw, None, printed, f"its files cannot be read back: {exc.strerror or exc}")
        finally:
            _remove(place)

    def _problem(self, code: int | None) -> str | None:
        if code is None:
            return f"the command took longer than {self._command.timeout_s:g} s"
        if code < 0:
            return f"the command was ended by signal {-code}"
        return f"the command failed with exit code {code}" if code else None

    def _run(self, place: str, number: int, raw: RawSample) -> tuple[int | None, bytes]:
        """Run it; None for the exit code if it took too long."""
        words = {"PENSTOCK_KEY": raw.key, "PENSTOCK_SHARD": raw.shard, "PENSTOCK_NUMBER": str(number)}
        log = os.memfd_create("penstock-proc")
        try:
            process = subprocess.Popen(
                self._command.words,
                cwd=place,
                env=os.environ | words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # so that what it starts can be ended with it
            )
            with self._lock:
                self._running.add(process.pid)
                if self._stopped:
                    _kill(process.pid)
            try:
                code = self._waited(process)
            finally:
                with self._lock:
                    _kill(process.pid)
                    self._running.discard(process.pid)
                process.wait()
            size = os.fstat(log).st_size
            return code, os.pread(log, _LOG, max(0, size - _LOG))
        except OSError as exc:
            raise StorageError(f"the command cannot be started: {exc.strerror or exc}", self._command.words[0]) from exc
        finally:
            os.close(log)

    def _waited(self, process: subprocess.Popen[bytes]) -> int | None:
        if self._command.timeout_s is None:
            # Not reaped here: its number must stay its own until its group is ended.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            return _code(process.pid)
        handle = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(self._command.timeout_s * 1000):
                return None
        finally:
            os.close(handle)
        return _code(process.pid)

    def _result(self, place: str, raw: RawSample, printed: bytes) -> EncodedSamples | None:
        """Read the files of a sample back."""
        fields: dict[str, bytes] = {}
        key = raw.key
        with os.scandir(place) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            field = name[len(_NAME) + 1 :].lower()
            if not name.startswith(f"{_NAME}.") or not field:
                continue
            data = _content(os.path.join(place, name))
            if field == _RENAMED:
                key = data.decode("utf-8", "surrogateescape").split("\n")[0]
            elif field in fields:
                raise DataError(f"two files are the field {field!r}")
            elif not (field.startswith("__") and field.endswith("__")):
                fields[field] = data
        if self._command.log is not None:
            fields[self._command.log] = printed
        return encode_sample(key, fields) if fields else None


def _code(pid: int) -> int:
    """The exit code of a process that has ended and is not reaped yet; of a signal, its number below zero."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _put(place: str, raw: RawSample) -> None:
    os.mkdir(place, 0o700)
    for field, data in raw.fields().items():
        handle = os.open(os.path.join(place, f"{_NAME}.{field}"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(handle, rest) :]
        finally:
            os.close(handle)


def _content(path: str) -> bytes:
    """Read a file that a command left; never one it only points to."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise DataError(f"{os.path.basename(path)!r} is a link, not a file") from exc
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{os.path.basename(path)!r} is no file")
        if status.st_size > MAX_MEMBER:  # it may have holes, and need no disk to be larger than memory
            raise DataError(f"{os.path.basename(path)!r} has more than {MAX_MEMBER} bytes, too many for a field")
        with open(handle, "rb", buffering=0, closefd=False) as file:
            return file.readall()
    finally:
        os.close(handle)


def _remove(place: str) -> None:
    try:
        shutil.rmtree(place)
    except FileNotFoundError:
        return
    except OSError:  # a folder that the command has locked
        for folder, _, _ in os.walk(place):
            os.chmod(folder, 0o700)
        shutil.rmtree(place, ignore_errors=True)


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _parent() -> str:
    """Memory, where there is room; else where temporary files go."""
    try:
        free = os.statvfs(_SHM)
        if free.f_bavail * free.f_frsize >= _ROOM and os.access(_SHM, os.W_OK):
            return _SHM
    except OSError:
        pass
    return tempfile.gettempdir()


def _remove_stale(parent: str) -> None:
    """Remove what killed runs of this user have left."""
    try:
        with os.scandir(parent) as entries:
            left = [entry for entry in entries if _STALE.match(entry.name)]
        for entry in left:
            match = _STALE.match(entry.name)
            gone = match is not None and not os.path.exists(f"/proc/{match[1]}")
            if gone and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                _remove(entry.path)
    except OSError:
        return


def echo(data: bytes) -> None:
    """Show what a command printed."""
    if data:
        sys.stderr.buffer.write(data if data.endswith(b"\n") else data + b"\n")
        sys.stderr.buffer.flush()
