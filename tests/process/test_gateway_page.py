# SPDX-License-Identifier: Apache-2.0
"""The gateway's page in a real browser, against a real gateway: what a user sees and does."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from browser import Page, browsing, chromium
from test_controller_processes import Running

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium on this machine"),
]
HOSTILE = '<img src=x onerror="document.title=1">'
TILE = "document.querySelector('[data-model=chat]')"
STATE = TILE + "?.querySelector('.state').textContent"
NO_SCROLL = "document.documentElement.scrollWidth <= innerWidth"


class Guarded(Running):
    """Only who has the key may use it."""

    def write(self, models: dict[str, Any]) -> None:
        super().write(models)
        file = self.folder / "models.yaml"
        keys = ["opens-everything", {"key": "opens-models", "models": ["chat"]}]
        file.write_text(json.dumps({**json.loads(file.read_text()), "api_keys": keys}))


def visit(folder: Path, run_dir: Path, tour: Callable[[Running, Page], Awaitable[None]], kind: type[Running] = Running) -> None:
    (folder / "say").write_text(f"\x1b[32mloading\x1b[0m\n{HOSTILE}\n" + 3000 * "x" + "\n")
    (folder / "pool").write_text("8")
    it = kind(folder, sleep="kv", env={"KVCACHED_RUN_DIR": str(run_dir)})
    remote = {"engine": "remote", "address": "http://127.0.0.1:9"}
    it.reload(
        {"chat": it.chat, "late": {**it.chat, "sleep": "stop"}, HOSTILE: remote, 45 * "long": remote}
        if kind is Running
        else {"chat": it.chat}
    )

    async def go() -> None:
        async with browsing(folder / "profile") as page:
            await page.resize(1280, 900)
            await page.open(it.url + "/ui/")
            await tour(it, page)

    try:
        asyncio.run(go())
        it.stop()
    finally:
        it.kill()


def button(word: str, model: str = "chat") -> str:
    return f"[data-model={model}] button[aria-label*='{word}']"


def test_a_user_sees_and_does_everything(tmp_path: Path, run_dir: Path) -> None:
    async def tour(it: Running, page: Page) -> None:
        await page.until(STATE, "stopped")
        await page.click(button("Wake"))
        await page.until(STATE, "ready")
        await chats(it, page)
        await remembers(it, page)
        await limits(page)
        await sleeps_and_wakes(page)
        await asks_before_it_ends_a_stream(it, page)
        await reads_logs(page)
        await is_not_fooled(page)
        await fits_a_phone_and_the_night(page, tmp_path)
        assert page.problems == []

    visit(tmp_path, run_dir, tour)


async def chats(it: Running, page: Page) -> None:
    """By keyboard alone, from the button of the model on; the answer comes piece by piece."""
    await page.until("document.querySelector('#chat-model').options.length", 4)
    await page.run(f"document.querySelector({json.dumps(button('Chat'))}).focus()")
    await page.press("Enter", 13)
    await page.until("document.activeElement.id", "chat-text")
    await page.run(
        "globalThis.lengths = []; new MutationObserver(() => lengths.push(document.querySelector('#conversation').textContent.length))"
        ".observe(document.querySelector('#conversation'), {subtree: true, childList: true, characterData: true})"
    )
    text = " ".join([*(f"word{number}" for number in range(30)), HOSTILE])
    await page.type(text)
    await page.press("Enter", 13)
    await page.until("[...document.querySelectorAll('#conversation .said')].map(one => one.textContent.trim())", [text, text])
    await page.until("document.querySelector('#conversation').getAttribute('aria-busy')", "false")
    assert json.loads(it.call("/traffic", method="GET")[1])["models"]["chat"]["total"]["errors"] == 0
    assert await page.run("new Set(lengths).size") > 5
    assert await page.run("document.querySelectorAll('#conversation img').length") == 0


async def remembers(it: Running, page: Page) -> None:
    """The graph has what the record has, and what it had."""
    picture = "document.querySelector('#card-list svg.plot')"
    await page.until(
        f"{picture}?.getAttribute('aria-label').includes('chat: ') && {picture}.getAttribute('aria-label').includes('8.0 MiB used')"
    )
    (it.folder / "pool").write_text("24")
    assert it.ask()[0] == 200
    await page.until(f"{picture}.getAttribute('aria-label').includes('24 MiB used')")
    points = await page.run(f"{picture}.querySelector('polygon').getAttribute('points')")
    heights = {point.split(",")[1] for point in points.split()}
    assert len(heights) >= 3, "two different layers above the ground"
    assert await page.run("document.querySelector('.swatches').textContent.includes('24 MiB used')")


async def limits(page: Page) -> None:
    await page.until(f"document.querySelector({json.dumps(button('Limit'))}).getAttribute('aria-disabled')", "false")
    await page.click(button("Limit"))
    await page.until("document.querySelector('#question').open")
    assert await page.run("document.activeElement.id") == "question-input"
    await page.type("much")
    await page.press("Enter", 13)
    await page.until("document.querySelector('#notice').textContent.includes('limit')")
    page.problems[:] = [problem for problem in page.problems if "400" not in problem]  # the browser's note of a refusal that was meant
    await page.click(button("Limit"))
    await page.type("32MiB")
    await page.press("Enter", 13)
    await page.until("document.querySelector('#notice').textContent", "chat: limited to 32 MiB")
    await page.click(button("Limit"))
    await page.press("Escape", 27)
    await page.until("document.querySelector('#question').open", False)


async def sleeps_and_wakes(page: Page) -> None:
    """No question where nothing is lost."""
    await page.click(button("sleep"))
    await page.until(STATE, "asleep")
    await page.until(f"document.querySelector({json.dumps(button('sleep'))}).getAttribute('aria-disabled')", "true")
    await page.click(button("Wake"))
    await page.until(STATE, "ready")


async def asks_before_it_ends_a_stream(it: Running, page: Page) -> None:
    (it.folder / "hold").touch()
    asking = asyncio.create_task(asyncio.to_thread(it.ask))
    await page.until("document.querySelector('#requests-rows').textContent.startsWith('chat/v1/completionssent')")
    await page.until(f"{TILE}.textContent.includes('1 open')")
    await page.click(button("sleep"))
    await page.until("document.querySelector('#question').open")
    assert "1 requests are open" in await page.run("document.querySelector('#question-text').textContent")
    await page.press("Escape", 27)
    await page.until("document.querySelector('#question').open", False)
    assert await page.run(STATE) == "ready"
    await page.click(button("sleep"))
    await page.click("#question-answers button:nth-child(2)")
    assert (await asking)[0] == 503
    (it.folder / "hold").unlink()
    await page.until(STATE, "asleep")
    await page.until("document.querySelector('#requests-count').textContent", "none")


async def reads_logs(page: Page) -> None:
    lines = "[...document.querySelectorAll('#log-lines div')].map(line => line.textContent)"
    await page.click(button("logs"))
    await page.until(f"{lines}.slice(0, 2)", ["loading", HOSTILE])
    assert await page.run(f"{lines}.includes('ready as chat')")
    await page.run(
        "document.querySelector('#logs-model').value = 'late'; document.querySelector('#logs-model').dispatchEvent(new Event('change'))"
    )
    await page.until(f"{lines}.length", 0)
    await page.click(button("Wake", "late"))
    await page.until(f"{lines}.includes('ready as late')")
    box = "document.querySelector('#log-lines')"
    assert await page.run(f"{box}.scrollTop + {box}.clientHeight >= {box}.scrollHeight - 2"), "it does not follow"


async def is_not_fooled(page: Page) -> None:
    assert await page.run("document.title") == "KVCacheD gateway"
    assert await page.run("document.querySelectorAll('img').length") == 0
    titles = await page.run("[...document.querySelectorAll('#model-list h3')].map(title => title.textContent)")
    assert HOSTILE in titles
    await page.run("document.querySelector('#logs-model').value = 'none'")
    tile = f"[...document.querySelectorAll('.tile')].find(tile => tile.dataset.model === {json.dumps(HOSTILE)})"
    await page.run(f"{tile}.querySelectorAll('button')[3].click()")
    await page.until("document.querySelector('#logs-note').textContent.includes('somebody else')")


async def fits_a_phone_and_the_night(page: Page, folder: Path) -> None:
    await page.picture(folder / "page.png")
    await page.resize(375, 700, mobile=True)
    await page.until(NO_SCROLL)
    await page.picture(folder / "page-phone.png")
    day = await page.run("getComputedStyle(document.body).backgroundColor")
    await page.colours("dark")
    await page.until(f"getComputedStyle(document.body).backgroundColor !== {day!r}")
    await page.resize(1280, 900)
    await page.picture(folder / "page-dark.png")
    unnamed = (
        "[...document.querySelectorAll('button, input, select, textarea, [role=img], [role=log]')]"
        ".filter(one => !(one.getAttribute('aria-label') || one.labels?.length || one.textContent.trim()) && !one.closest('dialog')).length"
    )
    assert await page.run(unnamed) == 0


def test_who_has_no_key_is_asked_for_it_and_sees_nothing_before(tmp_path: Path, run_dir: Path) -> None:
    async def tour(it: Running, page: Page) -> None:
        await page.until("document.querySelector('#question').open")
        assert await page.run("document.activeElement.type") == "password"
        assert await page.run("document.querySelectorAll('.tile').length") == 0
        await page.press("Escape", 27)
        await page.until("document.querySelector('#connection').textContent", "The API key is missing or wrong.")
        await enter(page, "opens-models")
        await page.until("document.querySelector('#connection').textContent", "This API key opens models only.")
        await page.until("document.querySelector('#chat-model').value", "chat")
        await enter(page, "opens-everything")
        await page.until(STATE, "stopped")
        await page.click(button("Wake"))
        await page.until(STATE, "ready")
        assert "opens-everything" not in await page.run("document.documentElement.outerHTML")
        assert {word for problem in page.problems for word in ("401", "403") if word in problem} == {"401", "403"}
        assert all("401" in problem or "403" in problem for problem in page.problems)

    visit(tmp_path, run_dir, tour, Guarded)


async def enter(page: Page, key: str) -> None:
    await page.click("#enter-key")
    await page.until("document.querySelector('#question').open")
    await page.type(key)
    await page.press("Enter", 13)


def test_a_gateway_that_is_gone_is_said_and_found_again(tmp_path: Path, run_dir: Path) -> None:
    async def tour(it: Running, page: Page) -> None:
        await page.until(STATE, "stopped")
        port = it.url.rpartition(":")[2]
        it.stop()
        await page.until("document.querySelector('#connection').textContent", "nobody answers")
        file = tmp_path / "models.yaml"
        file.write_text(file.read_text().replace("127.0.0.1:0", f"127.0.0.1:{port}"))
        assert it.process.stdout is not None
        it.process.stdout.close()
        it.launch()
        await page.until("document.querySelector('#connection').textContent", "connected")

    visit(tmp_path, run_dir, tour)


def test_an_event_stream_is_read_whatever_its_chunks(tmp_path: Path, run_dir: Path) -> None:
    stream = (
        'data: {"choices": [{"delta": {"content": "é1"}}]}\r\n\r\n: comment\n\ndata: {"choices": [{"delta":\ndata: {"content": "2"}}]}\n\n'
    )
    stream += 'data: {"choices": []}\n\ndata: {"error": {"message": "lost"}}\n\ndata: [DONE]\n\ndata: never\n\n'

    async def tour(it: Running, page: Page) -> None:
        for size in (1, 2, 3, 7, 1000):
            chunks = "new ReadableStream({start(c) { for (let i = 0; i < b.length; i += %d) c.enqueue(b.slice(i, i + %d)); c.close(); }})"
            found = await page.run(
                "(async () => { const {piecesOf} = await import('./events.js'); "
                f"const b = new TextEncoder().encode({json.dumps(stream)}); const found = []; "
                f"for await (const piece of piecesOf({chunks % (size, size)})) found.push(piece); return found; }})()"
            )
            assert found == [{"text": "é1"}, {"text": "2"}, {"problem": "lost"}], size
        bounded = await page.run(
            "(async () => { const {History, MOST_SAMPLES} = await import('./history.js'); const h = new History();"
            "for (let i = 0; i < 5000; i += 1) h.add(i * 10, new Map([['m' + i, 1]])); "
            "return [h.length === MOST_SAMPLES, h.models().length]; })()"
        )
        assert bounded == [True, 300]

    visit(tmp_path, run_dir, tour)
