"""Words split into parts of so many characters: a file in, a file and rows out.

    python examples/word_splitter.py
    python examples/word_splitter.py --engine ray --address auto

The list of inputs is a column of a table. One input is tried first, in this process; then all of them, side by side,
and the rows of all parts are in one table, in the order of the inputs. Run it again: nothing is left to do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock as ps

WORDS = {"a.txt": "simple", "b.txt": "scaleable", "c.txt": "preprocessing", "d.txt": "pytorch"}


def split_word(word: str, num_chars: int = 2, overlap: int = 1) -> list[str]:
    """Cut a word into parts that share ``overlap`` characters; the last one ends with the word.

    >>> split_word("hello", num_chars=2, overlap=1)
    ['he', 'el', 'll', 'lo']
    >>> split_word("hello", num_chars=3, overlap=2)
    ['hel', 'ell', 'llo']
    """
    last = max(0, len(word) - num_chars)
    starts = [*range(0, last, num_chars - overlap), last]
    return [word[start : start + num_chars] for start in starts]


@dataclass(frozen=True)
class WordSplitter:
    """What is done to one file."""

    num_chars: int = 2
    overlap: int = 1

    def __call__(self, path: Path, out: Any) -> Iterator[dict[str, Any]]:
        parts = split_word(path.read_text().strip(), self.num_chars, self.overlap)
        out.path(f"{path.stem}.parts").write_text("\n".join(parts))
        for number, part in enumerate(parts):
            yield {"source": path, "number": number, "part": part}


def main() -> None:
    """Make the words, try one, split all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="words", help="where everything goes")
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--address", help="the Ray cluster")
    args = parser.parse_args()
    folder = Path(args.folder)
    (folder / "inputs").mkdir(parents=True, exist_ok=True)
    for name, word in WORDS.items():
        if not (folder / "inputs" / name).exists():
            (folder / "inputs" / name).write_text(f"{word}\n")
    (folder / "dataset.csv").write_text("\n".join(["input", *WORDS]))

    inputs = ps.read_csv(folder / "dataset.csv")["input"].map(lambda name: folder / "inputs" / name)
    splitter = WordSplitter(num_chars=3, overlap=2)
    tried = ps.process(inputs, splitter, folder / "outputs", only=1)
    print("one:", tried["part"].take_all())

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
    again = ps.process(inputs, splitter, folder / "outputs", folder / "metadata.parquet")
    print(f"{len(meta)} parts of {meta.inputs} words; done again: {again.worked}")


if __name__ == "__main__":
    main()
