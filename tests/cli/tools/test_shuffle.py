from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.cli import main


def test_a_shuffle_is_a_permutation_that_follows_from_the_seed(
    shard: str, keys_of: Callable[[bytes], list[str]], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    orders = []
    for options in (["--seed", "3"], ["--seed", "3"], ["--seed", "4"], []):
        assert main(["shuffle", *options, shard]) == 0
        orders.append(keys_of(capfdbinary.readouterr().out))
    keys = [f"k{number:02d}" for number in range(20)]
    assert all(sorted(order) == keys for order in orders)
    assert orders[0] == orders[1]
    assert keys not in orders
    assert len({tuple(order) for order in orders}) == 3
