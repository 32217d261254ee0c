"""Long recordings cut into windows with overlap, those kept in which somebody heard something.

    python examples/audio_splitter.py
    python examples/audio_splitter.py --engine ray --address auto
    python examples/audio_splitter.py --wavs recordings --annotations tables --labels labels.csv

Recordings are made up unless ``--wavs`` names a folder of them. An annotation table is a CSV of ``begin,end,label`` (in
seconds) with the name of its recording; a recording without one is left out with a warning. ``--labels`` is a CSV of
``label,as`` that gives labels other names. Windows last ``--duration`` seconds and share ``--overlap`` with the next;
the last one ends with the recording.
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
    """Where windows of ``size`` begin and end; the last one is moved back so that it ends with the whole.

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
    """What is done to one recording.

    Attributes:
        duration: Seconds of a window.
        overlap: Seconds it shares with the next.
        annotations: The folder of annotation tables; ``None``: every window is kept.
        labels: Other names for labels.
    """

    duration: float
    overlap: float
    annotations: Path | None = None
    labels: dict[str, str] = field(default_factory=dict)

    def __call__(self, path: Path, out: Any) -> Iterator[dict[str, Any]]:
        table = None if self.annotations is None else self.annotations / f"{path.stem}.csv"
        if table is not None and not table.exists():
            log.warning("%s has no annotations; skipped", path.name)
            return
        heard = [] if table is None else self._heard(table)
        with wave.open(str(path), "rb") as source:
            kind, rate = source.getparams(), source.getframerate()
            frame = source.getnchannels() * source.getsampwidth()
            sound = source.readframes(source.getnframes())
        for first, end in windows(kind.nframes, round(self.duration * rate), round(self.overlap * rate)):
            begin_s, end_s = first / rate, end / rate
            labels = sorted({label for low, high, label in heard if low < end_s and high > begin_s})
            if table is not None and not labels:
                continue
            name = hashlib.md5(f"{out.input}-{begin_s}-{end_s}".encode()).hexdigest() + ".wav"
            with wave.open(str(out.path(name)), "wb") as target:
                target.setparams(kind)
                target.writeframes(sound[first * frame : end * frame])
            yield {
                "source": out.input,
                "annotation": table,
                "begin": begin_s,
                "end": end_s,
                "dest": name,
                "labels": "|".join(labels),
            }

    def _heard(self, table: Path) -> list[tuple[float, float, str]]:
        with table.open(newline="") as rows:
            return [
                (float(row["begin"]), float(row["end"]), self.labels.get(row["label"], row["label"]))
                for row in csv.DictReader(rows)
            ]


def recordings(folder: Path, many: int) -> None:
    """Make recordings of a few seconds, all but the last with annotations, and names for their labels."""
    for kind in ("wavs", "tables"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    (folder / "labels.csv").write_text("label,as\nRBWO,woodpecker\nEATO,towhee\n")
    for number in range(many):
        path = folder / "wavs" / f"{number:03d}.wav"
        if path.exists():
            continue
        seconds = 3 + number % 4 + 0.25
        tone = np.sin(np.arange(int(seconds * RATE)) * (2 * np.pi * (220 + 20 * number) / RATE))
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes((tone * 12_000).astype("<i2").tobytes())
        if number < many - 1:
            lines = ["begin,end,label", "0.2,0.4,RBWO", f"{seconds - 0.6},{seconds - 0.1},EATO", "0.3,0.9,owl"]
            (folder / "tables" / f"{number:03d}.csv").write_text("\n".join(lines))


def main() -> None:
    """Split all recordings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="audio", help="where everything goes")
    parser.add_argument("--wavs", help="a folder of recordings, in place of made-up ones")
    parser.add_argument("--annotations", help="the folder of their tables")
    parser.add_argument("--labels", help="a CSV of label,as")
    parser.add_argument("--many", type=int, default=8, help="recordings to make up")
    parser.add_argument("--duration", type=float, default=1.0)
    parser.add_argument("--overlap", type=float, default=0.25)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--address", help="the Ray cluster")
    args = parser.parse_args()
    folder, made_up = Path(args.folder), args.wavs is None
    if made_up:
        recordings(folder, args.many)
    wavs = folder / "wavs" if made_up else Path(args.wavs)
    tables = folder / "tables" if made_up else args.annotations and Path(args.annotations)
    names = folder / "labels.csv" if made_up else args.labels
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
        print(f"{row['count']} windows with {row['labels'] or 'anything'}")
    for one in meta.failures:
        print(f"failed: {one.input}: {one.error}")
    print(f"{len(meta)} windows of {meta.inputs} recordings, {meta.worked} split now")


if __name__ == "__main__":
    main()
