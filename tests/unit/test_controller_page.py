# SPDX-License-Identifier: Apache-2.0
"""The web page's files, who may see what they show, and that nobody else's page can act."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, ClassVar

import pytest
from aiohttp import web
from gateway_stage import error_of, play, stage, until

from kvcached.controller.journal import MOST_LINES, Journal
from kvcached.controller.origin import is_foreign, is_misled
from kvcached.controller.page import FOLDER

FILES = sorted(FOLDER.iterdir())


class TestFiles:
    def test_the_page_and_all_that_it_names_is_served_with_its_policy(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                async with it.client.get(it.url + "/") as response:
                    page = await response.text()
                    assert (response.url.path, response.content_type) == ("/ui/", "text/html")
                named = re.findall(r'(?:src|href)="([^"#]+)"', page)
                for file in (FOLDER / name for name in named):
                    named += re.findall(r'from "\./([^"]+)"', file.read_text())
                assert set(named) | {"index.html"} == {file.name for file in FILES}
                for name in set(named):
                    async with it.client.get(f"{it.url}/ui/{name}") as response:
                        assert (response.status, await response.read()) == (200, (FOLDER / name).read_bytes())
                        policy = response.headers["Content-Security-Policy"]
                        assert "default-src 'none'" in policy
                        assert "unsafe" not in policy
                        assert response.headers["X-Content-Type-Options"] == "nosniff"

        play(scene)

    @pytest.mark.parametrize("name", ["../page.py", "..%2Fpage.py", "%2e%2e/page.py", "/etc/passwd", "none", "sub/index.html"])
    def test_nothing_else_is(self, name: str) -> None:
        async def scene() -> None:
            async with stage() as it:
                status, _, _ = await raw_get(it.url, f"/ui/{name}")
                assert status == 404

        play(scene)

    @pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
    def test_nothing_from_elsewhere_and_no_text_that_becomes_code(self, file: Any) -> None:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|javascript:", text)
        assert not re.search(r"<script(?! type=\"module\" src)|<style|\sstyle=|\son[a-z]+=\"", text)
        assert len(text.splitlines()) <= 400


async def raw_get(url: str, path: str, **headers: str) -> tuple[int, bytes, bytes]:
    """Without a client that tidies the path up."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), head, body


class TestWhoMay:
    TOP: ClassVar[dict[str, Any]] = {"api_keys": ["all-of-them", {"key": "chat-alone", "models": ["chat"]}]}

    @pytest.mark.parametrize("path", ["/cards", "/requests", "/logs/chat"])
    def test_what_it_shows_needs_a_key_for_all(self, path: str) -> None:
        async def scene() -> None:
            async with stage(top=dict(self.TOP)) as it:
                assert (await it.get(path))[0] == 401
                assert (await it.get(path, headers={"x-api-key": "chat-alone"}))[0] == 403
                assert (await it.get(path, headers={"x-api-key": "all-of-them"}))[0] == 200

        play(scene)

    @pytest.mark.parametrize("path", ["/action/sleep/chat", "/action/wakeup/chat", "/action/limit/chat?limit=1GiB", "/upstream/chat/x"])
    @pytest.mark.parametrize(
        "headers",
        [
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"Origin": "http://elsewhere.test"},
            {"Origin": "null"},
            {"Host": "rebound.test"},
        ],
        ids=str,
    )
    def test_no_page_of_another_site_acts(self, path: str, headers: dict[str, str]) -> None:
        async def scene() -> None:
            async with stage({"sleep": "host"}) as it:
                await it.post()
                before = list(it.upstream.calls)
                status, body, _ = await it.post(path, headers=headers)
                assert (status, error_of(body)["code"]) == (403, "wrong_host" if "Host" in headers else "cross_site")
                assert it.upstream.calls == before
                assert it.state().value == "ready"

        play(scene)

    def test_without_keys_no_page_of_another_site_makes_a_model_work(self) -> None:
        foreign = {"Origin": "http://elsewhere.test", "Content-Type": "text/plain"}

        async def scene() -> None:
            async with stage() as it:
                status, body, _ = await it.post(headers=foreign)
                assert (status, error_of(body)["code"]) == (403, "cross_site")
                assert it.upstream.calls == []
                assert (await it.post(headers={"Origin": it.url}))[0] == 200
            async with stage(top=dict(self.TOP)) as it:
                assert (await it.post(headers={**foreign, "x-api-key": "chat-alone"}))[0] == 200

        play(scene)

    @pytest.mark.parametrize(
        ("kind", "policy"), [("text/html; charset=utf-8", "sandbox"), ("image/svg+xml", "sandbox"), ("text/plain", None)]
    )
    def test_what_a_server_shows_cannot_act_in_the_gateways_name(self, kind: str, policy: str | None) -> None:
        async def shows(request: web.Request) -> web.Response:
            return web.Response(body=b"<script>act()</script>", headers={"Content-Type": kind})

        async def scene() -> None:
            async with stage() as it:
                it.upstream.script.append(shows)
                _, body, headers = await it.post("/upstream/chat/docs")
                assert (body, headers.get("Content-Security-Policy")) == (b"<script>act()</script>", policy)

        play(scene)

    def test_a_key_that_opens_models_only_is_not_told_why_one_fails(self) -> None:
        async def said(key: str, **more: Any) -> tuple[int, str]:
            async with stage(addresses=["http://127.0.0.1:9"], top=dict(self.TOP), more=more) as it:
                status, body, _ = await it.post(body={"model": "chat", "stream": bool(more)}, headers={"x-api-key": key})
                return status, body.decode()

        async def scene() -> None:
            for more in ({}, {"keep_alive_s": 0.1}):
                status, body = await said("chat-alone", **more)
                assert ("127.0.0.1:9" in body, "chat failed; who runs it finds the reason at /sleep/status" in body) == (False, True), body
                assert status == (200 if more else 503)
            assert "127.0.0.1:9" in (await said("all-of-them"))[1]

        play(scene)

    def test_its_own_page_and_programs_act(self) -> None:
        async def scene() -> None:
            async with stage({"sleep": "host"}) as it:
                for headers in ({}, {"Sec-Fetch-Site": "same-origin", "Origin": it.url}, {"Origin": it.url}):
                    assert (await it.post("/action/sleep/chat?wait_s=50", headers=headers))[0] == 200
            async with stage(top=dict(self.TOP)) as it:
                assert (await it.get("/cards", headers={"x-api-key": "all-of-them", "Host": "proxy.test"}))[0] == 200

        play(scene)

    @pytest.mark.parametrize(
        ("headers", "foreign"),
        [
            ({}, False),
            ({"Sec-Fetch-Site": "same-origin", "Origin": "https://public.test", "Host": "10.0.0.1:80"}, False),
            ({"Sec-Fetch-Site": "none"}, False),
            ({"Sec-Fetch-Site": "cross-site", "Origin": "http://a.test", "Host": "a.test"}, True),
            ({"Origin": "http://A.test:8080", "Host": "a.test:8080"}, False),
            ({"Origin": "http://a.test:8081", "Host": "a.test:8080"}, True),
            ({"Origin": "http://a.test"}, True),
            ({"Origin": "http://[", "Host": "a.test"}, True),
        ],
    )
    def test_whose_page_asks(self, headers: dict[str, str], foreign: bool) -> None:
        assert is_foreign(headers) == foreign

    @pytest.mark.parametrize(
        ("host", "listen", "misled"),
        [
            ("127.0.0.1:8080", "127.0.0.1", False),
            ("localhost:8080", "127.0.0.1", False),
            ("[::1]:8080", "::1", False),
            ("a.localhost", "127.0.0.1", False),
            ("a.test:8080", "127.0.0.1", True),
            ("a.test", "localhost", True),
            ("10.0.0.1", "127.0.0.1", True),
            ("[", "127.0.0.1", True),
            ("a.test", "0.0.0.0", False),
            ("a.test", "10.0.0.1", False),
        ],
    )
    def test_whose_name_leads_here(self, host: str, listen: str, misled: bool) -> None:
        assert is_misled({"Host": host}, listen) == misled


class TestFigures:
    def test_a_request_is_under_way_until_its_last_byte(self) -> None:
        async def scene() -> None:
            async with stage({"concurrency": 1}) as it:
                it.upstream.gate.clear()
                asking = [asyncio.create_task(it.post("/v1/completions?secret=1")) for _ in range(3)]
                await it.upstream.arrived.wait()
                await until(lambda: len(it.owner.fleet.models["chat"].waiting) == 2)
                facts = (await it.get("/requests"))[1]
                assert [(one["model"], one["path"], one["phase"]) for one in facts["requests"]] == [
                    ("chat", "/v1/completions", phase) for phase in ("sent", "waiting", "waiting")
                ]
                facts = (await it.get("/requests?most=1"))[1]
                assert (facts["count"], len(facts["requests"])) == (3, 1)
                asking.pop().cancel()
                it.upstream.gate.set()
                assert [answer[0] for answer in await asyncio.gather(*asking)] == [200] * 2
                assert (await it.get("/requests"))[1] == {"count": 0, "requests": []}

        play(scene)

    def test_what_a_remote_has_is_not_ours(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                assert (await it.get("/logs/chat"))[1]["lines"] is None
                assert (await it.get("/cards"))[1] == {"cards": [], "problems": []}
                assert (await it.get("/sleep/status"))[1]["models"]["chat"]["is_elastic"] is False

        play(scene)

    @pytest.mark.parametrize("query", ["after=-1", "after=x", "most=1.5", "after=" + "9" * 400, "most=%C2%B2"])
    def test_a_count_is_a_count(self, query: str) -> None:
        async def scene() -> None:
            async with stage() as it:
                assert (await it.get(f"/logs/chat?{query}"))[0] == 400

        play(scene)

    def test_any_name_can_be_asked_for(self) -> None:
        name = '<img src=x onerror="a()">/50%2F'

        async def scene() -> None:
            async with stage(top={"models": {name: {}}}) as it:
                _, _, body = await raw_get(it.url, "/logs/%3Cimg%20src%3Dx%20onerror%3D%22a()%22%3E%2F50%252F")
                assert json.loads(body)["model"] == name

        play(scene)


class TestJournal:
    def test_lines_since_and_how_many_are_missed(self) -> None:
        journal = Journal()
        assert journal.after(0, 10).lines == ()
        for number in range(5):
            journal.add(str(number))
        assert journal.after(3, 10) == journal.after(3, 2)
        assert journal.after(3, 10).lines == ("3", "4")
        assert (journal.after(0, 2).lines, journal.after(0, 2).missed) == (("3", "4"), 3)
        assert (journal.after(5, 10).lines, journal.after(5, 10).next) == ((), 5)
        assert journal.after(9, 10).lines == ("0", "1", "2", "3", "4")

    def test_it_has_a_bound(self) -> None:
        journal = Journal()
        for number in range(3 * MOST_LINES):
            journal.add(f"{number} " + 10_000 * "x")
        excerpt = journal.after(0, 10**9)
        assert (len(excerpt.lines), excerpt.missed, excerpt.next) == (MOST_LINES, 2 * MOST_LINES, 3 * MOST_LINES)
        assert excerpt.lines[-1].startswith(f"{3 * MOST_LINES - 1} ")
        assert max(map(len, excerpt.lines)) == 2000
