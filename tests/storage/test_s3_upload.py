from __future__ import annotations

import pytest

from penstock.storage.s3_upload import part_size


@pytest.mark.parametrize("hint", [None, 0, 1, 10**8, 10**10, 10**11, 5 * 10**12])
def test_no_object_needs_more_parts_than_s3_allows(hint: int | None) -> None:
    size = part_size(hint)
    assert 8 << 20 <= size <= 5 << 30
    assert (hint or 0) * 1.1 <= size * 10_000


def test_parts_of_common_shards_are_of_8_to_16_mb() -> None:
    assert {part_size(hint) for hint in (None, 10**6, 10**9, 10**11)} == {8 << 20, 16 << 20}
