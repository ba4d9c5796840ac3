# SPDX-License-Identifier: Apache-2.0
"""The owner's account of credit: what maps under way count on, how it grows ahead of need, and how it goes back. Pure.

A wish that finds no credit waits for all ranks, so it asks for more than it needs; what is left of that is filled up again while nobody
waits. Where memory is short it is the exact need that counts, and for a while nothing is asked for ahead of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvcached.ranks.api import Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.ranks.coordinator import Coordinator, Effect
    from kvcached.ranks.transactions import Classes

    Then = Callable[[Outcome], None]

_MODEST_S: Final = 1.0
"""After a refusal, and after credit was taken back, nothing is asked for ahead of need for so long."""
_DONE: Final = Outcome(Verdict.DONE)


class CreditAccount:
    """`begin` carries a transaction of the coordinator out and calls back when it has ended; `clock` tells seconds. `ahead_pages`: how
    many pages of credit of a class to hold beyond what is claimed, 0: none. `unit_bytes`: bytes of a page.

    Not safe for threads: called under its group's lock.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        begin: Callable[[tuple[int, list[Effect]], Then], None],
        clock: Callable[[], float],
        *,
        unit_bytes: int,
        ahead_pages: int = 0,
    ) -> None:
        self._coordinator = coordinator
        self._begin = begin
        self._clock = clock
        self._unit_bytes = unit_bytes
        self._ahead_pages = ahead_pages
        self._claimed: Counter[int] = Counter()  # credit that maps under way count on, by class
        self._modest_until_s = float("-inf")
        self._filling = False
        self._trims = 0

    def spare(self, run_pages: int) -> int:
        """Runs that nobody has a claim on."""
        return max(0, self._coordinator.credit(run_pages) - self._claimed[run_pages])

    def claim(self, need: Classes, urgent: bool, then: Then) -> None:
        """Call `then` as soon as there is credit for `need` beside what others have claimed, at once if there is; the claim ends with it.
        Or with a refusal, whose bytes are what a smaller wish could use."""
        missing = tuple((pages, count - spare) for pages, count in need if (spare := self.spare(pages)) < count)
        self._claimed.update(dict(need))

        def grown(outcome: Outcome) -> None:
            self._claimed.subtract(dict(need))
            then(outcome if outcome.verdict is Verdict.DONE else self._with_spare(outcome, need))

        if not missing:
            grown(_DONE)
        elif urgent and self._asks_ahead:
            self._grow_ahead(missing, grown)
        else:
            self._grow(missing, urgent, grown)

    def fill_up(self, classes: Classes) -> None:
        """What is low of these classes is acquired while nobody waits for it."""
        if self._filling or not self._asks_ahead:
            return
        low = [(pages, self._ahead_runs(pages)) for pages, _ in classes]
        wanted = tuple((pages, most - spare) for pages, most in low if 2 * (spare := self.spare(pages)) < most)
        if wanted:
            self._filling, trims = True, self._trims
            self._begin(self._coordinator.grow_credit(wanted), lambda outcome: self._filled(outcome, trims))

    def trim(self, then: Then) -> None:
        """Give back what nobody has a claim on: it is wanted elsewhere, or nobody works here."""
        self._trims += 1
        self._be_modest()
        self.release(self._all_spare(), then)

    def release(self, classes: Classes, then: Then) -> None:
        if classes:
            self._begin(self._coordinator.release_credit(classes), then)
        else:
            then(_DONE)

    # ------------------------------------------------------------------ growth

    @property
    def _asks_ahead(self) -> bool:
        return self._ahead_pages > 0 and self._clock() >= self._modest_until_s

    def _be_modest(self) -> None:
        self._modest_until_s = self._clock() + _MODEST_S

    def _ahead_runs(self, run_pages: int) -> int:
        return self._ahead_pages // run_pages

    def _grow_ahead(self, missing: Classes, then: Then) -> None:
        """More than is missing, without pressing anybody; where that is refused, just that."""

        def grown(outcome: Outcome) -> None:
            if outcome.verdict is Verdict.EXHAUSTED:
                self._be_modest()
                self._grow(missing, True, then)
            else:
                then(outcome)

        more = tuple((pages, count + self._ahead_runs(pages)) for pages, count in missing)
        self._begin(self._coordinator.grow_credit(more), grown)

    def _grow(self, missing: Classes, urgent: bool, then: Then) -> None:
        """When it is refused, credit of other classes may be in the way: that goes first, and it is tried once more."""

        def refused(outcome: Outcome) -> None:
            wanted = {pages for pages, _ in missing}
            others = tuple((pages, runs) for pages, runs in self._all_spare() if pages not in wanted)
            if outcome.verdict is Verdict.EXHAUSTED and others:
                self.release(others, lambda _: self._begin(self._coordinator.grow_credit(missing, urgent), then))
            else:
                then(outcome)

        self._begin(self._coordinator.grow_credit(missing, urgent), refused)

    def _filled(self, outcome: Outcome, trims: int) -> None:
        self._filling = False
        if outcome.verdict is not Verdict.DONE:
            self._be_modest()
        elif trims != self._trims:  # it came after all else had been given back
            self.release(self._all_spare(), lambda _: None)

    # ------------------------------------------------------------------ what is left

    def _all_spare(self) -> Classes:
        return tuple((pages, spare) for pages, _ in self._coordinator.credits() if (spare := self.spare(pages)))

    def _with_spare(self, outcome: Outcome, need: Classes) -> Outcome:
        """A smaller wish could use what there is."""
        if outcome.verdict is not Verdict.EXHAUSTED:
            return outcome
        spare_pages = sum(pages * self.spare(pages) for pages, _ in need)
        return replace(outcome, size_bytes=outcome.size_bytes + spare_pages * self._unit_bytes)
