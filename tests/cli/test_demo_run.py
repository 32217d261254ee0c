from __future__ import annotations

import numpy as np
import pytest

from penstock.cli import demo_run


@pytest.mark.parametrize(
    ("delivered", "expected", "ordered", "text"),
    [
        ([("a", 1), ("b", 2)], [("a", 1), ("b", 2)], True, demo_run.EXACT),
        ([("b", 2), ("a", 1)], [("a", 1), ("b", 2)], False, demo_run.EXACT),
        ([("b", 2), ("a", 1)], [("a", 1), ("b", 2)], True, "NOT EXACT, in another order"),
        ([("a", 1)], [("a", 1), ("b", 2)], False, "NOT EXACT, 1 missing and 0 unexpected"),
        ([("a", 1), ("a", 1)], [("a", 1)], False, "NOT EXACT, 0 missing and 1 unexpected"),
        ([("a", 7)], [("a", 1)], False, "NOT EXACT, 1 missing and 1 unexpected"),
    ],
)
def test_a_verdict_compares_samples_pixels_and_order(
    delivered: demo_run.Checksums, expected: demo_run.Checksums, ordered: bool, text: str
) -> None:
    assert demo_run.verdict(delivered, expected, ordered=ordered) == text


def test_augmenting_shifts_and_flips_but_changes_no_pixel() -> None:
    image = np.arange(32 * 32 * 3, dtype=np.uint32).astype(np.uint8).reshape(32, 32, 3)
    augmented = [demo_run.augment(image, np.random.default_rng(seed)) for seed in range(20)]
    assert len({result.tobytes() for result in augmented}) > 5
    assert all(np.array_equal(np.sort(result, axis=None), np.sort(image, axis=None)) for result in augmented)


def test_the_network_learns_the_shapes_and_follows_from_the_seed() -> None:
    rng = np.random.default_rng(0)
    samples = [demo_run.draw({"cls": number % 4}, rng) for number in range(64)]
    images = np.stack([sample["png"] for sample in samples])
    labels = np.array([sample["cls"] for sample in samples])
    nets = [demo_run.Net(7), demo_run.Net(7)]
    for net in nets:
        for _ in range(200):
            net.learn(images, labels)
    first, second = (net.predict(images) for net in nets)
    assert np.array_equal(first, second)
    assert (first == labels).mean() > 0.9
