"""Samples into shards, encoded by the extensions of their fields."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from penstock.codecs.arrays import encode_pth, encode_tenbin
from penstock.codecs.text import encode_cbor, encode_msgpack
from penstock.compat.webdataset import gopen
from penstock.formats.tar.archive import END_MARKER, ZEROS

Encoder = Callable[[Any], Any]
_COMPRESSORS: dict[str, Any] = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}

torch_dumps = encode_pth


def _saved(save: Callable[..., Any], *args: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    save(stream, *args, **options)
    return stream.getvalue()


def imageencoder(image: Any, format: str = "PNG") -> bytes:
    """Encode a PIL image or an array, floats in 0..1; JPEG with quality 100."""
    if isinstance(image, np.ndarray):
        if image.dtype.kind == "f":
            low, high = np.amin(image), np.amax(image)
            if low <= -0.001 or high >= 1.001:
                raise ValueError(f"image values out of range {low} {high}")
            image = (np.clip(image, 0.0, 1.0) * 255.0).astype(np.uint8)
        image = import_module("PIL.Image").fromarray(image[:, :, 0] if image.shape[2:] == (1,) else image)
    format = {"JPG": "JPEG"}.get(format.upper(), format)
    return _saved(image.save, format=format, **({"quality": 100} if format in ("JPEG", "TIFF") else {}))


numpy_dumps = partial(_saved, np.save)
_ENCODERS: dict[str, Encoder] = {  # of values that are neither bytes nor text
    "cls cls2 class count index inx id": lambda x: str(x).encode("ascii"),
    "pyd pickle": pickle.dumps,
    "pth": torch_dumps,
    "npy": numpy_dumps,
    "npz": lambda x: _saved(np.savez_compressed, **x),
    "ten tenbin tb": encode_tenbin,
    "json jsn": lambda x: json.dumps(x).encode("utf-8"),
    "mp msgpack msg": encode_msgpack,
    "cbor": encode_cbor,
    "jpg jpeg img image": partial(imageencoder, format="JPEG"),
    "tiff tif": partial(imageencoder, format="TIFF"),
    "png": imageencoder,
    "pbm pgm ppm": partial(imageencoder, format="PPM"),
}
default_handlers = {name: encoder for names, encoder in _ENCODERS.items() for name in names.split()}


def add_handlers(d: dict[str, Encoder], keys: Any, value: Encoder) -> None:
    d.update(dict.fromkeys(keys.split() if isinstance(keys, str) else keys, value))


def _encoded(data: Any, name: str, handlers: dict[str, Encoder]) -> Any:
    if isinstance(data, str):
        data = data.encode("utf-8")
    elif not isinstance(data, bytes):
        extension = name.removesuffix(".gz").rpartition(".")[2].lower()
        if extension not in handlers:
            raise ValueError(f"no handler found for {extension}")
        data = handlers[extension](data)
    return gzip.compress(data) if name.endswith(".gz") else data


def make_encoder(spec: Any) -> Encoder:
    if callable(spec) or not spec:
        return spec or dict
    handlers = default_handlers if spec is True else spec
    return lambda sample: {k: v if k[0] == "_" else _encoded(v, k, handlers) for k, v in sample.items()}


@dataclass(eq=False)
class TarWriter(AbstractContextManager["TarWriter"]):
    fileobj: Any  # a path, a URL or a stream
    user: str = "bigdata"
    group: str = "bigdata"
    mode: int = 0o444
    compress: bool | str | None = None  # True or "gz", "bz2", "xz"; None: what the name ends with
    encoder: Any = True
    keep_meta: bool = False  # write fields whose names begin with "_", too
    mtime: float | None = None  # None: now
    format: Any = None  # one of tarfile; None: plain headers, and PAX only where they do not suffice

    def __post_init__(self) -> None:
        named = isinstance(self.fileobj, str)
        kind = "gz" if self.compress is True else self.compress
        if kind is None and named:
            kind = next((kind for kind in _COMPRESSORS if self.fileobj.endswith(kind)), None)
        self.stream = gopen.gopen(self.fileobj, "wb") if named else self.fileobj
        self.tarstream: Any = _COMPRESSORS[kind](self.stream, "wb") if kind else self.stream
        self.encode, layout = make_encoder(self.encoder), self.format or tarfile.PAX_FORMAT
        self.layout: Any = getattr(tarfile, layout) if isinstance(layout, str) else layout

    def write(self, obj: dict[str, Any]) -> int:
        sample = self.encode(obj)
        if not isinstance(sample.get("__key__"), str):
            raise ValueError(f"object must contain a __key__ that is text, got {sample.get('__key__')!r}")
        total, pieces = 0, []
        for name, value in sorted(sample.items()):
            if name == "__key__" or (name[0] == "_" and not self.keep_meta):
                continue
            value = value.encode("utf-8") if isinstance(value, str) and name[0] == "_" else value
            if not isinstance(value, bytes | bytearray | memoryview):
                raise ValueError(f"{name} doesn't map to a bytes after encoding ({type(value)})")
            member = tarfile.TarInfo(f"{sample['__key__']}.{name}")
            member.size, member.mode, member.uname, member.gname = len(value), self.mode, self.user, self.group
            member.mtime = int(time.time() if self.mtime is None else self.mtime)  # whole: plain headers hold no more
            pieces += [member.tobuf(self.layout, "utf-8", "surrogateescape"), value, ZEROS[: -len(value) % 512]]
            total += len(value)
        for piece in pieces:  # only when the whole sample is known to be good
            self.tarstream.write(piece)
        return total

    def close(self) -> None:
        if self.tarstream is not None:
            self.tarstream.write(END_MARKER)
            if self.tarstream is not self.stream:
                self.tarstream.close()
            if self.stream is not self.fileobj:
                self.stream.close()
            self.tarstream = None

    def __exit__(self, *error: Any) -> None:
        self.close()


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """Writes samples to numbered shards; the next begins when one holds ``maxcount`` samples or ``maxsize`` bytes."""

    def __init__(
        self,
        pattern: str,
        maxcount: float = 100000,
        maxsize: float = 3e9,
        post: Callable[[str], Any] | None = None,  # called with the name of each complete shard
        start_shard: int = 0,
        verbose: int = 1,
        opener: Callable[[str], Any] | None = None,
        **kw: Any,
    ) -> None:
        self.pattern, self.maxcount, self.maxsize, self.post = pattern, maxcount, maxsize, post
        self.shard, self.verbose, self.opener, self.kw = start_shard, verbose, opener, kw
        self.total = self.count = self.size = 0
        self.tarstream: Any = None
        self.next_stream()

    def next_stream(self) -> None:
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
        self.size += self.tarstream.write(obj)
        self.count += 1
        self.total += 1

    def finish(self) -> None:
        if self.tarstream is not None:
            self.tarstream.close()
            if self.opener:
                self.tarstream.stream.close()
            self.tarstream = None
            if self.post:
                self.post(self.fname)

    close = finish

    def __exit__(self, *error: Any) -> None:
        self.close()
