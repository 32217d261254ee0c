"""Sound: WAV, FLAC, Ogg and MP3 by libsndfile, as ``{"array": float32, "sampling_rate": int}``.

The array is ``(frames,)`` for one channel, else ``(frames, channels)``, in -1..1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from io import BytesIO
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.codecs.arrays import as_array
from penstock.codecs.limits import Limits
from penstock.errors import MissingExtra

EXTENSIONS = ("wav", "flac", "ogg", "oga", "opus", "mp3", "aiff", "aif")

# Told by content, and only these: libsndfile would also try two dozen formats nobody trains on.
_MAGICS = (b"RIFF", b"RIFX", b"RF64", b"fLaC", b"OggS", b"FORM", b"ID3")
_SAMPLE_BYTES = 4
_BLOCK_FRAMES = 1 << 16
_UNSAID = 2**63 - 1  # libsndfile's count where the file does not tell, as in FLAC made by a pipe

# Lossless where the format can be. FLAC has no floats: 24 bits keep them to 6e-8.
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


def decoder(limits: Limits) -> Callable[[bytes], dict[str, Any]]:
    """Return the decoder of audio files; the kind of file is told by its content.

    Raises:
        MissingExtra: The package soundfile is not installed.
    """
    _soundfile()
    return partial(decode_audio, limits=limits)


def decode_audio(data: bytes, limits: Limits) -> dict[str, Any]:
    """Return the whole sound and its rate.

    Raises:
        OverLimit: It declares, or has, more than ``limits.bytes`` as float32.
        ValueError: It is no audio file that is known here, is damaged or is cut short.
        MissingExtra: The package soundfile is not installed.
    """
    soundfile = _soundfile()
    if not _looks_like_audio(data):
        raise ValueError(f"not an audio file (WAV, FLAC, Ogg, MP3, AIFF): it starts with {bytes(data[:8])!r}")
    try:
        with _forward_reader()(_QuietStream(data)) as sound:
            return {"array": _read(sound, limits), "sampling_rate": int(sound.samplerate)}
    except soundfile.LibsndfileError as exc:
        raise ValueError(f"damaged audio file: {exc.error_string}") from exc


def encode_audio(value: Any, extension: str) -> bytes:
    """Return ``{"array", "sampling_rate"}`` or ``(array, rate)`` in the format of the extension.

    WAV and AIFF keep float32, int16 and int32 exactly; FLAC keeps int16 exactly and all else to 24 bits;
    Ogg, Opus and MP3 are lossy. Formats without floats take values in -1..1 only.

    Raises:
        TypeError: It is neither, or the array's dtype is not a float, int16 or int32.
        ValueError: Its shape is not ``(frames,)`` or ``(frames, channels)``, or values are out of range.
        MissingExtra: The package soundfile is not installed.
    """
    array, rate = _sound(value)
    kind = _FLOATS if array.dtype.kind == "f" else f"{array.dtype.kind}{array.dtype.itemsize}"
    container, subtypes = _SUBTYPES[extension]
    if kind not in subtypes:
        raise TypeError(f"sound is float, int16 or int32, not {array.dtype}")
    if array.ndim not in (1, 2):
        raise ValueError(f"sound has the shape (frames,) or (frames, channels), not {array.shape}")
    if kind == _FLOATS and subtypes[kind] != "FLOAT" and array.size and not float(np.abs(array).max()) <= 1:
        raise ValueError(f"{container} holds values in -1..1 only")
    return _written(array, rate, container, subtypes[kind])


def _sound(value: Any) -> tuple[npt.NDArray[Any], int]:
    if isinstance(value, Mapping) and {"array", "sampling_rate"} <= value.keys():
        samples, rate = value["array"], value["sampling_rate"]
    elif isinstance(value, tuple) and len(value) == 2:
        samples, rate = value
    else:
        raise TypeError('sound is {"array": ..., "sampling_rate": ...} or (array, rate)')
    array = as_array(samples)
    if array is None:
        raise TypeError(f"sound needs an array, not {type(samples).__name__}")
    return array, int(rate)


def _written(array: npt.NDArray[Any], rate: int, container: str, subtype: str) -> bytes:
    soundfile = _soundfile()
    channels = 1 if array.ndim == 1 else array.shape[1]
    # libsndfile takes these four types only; half and long double become their neighbours.
    if array.dtype.kind == "f" and array.dtype.itemsize not in (4, 8):
        array = array.astype(np.float32 if array.dtype.itemsize < 4 else np.float64)
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    stream = BytesIO()
    try:
        with soundfile.SoundFile(stream, "w", rate, channels, subtype, format=container) as sound:
            # In blocks: libsndfile's Vorbis encoder puts a whole write on the stack.
            for start in range(0, len(array), _BLOCK_FRAMES):
                sound.write(array[start : start + _BLOCK_FRAMES])
    except soundfile.LibsndfileError as exc:
        problem = f"{container} cannot hold {channels} channels at {rate} Hz"
        raise ValueError(f"{problem}: {exc.error_string}") from exc
    return stream.getvalue()


def _looks_like_audio(data: bytes) -> bool:
    # MP3 without a tag begins with a frame: eleven bits set.
    return data.startswith(_MAGICS) or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0)


def _read(sound: Any, limits: Limits) -> npt.NDArray[np.float32]:
    declared, width = sound.frames, sound.channels * _SAMPLE_BYTES
    if declared == _UNSAID:
        return _read_to_the_end(sound, limits)
    limits.check_bytes(declared * width, "audio")
    array: npt.NDArray[np.float32] = sound.read(declared, dtype="float32")
    if len(array) == declared:
        return array
    if sound.format == "FLAC":
        raise ValueError(f"truncated FLAC file: {declared} frames declared, {len(array)} present")
    # MP3 only estimates its length; the copy lets go of the rest.
    return array.copy()


def _read_to_the_end(sound: Any, limits: Limits) -> npt.NDArray[np.float32]:
    blocks = [np.empty((0,) if sound.channels == 1 else (0, sound.channels), np.float32)]
    size = 0
    while True:
        block = sound.read(_BLOCK_FRAMES, dtype="float32")
        if not len(block):
            return np.concatenate(blocks)
        size += block.nbytes
        limits.check_bytes(size, "audio")
        blocks.append(block)


class _QuietStream(BytesIO):
    """Bytes to seek in: damaged files send libsndfile before the start, where an error would be printed."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return super().seek(0)


@cache
def _forward_reader() -> type[Any]:
    """soundfile's reader without its seek after every read, which fails where the length is not said."""
    soundfile = _soundfile()

    class ForwardReader(soundfile.SoundFile):  # type: ignore[name-defined, misc]
        def seekable(self) -> bool:
            return False

    return ForwardReader


def _soundfile() -> ModuleType:
    try:
        import soundfile
    except ImportError as exc:
        raise MissingExtra("audio", "audio") from exc
    module: ModuleType = soundfile
    return module
