from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.meter import Meter, Meters
from penstock.engines.stats import Load, Picture, Stats, bottleneck, ceiling, snapshot, spoken

SECONDS = 10.0
DECODE = "read -> decode('rgb8')"


def meter(name: str = DECODE, workers: int = 2, busy: float = 0.97, cpu: float = 0.9, **facts: Any) -> Meter:
    """A segment of a run of ten seconds; ``busy`` and ``blocked`` of its workers' time, ``cpu`` of the busy time."""
    existed = workers * SECONDS
    blocked = facts.pop("blocked", 0.0)
    settings: dict[str, Any] = {"on": "threads", "blocks": 100, "items": 800, "least": workers, "most": workers}
    made = Meter(name, **(settings | {"workers": workers} | facts))
    made.busy, made.cpu, made.blocked = busy * existed, cpu * busy * existed, blocked * existed
    made.starved = max(0.0, 1 - busy - blocked) * existed
    made.awaited *= SECONDS
    return made


def inline(name: str = "read", busy: float = 0.9, cpu: float = 1.0, **facts: Any) -> Meter:
    made = meter(name, 1, busy, cpu, on="inline", **facts)
    made.starved = 0.0
    return made


def run(
    *segments: Meter,
    waited: float = 1.0,
    cores: float = 16,
    crowded: bool = False,
    engine: str = "local",
    items: int = 800,
) -> Stats:
    """The stats of a run of ten seconds, in which the consumer waited for a share of the time."""
    meters = Meters(list(segments), engine, begun=5.0, ended=5.0 + SECONDS, items=items, waited=waited * SECONDS)
    return snapshot(meters, cores, crowded)


def said(*segments: Meter, **facts: Any) -> str:
    return run(*segments, **facts).bottleneck


class TestNumbers:
    def test_rates_are_over_the_whole_run(self) -> None:
        stats = run(meter(items=500, nbytes=30_000_000), items=400)
        assert (stats.samples_per_s, stats.seconds, stats.items) == (40, 10, 400)
        assert (stats.segments[0].samples_per_s, stats.segments[0].mb_per_s) == (50, 3)

    def test_shares_are_of_the_time_the_workers_existed(self) -> None:
        segment = run(meter(workers=3, busy=0.5, blocked=0.2, cpu=0.4)).segments[0]
        assert [segment.busy, segment.starved, segment.blocked] == pytest.approx([0.5, 0.3, 0.2])
        assert segment.cpu_share == pytest.approx(0.4)

    def test_workers_that_came_later_existed_for_less(self) -> None:
        grown = meter(workers=4)
        grown.busy, grown.starved, grown.sizes = 22.0, 0.0, [(0.0, 1), (6.0, 4)]  # 6 x 1 + 4 x 4 worker-seconds
        assert run(grown).segments[0].busy == pytest.approx(1.0)

    def test_a_block_in_work_leaves_its_time_open(self) -> None:
        begun = meter(workers=1)
        begun.busy, begun.starved = 4.0, 0.0
        assert run(begun).segments[0].busy == pytest.approx(0.4)

    def test_inline_work_is_a_share_of_the_run(self) -> None:
        assert run(inline(busy=0.3)).segments[0].busy == pytest.approx(0.3)

    def test_the_consumer_is_busy_while_it_does_not_wait(self) -> None:
        assert run(meter(), waited=0.2).consumer == pytest.approx(0.8)
        assert run(meter(), waited=1.3).consumer == 0

    def test_a_wait_that_goes_on_counts(self) -> None:
        meters = Meters([meter()], begun=time.perf_counter() - 10)
        assert snapshot(meters).consumer == 1
        meters.since = time.perf_counter() - 8
        assert snapshot(meters).consumer == pytest.approx(0.2, abs=0.05)
        meters.ended = meters.begun + 10  # it was closed meanwhile
        assert snapshot(meters).consumer == 1

    def test_a_pool_that_ended_shows_the_workers_it_had(self) -> None:
        assert run(replace(meter(), workers=0, sizes=[(0.0, 3), (10.0, 0)])).segments[0].workers == 3

    def test_no_time_and_no_work_are_zeros(self) -> None:
        stats = snapshot(Meters([Meter("read", "threads")], begun=5.0, ended=5.0))
        segment = stats.segments[0]
        assert (stats.samples_per_s, stats.consumer, segment.mb_per_s, segment.cpu_share) == (0, 0, 0, 0)
        assert (segment.busy, segment.starved, segment.blocked) == (0, 0, 0)

    def test_what_is_counted_is_passed_on(self) -> None:
        counted = meter(pending=4, retries=3, skips=2, deaths=1, timeouts=5, blocks=7, least=1, most=8)
        segment = run(counted).segments[0]
        assert (segment.queue_fill, segment.blocks, segment.least, segment.most) == (4, 7, 1, 8)
        assert segment.faults == "retries 3, skips 2, deaths 1, timeouts 5"
        assert run(meter()).segments[0].faults == ""

    def test_a_run_without_end_is_running(self) -> None:
        assert snapshot(Meters()).running
        assert not run().running

    def test_a_snapshot_does_not_change_later(self) -> None:
        meters = Meters([meter(sizes=[(0.0, 2)])], begun=0.0, ended=1.0)
        stats = snapshot(meters)
        meters.segments[0].sizes.append((1.0, 3))
        meters.segments.append(meter())
        assert len(stats.segments) == 1
        assert stats.segments[0].sizes == ((0.0, 2),)

    def test_a_snapshot_is_taken_while_others_write(self) -> None:
        meters, stop = Meters([meter()]), threading.Event()

        def write() -> None:
            while not stop.is_set():
                meters.segments[0].sizes.append((1.0, 2))
                meters.segments.append(meter())
                del meters.segments[1:], meters.segments[0].sizes[20:]

        writer = threading.Thread(target=write)
        writer.start()
        try:
            begun = time.perf_counter()
            assert all(snapshot(meters).segments for _ in range(200))
            assert time.perf_counter() - begun < 5  # well below a millisecond each, and the writer's turns
        finally:
            stop.set()
            writer.join()


class TestText:
    def test_the_values_are_plain_json(self) -> None:
        stats = run(meter(sizes=[(0.0, 2)]), inline())
        plain = stats.to_dict()
        assert json.loads(json.dumps(plain)) == plain
        assert plain["segments"][0]["sizes"] == [[0.0, 2]]
        assert plain["bottleneck"] == stats.bottleneck
        assert set(plain["segments"][1]) >= {"name", "busy", "cpu_share", "timeouts"}

    def test_the_table_has_a_line_a_segment_between_the_run_and_the_sentence(self) -> None:
        text = str(run(meter(nbytes=123_000_000, retries=2), inline("read -> " + "x" * 60), waited=0.9, items=12_345))
        assert text.splitlines() == [
            "local, ended, 10.0 s: 12,345 delivered, 1,234/s; consumer busy 10%",
            "segment                                       on       workers  samples/s  MB/s  busy  starved  blocked"
            "   cpu  queue  faults",
            "read -> decode('rgb8')                        threads        2         80    12   97%       3%       0%"
            "   90%      0  retries 2",
            "read -> xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...  inline         1         80     0   90%       0%       0%"
            "  100%      0  none",
            text.splitlines()[-1],
        ]
        assert text.endswith(run(meter(), inline("read -> " + "x" * 60), waited=0.9).bottleneck)

    def test_a_run_without_segments_is_two_lines(self) -> None:
        assert str(run(items=0)).splitlines()[1:] == ["nothing has run yet"]

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("read", "reading"),
            ("read -> select('jpg')", "reading"),
            ("read -> decode('rgb8') -> map(augment)", "decode('rgb8') -> map(augment)"),
            ("map(f) -> drop('x')", "map(f)"),
            ("rename(a='b')", "rename(a='b')"),
            ("batched(64)", "batched(64)"),
        ],
    )
    def test_a_segment_is_named_by_what_is_heavy_in_it(self, name: str, words: str) -> None:
        assert spoken(name) == words


class TestTooLittle:
    def test_nothing_has_run(self) -> None:
        assert said(items=0) == "nothing has run yet"
        assert said(meter(busy=0, blocks=0), items=0) == "nothing has run yet"

    def test_a_few_blocks_say_nothing(self) -> None:
        assert said(meter(blocks=4)) == "too little has run to tell what holds it up"
        assert said(meter(blocks=5)) != "too little has run to tell what holds it up"

    def test_a_few_milliseconds_say_nothing(self) -> None:
        short = Meters([Meter("read", "inline", blocks=9, busy=0.04)], begun=0.0, ended=0.04, waited=0.04)
        assert snapshot(short).bottleneck == "too little has run to tell what holds it up"

    def test_an_engine_without_meters_knows_only_the_consumer(self) -> None:
        assert said(waited=0.6) == "the consumer waits 60% of the time"
        assert said(waited=0.2).startswith("the consumer takes 80% of the time")


class TestConsumer:
    def test_a_slow_consumer_bounds_every_gain(self) -> None:
        assert said(meter(busy=0.3), waited=0.2) == (
            "the consumer takes 80% of the time: a faster pipeline would give at most 1.25x"
        )

    def test_a_consumer_that_never_waits_gains_nothing(self) -> None:
        assert said(meter(busy=0.3), waited=0.001) == (
            "the consumer takes 100% of the time: a faster pipeline would give nothing"
        )

    def test_a_segment_that_is_busier_than_the_consumer_is_named_instead(self) -> None:
        assert said(meter(busy=0.97, awaited=0.4), waited=0.4) == (
            "decode('rgb8') is busy 97%: workers 2 -> 3 would give about 1.5x"
        )

    def test_where_everything_is_busy_the_consumer_is_named(self) -> None:
        busy = meter(busy=0.99, cpu=0.99, awaited=0.08)
        assert said(busy, waited=0.08, cores=2).startswith("the consumer takes 92% of the time")


class TestMachine:
    def test_cores_that_are_all_used_are_the_limit(self) -> None:
        assert said(meter(workers=2, cpu=0.9), meter("map(f)", 1, 0.3, 0.9), cores=2) == (
            "all 2 cores are in use, 1.7 by decode('rgb8'): the machine is the limit, not a setting"
        )

    def test_one_core_is_the_limit_before_the_interpreter_lock(self) -> None:
        assert said(meter(workers=2, cpu=0.5), cores=1) == (
            "the one core is in use, 1.0 by decode('rgb8'): the machine is the limit, not a setting"
        )

    def test_a_consumer_may_need_the_last_core(self) -> None:
        assert said(meter(workers=2, busy=0.97, cpu=0.8, awaited=0.6), waited=0.6, cores=2) == (
            "decode('rgb8') is busy 97%, but more workers would find no free core: "
            "1.6 of 2 are in use, and the consumer needs its own"
        )


class TestInline:
    def test_reading_that_waits_for_storage_wants_workers(self) -> None:
        assert said(inline(busy=0.9, cpu=0.1)) == (
            "reading takes 90% of the time, mostly waiting for storage: workers= at the source or a nearer copy "
            "would help"
        )

    def test_where_no_cpu_was_counted_nothing_is_known_of_storage(self) -> None:
        assert said(inline(busy=0.9, cpu=0.0)) == "reading takes 90% of the time, in one thread"

    def test_reading_that_computes_is_stated_without_advice(self) -> None:
        assert said(inline("read -> select('jpg')", busy=0.9)) == "reading takes 90% of the time, in one thread"

    def test_a_slow_stage_at_the_consumer_could_work_earlier(self) -> None:
        assert said(meter(busy=0.4), inline("batched(64)", busy=0.95)) == (
            "batched(64) takes 95% of the time, in the one thread that moves blocks: "
            "what a map before it can do is done by workers"
        )

    def test_work_of_several_kinds_in_one_thread_adds_up(self) -> None:
        assert said(meter(busy=0.8, awaited=0.5), inline("read", 0.4), inline("batched(8)", 0.5)).startswith(
            "batched(8) takes 50% of the time, in the one thread"
        )

    def test_the_serial_engine_is_one_thread(self) -> None:
        segments = (inline("read", 0.2), inline("decode('rgb8')", 0.7))
        takes = "decode('rgb8') takes 70% of the time: the serial engine does all in one thread"
        assert said(*segments, engine="serial") == f'{takes}, on("local") in 16 cores'
        assert said(waited=0.9, engine="serial", cores=1) == (
            "the consumer waits 90% of the time: the serial engine does all in one thread"
        )

    def test_little_work_inline_explains_nothing(self) -> None:
        assert said(inline(busy=0.1), waited=0.6) == (
            "the consumer waits 60% of the time, but no segment is busy throughout: reading is the busiest, with 10%"
        )


class TestOrder:
    def test_workers_that_wait_while_they_are_waited_for_are_held_by_the_order(self) -> None:
        assert said(meter(busy=0.4, blocked=0.55, awaited=0.9)) == (
            "decode('rgb8') is held up by single slow blocks, its workers are busy 40% and wait 55% for those to be "
            "taken: ordered=False would give up to 2.5x"
        )

    def test_workers_that_wait_for_a_slower_segment_are_not(self) -> None:
        sentence = said(meter(busy=0.4, blocked=0.55, awaited=0.0), meter("map(f)", 4, 0.98, awaited=0.9))
        assert sentence.startswith("map(f) is busy 98%")

    def test_workers_that_nobody_waits_for_are_not(self) -> None:
        assert "ordered" not in said(meter(busy=0.4, blocked=0.55, awaited=0.1), waited=0.6)


class TestLock:
    def test_threads_that_use_one_core_between_them_should_be_processes(self) -> None:
        assert said(meter("map(tokenize)", 4, 0.98, 0.25, awaited=0.9), cores=2) == (
            "map(tokenize) is busy 98%, but the threads of this run use one core between them: it looks held by the "
            'interpreter lock, and on="processes" would give up to 2.0x'
        )

    def test_the_one_that_computes_is_named_where_all_wait_for_the_lock(self) -> None:
        both = (meter("map(tokenize)", 4, 0.98, 0.23, awaited=0.3), meter("map(fetch)", 2, 0.95, 0.01, awaited=0.9))
        assert said(*both, cores=2).startswith("map(tokenize) is busy 98%, but the threads of this run use one core")

    def test_threads_that_wait_for_nothing_are_not_held_by_it(self) -> None:
        assert "looks held" not in said(meter("map(f)", 1, 0.98, 0.95, awaited=0.9), meter("map(g)", 4, 0.9, 0.02))

    def test_on_a_crowded_machine_threads_may_wait_for_a_core_instead(self) -> None:
        assert said(meter("map(f)", 2, 0.98, 0.5, awaited=0.9), crowded=True) == (
            "map(f) is busy 98%: workers 2 -> 8 would give about 4.0x "
            "(perhaps less: other programs keep the machine busy)"
        )

    @pytest.mark.parametrize(("load", "told"), [(0.5, False), (1.4, False), (1.6, True)])
    def test_the_load_of_the_machine_says_whether_it_is_crowded(
        self, load: float, told: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("os.cpu_count", lambda: 8)
        monkeypatch.setattr("os.getloadavg", lambda: (8 * load, 0.0, 0.0))
        meters = Meters([meter("map(f)", 2, 0.98, 0.1, awaited=0.9)], begun=0.0, ended=SECONDS, waited=SECONDS)
        assert ("other programs" in snapshot(meters, cores=8).bottleneck) == told

    def test_the_gain_of_processes_is_what_the_cores_allow(self) -> None:
        assert said(meter("map(f)", 4, 0.98, 0.25), cores=8).endswith("up to 8.2x")
        assert said(meter("map(f)", 4, 0.98, 0.25), waited=0.75, cores=8).endswith("up to 4.0x")

    def test_threads_that_stay_behind_share_the_lock(self) -> None:
        both = (meter("map(f)", 2, 0.98, 0.25, awaited=0.9), meter("map(g)", 2, 0.9, 0.25))
        assert said(*both, cores=8).endswith("up to 2.2x")

    def test_processes_are_not_held_by_it(self) -> None:
        held = meter("map(f)", 4, 0.98, 0.25, on="processes", awaited=0.9)
        assert "interpreter lock" not in said(held, cores=8)

    def test_threads_that_use_more_than_a_core_are_not_held_by_it(self) -> None:
        assert "interpreter lock" not in said(meter("map(f)", 4, 0.98, 0.5, awaited=0.9), cores=8)

    def test_one_thread_cannot_tell(self) -> None:
        assert said(meter("map(f)", 1, 0.98, 1.0, awaited=0.9), cores=2) == (
            "map(f) is busy 98%: workers 1 -> 2 would give about 2.0x, then the cores are the limit "
            '(if the interpreter lock lets it: pure Python needs on="processes")'
        )

    def test_one_that_waits_beside_one_that_computes_cannot_tell_either(self) -> None:
        both = (meter("map(fetch)", 4, 0.98, 0.02, awaited=0.9), meter("map(f)", 1, 0.6, 1.0))
        assert said(*both).endswith('(if the interpreter lock lets it: pure Python needs on="processes")')


class TestWorkers:
    def test_more_workers_are_worth_what_they_add(self) -> None:
        assert said(meter(awaited=0.9)) == "decode('rgb8') is busy 97%: workers 2 -> 8 would give about 4.0x"

    def test_the_next_segment_bounds_the_gain(self) -> None:
        assert said(meter(awaited=0.9), meter("map(f)", 2, 0.5)) == (
            "decode('rgb8') is busy 97%: workers 2 -> 4 would give about 1.9x, then map(f) is the limit"
        )

    def test_the_cores_bound_the_gain(self) -> None:
        assert said(meter(cpu=0.97, awaited=0.9), cores=4) == (
            "decode('rgb8') is busy 97%: workers 2 -> 4 would give about 2.0x"
        )

    def test_the_consumer_bounds_the_gain(self) -> None:
        sentence = said(meter(workers=10, awaited=0.5), waited=0.55, cores=64)
        assert sentence.endswith("workers 10 -> 22 would give about 2.2x, then the consumer is the limit")

    def test_the_thread_that_moves_blocks_bounds_the_gain(self) -> None:
        sentence = said(meter(workers=10, awaited=0.5), inline("batched(8)", 0.52), cores=64)
        assert sentence.endswith("10 -> 19 would give about 1.9x, then the thread that moves blocks is the limit")

    def test_a_segment_that_waits_may_have_more_workers_than_cores(self) -> None:
        assert said(meter("map(fetch)", 4, 0.99, 0.03, awaited=0.9), cores=2) == (
            "map(fetch) is busy 99%, mostly waiting: workers 4 -> 16 would give about 4.0x"
        )

    def test_two_that_are_equally_busy_need_more_workers_both(self) -> None:
        both = (meter(awaited=0.5), meter("map(f)", 4, 0.95, awaited=0.48))
        assert said(*both, cores=12) == (
            "decode('rgb8') is busy 97% and map(f) 95%: more workers for all of them, 2 -> 5 and 4 -> 9, "
            "would give about 2.3x, then the cores are the limit"
        )

    def test_a_pool_at_its_most_should_be_allowed_more(self) -> None:
        assert said(meter(workers=4, least=1, most=4, awaited=0.9), meter("map(f)", 2, 0.5)) == (
            "decode('rgb8') is busy 97% with the 4 workers it may grow to: letting it grow to 8 would give about "
            "1.9x, then map(f) is the limit"
        )

    def test_a_pool_below_its_most_is_asked_for_no_more(self) -> None:
        assert said(meter(workers=2, least=1, most=3, awaited=0.9)) == (
            "decode('rgb8') is busy 97% and may grow to 3 workers: 2 -> 3 would give about 1.5x"
        )

    def test_the_one_that_is_waited_for_is_named_and_not_the_busiest(self) -> None:
        assert said(meter(busy=0.93, awaited=0.8), meter("map(f)", 8, 0.95, awaited=0.1)).startswith("decode")

    def test_one_that_would_gain_nothing_by_itself_is_not_named(self) -> None:
        assert said(meter(busy=0.8, awaited=0.8), meter("map(f)", 4, 0.99, awaited=0.1)) == (
            "map(f) is busy 99%: workers 4 -> 5 would give about 1.2x, then decode('rgb8') is the limit"
        )

    def test_between_equals_the_busiest_is_named(self) -> None:
        assert said(meter(busy=0.9, awaited=0.42), meter("map(f)", 8, 0.99, awaited=0.4)).startswith("map(f)")

    def test_one_that_waits_itself_is_not_to_blame(self) -> None:
        both = (meter("map(fetch)", 4, 0.98, 0.02, awaited=0.1), meter("map(f)", 4, 0.3, awaited=0.9))
        assert said(*both, cores=64).startswith("map(fetch) is busy 98%, mostly waiting: workers 4 -> ")

    def test_a_gain_is_measured_against_the_workers_of_now(self) -> None:
        grown = meter(workers=4)
        grown.busy, grown.starved, grown.sizes = 24.0, 1.0, [(0.0, 1), (5.0, 4)]
        assert "workers 4 -> 16 would give about 4.0x" in said(grown, cores=64)

    def test_where_nobody_is_busy_nothing_is_promised(self) -> None:
        assert said(meter(busy=0.6, awaited=0.6), waited=0.7) == (
            "the consumer waits 70% of the time, but no segment is busy throughout: "
            "decode('rgb8') is the busiest, with 60%"
        )


workers_ = st.integers(1, 64)
shares = st.floats(0, 1)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    workers, on = draw(workers_), draw(st.sampled_from(["threads", "processes", "inline"]))
    size = 1.0 if on == "inline" else float(workers)
    busy = draw(shares) * size
    bounds = (1, workers + draw(st.integers(0, 8)))
    return Load("map(f)", on, workers, 100, bounds, size, busy, draw(shares) * size, draw(shares) * busy, draw(shares))


pictures = st.builds(
    Picture,
    st.lists(loads(), min_size=1, max_size=4).map(tuple),
    seconds=st.just(10.0),
    consumer=shares,
    cores=st.floats(1, 128),
    engine=st.sampled_from(["local", "serial"]),
    items=st.just(1),
)


class TestModel:
    @given(pictures, st.integers(0, 3), workers_, st.integers(0, 64))
    def test_more_workers_never_promise_less(self, picture: Picture, at: int, workers: int, more: int) -> None:
        assert ceiling(picture, {at: workers + more}).gain >= ceiling(picture, {at: workers}).gain

    @given(pictures, st.dictionaries(st.integers(0, 3), workers_))
    def test_no_workers_promise_more_than_the_rest_allows(self, picture: Picture, workers: dict[int, int]) -> None:
        gain = min(1e9, ceiling(picture, workers).gain) * (1 - 1e-9)
        asked = {(picture.consumer, 1.0), (picture.cpu, picture.cores), (picture.inline, 1.0)}
        for at, load in enumerate(picture.loads):
            if load.on != "inline":
                asked.add((load.busy, workers.get(at, load.workers)))
        assert gain <= 1 or all(gain * used <= most for used, most in asked)

    @given(pictures, st.dictionaries(st.integers(0, 3), workers_))
    def test_what_is_said_to_hold_a_run_holds_it(self, picture: Picture, workers: dict[int, int]) -> None:
        gain, by = ceiling(picture, workers)
        if isinstance(by, int) and gain > 1:
            assert ceiling(picture, {**workers, by: 10**9}).gain >= gain
            assert gain * picture.loads[by].busy == pytest.approx(workers.get(by, picture.loads[by].workers))

    def test_nothing_measured_bounds_nothing(self) -> None:
        assert ceiling(Picture((), 1.0, 0.0, 4)).gain == float("inf")

    @given(pictures)
    def test_there_is_always_one_sentence(self, picture: Picture) -> None:
        sentence = bottleneck(picture)
        assert sentence
        assert "\n" not in sentence
        assert "inf" not in sentence
        assert "nan" not in sentence
