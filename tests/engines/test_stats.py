"""Stats are computed from the meters, and the bottleneck sentence promises only what the model allows."""

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
from penstock.engines.stats import RunLoad, SegmentLoad, Stats, bottleneck, ceiling, short_name, snapshot

SECONDS = 10.0
DECODE = "read -> decode('rgb8')"


def meter(name: str = DECODE, workers: int = 2, busy: float = 0.97, cpu: float = 0.9, **facts: Any) -> Meter:
    """Make the meter of a run of ten seconds; ``busy`` and ``blocked`` are shares of time, ``cpu`` of the busy time."""
    existed = workers * SECONDS
    blocked = facts.pop("blocked", 0.0)
    settings: dict[str, Any] = {"on": "threads", "blocks": 100, "items": 800, "least": workers, "most": workers}
    out = Meter(name, **(settings | {"workers": workers} | facts))
    out.busy, out.cpu, out.blocked = busy * existed, cpu * busy * existed, blocked * existed
    out.starved = max(0.0, 1 - busy - blocked) * existed
    out.awaited *= SECONDS
    return out


def inline(name: str = "read", busy: float = 0.9, cpu: float = 1.0, **facts: Any) -> Meter:
    out = meter(name, 1, busy, cpu, on="inline", **facts)
    out.starved = 0.0
    return out


def run(
    *segments: Meter,
    waited: float = 1.0,
    cores: float = 16,
    crowded: bool = False,
    engine: str = "local",
    items: int = 800,
) -> Stats:
    """Return the stats of a run of ten seconds, in which the consumer waited for a share of the time."""
    meters = Meters(list(segments), engine, begun=5.0, ended=5.0 + SECONDS, items=items, waited=waited * SECONDS)
    return snapshot(meters, cores, crowded)


def sentence_of(*segments: Meter, **facts: Any) -> str:
    """Return the bottleneck of such a run."""
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

    def test_workers_that_started_later_count_for_less_time(self) -> None:
        grown = meter(workers=4)
        grown.busy, grown.starved, grown.sizes = 22.0, 0.0, [(0.0, 1), (6.0, 4)]  # 6 x 1 + 4 x 4 worker-seconds
        assert run(grown).segments[0].busy == pytest.approx(1.0)

    def test_the_time_of_an_unfinished_block_is_not_counted(self) -> None:
        unfinished = meter(workers=1)
        unfinished.busy, unfinished.starved = 4.0, 0.0
        assert run(unfinished).segments[0].busy == pytest.approx(0.4)

    def test_inline_work_is_a_share_of_the_run(self) -> None:
        assert run(inline(busy=0.3)).segments[0].busy == pytest.approx(0.3)

    def test_the_consumer_is_busy_while_it_does_not_wait(self) -> None:
        assert run(meter(), waited=0.2).consumer == pytest.approx(0.8)
        assert run(meter(), waited=1.3).consumer == 0

    def test_the_current_wait_counts(self) -> None:
        meters = Meters([meter()], begun=time.perf_counter() - 10)
        assert snapshot(meters).consumer == 1
        meters.waiting_since = time.perf_counter() - 8
        assert snapshot(meters).consumer == pytest.approx(0.2, abs=0.05)
        meters.ended = meters.begun + 10  # it was closed during the wait
        assert snapshot(meters).consumer == 1

    def test_a_pool_that_ended_shows_its_last_workers(self) -> None:
        assert run(replace(meter(), workers=0, sizes=[(0.0, 3), (10.0, 0)])).segments[0].workers == 3

    def test_a_run_without_time_or_work_has_zeros(self) -> None:
        stats = snapshot(Meters([Meter("read", "threads")], begun=5.0, ended=5.0))
        segment = stats.segments[0]
        assert (stats.samples_per_s, stats.consumer, segment.mb_per_s, segment.cpu_share) == (0, 0, 0, 0)
        assert (segment.busy, segment.starved, segment.blocked) == (0, 0, 0)

    def test_counts_are_copied_from_the_meter(self) -> None:
        counted = meter(pending=4, retries=3, skips=2, deaths=1, timeouts=5, blocks=7, least=1, most=8)
        segment = run(counted).segments[0]
        assert (segment.queue_fill, segment.blocks, segment.least, segment.most) == (4, 7, 1, 8)
        assert segment.faults == "retries 3, skips 2, deaths 1, timeouts 5"
        assert run(meter()).segments[0].faults == ""

    def test_a_run_that_has_not_ended_is_running(self) -> None:
        assert snapshot(Meters()).running
        assert not run().running

    def test_a_snapshot_never_changes(self) -> None:
        meters = Meters([meter(sizes=[(0.0, 2)])], begun=0.0, ended=1.0)
        stats = snapshot(meters)
        meters.segments[0].sizes.append((1.0, 3))
        meters.segments.append(meter())
        assert len(stats.segments) == 1
        assert stats.segments[0].sizes == ((0.0, 2),)

    def test_a_snapshot_can_be_taken_while_other_threads_write(self) -> None:
        meters, stop = Meters([meter()]), threading.Event()

        def write() -> None:
            while not stop.is_set():
                meters.segments[0].sizes.append((1.0, 2))
                meters.segments.append(meter())
                del meters.segments[1:], meters.segments[0].sizes[20:]

        writer = threading.Thread(target=write)
        writer.start()
        try:
            started_at = time.thread_time()
            assert all(snapshot(meters).segments for _ in range(200))
            assert time.thread_time() - started_at < 1  # well below a millisecond each while a thread writes
        finally:
            stop.set()
            writer.join()


class TestText:
    def test_the_values_can_be_written_as_json(self) -> None:
        stats = run(meter(sizes=[(0.0, 2)]), inline())
        plain = stats.to_dict()
        assert json.loads(json.dumps(plain)) == plain
        assert plain["segments"][0]["sizes"] == [[0.0, 2]]
        assert plain["bottleneck"] == stats.bottleneck
        assert set(plain["segments"][1]) >= {"name", "busy", "cpu_share", "timeouts"}

    def test_the_table_has_a_line_for_each_segment_between_summary_and_bottleneck(self) -> None:
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

    def test_a_run_without_segments_has_two_lines(self) -> None:
        assert str(run(items=0)).splitlines()[1:] == ["nothing has run yet"]

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("read", "reading"),
            ("read -> select('jpg')", "reading"),
            ("read -> decode('rgb8') -> map(augment)", "decode('rgb8') -> map(augment)"),
            ("map(f) -> drop('x')", "map(f)"),
            ("rename(a='b')", "rename(a='b')"),
            ("batched(64)", "batched(64)"),
        ],
    )
    def test_a_sentence_names_a_segment_by_its_heavy_stages(self, name: str, expected: str) -> None:
        assert short_name(name) == expected


class TestTooLittle:
    def test_a_run_without_blocks_has_no_bottleneck_yet(self) -> None:
        assert sentence_of(items=0) == "nothing has run yet"
        assert sentence_of(meter(busy=0, blocks=0), items=0) == "nothing has run yet"

    def test_a_few_blocks_are_not_enough(self) -> None:
        assert sentence_of(meter(blocks=4)) == "too little has run to find the bottleneck"
        assert sentence_of(meter(blocks=5)) != "too little has run to find the bottleneck"

    def test_a_few_milliseconds_are_not_enough(self) -> None:
        short = Meters([Meter("read", "inline", blocks=9, busy=0.04)], begun=0.0, ended=0.04, waited=0.04)
        assert snapshot(short).bottleneck == "too little has run to find the bottleneck"

    def test_without_segments_only_the_consumer_is_known(self) -> None:
        assert sentence_of(waited=0.6) == "the consumer waits 60% of the time"
        assert sentence_of(waited=0.2).startswith("the consumer takes 80% of the time")


class TestConsumer:
    def test_a_slow_consumer_bounds_the_gain(self) -> None:
        assert sentence_of(meter(busy=0.3), waited=0.2) == (
            "the consumer takes 80% of the time: a faster pipeline would give at most 1.25x"
        )

    def test_nothing_helps_a_consumer_that_never_waits(self) -> None:
        assert sentence_of(meter(busy=0.3), waited=0.001) == (
            "the consumer takes 100% of the time: a faster pipeline would not help"
        )

    def test_a_segment_busier_than_the_consumer_is_named_instead(self) -> None:
        assert sentence_of(meter(busy=0.97, awaited=0.4), waited=0.4) == (
            "decode('rgb8') is busy 97%: workers 2 -> 3 would give about 1.5x"
        )

    def test_the_consumer_is_named_if_everything_is_busy(self) -> None:
        busy = meter(busy=0.99, cpu=0.99, awaited=0.08)
        assert sentence_of(busy, waited=0.08, cores=2).startswith("the consumer takes 92% of the time")


class TestMachine:
    def test_the_machine_is_the_limit_if_all_cores_are_in_use(self) -> None:
        assert sentence_of(meter(workers=2, cpu=0.9), meter("map(f)", 1, 0.3, 0.9), cores=2) == (
            "all 2 cores are in use, 1.7 by decode('rgb8'): the machine is the limit, not a setting"
        )

    def test_a_single_core_is_named_rather_than_the_interpreter_lock(self) -> None:
        assert sentence_of(meter(workers=2, cpu=0.5), cores=1) == (
            "the only core is in use, 1.0 by decode('rgb8'): the machine is the limit, not a setting"
        )

    def test_the_last_core_is_left_to_the_consumer(self) -> None:
        assert sentence_of(meter(workers=2, busy=0.97, cpu=0.8, awaited=0.6), waited=0.6, cores=2) == (
            "decode('rgb8') is busy 97%, but no core is free for more workers: "
            "1.6 of 2 are in use, and the consumer needs one"
        )


class TestInline:
    def test_reading_that_waits_for_storage_needs_workers(self) -> None:
        assert sentence_of(inline(busy=0.9, cpu=0.1)) == (
            "reading takes 90% of the time, mostly waiting for storage: workers= at the source or a closer copy "
            "would help"
        )

    def test_without_cpu_times_storage_is_not_mentioned(self) -> None:
        assert sentence_of(inline(busy=0.9, cpu=0.0)) == "reading takes 90% of the time, in a single thread"

    def test_reading_that_computes_gets_no_advice(self) -> None:
        assert (
            sentence_of(inline("read -> select('jpg')", busy=0.9))
            == "reading takes 90% of the time, in a single thread"
        )

    def test_a_slow_group_stage_should_leave_work_to_a_map_before_it(self) -> None:
        assert sentence_of(meter(busy=0.4), inline("batched(64)", busy=0.95)) == (
            "batched(64) takes 95% of the time, in the single thread that moves blocks: "
            "in a map before it, workers would share the work"
        )

    def test_the_work_of_several_inline_stages_adds_up(self) -> None:
        assert sentence_of(meter(busy=0.8, awaited=0.5), inline("read", 0.4), inline("batched(8)", 0.5)).startswith(
            "batched(8) takes 50% of the time, in the single thread"
        )

    def test_the_serial_engine_uses_one_thread(self) -> None:
        segments = (inline("read", 0.2), inline("decode('rgb8')", 0.7))
        takes = "decode('rgb8') takes 70% of the time: the serial engine runs everything in one thread"
        assert sentence_of(*segments, engine="serial") == f'{takes}; on("local") would use 16 cores'
        assert sentence_of(waited=0.9, engine="serial", cores=1) == (
            "the consumer waits 90% of the time: the serial engine runs everything in one thread"
        )

    def test_little_inline_work_is_not_the_bottleneck(self) -> None:
        assert sentence_of(inline(busy=0.1), waited=0.6) == (
            "the consumer waits 60% of the time, but no segment is busy all the time: reading is the busiest, at 10%"
        )


class TestOrder:
    def test_workers_that_are_blocked_and_awaited_are_held_up_by_the_order(self) -> None:
        assert sentence_of(meter(busy=0.4, blocked=0.55, awaited=0.9)) == (
            "decode('rgb8') is held up by single slow blocks: its workers are busy 40% and wait 55% for those to be "
            "delivered; ordered=False would give up to 2.5x"
        )

    def test_workers_that_wait_for_a_slower_segment_are_not_held_up_by_the_order(self) -> None:
        sentence = sentence_of(meter(busy=0.4, blocked=0.55, awaited=0.0), meter("map(f)", 4, 0.98, awaited=0.9))
        assert sentence.startswith("map(f) is busy 98%")

    def test_workers_that_are_not_awaited_are_not_held_up_by_the_order(self) -> None:
        assert "ordered" not in sentence_of(meter(busy=0.4, blocked=0.55, awaited=0.1), waited=0.6)


class TestLock:
    def test_threads_that_use_one_core_together_should_be_processes(self) -> None:
        assert sentence_of(meter("map(tokenize)", 4, 0.98, 0.25, awaited=0.9), cores=2) == (
            "map(tokenize) is busy 98%, but all threads of this run together use one core: the interpreter lock seems "
            'to be the limit, and on="processes" would give up to 2.0x'
        )

    def test_if_all_wait_for_the_lock_the_segment_that_computes_is_named(self) -> None:
        both = (meter("map(tokenize)", 4, 0.98, 0.23, awaited=0.3), meter("map(fetch)", 2, 0.95, 0.01, awaited=0.9))
        assert sentence_of(*both, cores=2).startswith(
            "map(tokenize) is busy 98%, but all threads of this run together use one core"
        )

    def test_threads_that_do_not_wait_are_not_limited_by_the_lock(self) -> None:
        assert "lock seems" not in sentence_of(
            meter("map(f)", 1, 0.98, 0.95, awaited=0.9), meter("map(g)", 4, 0.9, 0.02)
        )

    def test_on_a_crowded_machine_the_lock_is_not_blamed(self) -> None:
        assert sentence_of(meter("map(f)", 2, 0.98, 0.5, awaited=0.9), crowded=True) == (
            "map(f) is busy 98%: workers 2 -> 8 would give about 4.0x "
            "(perhaps less: other programs keep the machine busy)"
        )

    @pytest.mark.parametrize(("load", "crowded"), [(0.5, False), (1.4, False), (1.6, True)])
    def test_a_machine_is_crowded_above_one_and_a_half_times_its_cores(
        self, load: float, crowded: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("os.cpu_count", lambda: 8)
        monkeypatch.setattr("os.getloadavg", lambda: (8 * load, 0.0, 0.0))
        meters = Meters([meter("map(f)", 2, 0.98, 0.1, awaited=0.9)], begun=0.0, ended=SECONDS, waited=SECONDS)
        assert ("other programs" in snapshot(meters, cores=8).bottleneck) == crowded

    def test_the_gain_of_processes_is_bounded_by_the_cores(self) -> None:
        assert sentence_of(meter("map(f)", 4, 0.98, 0.25), cores=8).endswith("up to 8.2x")
        assert sentence_of(meter("map(f)", 4, 0.98, 0.25), waited=0.75, cores=8).endswith("up to 4.0x")

    def test_the_gain_of_processes_is_bounded_by_the_remaining_threads(self) -> None:
        both = (meter("map(f)", 2, 0.98, 0.25, awaited=0.9), meter("map(g)", 2, 0.9, 0.25))
        assert sentence_of(*both, cores=8).endswith("up to 2.2x")

    def test_processes_are_not_limited_by_the_lock(self) -> None:
        held = meter("map(f)", 4, 0.98, 0.25, on="processes", awaited=0.9)
        assert "interpreter lock" not in sentence_of(held, cores=8)

    def test_threads_that_use_more_than_a_core_are_not_limited_by_the_lock(self) -> None:
        assert "interpreter lock" not in sentence_of(meter("map(f)", 4, 0.98, 0.5, awaited=0.9), cores=8)

    def test_with_one_thread_the_promise_names_the_lock(self) -> None:
        assert sentence_of(meter("map(f)", 1, 0.98, 1.0, awaited=0.9), cores=2) == (
            "map(f) is busy 98%: workers 1 -> 2 would give about 2.0x, then the cores are the limit "
            '(if the functions release the interpreter lock: pure Python needs on="processes")'
        )

    def test_with_one_other_computing_thread_the_promise_names_the_lock(self) -> None:
        both = (meter("map(fetch)", 4, 0.98, 0.02, awaited=0.9), meter("map(f)", 1, 0.6, 1.0))
        assert sentence_of(*both).endswith(
            '(if the functions release the interpreter lock: pure Python needs on="processes")'
        )


class TestWorkers:
    def test_the_gain_grows_with_the_workers(self) -> None:
        assert sentence_of(meter(awaited=0.9)) == "decode('rgb8') is busy 97%: workers 2 -> 8 would give about 4.0x"

    def test_the_next_segment_bounds_the_gain(self) -> None:
        assert sentence_of(meter(awaited=0.9), meter("map(f)", 2, 0.5)) == (
            "decode('rgb8') is busy 97%: workers 2 -> 4 would give about 1.9x, then map(f) is the limit"
        )

    def test_the_cores_bound_the_gain(self) -> None:
        assert sentence_of(meter(cpu=0.97, awaited=0.9), cores=4) == (
            "decode('rgb8') is busy 97%: workers 2 -> 4 would give about 2.0x"
        )

    def test_the_consumer_bounds_the_gain(self) -> None:
        sentence = sentence_of(meter(workers=10, awaited=0.5), waited=0.55, cores=64)
        assert sentence.endswith("workers 10 -> 22 would give about 2.2x, then the consumer is the limit")

    def test_the_thread_that_moves_blocks_bounds_the_gain(self) -> None:
        sentence = sentence_of(meter(workers=10, awaited=0.5), inline("batched(8)", 0.52), cores=64)
        assert sentence.endswith("10 -> 19 would give about 1.9x, then the thread that moves blocks is the limit")

    def test_a_segment_that_waits_can_use_more_workers_than_cores(self) -> None:
        assert sentence_of(meter("map(fetch)", 4, 0.99, 0.03, awaited=0.9), cores=2) == (
            "map(fetch) is busy 99%, mostly waiting: workers 4 -> 16 would give about 4.0x"
        )

    def test_two_equally_busy_segments_both_need_more_workers(self) -> None:
        both = (meter(awaited=0.5), meter("map(f)", 4, 0.95, awaited=0.48))
        assert sentence_of(*both, cores=12) == (
            "decode('rgb8') is busy 97% and map(f) 95%: more workers for all of them, 2 -> 5 and 4 -> 9, "
            "would give about 2.3x, then the cores are the limit"
        )

    def test_a_pool_at_its_maximum_needs_a_higher_one(self) -> None:
        assert sentence_of(meter(workers=4, least=1, most=4, awaited=0.9), meter("map(f)", 2, 0.5)) == (
            "decode('rgb8') is busy 97% with its maximum of 4 workers: a maximum of 8 would give about 1.9x, "
            "then map(f) is the limit"
        )

    def test_a_pool_below_its_maximum_should_grow_to_it(self) -> None:
        assert sentence_of(meter(workers=2, least=1, most=3, awaited=0.9)) == (
            "decode('rgb8') is busy 97% and may grow to 3 workers: 2 -> 3 would give about 1.5x"
        )

    def test_the_awaited_segment_is_named_rather_than_the_busiest(self) -> None:
        assert sentence_of(meter(busy=0.93, awaited=0.8), meter("map(f)", 8, 0.95, awaited=0.1)).startswith("decode")

    def test_a_segment_that_gains_nothing_by_itself_is_not_named(self) -> None:
        assert sentence_of(meter(busy=0.8, awaited=0.8), meter("map(f)", 4, 0.99, awaited=0.1)) == (
            "map(f) is busy 99%: workers 4 -> 5 would give about 1.2x, then decode('rgb8') is the limit"
        )

    def test_of_equally_awaited_segments_the_busiest_is_named(self) -> None:
        assert sentence_of(meter(busy=0.9, awaited=0.42), meter("map(f)", 8, 0.99, awaited=0.4)).startswith("map(f)")

    def test_an_awaited_segment_that_waits_itself_is_not_named(self) -> None:
        both = (meter("map(fetch)", 4, 0.98, 0.02, awaited=0.1), meter("map(f)", 4, 0.3, awaited=0.9))
        assert sentence_of(*both, cores=64).startswith("map(fetch) is busy 98%, mostly waiting: workers 4 -> ")

    def test_a_gain_is_relative_to_the_current_workers(self) -> None:
        grown = meter(workers=4)
        grown.busy, grown.starved, grown.sizes = 24.0, 1.0, [(0.0, 1), (5.0, 4)]
        assert "workers 4 -> 16 would give about 4.0x" in sentence_of(grown, cores=64)

    def test_without_a_busy_segment_nothing_is_promised(self) -> None:
        assert sentence_of(meter(busy=0.6, awaited=0.6), waited=0.7) == (
            "the consumer waits 70% of the time, but no segment is busy all the time: "
            "decode('rgb8') is the busiest, at 60%"
        )


worker_counts = st.integers(1, 64)
shares = st.floats(0, 1)


@st.composite
def loads(draw: st.DrawFn) -> SegmentLoad:
    workers, on = draw(worker_counts), draw(st.sampled_from(["threads", "processes", "inline"]))
    mean = 1.0 if on == "inline" else float(workers)
    busy = draw(shares) * mean
    bounds = (1, workers + draw(st.integers(0, 8)))
    return SegmentLoad(
        "map(f)", on, workers, 100, bounds, mean, busy, draw(shares) * mean, draw(shares) * busy, draw(shares)
    )


run_loads = st.builds(
    RunLoad,
    st.lists(loads(), min_size=1, max_size=4).map(tuple),
    seconds=st.just(10.0),
    consumer=shares,
    cores=st.floats(1, 128),
    engine=st.sampled_from(["local", "serial"]),
    items=st.just(1),
)


class TestModel:
    @given(run_loads, st.integers(0, 3), worker_counts, st.integers(0, 64))
    def test_more_workers_never_promise_less(self, run: RunLoad, at: int, workers: int, more: int) -> None:
        assert ceiling(run, {at: workers + more}).gain >= ceiling(run, {at: workers}).gain

    @given(run_loads, st.dictionaries(st.integers(0, 3), worker_counts))
    def test_no_workers_promise_more_than_the_other_parts_allow(self, run: RunLoad, workers: dict[int, int]) -> None:
        gain = min(1e9, ceiling(run, workers).gain) * (1 - 1e-9)
        limits = {(run.consumer, 1.0), (run.cpu, run.cores), (run.inline, 1.0)}
        for at, load in enumerate(run.loads):
            if load.on != "inline":
                limits.add((load.busy, workers.get(at, load.workers)))
        assert gain <= 1 or all(gain * used <= most for used, most in limits)

    @given(run_loads, st.dictionaries(st.integers(0, 3), worker_counts))
    def test_the_named_limit_is_reached(self, run: RunLoad, workers: dict[int, int]) -> None:
        gain, by = ceiling(run, workers)
        if isinstance(by, int) and gain > 1:
            assert ceiling(run, {**workers, by: 10**9}).gain >= gain
            assert gain * run.loads[by].busy == pytest.approx(workers.get(by, run.loads[by].workers))

    def test_without_measurements_there_is_no_ceiling(self) -> None:
        assert ceiling(RunLoad((), 1.0, 0.0, 4)).gain == float("inf")

    @given(run_loads)
    def test_the_bottleneck_is_always_one_finite_sentence(self, run: RunLoad) -> None:
        sentence = bottleneck(run)
        assert sentence
        assert "\n" not in sentence
        assert "inf" not in sentence
        assert "nan" not in sentence
