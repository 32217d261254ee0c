"""The page in a real browser: every section, on every format, by mouse and keyboard, without a complaint.

With PENSTOCK_PICTURES=1, the screenshots in docs/pictures are taken anew.
"""

from __future__ import annotations

import base64
import io
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import lmdb
import numpy as np
import PIL.Image
import PIL.ImageDraw
import pytest
import soundfile

import penstock as ps
from penstock import vision
from penstock.view import View, open_target

Serve = Callable[[View], Any]
Command = Callable[..., Any]
PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
FULL = os.environ.get("PENSTOCK_FULL") == "1"
TAKE_PICTURES = os.environ.get("PENSTOCK_PICTURES") == "1"
MAX_PICTURE_BYTES = 200_000
SHAPES = ("circle", "square", "triangle")
STEP_S = "0.9" if TAKE_PICTURES else "0.2"  # of the live run: a few points on its charts, or a quick test
RIGHT, DOWN, ENTER = "\ue014", "\ue015", "\ue007"

PROGRAM = """
import numpy as np
import penstock as ps
from penstock import vision


def brighten(sample, rng):
    return {{**sample, "jpg": np.clip(sample["jpg"] * rng.uniform(0.5, 1.6), 0, 255).astype(np.uint8)}}


ds = (
    ps.read_tar({shards!r})
    .shuffle(seed=5)
    .decode(jpg=vision.RandomResizedCrop(160, flip=True))
    .map(brighten)
)
small = ds.batched(2)
ds = ds.batched(8)
"""
RANK = """
import sys, time
sys.path.insert(0, sys.argv[1])
from program import small
ds = small.on("local", monitor="monitor")
for batch in ds.loader(rank=int(sys.argv[2]), world=4, uneven="keep", ledger="ledger"):
    print("step", flush=True)
    time.sleep(float(sys.argv[3]))
"""


def _photo(number: int) -> bytes:
    rng = np.random.default_rng(number)
    base = np.linspace(rng.integers(40, 220, 3), rng.integers(40, 220, 3), 200)
    image = PIL.Image.fromarray(np.repeat(base[None], 150, 0).astype(np.uint8))
    draw, colour = PIL.ImageDraw.Draw(image), tuple(rng.integers(0, 255, 3).tolist())
    if number % 3 == 0:
        draw.ellipse((60, 35, 140, 115), fill=colour)
    elif number % 3 == 1:
        draw.rectangle((60, 35, 140, 115), fill=colour)
    else:
        draw.polygon([(100, 30), (145, 115), (55, 115)], fill=colour)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=85)
    return out.getvalue()


def _sound(number: int) -> bytes:
    out, at = io.BytesIO(), np.arange(8000) / 8000
    wave = np.sin(at * 2 * np.pi * (200 + 40 * number)) * np.abs(np.sin(at * 3 * (1 + number % 5)))
    soundfile.write(out, wave, 8000, format=("WAV", "FLAC")[number % 2])
    return out.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same kind of data in every format."""
    folder = tmp_path_factory.mktemp("formats")
    for name in SHAPES:
        (folder / "images" / name).mkdir(parents=True)
    for number in range(90):
        (folder / "images" / SHAPES[number % 3] / f"{number:03}.jpg").write_bytes(_photo(number))
    ps.pack(folder / "images", folder / "tar", max_samples=30)
    rows = {"image": [PIL.Image.open(io.BytesIO(_photo(n))) for n in range(12)], "label": [n % 3 for n in range(12)]}
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(SHAPES))}
    (folder / "hf").mkdir()
    datasets.Dataset.from_dict(rows, datasets.Features(features)).to_parquet(folder / "hf" / "train.parquet")
    ps.read_tar(folder / "tar").limit(20).write_parquet(folder / "parquet")
    environment = lmdb.open(str(folder / "lmdb"), map_size=1 << 24)
    with environment.begin(write=True) as transaction:
        for number in range(8):
            transaction.put(f"{number:04}".encode(), _photo(number))
    environment.close()
    mixed: list[dict[str, Any]] = [
        {"__key__": f"clip{n}", ("wav", "flac")[n % 2]: _sound(n), "txt": f"clip number {n}".encode(), "cls": b"1"}
        for n in range(12)
    ]
    mixed[3]["npy"] = np.random.default_rng(1).normal(size=(24, 32)).astype(np.float32)
    mixed[4] = {"__key__": "notes", "json": {"speaker": "a", "turns": [1, 2, 3]}, "txt": "only text"}
    ps.from_items(mixed).write_tar(folder / "audio")
    ps.read_tar(folder / "tar").limit(30).write_tar(folder / "damaged")
    shard = next((folder / "damaged").glob("*.tar"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4096] = bytes(4096)
    shard.write_bytes(content)
    return folder


def take_picture(chromium: Any, name: str, width: int = 1280, height: int = 800) -> None:
    """Store a screenshot for the docs, if that is asked for; otherwise check that there is one."""
    path = PICTURES / f"view-{name}.png"
    if TAKE_PICTURES:
        chromium.resize(width, height)
        chromium.wait_for_pictures()
        image = PIL.Image.open(io.BytesIO(chromium.screenshot())).convert("RGB")
        image = image.resize((image.width * 4 // 5, image.height * 4 // 5), PIL.Image.Resampling.LANCZOS)
        image.save(path, optimize=True)
        if path.stat().st_size >= MAX_PICTURE_BYTES:
            image.quantize(256).save(path, optimize=True)
        chromium.resize(1280, 800)
    assert 0 < path.stat().st_size < MAX_PICTURE_BYTES


def fits(chromium: Any) -> bool:
    """Return whether the page is not wider than the window."""
    return bool(chromium.run("return document.documentElement.scrollWidth <= innerWidth"))


SECTIONS = ("/balance", "/shards", "/samples?n=12&seed=3", "/sample/1", "/samples?n=12&where=cls==1")
# Every section of every format; unless ``FULL``, two of each format that differ from those of the one before.
FORMATS = {
    name: SECTIONS if FULL else [SECTIONS[(2 * number + at) % len(SECTIONS)] for at in range(2)]
    for number, name in enumerate(("tar", "parquet", "hf", "lmdb", "images", "audio", "damaged"))
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_section_of_every_format_opens(name: str, data: Path, serve: Serve, chromium: Any) -> None:
    url = str(data / name)
    with serve(View(open_target([url]), (url,))) as (address, token):
        chromium.enter(address, token)
        chromium.open(f"{address}/samples?n=12")
        chromium.wait_for("Page 1")
        chromium.wait_for_pictures()
        for path in FORMATS[name]:
            chromium.open(address + path)
            chromium.wait_for_pictures()
            assert not chromium.run("return document.querySelectorAll('h1 ~ .error').length"), path
        chromium.open(f"{address}/sample/2")
        chromium.click("nav.pages a[rel=next]")
        chromium.wait(lambda: chromium.address.endswith("/sample/3"))


@pytest.mark.parametrize("sampling", [0, 2])
def test_a_jpeg_in_tiles_has_the_pixels_of_the_whole(sampling: int, chromium: Any) -> None:
    noise = PIL.Image.fromarray(np.random.default_rng(3).integers(0, 256, (20, 30, 3), np.uint8))
    out = io.BytesIO()
    noise.resize((290, 210), PIL.Image.Resampling.BICUBIC).save(out, "JPEG", subsampling=sampling)
    tiled = vision.tile_jpeg(out.getvalue(), verify=True)
    assert tiled != out.getvalue()
    chromium.open("data:image/jpeg;base64," + base64.b64encode(tiled).decode())
    chromium.wait_for_pictures()
    pixels = chromium.run("""
        const image = document.images[0], canvas = document.createElement("canvas");
        [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
        const context = canvas.getContext("2d");
        context.drawImage(image, 0, 0);
        return Array.from(context.getImageData(0, 0, canvas.width, canvas.height).data);
    """)
    shown = np.array(pixels, np.uint8).reshape(210, 290, 4)
    assert np.array_equal(shown[:, :, :3], vision.read_image(out.getvalue()))


def test_samples_are_found_by_mouse_keyboard_condition_key_and_chance(
    data: Path, view_command: Command, chromium: Any
) -> None:
    with view_command(str(data / "tar")) as address:
        base = address.partition("/?")[0]
        chromium.open(address)
        chromium.wait_for("90 samples in 3 shards")
        chromium.wait(lambda: "n=" in chromium.address)  # as many as fit the window
        chromium.wait_for_pictures()
        take_picture(chromium, "samples")
        assert "secret" not in chromium.address
        chromium.send_key("j")
        chromium.wait_for("Page 2")
        chromium.send_key("k")
        chromium.wait_for("Page 1")
        chromium.send_key("g")
        chromium.send_key(RIGHT)
        chromium.send_key(DOWN)
        position = chromium.run("return document.activeElement.getAttribute('href')")
        assert position.startswith("/sample/")
        chromium.send_key(ENTER)
        chromium.wait_for("Where it is stored")
        chromium.wait_for_pictures()
        take_picture(chromium, "sample", height=760)
        key = chromium.run("return document.querySelector('h1').firstChild.textContent")
        chromium.open(f"{base}/samples")
        chromium.send_key("/")
        chromium.type("#search", f"cls == 1{ENTER}")
        chromium.wait_for("searched by the indexes")
        assert chromium.text.count("1 square") > 2
        assert "0 circle" not in chromium.text
        chromium.type("input[name=find]", f"{key}{ENTER}")
        chromium.wait(lambda: chromium.address.endswith(position))
        chromium.open(f"{base}/samples?n=8&seed=1")
        first = chromium.run("return document.querySelector('.card a').href")
        chromium.open(f"{base}/samples?n=8&seed=2")
        assert chromium.run("return document.querySelector('.card a').href") != first


def test_a_bar_leads_to_the_samples_behind_it(data: Path, serve: Serve, chromium: Any) -> None:
    with serve(View(open_target([str(data / "tar")]))) as (address, token):
        chromium.enter(address, token)
        chromium.open(f"{address}/balance")
        chromium.wait_for("3 values in 90 samples")
        take_picture(chromium, "balance", height=720)
        chromium.click(".bars a")
        chromium.wait_for("searched by the indexes")
        labels = chromium.run("return [...document.querySelectorAll('.chips')].map(chip => chip.innerText)")
        assert labels
        assert len({*labels}) == 1


def test_a_damaged_shard_is_found_in_the_background(data: Path, serve: Serve, chromium: Any) -> None:
    url = str(data / "damaged")
    with serve(View(open_target([url]), (url,))) as (address, token):
        chromium.enter(address, token)
        chromium.open(f"{address}/shards")
        chromium.wait_for("not verified")
        chromium.click("#verify button")
        chromium.wait_for("1 of 1 verified")
        chromium.wait_for("damaged")
        assert "SHA-256" in chromium.text


def test_hostile_samples_run_nothing(hostile: View, serve: Serve, chromium: Any) -> None:
    with serve(hostile) as (address, token):
        chromium.enter(address, token)
        for path in ("/samples?n=25", "/balance", *(f"/sample/{number}" for number in range(0, 25, 1 if FULL else 3))):
            chromium.open(address + path)
            chromium.wait_for_pictures()
            assert chromium.run("return document.title").endswith("penstock view"), path
            assert chromium.run("return document.scripts.length") == 1, path
            assert fits(chromium), path


def test_stages_show_what_training_gets(data: Path, tmp_path: Path, view_command: Command, chromium: Any) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(shards=str(data / "tar")))
    with view_command(f"{tmp_path / 'program.py'}:ds") as address:
        chromium.open(address)
        chromium.wait_for("Page 1")
        chromium.open(f"{address.partition('/?')[0]}/stages?at=4")
        chromium.wait_for("map(brighten)")
        chromium.wait_for_pictures()
        assert chromium.run("return document.images.length") == 3
        assert "batched(8) joins samples" in chromium.text
        take_picture(chromium, "stages", height=720)
        chromium.click("nav.pages a:not([rel])")
        chromium.wait_for("epoch 1")


@pytest.fixture
def live_ranks(data: Path, tmp_path: Path, warm_python: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Four ranks that have delivered a batch each; they run in ``tmp_path``."""
    (tmp_path / "program.py").write_text(PROGRAM.format(shards=str(data / "tar")))
    command = [warm_python, "-c", RANK, str(tmp_path)]
    steps_s = [STEP_S, STEP_S, "30", STEP_S]  # the one that is killed must not end before
    ranks = [
        subprocess.Popen([*command, str(rank), step_s], cwd=tmp_path, stdout=subprocess.PIPE)
        for rank, step_s in enumerate(steps_s)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == b"step\n"
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_a_live_run_with_a_killed_rank_and_its_ledger(
    live_ranks: list[subprocess.Popen[bytes]], data: Path, tmp_path: Path, serve: Serve, chromium: Any
) -> None:
    view = View(open_target([str(data / "tar")]), (), False, str(tmp_path / "ledger"), str(tmp_path / "monitor"))
    with serve(view) as (address, token):
        chromium.open(f"{address}/?token={token}")
        chromium.wait_for("Page 1")
        chromium.open(f"{address}/run")
        chromium.wait_for("4 of 4 ranks")
        live_ranks[2].kill()
        live_ranks[2].wait()
        chromium.wait_for("Rank 2: its process is gone")  # without a reload
        for rank in (0, 1, 3):
            live_ranks[rank].wait()
        chromium.wait_for("3 ended, 1 lost")
        take_picture(chromium, "run", height=860)
        metrics = chromium.run("return fetch('/metrics').then(answer => answer.text())")
        assert 'penstock_up{rank="2",world="4"' in metrics
        assert view.run_view is not None
        for run in view.run_view.latest():
            rank = run.begin["rank"]
            items = next(
                line for line in metrics.splitlines() if line.startswith(f'penstock_items_total{{rank="{rank}"')
            )
            assert float(items.split()[-1]) == run.last.get("items", 0)
        chromium.open(f"{address}/ledger")
        chromium.wait_for("not finished")
        chromium.click("table a")
        chromium.wait_for("Rank 3")
        chromium.wait_for_pictures()
        assert chromium.run("return document.querySelectorAll('.card').length") >= 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_every_window_and_nothing_moves(data: Path, serve: Serve, chromium: Any, scheme: str) -> None:
    audio = str(data / "audio")
    chromium.prefer(scheme)
    with serve(View(open_target([audio]), (audio,))) as (address, token):
        chromium.enter(address, token)
        for width in (320, 768, 2560) if scheme == "light" else (320,):
            chromium.resize(width, 800)
            for path in ("/samples?n=12", "/sample/3", "/balance", "/shards"):
                chromium.open(address + path)
                chromium.wait_for_pictures()
                assert fits(chromium), (width, path)
        chromium.resize(1280, 800)
        chromium.open(f"{address}/samples?n=12")
        ground = chromium.run("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 200) == (scheme == "dark")
        if scheme == "dark":
            take_picture(chromium, "sounds")
    chromium.prefer("light")


def test_pictures_have_a_place_before_they_arrive(data: Path, serve: Serve, chromium: Any) -> None:
    with serve(View(open_target([str(data / "tar")]))) as (address, token):
        chromium.enter(address, token)
        chromium.open(f"{address}/sample/1")
        script = """return [...document.images].map(image => {
            const before = image.getBoundingClientRect().height;
            image.removeAttribute('src');
            return [before, image.getBoundingClientRect().height, image.width, image.height];
        })"""
        for before, after, width, height in chromium.run(script):
            assert before == after > 0, (width, height)


def test_names_and_roles_are_there_for_a_screen_reader(data: Path, serve: Serve, chromium: Any) -> None:
    with serve(View(open_target([str(data / "audio")]))) as (address, token):
        chromium.enter(address, token)
        chromium.open(f"{address}/samples?n=12")
        chromium.wait_for("Page 1")
        nameless = chromium.run(
            """return [...document.querySelectorAll('a, input, button, select, img, audio, nav, svg[role=img]')]
            .filter(e => !(e.getAttribute('aria-label') || e.alt || e.innerText || (e.labels && e.labels.length)
                || e.type === 'hidden')).map(e => e.outerHTML)"""
        )
        assert not nameless
        assert chromium.run("return document.documentElement.lang") == "en"
        assert chromium.run("return document.querySelectorAll('h1').length") == 1
