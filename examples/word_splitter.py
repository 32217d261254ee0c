"""Split words into parts of a fixed length: each input file becomes an output file and rows of a table.

    python examples/word_splitter.py
    python examples/word_splitter.py --engine ray --address auto

The inputs are a column of a table. The program tries one input first, in this process, and then runs all of them in
parallel. The rows of all parts go into one table, in the order of the inputs. A second run has nothing left to do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock as ps

WORDS = {"a.txt": "simple", "b.txt": "scaleable", "c.txt": "preprocessing", "d.txt": "pytorch"}


def split_word(word: str, size: int = 2, overlap: int = 1) -> list[str]:
    """Split a word into parts of ``size`` characters that overlap; the last part ends with the word.

    >>> split_word("hello", size=2, overlap=1)
    ['he', 'el', 'll', 'lo']
    >>> split_word("hello", size=3, overlap=2)
    ['hel', 'ell', 'llo']
    """
    last = max(0, len(word) - size)
    starts = [*range(0, last, size - overlap), last]
    return [word[start : start + size] for start in starts]


@dataclass(frozen=True)
class WordSplitter:
    """Splits the word of one file: writes its parts to a file, and yields a row for each."""

    size: int = 2
    overlap: int = 1

    def __call__(self, path: Path, out: Any) -> Iterator[dict[str, Any]]:
        parts = split_word(path.read_text().strip(), self.size, self.overlap)
        out.path(f"{path.stem}.parts").write_text("\n".join(parts))
        for number, part in enumerate(parts):
            yield {"source": path, "number": number, "part": part}


def main() -> None:
    """Write the words, try one of them, split all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="words", help="where data and results go")
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--address", help="the address of the Ray cluster")
    args = parser.parse_args()
    folder = Path(args.folder)
    (folder / "inputs").mkdir(parents=True, exist_ok=True)
    for name, word in WORDS.items():
        if not (folder / "inputs" / name).exists():
            (folder / "inputs" / name).write_text(f"{word}\n")
    (folder / "dataset.csv").write_text("\n".join(["input", *WORDS]))

    inputs = ps.read_csv(folder / "dataset.csv")["input"].map(lambda name: folder / "inputs" / name)
    splitter = WordSplitter(size=3, overlap=2)
    trial = ps.process(inputs, splitter, folder / "outputs", only=1)
    print("one word:", trial["part"].take_all())

    meta = ps.process(
        inputs,
        splitter,
        folder / "outputs",
        folder / "metadata.parquet",
        workers=len(WORDS),
        engine=args.engine,
        address=args.address,
    )
    for row in meta.groupby("source").count():
        print(f"{row['source']}: {row['count']} parts")
    second = ps.process(inputs, splitter, folder / "outputs", folder / "metadata.parquet")
    print(f"{len(meta)} parts of {meta.inputs} words; {second.worked} words processed again")


if __name__ == "__main__":
    main()
