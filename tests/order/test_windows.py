from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.order.windows import Group, indices_by_label


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=9),
    st.integers(1, 40),
    st.integers(0, 3),
    st.integers(0, 9),
)
def test_a_window_is_the_same_slice_of_every_span(counts: list[int], window: int, seed: int, number: int) -> None:
    group = Group(np.array(counts, np.int64), window, (seed, 0, number))
    total = sum(counts)
    slices = max(1, -(-total // window))
    span, index = group.locate(np.arange(total))
    found = list(zip(span.tolist(), index.tolist(), strict=True))
    at = 0
    for j in range(slices):
        edges = [(n * j // slices, n * (j + 1) // slices) for n in counts]
        expected = {(s, i) for s, (a, b) in enumerate(edges) for i in range(a, b)}
        assert set(found[at : at + len(expected)]) == expected
        at += len(expected)
    assert at == total


def test_a_window_exceeds_its_size_by_at_most_one_sample_per_span() -> None:
    counts = np.array([1000, 3, 777, 4096], np.int64)
    group = Group(counts, 100, (0, 0, 0))
    windows = group._windows(np.arange(counts.sum()), int(counts.sum()), 59)
    assert np.bincount(windows).max() <= 100 + len(counts)
    assert (np.diff(windows) >= 0).all()


def test_a_group_of_100_billion_samples_needs_no_table() -> None:
    counts = np.array([2**36, 2**35 + 1, 17], np.int64)
    group = Group(counts, 64, (0, 0, 0))
    offsets = np.array([0, 1, 2**36, int(counts.sum()) - 1])
    span, index = group.locate(offsets)
    assert (span < 3).all()
    assert (index < counts[span]).all()
    again = [group.locate(offsets[j : j + 1]) for j in range(4)]
    assert [(int(s[0]), int(i[0])) for s, i in again] == list(zip(span.tolist(), index.tolist(), strict=True))


def test_each_label_is_yielded_once_with_all_its_indices() -> None:
    found = {label: indices.tolist() for label, indices in indices_by_label(np.array([7, 2, 7, 7, 2], np.int64))}
    assert found == {2: [1, 4], 7: [0, 2, 3]}
    assert list(indices_by_label(np.zeros(0, np.int64))) == []
