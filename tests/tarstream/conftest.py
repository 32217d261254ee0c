"""Archives for the tests of raw samples."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

MakeArchive = Callable[..., str]


@pytest.fixture
def make_archive(tmp_path: Path) -> MakeArchive:
    """A function that writes samples with ``cls`` (their number) and ``jpg``, after members that are not samples."""

    def make(name: str, keys: list[str], format: int = tarfile.PAX_FORMAT, size: int = 700) -> str:
        path = tmp_path / name
        with tarfile.open(path, "w", format=format) as tar:
            tar.addfile(tarfile.TarInfo("README"))
            folder = tarfile.TarInfo("folder")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            for number, key in enumerate(keys):
                for field, data in (("cls", b"%d" % number), ("jpg", bytes([number % 256]) * (size + number))):
                    member = tarfile.TarInfo(f"{key}.{field}")
                    member.size, member.mtime, member.mode = len(data), 1e9 + 0.5, 0o440
                    tar.addfile(member, io.BytesIO(data))
        return str(path)

    return make
