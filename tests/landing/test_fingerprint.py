"""A fingerprint is the same in every process, and differs where the samples or the code may."""

from __future__ import annotations

import enum
import io
import os
import random
import subprocess
import sys
import textwrap
import threading
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from functools import cache, cached_property, partial, singledispatch
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch

import penstock as ps
from penstock.errors import StorageError
from penstock.formats.tar import TarWriter
from penstock.landing.fingerprint import code_digest, fingerprint_of
from penstock.landing.position import exact_program
from penstock.storage import Info, Memory
from penstock.testing.storages import write


def stages_of(ds: ps.Dataset, epoch: int = 0) -> str:
    return fingerprint_of(exact_program(ds.plan), epoch).stages


def source_of(ds: ps.Dataset, epoch: int = 0) -> str:
    return fingerprint_of(exact_program(ds.plan), epoch).source


def compiled(code: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(code), scope)
    function: Callable[..., Any] = scope["f"]
    return function


FUNCTION = """
import helper as helper
FACTOR = 2
def g(x): return x + 1
class Model:
    bias = 1
    def __call__(self, x): return x * self.bias
def f(sample, shift=3):
    inner = lambda x: x * FACTOR in {"a", "b", "c"}
    return inner(g(sample)) + shift + Model()(sample)
"""


@pytest.mark.parametrize(
    "edit",
    [
        ("x + 1", "x + 2"),
        ("FACTOR = 2", "FACTOR = 3"),
        ("shift=3", "shift=4"),
        ("bias = 1", "bias = 2"),
        ("x * self.bias", "x / self.bias"),
        ('"c"}', '"d"}'),
        ("+ shift", "- shift"),
    ],
    ids=str,
)
def test_an_edit_anywhere_in_the_code_changes_the_fingerprint(edit: tuple[str, str]) -> None:
    code = FUNCTION.replace("import helper as helper\n", "")
    same = code.replace("def g", "# a comment\n\ndef g")
    assert code_digest(compiled(code)) == code_digest(compiled(same)) != code_digest(compiled(code.replace(*edit)))


MODULES = {
    "imported.py": "import below.deep\nN = 1\ndef g(x): return below.deep.N",
    "patched.py": "N = 1",
    "lazy.py": "from below import deep\nfrom onward import *",
    "onward.py": "N = 1",
    "below/__init__.py": "",
    "below/deep.py": "from . import side\nN = 1",
    "below/side.py": "N = 1",
    "unused.py": "N = 1",
}


def test_all_modules_that_a_function_may_load_are_covered(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, imported, patched\nfrom penstock.landing import code_digest\npatched.N = int(sys.argv[1])\n"
        "def f(x):\n    import lazy\n    return imported.g(x), lazy, patched.N\n"
        "print(code_digest(f))\nimport unused\nfor name in sys.argv[2:]:\n"
        "    path = f'{sys.path[0]}/{name}'\n    text = open(path).read()\n"
        "    open(path, 'w').write(text + '#')\n    print(code_digest(f))\n    open(path, 'w').write(text)\n"
    )
    (tmp_path / "below").mkdir()
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)

    def run(*arguments: str) -> list[str]:
        command = [sys.executable, "-B", str(script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    before, *edited = run("1", *MODULES)
    assert [name for name, found in zip(MODULES, edited, strict=True) if found == before] == ["unused.py"]
    assert len({before, *edited}) == len(MODULES)
    assert run("2") != [before]


def test_a_module_of_the_user_is_covered_and_an_installed_one_is_not(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, numpy, json\nimport helper\nfrom penstock.landing import code_digest\n"
        "def f(x): return helper.g(x), numpy.abs(x), json.dumps(x), {'a', 'b', x}\nprint(code_digest(f))"
    )

    def run(helper: str, seed: str) -> str:
        (tmp_path / "helper.py").write_text(helper)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
        ).stdout

    one = run("def g(x): return 1", "1")
    assert one == run("def g(x): return 1", "2")
    assert one != run("def g(x): return 2", "1")


@dataclass
class Scale:
    by: float

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"n": sample["n"] * self.by}


def test_arguments_closures_and_state_count_and_workers_do_not() -> None:
    ds = ps.from_items([{"n": 1}])
    base = stages_of(ds.map(Scale(2)))
    assert base == stages_of(ds.map(Scale(2), workers=3, retries=2).on("serial"))
    assert base != stages_of(ds.map(Scale(3)))
    assert stages_of(ds.map(partial(max, 1))) != stages_of(ds.map(partial(max, 2)))
    assert stages_of(ds.rename(a="n")) != stages_of(ds.rename(b="n"))
    assert stages_of(ds.map(Scale(2)).on_error("skip")) != base
    numbers, same, other = (np.array(values) for values in ([1, 2], [1, 2], [1, 3]))
    assert code_digest(lambda: numbers) == code_digest(lambda: same) != code_digest(lambda: other)
    assert code_digest(cache(lambda: 1)) == code_digest(cache(lambda: 1)) != code_digest(cache(lambda: 2))


class Model(torch.nn.Module):
    def __init__(self, bias: int) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.full((2,), float(bias)))


def hidden_size(size: int) -> type:
    class Hidden:
        @cached_property
        def size(self) -> int:
            return size

        def __len__(self) -> int:
            return self.size

    return Hidden


def raising(kind: type[Exception]) -> Callable[[Any], Any]:
    def f(x: Any) -> Any:
        try:
            return x()
        except kind:
            return None

    return f


def dispatching(answer: int) -> Callable[[Any], Any]:
    @singledispatch
    def f(x: Any) -> int:
        return 0

    f.register(int, lambda x: answer)
    f(1)  # fills a cache
    return f


def marked(mark: int) -> Callable[[], None]:
    def f() -> None:
        pass

    f.mark = mark  # type: ignore[attr-defined]
    return f


def numbered(value: int) -> Any:
    class Number(enum.Enum):
        ONE = value

    return Number.ONE


class Labelled(str):
    label: int

    @classmethod
    def of(cls, label: int) -> Labelled:
        made = cls("a")
        made.label = label
        return made


VALUES: dict[str, Callable[[int], Any]] = {
    "date": lambda n: date(2020, 1, n),
    "timezone": lambda n: datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=n))),
    "decimal": lambda n: Decimal(n),
    "namespace": lambda n: Namespace(a=n),
    "deque": lambda n: deque([n]),
    "default dict": lambda n: defaultdict([list, set, dict][n]),
    "object array": lambda n: np.array([n, "a"], object),
    "masked array": lambda n: np.ma.array([1, 2], mask=[n == 1, False]),
    "generator": lambda n: np.random.default_rng(n),
    "random": lambda n: random.Random(n),
    "frame": lambda n: pandas.DataFrame({"a": [n]}),
    "dates": lambda n: pa.table({"a": [date(2020, 1, n)]}),
    "weights": lambda n: Model(n),
    "method of a model": lambda n: Model(n).forward,
    "dtype": lambda n: [torch.float16, torch.float32, torch.int8][n],
    "device": lambda n: torch.device("cuda", n),
    "bfloat16": lambda n: torch.full((), n).bfloat16(),
    "float8": lambda n: torch.full((2,), float(n)).to(torch.float8_e4m3fn),
    "sparse": lambda n: (n * torch.eye(2)).to_sparse(),
    "meta": lambda n: torch.empty(n, device="meta"),
    "builtin": lambda n: [min, max, len][n],
    "ufunc": lambda n: [np.add, np.subtract, np.multiply][n],
    "bound builtin": lambda n: str(n).join,
    "itemgetter": lambda n: itemgetter(n),
    "attribute of a function": marked,
    "exception": lambda n: raising([OSError, KeyError, ValueError][n]),
    "class": lambda n: hidden_size(n),
    "instance": lambda n: hidden_size(n)(),
    "singledispatch": dispatching,
    "enum": numbered,
    "subclass of str": Labelled.of,
    "set": lambda n: {(n, "a"), "b"},
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_a_function_holds_counts_whatever_its_type(name: str) -> None:
    def holder(value: Any) -> Callable[[], Any]:
        return lambda: value

    one, same, other = (code_digest(holder(VALUES[name](n))) for n in (1, 1, 2))
    assert one == same != other
    items = [source_of(ps.from_items([{"a": VALUES[name](n)}])) for n in (1, 1, 2)]
    assert items[0] == items[1] != items[2]


def test_what_has_no_value_of_its_own_makes_no_difference() -> None:
    for make in (threading.Lock, threading.Event, threading.local, lambda: random.random, lambda: np.random.uniform):
        before = code_digest(make())
        random.random()
        np.random.uniform()
        assert code_digest(make()) == before
    model = hidden_size(1)()
    before = code_digest(model)
    assert model.size == 1  # cached from now on
    assert code_digest(model) == before


def test_an_object_that_cannot_be_pickled_is_unlike_any_other() -> None:
    numbers = iter(n for n in [1])
    assert code_digest(lambda: numbers) != code_digest(lambda: numbers)
    assert code_digest(numbers, unseen="") == code_digest(numbers, unseen="")
    deep: Any = None
    for _ in range(2000):
        deep = [deep]
    assert code_digest(deep) != code_digest(deep)


def test_values_that_hold_themselves_have_a_fingerprint() -> None:
    def circle(n: int) -> Any:
        around: list[Any] = [n]
        around.append(around)
        name = Namespace(around=around)
        name.itself, name.known = name, {Labelled.of(n)}
        return name

    assert code_digest(circle(1)) == code_digest(circle(1)) != code_digest(circle(2))


def test_the_stamps_of_files_and_the_items_in_memory_count(tmp_path: Path) -> None:
    ps.from_items([{"cls": 1}]).write_tar(tmp_path / "a")
    before = source_of(ps.read_tar(str(tmp_path / "a")))
    assert before == source_of(ps.read_tar(f"{tmp_path}/a/*.tar", workers=2))
    os.utime(tmp_path / "a" / "shard-000000.tar", ns=(1, 1))
    assert before != source_of(ps.read_tar(str(tmp_path / "a")))
    assert source_of(ps.from_items([{"n": 1}])) != source_of(ps.from_items([{"n": 2}]))
    assert source_of(ps.from_items([{"n": 1}]), 1) == source_of(ps.from_items([{"n": 1}]), 2)
    for varying in (ps.from_items([{"n": 1}]).shuffle(), ps.from_items([{"n": 1}]).map(lambda s, rng: s)):
        assert source_of(varying, 1) != source_of(varying, 2)
    assert source_of(ps.from_items([{"n": 1}]).seed(1)) != source_of(ps.from_items([{"n": 1}]).seed(2))


@pytest.mark.parametrize("pattern", ["a", "a/", "a/*.tar", "?/shard-00000[0-9].tar", "a/shard-000000.tar"])
def test_the_tags_of_remote_files_count_listed_or_not(pattern: str) -> None:
    def write(text: str) -> None:
        with Memory().put("memory://tags/a/shard-000000.tar") as upload, io.BytesIO() as file:
            with TarWriter(file) as shard:
                shard.write({"__key__": "k", "txt": text})
            upload.write(file.getvalue())
            upload.commit()

    write("a")
    before = source_of(ps.read_tar(f"memory://tags/{pattern}"))
    assert source_of(ps.read_tar(f"memory://tags/{pattern}")) == before
    write("b")  # the same name, size and count
    assert source_of(ps.read_tar(f"memory://tags/{pattern}")) != before


def test_a_folder_of_files_need_not_be_an_object() -> None:
    class Refusing(Memory):
        """Memory that refuses requests for a folder, as WebDAV servers do, and S3 for the root of a bucket."""

        def info(self, url: str) -> Info:
            if not url.endswith(".txt"):
                raise StorageError("the server answers 405", url)
            return super().info(url)

    for name in ("a", "b"):
        write(Memory(), f"memory://refused/{name}.txt", b"x")
    folder = source_of(ps.read_files("memory://refused", storage=Refusing()))
    assert folder == source_of(ps.read_files("memory://refused", storage=Refusing()))
    with pytest.raises(StorageError, match="405"):
        source_of(ps.read_files("memory://refused/a.tx", storage=Refusing()))


def test_functions_that_call_themselves_and_each_other_have_a_fingerprint() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    assert code_digest(even) == code_digest(even) != code_digest(odd)
