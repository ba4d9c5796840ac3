# SPDX-License-Identifier: Apache-2.0
"""Who may be awake together, and who leaves to make room: the cheapest to bring back. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcached.controller.states import AWAKE, LEAVING, Model, State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(slots=True)
class Room:
    """What the awake models leave. `place` one after another in the order of their claims: who waits keeps its place.

    `card_bytes`: what models may take of each card together; a card that is not in it is taken as large enough.
    """

    models: Sequence[Model]
    card_bytes: Mapping[str, int]
    now_s: float
    hold_s: float = 0.0
    _claimed_bytes: dict[str, int] = field(default_factory=dict)
    _claimed_groups: set[str] = field(default_factory=set)

    def place(self, model: Model) -> Sequence[Model] | None:
        """Empty: it may be awake now. Else those that have to leave for it; None when it must wait, or can never be."""
        if model.spec.group is not None and model.spec.group in self._claimed_groups:
            return None
        victims = self._victims(model, soon=False)
        if victims is not None and not victims and self._fits_now(model):
            return []
        if victims is not None or self._victims(model, soon=True) is not None:
            self._claim(model)
        return victims or None

    def must_end(self, model: Model, victims: Sequence[Model]) -> bool:
        """Whether the sleep of those whom `place` named would keep memory that it needs, and has claimed."""
        return self._short_bytes(model, [], [*victims, *self._going(model)]) > model.spec.cost_bytes

    def movable(self, model: Model) -> list[Model]:
        """Those of its card that may leave for it now, in the order in which they would."""
        on_card = [other for other in self._others(model) if other.spec.card == model.spec.card]
        return sorted((other for other in on_card if self.may_displace(model, other)), key=self.price)

    def _fits_now(self, model: Model) -> bool:
        return not self._mates(model) and self._short_bytes(model) <= 0

    def _others(self, model: Model) -> list[Model]:
        """Awake, or asleep with memory."""
        return [other for other in self.models if other is not model and (other.state in AWAKE or other.taken_bytes)]

    def _mates(self, model: Model) -> list[Model]:
        awake = (other for other in self._others(model) if other.state in AWAKE)
        return [other for other in awake if model.spec.group is not None and other.spec.group == model.spec.group]

    def _going(self, model: Model) -> list[Model]:
        return [other for other in self._others(model) if other.state in LEAVING]

    def _claim(self, model: Model) -> None:
        card = model.spec.card
        self._claimed_bytes[card] = self._claimed_bytes.get(card, 0) + model.spec.cost_bytes
        if model.spec.group is not None:
            self._claimed_groups.add(model.spec.group)

    def _victims(self, model: Model, soon: bool) -> list[Model] | None:
        """Its mates, and as few more as give the memory. None when that cannot be. `soon`: when all others have settled."""
        going = self._going(model)
        must = [mate for mate in self._mates(model) if mate not in going]
        if not all(self.may_displace(model, mate, soon) for mate in must):
            return None
        chosen = list(must)
        for candidate in self._candidates(model, [*must, *going], soon):
            if self._short_bytes(model, chosen, going) <= 0:
                break
            chosen.append(candidate)
        if self._short_bytes(model, chosen, going) > 0:
            return None
        return self._without_needless(model, chosen, must, going)

    def _candidates(self, model: Model, but: Sequence[Model], soon: bool) -> list[Model]:
        on_card = [other for other in self._others(model) if other.spec.card == model.spec.card and other.taken_bytes > 0]
        return sorted((other for other in on_card if other not in but and self.may_displace(model, other, soon)), key=self.price)

    def _without_needless(self, model: Model, chosen: list[Model], must: list[Model], going: list[Model]) -> list[Model]:
        """A large one that came last can make the small ones before it needless."""
        kept = list(chosen)
        for candidate in [one for one in reversed(chosen) if one not in must]:
            without = [one for one in kept if one is not candidate]
            if self._short_bytes(model, without, going) <= 0:
                kept = without
        return kept

    def _short_bytes(self, model: Model, ended: Sequence[Model] = (), left: Sequence[Model] = ()) -> int:
        """What is missing on the card if those had ended and these had left; those that claimed before are taken as placed."""
        card = model.spec.card
        if card not in self.card_bytes:
            return 0
        staying = (other for other in self._others(model) if other.spec.card == card and other not in ended)
        used = sum(other.kept_bytes if other in left else other.taken_bytes for other in staying)
        return used + self._claimed_bytes.get(card, 0) + model.spec.cost_bytes - self.card_bytes[card]

    def may_displace(self, model: Model, other: Model, soon: bool = False) -> bool:
        """An idle one leaves for anybody; a busy one for whom it does not outrank, after it had `hold_s` to serve."""
        if other.state is State.ASLEEP:
            return other.spec.can_stop and (not other.busy or other.spec.priority <= model.spec.priority)
        if other.spec.pin or not other.spec.can_sleep or (other.state is not State.READY and not soon):
            return False
        if not other.busy:
            return soon or other.retry_at_s <= self.now_s
        rested = soon or self.now_s >= max(other.since_s + self.hold_s, other.retry_at_s)
        return rested and other.spec.priority <= model.spec.priority

    def price(self, model: Model) -> tuple[bool, int, float, float]:
        """Order in which models leave: idle ones, unimportant ones, those that are soon back, those that were idle for long."""
        return model.busy, model.spec.priority, model.price_s, -model.idle_s(self.now_s)
