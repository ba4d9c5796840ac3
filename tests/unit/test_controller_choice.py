# SPDX-License-Identifier: Apache-2.0
"""Which server gets a request: the least loaded, the one of its session or prefix, and not one that fails."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from gateway_stage import Upstream, cut_at_once, listening, play, stage, until

from kvcached.controller.choice import FIRST_REST_S, LONGEST_REST_S, Replica, choose, failed, key_of, tried, worked


def servers(*loads: int) -> list[Replica]:
    return [Replica(f"http://{number}", open={object() for _ in range(load)}) for number, load in enumerate(loads)]


class TestLoad:
    def test_the_fewest_requests(self) -> None:
        replicas = servers(2, 1, 3)
        assert choose(replicas, 0.0) is replicas[1]

    def test_nobody_is_up(self) -> None:
        (replica,) = servers(0)
        replica.up = False
        assert choose([replica], 0.0) is None
        assert choose([], 0.0, "key") is None


class TestRest:
    def test_one_that_failed_rests_and_twice_as_long_each_time(self) -> None:
        replicas = servers(0, 5)
        for number, rest_s in enumerate((FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S)):
            now_s = 100.0 * number
            failed(replicas[0], now_s)
            assert choose(replicas, now_s + rest_s - 0.01) is replicas[1]
            assert choose(replicas, now_s + rest_s) is replicas[0]
        for _ in range(50):
            failed(replicas[0], 0.0)
        assert replicas[0].rests_until_s == LONGEST_REST_S

    def test_the_first_try_after_it_is_alone(self) -> None:
        replicas = servers(0, 5)
        failed(replicas[0], 0.0)
        assert choose(replicas, 2.0) is replicas[0]
        tried(replicas[0], 2.0)
        assert choose(replicas, 2.0) is replicas[1]
        worked(replicas[0])
        assert choose(replicas, 2.0) is replicas[0]
        tried(replicas[0], 2.0)
        assert choose(replicas, 2.0) is replicas[0]

    def test_where_all_rest_one_has_to_try(self) -> None:
        replicas = servers(0, 0)
        failed(replicas[1], 0.0)
        failed(replicas[0], 0.5)
        assert choose(replicas, 0.6) is replicas[1]


class TestAffinity:
    def test_a_key_has_its_server_and_keys_are_spread(self) -> None:
        replicas = servers(0, 0, 0, 0)
        chosen = {str(number): choose(replicas, 0.0, str(number)) for number in range(400)}
        assert all(choose(replicas, 0.0, key) is replica for key, replica in chosen.items())
        shares = Counter(replica.address for replica in chosen.values() if replica is not None)
        assert len(shares) == 4
        assert min(shares.values()) > 60

    def test_the_others_keep_theirs_when_one_is_down(self) -> None:
        replicas = servers(0, 0, 0, 0)
        keys = [str(number) for number in range(100)]
        before = [choose(replicas, 0.0, key) for key in keys]
        replicas[2].up = False
        after = [choose(replicas, 0.0, key) for key in keys]
        assert all(new is old for new, old in zip(after, before, strict=True) if old is not replicas[2])
        assert replicas[2] not in after

    def test_one_with_many_more_than_the_others_is_spared(self) -> None:
        replicas = servers(0, 0)
        own = choose(replicas, 0.0, "key")
        assert own is not None
        other = next(replica for replica in replicas if replica is not own)
        for count, expected in ((1, other), (0, own)):
            own.open = {object() for _ in range(count)}
            assert choose(replicas, 0.0, "key") is expected
        own.open, other.open = {object() for _ in range(10)}, {object() for _ in range(9)}
        assert choose(replicas, 0.0, "key") is own

    @pytest.mark.parametrize(
        ("affinity", "headers", "body", "key"),
        [
            ("none", {"X-Session-ID": "s"}, {"user": "u"}, ""),
            ("session", {"X-Session-ID": "s"}, {"user": "u"}, "s"),
            ("session", {}, {"user": "u"}, "u"),
            ("session", {}, {"user": "u", "prompt_cache_key": "c"}, "c"),
            ("session", {}, {"prompt": "p"}, ""),
            ("session", {}, None, ""),
            ("prefix", {"X-Session-ID": "s"}, {"prompt": "p"}, "s"),
            ("prefix", {}, {"prompt": "p"}, '["p"]'),
            ("prefix", {}, {"input": ["\ud800"]}, '[["\\ud800"]]'),
            ("prefix", {}, {"max_tokens": 3}, ""),
        ],
    )
    def test_what_belongs_together(self, affinity: str, headers: dict[str, str], body: dict[str, Any] | None, key: str) -> None:
        assert key_of(affinity, headers, body) == key

    def test_what_begins_alike(self) -> None:
        begin = [{"role": "system", "content": "x" * 2000}]
        keys = {key_of("prefix", {}, {"messages": [*begin, {"role": "user", "content": word}]}) for word in ("a", "b")}
        assert len(keys) == 1
        assert len(next(iter(keys))) == 1024
        assert key_of("prefix", {}, {"messages": [{"role": "user", "content": "y"}]}) not in keys


@pytest.fixture
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine takes for some requests."""
    monkeypatch.setattr("kvcached.controller.choice.FIRST_REST_S", 60.0)


class TestThroughTheGateway:
    def test_a_session_stays_with_its_server(self) -> None:
        async def scene() -> None:
            one, other = Upstream(), Upstream()
            async with listening(one.app()) as first, listening(other.app()) as second:
                async with stage({"affinity": "session"}, addresses=[first, second]) as it:
                    for session in "abcdefgh":
                        before = len(one.calls)
                        for _ in range(4):
                            assert (await it.post(headers={"X-Session-ID": session}))[0] == 200
                        assert len(one.calls) - before in (0, 4)
                    assert one.calls
                    assert other.calls

        play(scene)

    @pytest.mark.usefixtures("long_rests")
    def test_one_that_says_503_rests_and_the_other_answers(self) -> None:
        async def scene() -> None:
            bad, good = Upstream(), Upstream()
            async with listening(bad.app()) as first, listening(good.app()) as second, stage(addresses=[first, second]) as it:
                bad.script = [busy] * 9
                statuses = [(await it.post())[0] for _ in range(6)]
                assert statuses == [503, 200, 200, 200, 200, 200]
                assert len(bad.calls) == 1

        play(scene)

    @pytest.mark.usefixtures("long_rests")
    def test_one_that_cuts_answers_rests_though_it_is_there(self) -> None:
        async def scene() -> None:
            bad, good = Upstream(), Upstream()
            async with listening(bad.app()) as first, listening(good.app()) as second, stage(addresses=[first, second]) as it:
                bad.script = [cut_at_once] * 9
                assert [(await it.post())[0] for _ in range(6)] == [200] * 6
                assert (len(bad.calls), len(good.calls)) == (1, 6)
                assert it.owner.backends["chat"].replicas[0].up

        play(scene)

    @pytest.mark.usefixtures("long_rests")
    def test_while_one_request_tries_it_the_others_go_elsewhere(self) -> None:
        async def scene() -> None:
            slow, good = Upstream(), Upstream()
            async with listening(slow.app()) as first, listening(good.app()) as second, stage(addresses=[first, second]) as it:
                await it.post()
                replicas = it.owner.backends["chat"].replicas
                replicas[0].failures = 1
                slow.gate.clear()
                trying = it.owner._loop.create_task(it.post())
                await until(lambda: len(slow.calls) == 2)
                replicas[1].open.update(object() for _ in range(5))
                assert (await it.post())[0] == 200
                assert len(slow.calls) == 2
                slow.gate.set()
                assert (await trying)[0] == 200
                assert replicas[0].failures == 0

        play(scene)

    def test_a_remote_that_was_not_there_at_the_start_is_looked_for(self) -> None:
        async def scene() -> None:
            late, good = Upstream(), Upstream()
            late.healthy = False
            async with listening(late.app()) as first, listening(good.app()) as second, stage(addresses=[first, second]) as it:
                assert [(await it.post())[0] for _ in range(2)] == [200, 200]
                assert not late.calls
                late.healthy = True
                await until(lambda: it.owner.backends["chat"].replicas[0].up)
                assert (await it.post())[0] == 200
                assert late.calls

        play(scene)

    def test_a_remote_that_was_gone_gets_requests_again(self) -> None:
        async def scene() -> None:
            one, other = Upstream(), Upstream()
            async with listening(one.app()) as first, listening(other.app()) as second, stage(addresses=[first, second]) as it:
                await it.post()
                one.healthy, one.script = False, [cut_at_once]
                assert (await it.post())[0] == 200
                replica = it.owner.backends["chat"].replicas[0]
                assert (replica.up, len(other.calls)) == (False, 1)
                one.healthy = True
                await until(lambda: replica.up)
                assert (await it.post())[0] == 200

        play(scene)


async def busy(request: web.Request) -> web.StreamResponse:
    return web.json_response({}, status=503)
