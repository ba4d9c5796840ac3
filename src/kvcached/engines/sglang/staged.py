# SPDX-License-Identifier: Apache-2.0
"""The gate of an allocator whose engine is a pipeline of stages.

Each stage schedules every step on its own, the first one before the last one can have ended the step before: so nobody can be asked for
an answer within a step. The stages agree on a *quota* instead: how many pages SGLang may own in all. Each step a rank offers what it has
memory for, and the least of all offers holds some steps later, on all ranks from the same step on, when the last stage must have come by.
What has been offered stays in stock until the offers of later steps, which asked for less, hold everywhere.

Within the quota decisions are as quick as in any other engine: what a request gives up can be taken by another in the same step.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from kvcached.core.tally import Eviction
from kvcached.engines.sglang.agreed import AgreedGate, Agreement, Offer
from kvcached.engines.sglang.ranks import Topic

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvcached.engines.sglang.ranks import Accord, Asked
    from kvcached.engines.sglang.stock import StockedBank


class StagedGate(AgreedGate):
    """`ready` of an `Offer` is the quota here: all pages that SGLang may own, not those that it may take."""

    bank: StockedBank

    def __init__(self, bank: StockedBank, accord: Accord) -> None:
        self._offers: deque[int] = deque()  # of this rank, that do not hold yet; the oldest first
        self._void = 0  # of them were made before the pool was cleared
        self._wish_pages = 0
        self._wish_steps = 0  # that it has lasted
        self._patience_steps = 3 * accord.stages
        super().__init__(bank, accord)
        bank.when_cleared = self._cleared

    # ------------------------------------------------------------------ offers

    def offer(self) -> Offer:
        bank = self.bank
        held = bank.out_pages + bank.stock_pages
        holdable = max(0, held + bank.arriving_pages + bank.pool.obtainable() - bank.pool.missing(0))  # missing: above the limit
        return Offer(min(held, holdable), holdable, bank.most_slots // bank.page_slots, *self._wishes())

    def make_offer(self, ahead_pages: int, coming_pages: int) -> Offer:
        """`ahead_pages`: what decodes until the offer holds takes at the most; `coming_pages`: what prefills want. The same on all
        ranks."""
        out = self.bank.out_pages
        self.ahead_slots = ahead_pages * self.bank.page_slots
        self._age_wish()
        asked = min(out + ahead_pages + max(coming_pages, self._wish_pages), max(out, self._agreed.holdable))  # more is of no use alone
        wanted = max(asked, self._promised()) - out
        self._make_ready(wanted - self.bank.stock_pages, urgent=self._wish_pages > 0 and not self.tree.evictable(), insist=False)
        self._stock_up(wanted)
        offer = self.offer()
        offer = offer._replace(ready=min(offer.ready, asked))
        self._offers.append(offer.ready)
        self._forget_wishes()  # the offer has them
        return offer

    def _promised(self) -> int:
        return max((self._agreed.ready, *self._offers))

    def _stock_up(self, pages: int) -> None:
        bank = self.bank
        short = min(pages - bank.stock_pages, bank.pool.available())
        if short > 0:
            bank.refill(short)
        elif (surplus := bank.stock_pages - max(0, pages)) > 0:
            bank.surrender(surplus)

    def adopt(self, agreed: Offer) -> None:
        """An offer of all ranks that was made some steps ago holds from here on."""
        self._offers.popleft()
        if self._void:
            self._void -= 1
            agreed = agreed._replace(ready=0)
        self._agreed = agreed
        self._grant(agreed)

    def start_with(self, agreed: Offer) -> None:
        """What the ranks have agreed on when the engine was complete; nothing has been promised."""
        self._agreed = agreed._replace(ready=0)

    def _cleared(self) -> None:
        """All ranks clear their pools in the same step, and with them all promises are void."""
        self._void = len(self._offers)
        self._offers = deque([0] * self._void)
        self._agreed = self._agreed._replace(ready=0)

    def lapse(self) -> None:
        """What has been promised stays."""

    # ------------------------------------------------------------------ what has been agreed

    @property
    def ready_slots(self) -> int:
        return max(0, self._agreed.ready - self.bank.out_pages) * self.bank.page_slots

    def may_have(self, slots: int) -> bool:
        pages = self.pages(slots) + self.pages(self.ahead_slots)
        self._wish(pages)
        return self.bank.out_pages + pages <= self._agreed.ready

    def secure(self, slots: int, *, insist: bool = True, patient: bool = False) -> bool:
        pages = self.pages(slots)
        if self._missing(pages) > 0:
            self._wish(pages)
            is_on_its_way = self.bank.out_pages + pages <= self._agreed.holdable and self._wish_steps < self._patience_steps
            while not (patient and is_on_its_way) and (missing := self._missing(pages)) > 0:
                if not self._drop(missing * self.bank.page_slots, Eviction.NEED):
                    break
        return self._missing(pages) <= 0

    def _missing(self, pages: int) -> int:
        return self.bank.out_pages + pages - self._agreed.ready

    def _wish(self, pages: int) -> None:
        self._wish_pages = max(self._wish_pages, pages)

    def _age_wish(self) -> None:
        """A wish lasts until it is served, or nobody has it any more."""
        if self._wish_pages and self._missing(self._wish_pages) > 0 and self._wish_steps < 2 * self._patience_steps:
            self._wish_steps += 1
        else:
            self._wish_pages = self._wish_steps = 0

    def take(self, pages: int) -> torch.Tensor:
        return self.bank.take(pages)


class StagedAgreement(Agreement):
    """What the stages agree on, a pipeline's length of steps ahead."""

    def __init__(self, accord: Accord, gates: Sequence[StagedGate], scheduler: Any, step_slots: int) -> None:
        """`step_slots`: what one batch takes at most."""
        super().__init__(accord, gates)
        self._staged = gates
        self._scheduler = scheduler
        self._step_slots = step_slots
        self._asked: deque[Asked] = deque()

    def start(self) -> None:
        agreed = self.accord.least(Topic.STEP, [number for gate in self._staged for number in gate.offer()])
        for gate, offer in zip(self._staged, self._offers_in(agreed), strict=True):
            gate.start_with(offer)

    def requests_come(self, queued: int) -> None:
        """The stages behind hear of requests only when this one has taken them up, and take them up by the same bounds as this one.
        What does not fit any more ends while it waits."""

    def begin(self, queued: int) -> None:
        decoding, coming_slots = decoding_and_coming(self._scheduler, self._step_slots)
        alike = [queued, *(number for gate in self._staged for number in (gate.bank.out_pages, gate.tree.evictable()))]
        offers = [number for gate in self._staged for number in gate.make_offer(decoding, gate.pages(coming_slots))]
        self._asked.append(self.accord.ask(Topic.STEP, offers, alike))
        if len(self._asked) >= self.accord.stages:
            for gate, offer in zip(self._staged, self._offers_in(self._asked.popleft().answer()), strict=True):
                gate.adopt(offer)


def decoding_and_coming(scheduler: Any, step_slots: int) -> tuple[int, int]:
    """Of a pipeline's scheduler: requests that decode, and slots that prefills want for one step each of all stages, of at most
    `step_slots`."""
    batches = [batch for batch in (*scheduler.running_mbs, *scheduler.mbs) if batch is not None]
    chunked = scheduler.chunked_req
    decoding = {id(req) for batch in batches for req in batch.reqs if req is not chunked}
    waiting = [req for req in (*scheduler.waiting_queue, chunked) if req is not None]
    tokens = sum(len(req.origin_input_ids) + len(req.output_ids) + scheduler.page_size for req in waiting)
    return len(decoding), min(tokens, scheduler.pp_loop_size * step_slots)
