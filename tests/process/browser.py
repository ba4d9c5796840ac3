# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven over its own protocol, as a user sees a page and works it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

WAIT_S = 120.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0", "about:blank"),
)


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One tab. `problems`: what the console has of errors, and what was thrown."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            else:
                self._note(told["method"], told["params"])

    def _note(self, method: str, facts: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(facts["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(facts["args"]))
        elif method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{facts['entry']['text']} {facts['entry'].get('url', '')}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        told = await asyncio.wait_for(self._answers[number], WAIT_S)
        assert "error" not in told, told
        return dict(told["result"])

    async def run(self, expression: str) -> Any:
        """The value of JavaScript."""
        told = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, expression: str, wanted: object = True) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while (found := await self.run(expression)) != wanted:
            assert time.monotonic() < deadline_s, f"{expression} is {found!r}, not {wanted!r}; {self.problems}"
            await asyncio.sleep(0.05)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({url!r}) && document.readyState", "complete")

    async def resize(self, width: int, height: int, mobile: bool = False) -> None:
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    async def colours(self, scheme: str) -> None:
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def click(self, selector: str) -> None:
        """With the mouse, where the element is: what lies over it would get it instead."""
        await self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = await self.run(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    async def type(self, text: str) -> None:
        """Where the focus is."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    async def picture(self, path: Path) -> None:
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def browsing(folder: Path) -> AsyncIterator[Page]:
    """`folder` is empty, and the browser's own."""
    program = chromium()
    assert program is not None
    process = subprocess.Popen([program, *FLAGS, f"--user-data-dir={folder}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = await _port(folder / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                tab = next(one for one in await response.json() if one["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                yield page
    finally:
        process.terminate()
        process.wait()


async def _port(file: Path) -> int:
    deadline_s = time.monotonic() + WAIT_S
    while not file.exists() or not file.read_text().split():
        assert time.monotonic() < deadline_s, "the browser does not come up"
        await asyncio.sleep(0.05)
    return int(file.read_text().split()[0])
