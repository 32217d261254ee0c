"""Cut long recordings into overlapping windows, and keep the windows that have annotations.

    python examples/audio_splitter.py
    python examples/audio_splitter.py --engine ray --address auto
    python examples/audio_splitter.py --wavs recordings --annotations tables --labels labels.csv

Recordings are generated unless ``--wavs`` names a folder of them. An annotation table is a CSV file of
``begin,end,label`` (in seconds) with the name of its recording; a recording without a table is skipped with a warning.
``--labels`` is a CSV file of ``label,as`` that renames labels. Windows last ``--duration`` seconds and overlap the next
window by ``--overlap`` seconds; the last window ends with the recording.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import logging
import wave
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps

RATE = 8000
log = logging.getLogger("audio_splitter")


def windows(length: int, size: int, overlap: int) -> list[tuple[int, int]]:
    """Return start and end of windows of ``size``; the last window is moved back so that it ends at ``length``.

    >>> windows(10, 4, 1)
    [(0, 4), (3, 7), (6, 10)]
    >>> windows(11, 4, 1)
    [(0, 4), (3, 7), (6, 10), (7, 11)]
    """
    last = max(0, length - size)
    starts = [*range(0, last, size - overlap), last]
    return [(start, min(length, start + size)) for start in starts]


@dataclass(frozen=True)
class AudioSplitter:
    """Splits one recording: writes its windows, and yields a row for each.

    Attributes:
        duration_s: The length of a window.
        overlap_s: The overlap with the next window.
        annotations: The folder of annotation tables; ``None``: every window is kept.
        labels: New names for labels.
    """

    duration_s: float
    overlap_s: float
    annotations: Path | None = None
    labels: dict[str, str] = field(default_factory=dict)

    def __call__(self, path: Path, out: Any) -> Iterator[dict[str, Any]]:
        table = None if self.annotations is None else self.annotations / f"{path.stem}.csv"
        if table is not None and not table.exists():
            log.warning("%s has no annotations; skipped", path.name)
            return
        annotations = [] if table is None else self._read_annotations(table)
        with wave.open(str(path), "rb") as source:
            parameters, rate = source.getparams(), source.getframerate()
            frame_bytes = source.getnchannels() * source.getsampwidth()
            frames = source.readframes(source.getnframes())
        for start, end in windows(parameters.nframes, round(self.duration_s * rate), round(self.overlap_s * rate)):
            begin_s, end_s = start / rate, end / rate
            labels = sorted({label for low_s, high_s, label in annotations if low_s < end_s and high_s > begin_s})
            if table is not None and not labels:
                continue
            name = hashlib.md5(f"{out.input}-{begin_s}-{end_s}".encode()).hexdigest() + ".wav"
            with wave.open(str(out.path(name)), "wb") as target:
                target.setparams(parameters)
                target.writeframes(frames[start * frame_bytes : end * frame_bytes])
            yield {
                "source": out.input,
                "annotation": table,
                "begin": begin_s,
                "end": end_s,
                "dest": name,
                "labels": "|".join(labels),
            }

    def _read_annotations(self, table: Path) -> list[tuple[float, float, str]]:
        with table.open(newline="") as rows:
            return [
                (float(row["begin"]), float(row["end"]), self.labels.get(row["label"], row["label"]))
                for row in csv.DictReader(rows)
            ]


def generate_recordings(folder: Path, count: int) -> None:
    """Write recordings of a few seconds, all but the last with annotations, and new names for their labels."""
    for name in ("wavs", "tables"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "labels.csv").write_text("label,as\nRBWO,woodpecker\nEATO,towhee\n")
    for number in range(count):
        path = folder / "wavs" / f"{number:03d}.wav"
        if path.exists():
            continue
        seconds = 3 + number % 4 + 0.25
        tone = np.sin(np.arange(int(seconds * RATE)) * (2 * np.pi * (220 + 20 * number) / RATE))
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes((tone * 12_000).astype("<i2").tobytes())
        if number < count - 1:
            lines = ["begin,end,label", "0.2,0.4,RBWO", f"{seconds - 0.6},{seconds - 0.1},EATO", "0.3,0.9,owl"]
            (folder / "tables" / f"{number:03d}.csv").write_text("\n".join(lines))


def main() -> None:
    """Split all recordings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="audio", help="where data and results go")
    parser.add_argument("--wavs", help="a folder of recordings, instead of generated ones")
    parser.add_argument("--annotations", help="the folder of their annotation tables")
    parser.add_argument("--labels", help="a CSV file of label,as")
    parser.add_argument("--count", type=int, default=8, help="how many recordings to generate")
    parser.add_argument("--duration", type=float, default=1.0, help="seconds of a window")
    parser.add_argument("--overlap", type=float, default=0.25, help="seconds that a window shares with the next")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--address", help="the address of the Ray cluster")
    args = parser.parse_args()
    folder, generated = Path(args.folder), args.wavs is None
    if generated:
        generate_recordings(folder, args.count)
    wavs = folder / "wavs" if generated else Path(args.wavs)
    tables = folder / "tables" if generated else args.annotations and Path(args.annotations)
    names = folder / "labels.csv" if generated else args.labels
    labels = {} if not names else {row["label"]: row["as"] for row in ps.read_csv(names)}

    meta = ps.process(
        f"{wavs}/*.wav",
        AudioSplitter(args.duration, args.overlap, tables or None, labels),
        folder / "windows",
        folder / "windows.csv",
        workers=args.workers,
        engine=args.engine,
        address=args.address,
    )
    for row in meta.groupby("labels").count():
        print(f"{row['count']} windows with {row['labels'] or 'no labels'}")
    for failure in meta.failures:
        print(f"failed: {failure.input}: {failure.error}")
    print(f"{len(meta)} windows of {meta.inputs} recordings, {meta.worked} recordings split now")


if __name__ == "__main__":
    main()
