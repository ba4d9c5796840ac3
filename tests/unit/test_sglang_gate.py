# SPDX-License-Identifier: Apache-2.0
"""When a prefill that was turned away for lack of memory is asked again, while others run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvcached.core.tally import Eviction, Tally
from kvcached.engines.sglang import gate as gate_module
from kvcached.engines.sglang.admission import remaining_tokens
from kvcached.engines.sglang.gate import Gate, Gates


class Bank:
    """A bank of which everything is said beforehand, and every wait for the device counted."""

    page_slots = 1

    def __init__(self) -> None:
        self.ready = 0
        self.at_best = 100
        self.arriving_pages = 0
        self.free_slots = 100
        self.waits = 0
        self.grows = 0
        self.grow_takes = lambda: None
        self.pool = SimpleNamespace(
            available=lambda: self.ready,
            missing=lambda blocks: max(0, blocks - self.ready),
            obtainable=lambda: self.at_best,
            grow=self._grow,
        )

    def _grow(self, pages: int, *, urgent: bool) -> int:
        self.grows += 1
        self.grow_takes()
        return 0

    def settle(self, *, wait: bool = False) -> None:
        self.waits += wait


def refused(bank: Bank) -> Gates:
    gates = Gates(Gate(cast("Any", bank)))
    assert not gates.admits(10, reserved=30)
    return gates


def test_nothing_is_asked_again_before_anything_was_refused() -> None:
    assert not Gates(Gate(cast("Any", Bank()))).may_reopen()


def test_it_is_asked_again_when_it_can_be_served_and_once() -> None:
    bank = Bank()
    gates = refused(bank)
    assert not gates.may_reopen()
    bank.ready = 10
    assert gates.may_reopen()
    assert not gates.may_reopen()


def test_a_card_that_refused_is_asked_again_after_a_pause(monkeypatch: Any) -> None:
    now = [100.0]
    monkeypatch.setattr(gate_module.time, "monotonic", lambda: now[0])
    gates = refused(Bank())
    now[0] += 0.2
    assert not gates.may_reopen()
    now[0] += 0.1
    assert gates.may_reopen()


def test_the_longer_an_ask_takes_the_longer_is_the_pause(monkeypatch: Any) -> None:
    now = [100.0]
    monkeypatch.setattr(gate_module.time, "monotonic", lambda: now[0])
    bank = Bank()
    bank.grow_takes = lambda: now.__setitem__(0, now[0] + 0.25)
    gates = refused(bank)
    for _ in range(24):
        now[0] += 0.1
        assert not gates.may_reopen()
    now[0] += 0.11
    assert gates.may_reopen()


def test_one_that_was_let_in_is_not_waited_for() -> None:
    bank = Bank()
    gates = refused(bank)
    bank.ready = 40
    assert gates.admits(10, reserved=30)
    assert not gates.may_reopen()


def test_nothing_is_asked_that_the_limit_forbids(monkeypatch: Any) -> None:
    now = [100.0]
    monkeypatch.setattr(gate_module.time, "monotonic", lambda: now[0])
    bank = Bank()
    bank.at_best = 9
    gates = refused(bank)
    now[0] += 10
    assert not gates.may_reopen()


def test_a_raised_limit_lets_those_in_that_were_counted_out() -> None:
    bank = Bank()
    bank.at_best = 40
    gates = Gates(Gate(cast("Any", bank)))
    adder = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(kvcached_gates=gates), rem_total_token_offset=1)
    assert remaining_tokens(lambda _: 70, adder) == 10
    assert not gates.may_reopen()
    bank.at_best = 90
    assert gates.may_reopen()
    assert not gates.may_reopen()


def test_a_refusal_waits_for_the_device_only_where_that_helps() -> None:
    bank = Bank()
    bank.arriving_pages = 39
    refused(bank)
    assert bank.waits == 0
    bank.arriving_pages = 40
    refused(bank)
    assert bank.waits == 1


class Tree:
    """Gives up what it is asked for, as far as it has it."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def evictable(self) -> int:
        return self.slots

    def evict(self, slots: int) -> int:
        evicted = min(slots, self.slots)
        self.slots -= evicted
        return evicted


def test_what_the_tree_drops_is_counted_in_blocks_and_by_reason() -> None:
    bank = Bank()
    bank.page_slots = 4
    bank.pool.tally = Tally()
    gate = Gate(cast("Any", bank))
    gate.tree = Tree(16)
    gate.trim_cache(8)
    assert not gate.secure(4)
    bank.at_best = 0
    gate.tree = Tree(4)
    gate.evict_ahead(4)
    assert {why: blocks for why, blocks in bank.pool.tally.evicted_blocks.items() if blocks} == {Eviction.CAP: 2, Eviction.NEED: 2 + 1}


def test_one_that_lacks_a_state_is_let_in_when_there_may_be_states_again() -> None:
    bank = Bank()
    gates = refused(bank)
    bank.ready = 10
    states = SimpleNamespace(kvcached_may_have=lambda: False)
    gates.states = cast("Any", states)
    assert not gates.may_reopen()
    states.kvcached_may_have = lambda: True
    assert gates.may_reopen()


def test_who_evicts_by_himself_gets_only_what_can_be_mapped() -> None:
    bank = Bank()
    gate = Gate(cast("Any", bank))
    gate.tree = cast("Any", SimpleNamespace(evict=pytest.fail, evictable=lambda: 40))
    assert not gate.make_ready(10, urgent=False)
    bank.ready = 10
    assert gate.make_ready(10, urgent=False)
