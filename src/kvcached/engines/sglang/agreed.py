# SPDX-License-Identifier: Apache-2.0
"""The gate of an allocator whose engine has several ranks: what is decided rests on numbers that all ranks have agreed on.

A number is offered only with memory behind it: mapped pages, which nobody takes away while the pool's lock is held. So what has been
agreed holds until the scheduler lets go of the lock, and then it lapses. What happens on one rank in between (a limit, pressure, a card
that refuses) changes what that rank offers next, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvcached.core.tally import Eviction
from kvcached.engines.sglang.gate import Gate
from kvcached.engines.sglang.ranks import Topic
from kvcached.errors import PoolExhausted

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvcached.engines.sglang.bank import PageBank
    from kvcached.engines.sglang.ranks import Accord


class Offer(NamedTuple):
    """What one rank can do for its engine, in SGLang's pages; the least of all ranks' counts.

    `ready`: can be taken at once. `holdable`: SGLang can own in all, at the present limit, once memory has been made for it. `most`:
    the same if the tree were empty and the card's other tenants gave what they can. The others are less than 0 where the tree is asked
    to give pages up: for a lower limit, for other pools, for somebody who asked.
    """

    ready: int
    holdable: int
    most: int
    for_limit: int = 0
    for_others: int = 0
    for_asking: int = 0

    @property
    def wishes(self) -> dict[Eviction, int]:
        """Pages that the tree is asked to give up."""
        return {Eviction.LIMIT: -self.for_limit, Eviction.PRESSURE: -self.for_others, Eviction.ASKED: -self.for_asking}


class AgreedGate(Gate):
    """Call it on every rank in the same order with the same arguments, with the pool's lock held."""

    def __init__(self, bank: PageBank, accord: Accord) -> None:
        super().__init__(bank)
        self._accord = accord
        self._forget_wishes()
        self._agreed = self.offer()._replace(ready=0)

    def offer(self) -> Offer:
        """This rank's."""
        bank = self.bank
        bank.settle()
        out = bank.out_pages + bank.arriving_pages
        holdable = max(0, out + bank.pool.obtainable() - bank.pool.missing(0))  # missing: above the limit
        return Offer(bank.pool.available(), holdable, super().most_slots // bank.page_slots, *self._wishes())

    def _wishes(self) -> tuple[int, int, int]:
        return -self._wished[Eviction.LIMIT], -self._wished[Eviction.PRESSURE], -self._wished[Eviction.ASKED]

    def _forget_wishes(self) -> None:
        self._wished = dict.fromkeys((Eviction.LIMIT, Eviction.PRESSURE, Eviction.ASKED), 0)

    def adopt(self, agreed: Offer) -> None:
        """All ranks' least; where one of them asks for it, the trees of all give pages up."""
        self._agreed = agreed
        self._forget_wishes()
        if self._grant(agreed):
            self.bank.settle(wait=True)

    def _grant(self, agreed: Offer) -> int:
        """The tree gives up the most that anybody wishes. Returns how many slots."""
        dropped = 0
        for why, pages in agreed.wishes.items():
            if (missing := pages * self.bank.page_slots - dropped) > 0:
                dropped += self._drop(missing, why)
        return dropped

    def lapse(self) -> None:
        """From here on this rank's pages may go elsewhere."""
        self._agreed = self._agreed._replace(ready=0)

    # ------------------------------------------------------------------ what has been agreed

    @property
    def ready_slots(self) -> int:
        return self._agreed.ready * self.bank.page_slots

    @property
    def most_slots(self) -> int:
        return self._agreed.most * self.bank.page_slots

    def withheld(self) -> int:
        return max(0, self.bank.capacity_pages - self._agreed.holdable) * self.bank.page_slots

    # ------------------------------------------------------------------ agreeing on more

    def secure(self, slots: int, *, insist: bool = True, patient: bool = False) -> bool:
        pages = self.pages(slots)
        missing = pages - self._agreed.ready
        if missing <= 0:
            return True
        can_evict = self.pages(self.tree.evictable()) >= missing
        self._make_ready(pages, urgent=not can_evict, insist=insist and not can_evict)
        while (missing := pages - self._agree_on_ready(pages)) > 0 and self._drop(missing * self.bank.page_slots, Eviction.NEED):
            self.bank.settle(wait=True)
        return missing <= 0

    def may_have(self, slots: int) -> bool:
        """Only what all ranks have said, which all of them know alike."""
        return self._agreed.ready >= self.pages(slots)

    def _make_ready(self, pages: int, *, urgent: bool, insist: bool) -> None:
        """As far as this rank can. It may have to wait, but not for other ranks."""
        pool = self.bank.pool
        self.bank.settle()
        if missing := pool.missing(pages):
            self._grow(missing, urgent=urgent, insist=insist)
        if pool.missing(pages):
            self.bank.settle(wait=True)

    def _agree_on_ready(self, pages: int) -> int:
        alike = (pages, self.bank.out_pages, self.tree.evictable())
        (ready,) = self._accord.least(Topic.READY, [self.bank.pool.available()], alike)
        self._agreed = self._agreed._replace(ready=ready)
        return ready

    def take(self, pages: int) -> torch.Tensor:
        if pages > self._agreed.ready:
            raise PoolExhausted(pages, self._agreed.ready, "pages", "not all ranks have memory for more")
        taken = self.bank.take(pages)
        self._agreed = self._agreed._replace(ready=self._agreed.ready - pages)
        return taken

    def prepare(self, slots: int) -> None:
        """What was admitted is ready; whoever takes more makes it ready then."""

    def evict_ahead(self, slots: int) -> None:
        missing = self.pages(slots) - (self._agreed.holdable - self.bank.out_pages)
        if missing > 0 and self.tree.evictable():
            self._drop(missing * self.bank.page_slots, Eviction.NEED)

    def reclaim(self, blocks: int, why: Eviction) -> int:
        """One rank's tree must not give anything up alone: the wish is told at the next agreement, and then all do."""
        self._wished[why] = max(self._wished.get(why, 0), blocks)
        return 0


class Agreement:
    """What the ranks agree on before each step, for all gates of an allocator."""

    def __init__(self, accord: Accord, gates: Sequence[AgreedGate]) -> None:
        self.accord = accord
        self._gates = gates

    def start(self) -> None:
        """All ranks at the same time, when the engine is complete."""
        self.requests_come(0)

    def requests_come(self, queued: int) -> None:
        """Bounds may have moved since the last step."""
        self.begin(queued)
        self.lapse()

    def begin(self, queued: int) -> None:
        """`queued`: requests that wait, the same on all ranks."""
        alike = [queued, *(number for gate in self._gates for number in (gate.bank.out_pages, gate.tree.evictable()))]
        offers = [number for gate in self._gates for number in gate.offer()]
        agreed = self.accord.least(Topic.STEP, offers, alike)
        for gate, offer in zip(self._gates, self._offers_in(agreed), strict=True):
            gate.adopt(offer)

    def _offers_in(self, agreed: Sequence[int]) -> list[Offer]:
        width = len(Offer._fields)
        return [Offer(*agreed[place : place + width]) for place in range(0, len(agreed), width)]

    def lapse(self) -> None:
        for gate in self._gates:
            gate.lapse()
