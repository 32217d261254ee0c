"""Audio files (WAV, FLAC, Ogg, MP3) by libsndfile, decoded to ``{"array": float32, "sampling_rate": int}``.

The array has the shape ``(frames,)`` for one channel, else ``(frames, channels)``; its values are in -1..1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.codecs.arrays import as_array
from penstock.codecs.limits import Limits
from penstock.errors import import_extra

AUDIO_EXTENSIONS = ("wav", "flac", "ogg", "oga", "opus", "mp3", "aiff", "aif")

# Only these formats, recognised by content: libsndfile would also try two dozen that no dataset needs.
_MAGICS = (b"RIFF", b"RIFX", b"RF64", b"fLaC", b"OggS", b"FORM", b"ID3")
_VALUE_BYTES = 4  # one float32
_CHUNK_FRAMES = 1 << 16
_UNKNOWN_FRAMES = 2**63 - 1  # libsndfile's count where the file has none, as in FLAC written to a pipe

# Lossless where the format allows it. FLAC has no floats: 24 bits keep them to within 6e-8.
_FLOATS, _SHORTS, _LONGS = "f", "i2", "i4"
_SUBTYPES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "wav": ("WAV", {_FLOATS: "FLOAT", _SHORTS: "PCM_16", _LONGS: "PCM_32"}),
    "flac": ("FLAC", {_FLOATS: "PCM_24", _SHORTS: "PCM_16", _LONGS: "PCM_24"}),
    "ogg": ("OGG", {_FLOATS: "VORBIS", _SHORTS: "VORBIS", _LONGS: "VORBIS"}),
    "oga": ("OGG", {_FLOATS: "VORBIS", _SHORTS: "VORBIS", _LONGS: "VORBIS"}),
    "opus": ("OGG", {_FLOATS: "OPUS", _SHORTS: "OPUS", _LONGS: "OPUS"}),
    "mp3": ("MP3", {_FLOATS: "MPEG_LAYER_III", _SHORTS: "MPEG_LAYER_III", _LONGS: "MPEG_LAYER_III"}),
    "aiff": ("AIFF", {_FLOATS: "FLOAT", _SHORTS: "PCM_16", _LONGS: "PCM_32"}),
    "aif": ("AIFF", {_FLOATS: "FLOAT", _SHORTS: "PCM_16", _LONGS: "PCM_32"}),
}


def audio_decoder(limits: Limits) -> Callable[[bytes], dict[str, Any]]:
    """Return a function that decodes audio files; the format is recognised by content.

    Raises:
        MissingExtra: The package soundfile is not installed.
    """
    _soundfile()
    return partial(decode_audio, limits=limits)


def decode_audio(data: bytes, limits: Limits) -> dict[str, Any]:
    """Decode a whole audio file.

    Raises:
        OverLimit: The file declares, or holds, more than ``limits.bytes`` as float32.
        ValueError: The format is not supported, or the file is damaged or truncated.
        MissingExtra: The package soundfile is not installed.
    """
    soundfile = _soundfile()
    if not _looks_like_audio(data):
        raise ValueError(f"not an audio file (WAV, FLAC, Ogg, MP3, AIFF): it starts with {bytes(data[:8])!r}")
    try:
        with _forward_only_file()(_LenientStream(data)) as file:
            return {"array": _read_frames(file, limits), "sampling_rate": int(file.samplerate)}
    except soundfile.LibsndfileError as exc:
        raise ValueError(f"damaged audio file: {exc.error_string}") from exc


def encode_audio(value: Any, extension: str) -> bytes:
    """Return ``{"array", "sampling_rate"}`` or ``(array, rate)`` in the format of the extension.

    WAV and AIFF keep float32, int16 and int32 exactly; FLAC keeps int16 exactly and anything else to 24 bits;
    Ogg, Opus and MP3 are lossy. Formats without floats take only values in -1..1.

    Raises:
        TypeError: The value is neither, or the array's dtype is not a float, int16 or int32.
        ValueError: The shape is not ``(frames,)`` or ``(frames, channels)``, or values are out of range.
        MissingExtra: The package soundfile is not installed.
    """
    array, rate = _array_and_rate(value)
    kind = _FLOATS if array.dtype.kind == "f" else f"{array.dtype.kind}{array.dtype.itemsize}"
    container, subtypes = _SUBTYPES[extension]
    if kind not in subtypes:
        raise TypeError(f"audio must be float, int16 or int32, not {array.dtype}")
    if array.ndim not in (1, 2):
        raise ValueError(f"audio must have the shape (frames,) or (frames, channels), not {array.shape}")
    if kind == _FLOATS and subtypes[kind] != "FLOAT" and array.size and not float(np.abs(array).max()) <= 1:
        raise ValueError(f"{container} holds only values in -1..1")
    return _encoded(array, rate, container, subtypes[kind])


def _array_and_rate(value: Any) -> tuple[npt.NDArray[Any], int]:
    if isinstance(value, Mapping) and {"array", "sampling_rate"} <= value.keys():
        frames, rate = value["array"], value["sampling_rate"]
    elif isinstance(value, tuple) and len(value) == 2:
        frames, rate = value
    else:
        raise TypeError('audio must be {"array": ..., "sampling_rate": ...} or (array, rate)')
    array = as_array(frames)
    if array is None:
        raise TypeError(f"audio needs an array, not {type(frames).__name__}")
    return array, int(rate)


def _encoded(array: npt.NDArray[Any], rate: int, container: str, subtype: str) -> bytes:
    soundfile = _soundfile()
    channels = 1 if array.ndim == 1 else array.shape[1]
    # libsndfile takes only float32 and float64; half precision is widened, long double narrowed.
    if array.dtype.kind == "f" and array.dtype.itemsize not in (4, 8):
        array = array.astype(np.float32 if array.dtype.itemsize < 4 else np.float64)
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    stream = BytesIO()
    try:
        with soundfile.SoundFile(stream, "w", rate, channels, subtype, format=container) as file:
            # In chunks: libsndfile's Vorbis encoder puts a whole write on the stack.
            for start in range(0, len(array), _CHUNK_FRAMES):
                file.write(array[start : start + _CHUNK_FRAMES])
    except soundfile.LibsndfileError as exc:
        problem = f"{container} cannot hold {channels} channels at {rate} Hz"
        raise ValueError(f"{problem}: {exc.error_string}") from exc
    return stream.getvalue()


def _looks_like_audio(data: bytes) -> bool:
    # MP3 without a tag begins with a frame header, whose first eleven bits are set.
    return data.startswith(_MAGICS) or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0)


def _read_frames(file: Any, limits: Limits) -> npt.NDArray[np.float32]:
    declared, frame_bytes = file.frames, file.channels * _VALUE_BYTES
    if declared == _UNKNOWN_FRAMES:
        return _read_until_end(file, limits)
    limits.check_bytes(declared * frame_bytes, "audio")
    array: npt.NDArray[np.float32] = file.read(declared, dtype="float32")
    if len(array) == declared:
        return array
    if file.format == "FLAC":
        raise ValueError(f"truncated FLAC file: {declared} frames declared, {len(array)} present")
    # MP3 files only estimate their length; the copy frees the unused end of the buffer.
    return array.copy()


def _read_until_end(file: Any, limits: Limits) -> npt.NDArray[np.float32]:
    chunks = [np.empty((0,) if file.channels == 1 else (0, file.channels), np.float32)]
    size = 0
    while True:
        chunk = file.read(_CHUNK_FRAMES, dtype="float32")
        if not len(chunk):
            return np.concatenate(chunks)
        size += chunk.nbytes
        limits.check_bytes(size, "audio")
        chunks.append(chunk)


class _LenientStream(BytesIO):
    """A stream whose invalid seeks go to its start: libsndfile seeks to negative offsets in damaged files.

    An exception from such a seek would be printed by the callback of soundfile, not raised.
    """

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return super().seek(0)


@cache
def _forward_only_file() -> type[Any]:
    """Return ``SoundFile`` without its seek after every read, which fails where the length is unknown."""
    soundfile = _soundfile()

    class ForwardOnlyFile(soundfile.SoundFile):  # type: ignore[name-defined, misc]
        def seekable(self) -> bool:
            return False

    return ForwardOnlyFile


def _soundfile() -> Any:
    return import_extra("soundfile", "audio", "audio")
