"""Samples into shards, encoded by the extensions of their fields."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Self

import numpy as np

from penstock.codecs.arrays import encode_pth
from penstock.compat.webdataset import gopen, tenbin
from penstock.formats.tar.archive import END_MARKER, ZEROS

Encoder = Callable[[Any], Any]
_FORMATS = {"JPG": "JPEG", "IMG": "PPM", "IMAGE": "PPM", "PBM": "PPM", "PGM": "PPM"}
_COMPRESSORS: dict[str, Any] = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}


def imageencoder(image: Any, format: str = "PNG") -> bytes:
    """Encode a PIL image or an array, floats in 0..1; JPEG with quality 100."""
    pillow = import_module("PIL.Image")
    assert isinstance(image, pillow.Image | np.ndarray), type(image)
    if isinstance(image, np.ndarray):
        if image.dtype.kind == "f":
            low, high = np.amin(image), np.amax(image)
            if low <= -0.001 or high >= 1.001:
                raise ValueError(f"image values out of range {low} {high}")
            image = (np.clip(image, 0.0, 1.0) * 255.0).astype(np.uint8)
        assert image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (1, 3)), image.shape
        image = pillow.fromarray(image[:, :, 0] if image.shape[2:] == (1,) else image)
    kind = _FORMATS.get(format.upper(), format.upper())
    stream = io.BytesIO()
    image.save(stream, format=kind, **({"quality": 100} if kind in ("JPEG", "TIFF") else {}))
    return stream.getvalue()


def bytestr(data: Any) -> bytes:
    """Return bytes as they are, and the ASCII text of anything else."""
    return data if isinstance(data, bytes) else str(data).encode("ascii")


torch_dumps = encode_pth


def numpy_dumps(data: Any) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(data))
    return stream.getvalue()


def numpy_npz_dumps(data: dict[str, Any]) -> bytes:
    assert isinstance(data, dict), type(data)
    stream = io.BytesIO()
    np.savez_compressed(stream, **data)
    return stream.getvalue()


def tenbin_dumps(x: Any) -> bytes:
    """Encode an array or a list of arrays."""
    return tenbin.encode_buffer(x if isinstance(x, list) else [x])


def mp_dumps(x: Any) -> bytes:
    packed: bytes = import_module("msgpack").packb(x)
    return packed


def cbor_dumps(x: Any) -> bytes:
    packed: bytes = import_module("cbor2").dumps(x)
    return packed


def make_handlers() -> dict[str, Encoder]:
    """Return the functions that encode fields, by extension."""
    table: dict[str, Encoder] = {
        "cls cls2 class count index inx id": bytestr,
        "txt text transcript html htm": lambda x: x.encode("utf-8"),
        "pyd pickle": pickle.dumps,
        "pth": torch_dumps,
        "npy": numpy_dumps,
        "npz": numpy_npz_dumps,
        "ten tenbin tb": tenbin_dumps,
        "json jsn": lambda x: json.dumps(x).encode("utf-8"),
        "mp msgpack msg": mp_dumps,
        "cbor": cbor_dumps,
        "jpg jpeg img image": partial(imageencoder, format="jpg"),
        "tiff tif": partial(imageencoder, format="tiff"),
        **{name: partial(imageencoder, format=name) for name in ("png", "pbm", "pgm", "ppm")},
    }
    return {name: encoder for names, encoder in table.items() for name in names.split()}


default_handlers = make_handlers()


def encode_based_on_extension1(data: Any, tname: str, handlers: dict[str, Encoder]) -> Any:
    """Encode one field; bytes and text are stored as they are, ``.gz`` is compressed."""
    if tname[0] == "_":
        if not isinstance(data, str):
            raise ValueError("the values of metadata must be of string type")
        return data
    name = tname.removesuffix(".gz")
    if isinstance(data, str):
        data = data.encode("utf-8")
    elif not isinstance(data, bytes):
        extension = name.rpartition(".")[2].lower()
        if extension not in handlers:
            raise ValueError(f"no handler found for {extension}")
        data = handlers[extension](data)
    return data if name == tname else gzip.compress(data)


def encode_based_on_extension(sample: dict[str, Any], handlers: dict[str, Encoder]) -> dict[str, Any]:
    return {name: encode_based_on_extension1(value, name, handlers) for name, value in sample.items()}


def make_encoder(spec: Any) -> Encoder:
    """Return the encoder of samples: by extension (True or a dict of functions), none (False), or a function."""
    if spec is False or spec is None:
        return lambda sample: sample
    if callable(spec):
        found: Encoder = spec
        return found
    if spec is True or isinstance(spec, dict):
        return lambda sample: encode_based_on_extension(sample, default_handlers if spec is True else spec)
    raise ValueError(f"{spec}: unknown decoder spec")


class TarWriter:
    """Writes samples to one shard: a path, a URL or a stream.

    ``compress`` is True or "gz", "bz2", "xz", by default what the name ends with; ``encoder`` see ``make_encoder``;
    ``keep_meta`` also writes fields whose names begin with ``_``; ``mtime`` is by default now; ``format`` is one of
    ``tarfile``, by default plain headers, and PAX only where they do not suffice.
    """

    def __init__(
        self,
        fileobj: Any,
        user: str = "bigdata",
        group: str = "bigdata",
        mode: int = 0o444,
        compress: bool | str | None = None,
        encoder: Any = True,
        keep_meta: bool = False,
        mtime: float | None = None,
        format: Any = None,
    ) -> None:
        self.user, self.group, self.mode, self.mtime = user, group, mode, mtime
        self.compress, self.keep_meta, self.encoder = compress, keep_meta, make_encoder(encoder)
        self.format: Any = getattr(tarfile, format, format) if isinstance(format, str) else format or tarfile.PAX_FORMAT
        self.own_fileobj = gopen.gopen(fileobj, "wb") if isinstance(fileobj, str) else None
        self.stream = fileobj if self.own_fileobj is None else self.own_fileobj
        kind = self.tarmode(fileobj, compress)[2:]
        self.tarstream: Any = _COMPRESSORS[kind](self.stream, "wb") if kind else self.stream

    @staticmethod
    def tarmode(fileobj: Any, compress: bool | str | None = None) -> str:
        """Return ``w|`` and the compression that the arguments mean."""
        kind = "gz" if compress is True else compress or ""
        if compress is None and isinstance(fileobj, str):
            kind = next((suffix for suffix in _COMPRESSORS if fileobj.endswith(suffix)), "")
        return f"w|{kind}"

    def write(self, obj: dict[str, Any]) -> int:
        """Write a sample and return the size of its fields."""
        sample = self.encoder(obj)
        if "__key__" not in sample:
            raise ValueError("object must contain a __key__")
        total, pieces = 0, []
        for name in sorted(sample):
            value = sample[name]
            if name == "__key__" or (name[0] == "_" and not self.keep_meta):
                continue
            value = value.encode("utf-8") if isinstance(value, str) and name[0] == "_" else value
            if not isinstance(value, bytes | bytearray | memoryview):
                raise ValueError(f"{name} doesn't map to a bytes after encoding ({type(value)})")
            member = tarfile.TarInfo(f"{sample['__key__']}.{name}")
            member.size, member.mode, member.uname, member.gname = len(value), self.mode, self.user, self.group
            member.mtime = int(time.time() if self.mtime is None else self.mtime)  # whole: plain headers hold no more
            pieces += [member.tobuf(self.format, "utf-8", "surrogateescape"), value, ZEROS[: -len(value) % 512]]
            total += len(value)
        for piece in pieces:  # only when the whole sample is known to be good
            self.tarstream.write(piece)
        return total

    def close(self) -> None:
        """Write the end of the archive, and close what was opened here."""
        if self.tarstream is None:
            return
        self.tarstream.write(END_MARKER)
        if self.tarstream is not self.stream:
            self.tarstream.close()
        self.tarstream = None
        if self.own_fileobj is not None:
            self.own_fileobj.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class ShardWriter:
    """Writes samples to numbered shards; the next begins when one holds ``maxcount`` samples or ``maxsize`` bytes.

    ``pattern`` has ``%06d`` for the number; ``post`` is called with the name of each complete shard; ``opener`` opens
    the stream of a name; all other arguments are those of ``TarWriter``.
    """

    def __init__(
        self,
        pattern: str,
        maxcount: float = 100000,
        maxsize: float = 3e9,
        post: Callable[[str], Any] | None = None,
        start_shard: int = 0,
        verbose: int = 1,
        opener: Callable[[str], Any] | None = None,
        **kw: Any,
    ) -> None:
        self.pattern, self.maxcount, self.maxsize, self.post = pattern, maxcount, maxsize, post
        self.shard, self.verbose, self.opener, self.kw = start_shard, verbose, opener, kw
        self.total = self.count = self.size = 0
        self.fname = ""
        self.tarstream: TarWriter | None = None
        self.next_stream()

    def next_stream(self) -> None:
        """Complete the shard and begin the next."""
        self.finish()
        self.fname = self.pattern % self.shard
        if self.verbose:
            print("# writing", self.fname, self.count, f"{self.size / 1e9:.1f} GB", self.total)
        self.shard += 1
        self.tarstream = TarWriter(self.opener(self.fname) if self.opener else self.fname, **self.kw)
        self.count = self.size = 0

    def write(self, obj: dict[str, Any]) -> None:
        if self.tarstream is None or self.count >= self.maxcount or self.size >= self.maxsize:
            self.next_stream()
        assert self.tarstream is not None
        self.size += self.tarstream.write(obj)
        self.count += 1
        self.total += 1

    def finish(self) -> None:
        """Complete the shard."""
        if self.tarstream is None:
            return
        self.tarstream.close()
        if self.opener:
            self.tarstream.stream.close()
        self.tarstream = None
        if callable(self.post):
            self.post(self.fname)

    def close(self) -> None:
        self.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
