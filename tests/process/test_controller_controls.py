# SPDX-License-Identifier: Apache-2.0
"""What is said to an engine that goes to sleep or wakes, and that a real pool gives its memory back."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web

import kvcached
from kvcached.controller.backends import BackendFailed
from kvcached.controller.controls import Door, EngineControls, KvMemory, SglangControls, VllmControls
from kvcached.runtime.control import ControlClient
from kvcached.runtime.endpoint import endpoint_path
from kvcached.setting_types import Amount

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CREDENTIALS = {"Authorization": "Bearer the-server's-own-key"}


def said(controls_of: Callable[[Door], EngineControls], fails: str = "") -> list[str]:
    """Path, query and body of each call of one sleep and one wake-up."""
    calls: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        calls.append(f"{request.rel_url} {await request.text()}".strip())
        if request.headers.get("Authorization") != CREDENTIALS["Authorization"]:
            return web.Response(status=401)
        return web.Response(status=500, text="CUDA out of memory") if fails and fails in request.path else web.Response()

    async def play() -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            address = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with aiohttp.ClientSession() as session:
                controls = controls_of(Door(session, CREDENTIALS))
                await controls.sleep(address)
                await controls.wake(address)
        finally:
            await runner.cleanup()

    asyncio.run(play())
    return calls


def test_vllm_with_weights_in_host_memory() -> None:
    assert said(lambda door: VllmControls(door, discard=False)) == ["/sleep?level=1&mode=wait", "/wake_up"]


def test_vllm_with_weights_read_again() -> None:
    assert said(lambda door: VllmControls(door, discard=True, mode="abort")) == [
        "/sleep?level=2&mode=abort",
        "/wake_up?tags=weights",
        '/collective_rpc {"method": "reload_weights"}',
        "/wake_up?tags=kv_cache",
    ]


def test_sglang() -> None:
    kept = ["/release_memory_occupation {}", "/resume_memory_occupation {}"]
    assert said(lambda door: SglangControls(door, discard=False, model="m")) == kept
    assert said(lambda door: SglangControls(door, discard=True, model="m")) == [
        *kept,
        '/update_weights_from_disk {"model_path": "m"}',
    ]


def test_a_refusal_says_whether_it_was_for_memory() -> None:
    with pytest.raises(BackendFailed, match="said 500: CUDA out of memory") as caught:
        said(lambda door: VllmControls(door, discard=False), fails="wake_up")
    assert caught.value.no_memory


def test_a_real_pool_gives_back_all_that_nobody_uses_and_obeys_a_limit(tmp_path: Path) -> None:
    with (
        kvcached.open_card("host:0", run_dir=str(tmp_path / "run"), budget="64MiB") as card,
        card.open_pool("chat", block_bytes=65_536, blocks=512) as pool,
    ):
        memory = KvMemory(endpoint_path(tmp_path / "run", pool.instance))
        pool.give(pool.take(300))
        assert pool.stats().held_bytes > 0
        assert asyncio.run(memory.give_back()) == 0
        assert asyncio.run(memory.limit(Amount.parse("4MiB"))) == pool.stats().limit_bytes == 4 << 20
        assert asyncio.run(memory.limit(Amount.parse("50%"))) == pool.stats().limit_bytes == 32 << 20


def test_a_pool_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BackendFailed, match="nobody answers"):
        asyncio.run(KvMemory(endpoint_path(tmp_path, "none")).give_back())


def test_the_pools_of_one_server_are_told_from_those_of_others(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code = (
        "import sys, kvcached\n"
        "with kvcached.open_card('host:0', run_dir=sys.argv[1], budget='64MiB') as card:\n"
        "    with card.open_pool(sys.argv[2], block_bytes=65_536, blocks=512) as pool:\n"
        "        pool.give(pool.take(300))\n"
        "        print(pool.instance, flush=True)\n"
        "        sys.stdin.read()\n"
    )

    def start(name: str, leads: bool) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(run_dir), name]
        environment = {**os.environ, "KVCACHED_IPC_NAME": name, "KVCACHED_IDLE_TRIM_S": "3600"}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=leads, env=environment)

    with start("chat-dp1", leads=True) as own, start("chat-2", leads=True) as other:
        try:
            for process in (own, other):
                assert process.stdout is not None
                assert process.stdout.readline().strip().startswith("chat")
            assert held(run_dir, "chat-dp1") > 0
            assert asyncio.run(KvMemory(endpoint_path(run_dir, "chat")).give_back(own.pid)) == 0
            assert held(run_dir, "chat-dp1") == 0 < held(run_dir, "chat-2")
            (run_dir / "pools" / "chat-old.sock").touch()
            assert asyncio.run(KvMemory(endpoint_path(run_dir, "chat")).limit(Amount.parse("4MiB"), other.pid)) == 4 << 20
            with pytest.raises(BackendFailed, match="nobody of process"):
                asyncio.run(KvMemory(endpoint_path(run_dir, "chat")).give_back(os.getpid()))
        finally:
            own.kill()
            other.kill()


def held(run_dir: Path, instance: str) -> int:
    return ControlClient(endpoint_path(run_dir, instance)).status().held_bytes
