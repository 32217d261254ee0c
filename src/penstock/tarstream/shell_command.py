"""Run a shell command on every sample, in a private folder that holds the sample's files.

The files that the folder holds when the command ends are the new sample.
"""

from __future__ import annotations

import errno
import fcntl
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
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Self
from weakref import WeakSet

from penstock.blobs.content import memory_file
from penstock.errors import DataError, EngineError, StorageError
from penstock.formats.tar.archive import EncodedSamples, encode_sample
from penstock.formats.tar.walker import MAX_MEMBER
from penstock.tarstream.raw import RawSample

_SHARED_MEMORY = "/dev/shm"
_POLL_S = 0.01  # between looks at a process where the system cannot wait for it with a timeout
_MIN_FREE_BYTES = 1 << 30  # of shared memory, for folders to be created there
_LOG_BYTES = 64 << 10  # only the last bytes of a command's output are kept
_RUN_FOLDER = "penstock-proc-"
_KEY_FIELD = "__key__"  # a file sample.__key__ that the command writes holds the new key


@dataclass(frozen=True, slots=True)
class TarprocFiles:
    """The folder of a sample as tarproc fills and reads it: a command may leave the files of several samples.

    The files ``__key__`` and ``__source__`` hold the key and the shard. All files whose names have a dot belong to a
    sample; those with the same base name belong together.

    Attributes:
        fields: The fields that are written as files; None: all.
        separator: Stands between the key and what a base name adds to it.
        include: A regular expression; only files whose names it matches are read.
        exclude: A regular expression; files whose names it matches are not read.
    """

    fields: frozenset[str] | None = None
    separator: str = ""
    include: str | None = None
    exclude: str | None = None

    def reads(self, name: str) -> bool:
        """Return whether a file that the command left belongs to a sample."""
        if name.find(".") < 1 or (self.exclude is not None and re.search(self.exclude, name)):
            return False
        return self.include is None or re.search(self.include, name) is not None

    def key(self, key: str, added: str) -> str:
        """Return the key of a sample whose base name adds a text to the original sample's."""
        return f"{key}{self.separator}{added}" if added else key


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """The command that is run on every sample.

    Attributes:
        argv: The program and its arguments.
        timeout_s: How long it may take for one sample; None: no limit.
        log_field: The field that stores what the command printed; None: not stored.
        base: The name of the files of a sample, before the dot.
        any_exit_code: Whether a command that ends with another exit code than 0 succeeds, too.
        tarproc: Fill and read folders as tarproc does; None: all fields are files, and the files ``base.*`` are read.
    """

    argv: tuple[str, ...]
    timeout_s: float | None = None
    log_field: str | None = None
    base: str = "sample"
    any_exit_code: bool = False
    tarproc: TarprocFiles | None = None


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The outcome of the command for one sample.

    Attributes:
        raw: The original sample.
        encoded: The new samples; none if the command failed or left no files.
        printed: The last bytes that the command printed.
        problem: Why it failed; None if it succeeded.
    """

    raw: RawSample
    encoded: list[EncodedSamples]
    printed: bytes
    problem: str | None = None


_runners: WeakSet[CommandRunner] = WeakSet()


def stop_all() -> None:
    """Kill the running commands of all runners in this process."""
    for runner in list(_runners):
        runner.stop()


def run_on_each(
    samples: Iterable[RawSample], runner: CommandRunner, parallel: int, ordered: bool = True
) -> Iterator[CommandResult]:
    """Run the command on samples, ``parallel`` at a time; yield results in the order of the samples or as they finish.

    Closing the iterator kills the running commands.

    Raises:
        StorageError: The files of a sample cannot be written.
        EngineError: The runner was stopped.
    """
    pool = ThreadPoolExecutor(parallel, thread_name_prefix="penstock-proc")
    pending: deque[Future[CommandResult]] = deque()
    ended: SimpleQueue[Future[CommandResult]] = SimpleQueue()  # Ctrl-C in futures.wait() may leave a future locked

    def pop_next() -> Future[CommandResult]:
        if ordered:
            return pending.popleft()
        future = ended.get()
        pending.remove(future)
        return future

    try:
        for number, raw in enumerate(samples):
            pending.append(pool.submit(runner.run, number, raw))
            if not ordered:
                pending[-1].add_done_callback(ended.put)
            # Twice as many as run at a time, so that a slow sample at the front does not leave threads idle.
            while len(pending) >= parallel * 2 or (pending and pending[0].done()):
                yield pop_next().result()
        while pending:
            yield pop_next().result()
    finally:
        runner.stop()  # a consumer that leaves early does not wait for commands
        pool.shutdown(wait=True, cancel_futures=True)


class CommandRunner:
    """Runs a command on samples, each in a private folder below a temporary one.

    Leaving the ``with`` block kills the running commands and removes the temporary folder. Thread-safe.

    Args:
        command: The command.
        folder: Where the temporary folder is created; by default in memory if there is room, else in ``TMPDIR``.

    Raises:
        StorageError: The temporary folder cannot be created.
    """

    def __init__(self, command: ShellCommand, folder: str | None = None) -> None:
        self._command = command
        parent = folder or _default_parent()
        _remove_stale_folders(parent)
        try:
            os.makedirs(parent, exist_ok=True)
            self._root, self._root_lock = _locked_folder(parent)
        except OSError as exc:
            raise StorageError(f"cannot create the work folder: {exc.strerror or exc}", parent) from exc
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self._stopped = False
        _runners.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        _remove_folder(self._root)
        os.close(self._root_lock)

    def stop(self) -> None:
        """Kill the running commands, and refuse to start others."""
        with self._lock:
            self._stopped = True
            for pid in self._running:
                _kill_group(pid)

    def run(self, number: int, raw: RawSample) -> CommandResult:
        """Run the command on a sample.

        Raises:
            StorageError: The files of the sample cannot be written, or the command cannot be started.
            EngineError: The runner was stopped.
        """
        folder = os.path.join(self._root, f"_{number:08d}")
        try:
            try:
                self._write_files(folder, raw)
            except OSError as exc:
                if exc.errno == errno.ENAMETOOLONG:  # the name of a field is too long for a file
                    return CommandResult(raw, [], b"", f"its fields cannot be written as files: {exc.strerror}")
                raise StorageError(f"cannot write the files of {raw.key!r}: {exc.strerror}", self._root) from exc
            code, printed = self._run_in(folder, number, raw)
            if self._stopped:  # a command that was killed is not a failure of its sample
                raise EngineError("the command was stopped")
            problem = self._problem(code)
            if problem is not None:
                return CommandResult(raw, [], printed, problem)
            try:
                return CommandResult(raw, self._read_files(folder, raw, printed), printed)
            except DataError as exc:
                return CommandResult(raw, [], printed, exc.problem)
            except OSError as exc:
                return CommandResult(raw, [], printed, f"its files cannot be read back: {exc.strerror or exc}")
        finally:
            _remove_folder(folder)

    def _problem(self, code: int | None) -> str | None:
        if code is None:
            return f"the command took longer than {self._command.timeout_s:g} s"
        if code < 0:
            return f"the command was killed by signal {-code}"
        return f"the command failed with exit code {code}" if code and not self._command.any_exit_code else None

    def _run_in(self, folder: str, number: int, raw: RawSample) -> tuple[int | None, bytes]:
        """Run the command in a folder; return its exit code (None after a timeout) and the end of what it printed."""
        variables = {"PENSTOCK_KEY": raw.key, "PENSTOCK_SHARD": raw.shard, "PENSTOCK_NUMBER": str(number)}
        log = memory_file()
        try:
            process = subprocess.Popen(
                self._command.argv,
                cwd=folder,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # so that its children can be killed with it
            )
            with self._lock:
                self._running.add(process.pid)
                if self._stopped:
                    _kill_group(process.pid)
            try:
                code = self._wait(process)
            finally:
                with self._lock:
                    _kill_group(process.pid)
                    self._running.discard(process.pid)
                process.wait()
            size = os.fstat(log).st_size
            return code, os.pread(log, _LOG_BYTES, max(0, size - _LOG_BYTES))
        except OSError as exc:
            raise StorageError(f"cannot start the command: {exc.strerror or exc}", self._command.argv[0]) from exc
        finally:
            os.close(log)

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """Wait for a process without reaping it, so that its pid stays valid until its group is killed."""
        if self._command.timeout_s is None:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            return _exit_code(process.pid)
        return _exit_code(process.pid) if _exits_within(process.pid, self._command.timeout_s) else None

    def _write_files(self, folder: str, raw: RawSample) -> None:
        os.mkdir(folder, 0o700)
        base, tarproc = self._command.base, self._command.tarproc
        for field, data in raw.fields().items():
            if tarproc is None or tarproc.fields is None or field in tarproc.fields:
                _write_file(os.path.join(folder, f"{base}.{field}"), data)
        if tarproc is not None:
            _write_file(os.path.join(folder, "__key__"), raw.key.encode("utf-8", "surrogateescape"))
            _write_file(os.path.join(folder, "__source__"), raw.shard.encode("utf-8", "surrogateescape"))

    def _read_files(self, folder: str, raw: RawSample, printed: bytes) -> list[EncodedSamples]:
        """Read the samples from the files that the command left; none if there are none."""
        base, log_field, tarproc = self._command.base, self._command.log_field, self._command.tarproc
        with os.scandir(folder) as entries:
            if tarproc is None:
                names = [entry.name for entry in entries if entry.name.startswith(f"{base}.")]
            else:
                names = [entry.name for entry in entries if tarproc.reads(entry.name) and not entry.is_dir()]
        groups: dict[str, list[str]] = {base: []} if log_field is not None else {}
        for name in sorted(names, key=lambda name: name.partition(".")):
            groups.setdefault(name.partition(".")[0], []).append(name)
        samples = []
        for found, group in groups.items():
            key = raw.key if tarproc is None else tarproc.key(raw.key, found.removeprefix(base))
            key, fields = _read_fields(folder, group, key)
            if log_field is not None and found == base:
                fields[log_field] = printed
            if fields:
                samples.append(encode_sample(key, fields))
        return samples


def _read_fields(folder: str, names: list[str], key: str) -> tuple[str, dict[str, bytes]]:
    """Read the files of one sample; return its key, which a file may replace, and its fields.

    Raises:
        DataError: Two files are the same field, or one cannot be a field.
    """
    fields: dict[str, bytes] = {}
    for name in names:
        field = name.partition(".")[2].lower()
        if not field:
            continue
        data = _read_file(os.path.join(folder, name))
        if field == _KEY_FIELD:
            key = data.decode("utf-8", "surrogateescape").split("\n")[0]
        elif field in fields:
            raise DataError(f"two files are the field {field!r}: their names differ only in case")
        elif not (field.startswith("__") and field.endswith("__")):
            fields[field] = data
    return key, fields


def _exits_within(pid: int, timeout_s: float) -> bool:
    """Wait for a child process without reaping it; return False after the timeout."""
    if not hasattr(os, "pidfd_open"):
        deadline = time.monotonic() + timeout_s
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(fd)


def _exit_code(pid: int) -> int:
    """Return the exit code of a process that has ended and is not reaped yet; after a signal, its negative number."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert status is not None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _write_file(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
    finally:
        os.close(fd)


def _read_file(path: str) -> bytes:
    """Read a regular file that a command left, without following a link or waiting at a pipe.

    Raises:
        DataError: The path is not a regular file, or too large for a field.
    """
    name = os.path.basename(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise DataError(f"{name!r} is a link, not a file") from exc
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{name!r} is not a regular file")
        if status.st_size > MAX_MEMBER:  # a sparse file may be larger than memory
            raise DataError(f"{name!r} has more than {MAX_MEMBER} bytes, too many for a field")
        with open(fd, "rb", buffering=0, closefd=False) as file:
            return file.readall()
    finally:
        os.close(fd)


def _remove_folder(folder: str) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError:  # the command has removed the permissions of a folder
        for parent, _, _ in os.walk(folder):
            os.chmod(parent, 0o700)
        shutil.rmtree(folder, ignore_errors=True)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _default_parent() -> str:
    """Return the folder in shared memory if there is room, else the one for temporary files."""
    try:
        free = os.statvfs(_SHARED_MEMORY)
        if free.f_bavail * free.f_frsize >= _MIN_FREE_BYTES and os.access(_SHARED_MEMORY, os.W_OK):
            return _SHARED_MEMORY
    except OSError:
        pass
    return tempfile.gettempdir()


def _locked_folder(parent: str) -> tuple[str, int]:
    """Create a folder, and lock it until its descriptor is closed: the lock shows that its owner is alive.

    A process id would not: other containers, which may share the folder, number their processes themselves.
    """
    while True:
        folder = tempfile.mkdtemp(prefix=_RUN_FOLDER, dir=parent)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another run has removed it, as it was not locked
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.isdir(folder):  # it may also have been removed since
            return folder, lock
        os.close(lock)


def _remove_stale_folders(parent: str) -> None:
    """Remove the folders that killed runs of this user left behind: those that no process has locked."""
    try:
        with os.scandir(parent) as entries:
            folders = [entry for entry in entries if entry.name.startswith(_RUN_FOLDER)]
        for entry in folders:
            if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove_folder(entry.path)
            finally:
                os.close(lock)
    except OSError:
        return


def echo(data: bytes) -> None:
    """Write what a command printed to standard error, as whole lines."""
    if data:
        sys.stderr.buffer.write(data if data.endswith(b"\n") else data + b"\n")
        sys.stderr.buffer.flush()
