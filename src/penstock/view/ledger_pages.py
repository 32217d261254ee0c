"""The pages of a ledger: epochs, ranks and steps, the samples of a step, what is missing or came twice."""

from __future__ import annotations

from typing import Any

from penstock.codecs.markup import Markup, tag
from penstock.feed.ledger import Ledger, Proof, Sample, ledger
from penstock.view.browser import Browser, SamplePlace
from penstock.view.layout import data_table, link, note
from penstock.view.sample_pages import card

_MAX_LISTED = 200
_MAX_SHOWN = 64  # samples of one rank that are shown as cards


class LedgerView:
    """A ledger, and the data that its samples are in, if it is known."""

    def __init__(self, folder: str, browser: Browser | None) -> None:
        self._folder, self._browser = folder, browser
        names = [] if browser is None else [reader.names for reader in browser.readers]
        self._places = {
            (leaf, name): (leaf, shard) for leaf, shards in enumerate(names) for shard, name in enumerate(shards)
        }

    def overview(self) -> list[Any]:
        """Return the content of the page of all epochs.

        Raises:
            StorageError: The ledger cannot be read.
        """
        opened = ledger(self._folder)
        proof = opened.verify(most=_MAX_LISTED)
        verdict = "every sample came exactly once" if proof.ok else "samples are missing or came twice"
        rows = [
            (
                tag("a", f"epoch {epoch.epoch}", href=link("/ledger/step", epoch=epoch.epoch, step=0)),
                f"{epoch.world:,}",
                f"{epoch.sessions:,}",
                f"{epoch.delivered:,}",
                f"{epoch.to_come:,}",
                f"{epoch.missing:,}",
                f"{epoch.repeated:,}",
                "finished" if epoch.finished else "not finished",
            )
            for epoch in proof.epochs
        ]
        heads = ("Epoch", "Ranks", "Sessions", "Delivered", "To come", "Missing", "Came twice", "State")
        return [
            tag("h1", "Ledger"),
            note("So far, " + verdict + ".", kind="note" if proof.ok else "error"),
            data_table(heads, rows),
            self._wrong(proof),
        ]

    def _wrong(self, proof: Proof) -> list[Any]:
        parts: list[Any] = []
        if proof.missing:
            parts += [
                tag("h2", "Missing"),
                tag("ul", [tag("li", self._sample_link(m.sample), f" epoch {m.epoch}") for m in proof.missing]),
            ]
        if proof.repeated:
            items = [
                tag("li", self._sample_link(found.sample), f" in {', '.join(map(str, found.seen))}")
                for found in proof.repeated
            ]
            parts += [tag("h2", "Came twice"), tag("ul", items)]
        if proof.lost:
            items = [tag("li", f"epoch {epoch}: {step}") for epoch, step in proof.lost[:_MAX_LISTED]]
            parts += [tag("h2", "Lost steps"), tag("ul", items)]
        if proof.torn:
            parts += [tag("h2", "Files that were cut off"), tag("ul", [tag("li", str(torn)) for torn in proof.torn])]
        return parts

    def _sample_link(self, sample: Sample | None) -> Any:
        if sample is None:
            return "a sample whose name is not known"
        position = self._position(sample)
        return tag("a", str(sample), href=f"/sample/{position}") if position is not None else str(sample)

    def _position(self, sample: Sample) -> int | None:
        found = self._places.get((sample.source, sample.shard))
        if found is None or self._browser is None:
            return None
        return self._browser.position_of(SamplePlace(*found, sample.index))

    def step(self, number: int, epoch: int | None) -> list[Any]:
        """Return the content of the page of one step.

        Raises:
            PlanError: There is no such step.
            StorageError: The ledger cannot be read.
        """
        opened: Ledger = ledger(self._folder)
        step = opened.step(number, epoch)
        form = tag(
            "form",
            tag("label", tag("span", "Step"), tag("input", name="step", value=number, inputmode="numeric")),
            tag("label", tag("span", "Epoch"), tag("input", name="epoch", value=step.epoch, inputmode="numeric")),
            tag("button", "Show"),
            action="/ledger/step",
            class_="controls",
        )
        before = link("/ledger/step", epoch=step.epoch, step=number - 1)
        after = link("/ledger/step", epoch=step.epoch, step=number + 1)
        moves = tag(
            "nav",
            tag("a", "Previous", href=before, rel="prev") if number else tag("span", "Previous"),
            tag("a", "All epochs", href="/ledger", rel="up"),
            tag("a", "Next", href=after, rel="next"),
            class_="pages",
            aria_label="Steps",
        )
        ranks = [self._rank(rank, samples) for rank, samples in step.ranks.items()]
        return [tag("h1", f"Step {number:,}", tag("small", f"epoch {step.epoch}")), form, ranks, moves]

    def _rank(self, rank: int, samples: list[Sample]) -> Markup:
        heading = tag("h2", f"Rank {rank}", tag("small", f"{len(samples):,} samples"))
        positions = [self._position(sample) for sample in samples[:_MAX_SHOWN]]
        if self._browser is None or any(position is None for position in positions):
            items = [tag("li", str(sample)) for sample in samples[:_MAX_LISTED]]
            return tag("section", heading, tag("ul", items), class_="field")
        found = self._browser.page([position for position in positions if position is not None])
        cards = [card(self._browser, sample) for sample in found]
        more = note(f"and {len(samples) - _MAX_SHOWN:,} more") if len(samples) > _MAX_SHOWN else None
        return tag("section", heading, tag("ol", cards, class_="grid"), more, class_="field")
