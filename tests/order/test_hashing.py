from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.order.hashing import (
    MAX_SORTED_SIZE,
    fold,
    fold_into,
    generators,
    name_hash,
    name_hashes,
    permutations,
    permute,
    scramble,
)

WORDS = st.integers(0, 2**64 - 1)


def test_scramble_never_changes_its_values() -> None:
    assert scramble(np.array([0, 1, 2**64 - 1], np.uint64)).tolist() == [
        0,
        6238072747940578789,
        13029008266876403067,
    ]


def test_fold_never_changes_its_values() -> None:
    assert [fold(), fold(0), fold(1, 2, 3), fold(3, 2, 1), fold(-1)] == [
        0,
        16294208416658607535,
        10530651154998451608,
        13526581269318521959,
        16490336266968443936,
    ]


def test_name_hashes_never_change() -> None:
    assert [name_hash("train-0000.tar"), name_hash("ü")] == [12795054637406227868, 3976460501203677525]


def test_the_sorted_permutation_never_changes() -> None:
    assert permute(7, 12, np.arange(12)).tolist() == [2, 0, 11, 9, 6, 8, 1, 10, 5, 7, 4, 3]


def test_the_feistel_permutation_never_changes() -> None:
    assert permute(7, 1_000_003, np.arange(8)).tolist() == [
        708624,
        596955,
        391448,
        5407,
        881106,
        810369,
        528384,
        487051,
    ]


def test_generators_never_change_their_draws() -> None:
    first, second = generators(np.array([5, 6], np.uint64), stage_number=2)
    assert first.bit_generator.random_raw(2).tolist() == [9539582425722743007, 15276949222654013981]
    assert second.bit_generator.random_raw(2).tolist() == [4347133664001746518, 14436920094094945962]


@given(st.lists(st.integers(-(2**70), 2**70), max_size=4), WORDS)
def test_fold_into_folds_one_more_part(parts: list[int], part: int) -> None:
    keys = np.array([fold(*parts)], np.uint64)
    assert int(fold_into(keys, part)[0]) == fold(*parts, part)
    assert int(fold_into(keys, np.array([part], np.uint64))[0]) == fold(*parts, part)


def test_parts_are_taken_modulo_two_to_the_64() -> None:
    assert fold(2**64 + 5) == fold(5)
    assert fold(-1) == fold(2**64 - 1)
    assert int(fold_into(np.array([9], np.uint64), -1)[0]) == fold_into(np.array([9], np.uint64), 2**64 - 1)[0]


def test_flipping_one_bit_flips_about_half_of_a_key() -> None:
    keys = np.full(64, fold(1, 2), np.uint64)
    flipped = fold_into(keys, np.uint64(1) << np.arange(64, dtype=np.uint64)) ^ fold_into(keys, 0)
    changed = np.array([int(word).bit_count() for word in flipped])
    assert 28 < changed.mean() < 36
    assert changed.min() > 12


def test_name_hashes_agrees_with_name_hash() -> None:
    assert name_hashes(["a", "b"]).tolist() == [name_hash("a"), name_hash("b")]


@given(WORDS, st.one_of(st.integers(1, 300), st.integers(MAX_SORTED_SIZE - 1, MAX_SORTED_SIZE + 2), st.just(9000)))
def test_permute_is_a_permutation(key: int, n: int) -> None:
    assert sorted(permute(key, n, np.arange(n)).tolist()) == list(range(n))


@given(WORDS, st.integers(1, 2**45), st.data())
def test_permute_can_be_evaluated_at_any_index(key: int, n: int, data: st.DataObject) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=8)), np.int64)
    if n > MAX_SORTED_SIZE:
        together = permute(key, n, indices)
        assert together.tolist() == [int(permute(key, n, indices[j : j + 1])[0]) for j in range(len(indices))]
        assert len(set(together.tolist())) == len(indices)
        assert all(0 <= value < n for value in together.tolist())


@pytest.mark.parametrize("n", [4000, 4097, 10_000])
def test_permute_looks_random(n: int) -> None:
    """Over many keys, first values, neighbours and fixed points are distributed as in a fair shuffle."""
    rows = np.array([permute(fold(n, key), n, np.arange(n)) for key in range(200)])
    middle = (n - 1) / 2
    assert abs(rows[:, 0].mean() - middle) < 0.1 * n
    assert abs(np.corrcoef(rows[:, :-1].ravel(), rows[:, 1:].ravel())[0, 1]) < 0.01
    adjacent = (rows[:, 1:] - rows[:, :-1] == 1).mean()
    assert adjacent == pytest.approx(1 / n, rel=0.4)
    fixed_points = (rows == np.arange(n)).mean()
    assert fixed_points == pytest.approx(1 / n, rel=0.4)


def test_permutations_returns_one_permutation_per_key() -> None:
    keys = np.array([3, 4], np.uint64)
    rows = permutations(keys, 50)
    assert rows.tolist() == [permute(int(key), 50, np.arange(50)).tolist() for key in keys]


def test_a_generator_depends_only_on_its_key_and_stage_number() -> None:
    keys = np.arange(10, dtype=np.uint64)
    together = [rng.random() for rng in generators(keys, 1)]
    assert together == [generators(keys[j : j + 1], 1)[0].random() for j in range(10)]
    assert len({*together, *(rng.random() for rng in generators(keys, 2))}) == 20


def test_neighbouring_generators_are_independent() -> None:
    draws = np.array([rng.random(2) for rng in generators(np.arange(2000, dtype=np.uint64), 0)])
    assert abs(draws.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.08


def test_a_generator_can_be_copied_and_pickled() -> None:
    rng = generators(np.array([1], np.uint64), 0)[0]
    copies = [copy.deepcopy(rng), pickle.loads(pickle.dumps(rng))]
    expected = rng.random(3).tolist()
    assert [copied.random(3).tolist() for copied in copies] == [expected, expected]


def test_a_generators_seed_can_seed_other_bit_generators() -> None:
    rng = generators(np.array([1], np.uint64), 0)[0]
    words = rng.bit_generator.seed_seq.generate_state(3, np.uint64)
    assert words.dtype == np.uint64
    assert len(set(words.tolist())) == 3
    assert rng.bit_generator.seed_seq.generate_state(8, np.uint32).dtype == np.uint32
