# SPDX-License-Identifier: Apache-2.0
"""`kvcached metrics` on real pools in other processes: what they did is counted; who is stopped or dead costs nobody anything."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from real_pool import PoolProcess, eventually

from kvcached.cli.metrics.exporter import Exporter
from kvcached.cli.metrics.inquiry import Inquiry
from kvcached.runtime.control import ControlClient, endpoint_path
from kvcached.testing.stopping import stop_process
from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEADLINE_S = 60.0


@pytest.fixture
def code(run_dir: Path) -> Iterator[PoolProcess]:
    pool = PoolProcess(run_dir, "code")
    yield pool
    pool.kill()


class Text:
    """A scrape, parsed."""

    def __init__(self, text: str) -> None:
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def __getitem__(self, name: str) -> float:
        """The sum of `kvcached_NAME` over whatever `{LABEL=VALUE}` leaves."""
        values = self.all(name)
        assert values, f"there is no {name}"
        return sum(values)

    def all(self, name: str) -> list[float]:
        name, _, rest = name.partition("{")
        labels = dict(re.findall(r"(\w+)=([^,}]*)", rest)).items()
        return [sample.value for sample in self.samples if sample.name == f"kvcached_{name}" and labels <= sample.labels.items()]


def scrape(run_dir: Path, timeout_s: float = 30.0) -> Text:
    exporter = Exporter(run_dir, timeout_s)
    try:
        return Text(exporter.text())
    finally:
        exporter.close()


class TestWhatPoolsDo:
    def test_bytes_are_those_of_the_record_and_the_pool(self, run_dir: Path, chat: PoolProcess) -> None:
        chat.take(12)
        eventually(lambda: scrape(run_dir)["pool_owned_bytes{pool=chat}"] == 12 * MIB)
        text, status = scrape(run_dir), ControlClient(endpoint_path(run_dir, "chat"), 30).status()
        for name in ("lease", "mapped", "cached", "parked", "retired", "limit", "floor"):
            assert text[f"pool_{name}_bytes{{pool=chat,rank=0}}"] == getattr(status, f"{name}_bytes")
        assert text["card_budget_bytes"] == 64 * MIB
        assert text["card_leased_bytes"] == status.lease_bytes
        assert text["card_leased_bytes"] + text["card_free_bytes"] == text["card_budget_bytes"]
        assert text["pool_page_bytes"] == status.page_bytes
        assert text[f"pool_info{{pool=chat,model=model-of-chat,pid={chat.pid}}}"] == 1

    def test_maps_unmaps_leases_and_waits_are_counted(self, run_dir: Path, chat: PoolProcess) -> None:
        before = scrape(run_dir)
        chat.take(4)
        assert scrape(run_dir)["pool_schedule_wait_seconds_count"] > before["pool_schedule_wait_seconds_count"]
        after = scrape(run_dir)
        for name in ("map", "lease_wait"):
            assert after[f"pool_{name}_seconds_count{{pool=chat,rank=0}}"] > before[f"pool_{name}_seconds_count"]
            assert after[f"pool_{name}_seconds_sum"] > before[f"pool_{name}_seconds_sum"]
        unmaps = after["pool_unmap_seconds_count"]
        chat.ask("give")
        ControlClient(endpoint_path(run_dir, "chat"), 30).trim()
        assert scrape(run_dir)["pool_unmap_seconds_count"] > unmaps

    def test_a_take_beyond_the_limit_is_a_miss(self, run_dir: Path, chat: PoolProcess) -> None:
        assert scrape(run_dir)["pool_misses_total"] == 0
        assert chat.ask("take", 100)["error"] == "PoolExhausted"
        assert scrape(run_dir)["pool_misses_total{pool=chat}"] == 1

    def test_cached_blocks_go_by_reason(self, run_dir: Path, chat: PoolProcess) -> None:
        chat.take(12)
        chat.ask("cache")
        client = ControlClient(endpoint_path(run_dir, "chat"), 30)
        assert client.evict(4 * MIB).given_bytes == 4 * MIB
        assert scrape(run_dir)["pool_evicted_blocks_total{reason=asked}"] == 4
        client.limit(4 * MIB)
        eventually(lambda: scrape(run_dir)["pool_evicted_blocks_total{reason=limit}"] == 4)
        chat.take(4)  # of what is cached
        text = scrape(run_dir)
        assert text["pool_evicted_blocks_total{reason=need}"] == 4
        assert text["pool_evicted_blocks_total"] == 12

    def test_what_one_gives_the_other_takes(self, run_dir: Path, chat: PoolProcess, code: PoolProcess) -> None:
        chat.take(48)
        chat.ask("cache")
        assert scrape(run_dir)["pool_presses_total"] == 0
        code.take(40)
        text = scrape(run_dir)
        assert text["pool_presses_total{pool=code}"] >= 1
        assert text["pool_refusals_total{pool=code}"] >= 1
        assert text["pool_given_bytes_total{pool=chat}"] >= 24 * MIB
        # An answer that comes after the asker's deadline was given, and not taken.
        assert text["pool_taken_bytes_total{pool=code}"] <= text["pool_given_bytes_total{pool=chat}"]
        assert text["pool_evicted_blocks_total{pool=chat,reason=pressure}"] >= 24
        assert text["pool_given_bytes_total{pool=code}"] == 0


class TestWhoDoesNotAnswer:
    def test_one_stopped_one_killed_and_one_well(self, run_dir: Path, chat: PoolProcess, code: PoolProcess) -> None:
        mail = PoolProcess(run_dir, "mail")
        for pool in (chat, code, mail):
            pool.take(6)
        eventually(lambda: scrape(run_dir)["pool_owned_bytes"] == 18 * MIB)
        mail.kill()  # not before: a lease may clear up after the dead
        stop_process(code.pid)
        text = scrape(run_dir, 5.0)
        for name, up, answers in (("chat", 1, 1), ("code", 1, 0), ("mail", 0, 0)):
            assert text[f"pool_up{{pool={name}}}"] == up, name
            assert text[f"pool_answers{{pool={name}}}"] == answers, name
        assert text["pool_owned_bytes{pool=code}"] == 6 * MIB  # the record needs no answer
        assert text["pool_misses_total{pool=chat}"] >= 0
        assert not text.all("pool_misses_total{pool=code}")
        assert not text.all("pool_lease_bytes{pool=mail}")
        os.kill(code.pid, signal.SIGCONT)
        assert scrape(run_dir)["pool_answers{pool=code}"] == 1

    def test_a_dead_pool_is_down_and_holds_nothing(self, run_dir: Path, chat: PoolProcess) -> None:
        chat.take(4)
        chat.kill()
        text = scrape(run_dir)
        assert (text["pool_up{pool=chat}"], text["pool_answers{pool=chat}"]) == (0, 0)
        assert not text.all("pool_lease_bytes")
        assert text["card_leased_bytes"] == 0

    def test_the_silent_are_not_waited_for_by_the_others(self, run_dir: Path, chat: PoolProcess, code: PoolProcess) -> None:
        stop_process(chat.pid)
        inquiry = Inquiry(5.0)
        silent = {f"chat-{number}": endpoint_path(run_dir, "chat") for number in range(100)}
        others = {"gone": run_dir / "nobody.sock", "code": endpoint_path(run_dir, "code")}
        assert set(inquiry.ask({**silent, **others})) == {"code"}
        inquiry.close()
        os.kill(chat.pid, signal.SIGCONT)

    @pytest.mark.timeout(60)
    def test_the_silent_do_not_add_up(self, run_dir: Path, chat: PoolProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        """So many that one after another they would take longer than this test may, also where there are more than threads."""
        monkeypatch.setattr("kvcached.cli.metrics.inquiry._AT_ONCE", 1)
        stop_process(chat.pid)
        inquiry = Inquiry(1.0)
        assert inquiry.ask({f"chat-{number}": endpoint_path(run_dir, "chat") for number in range(100)}) == {}
        inquiry.close()
        os.kill(chat.pid, signal.SIGCONT)

    def test_an_engine_inside_a_step_is_counted(self, run_dir: Path, chat: PoolProcess) -> None:
        """It holds the pool's lock, for which everything else that can be asked waits."""
        chat.ask("hold")
        assert scrape(run_dir)["pool_answers{pool=chat}"] == 1


class TestCommand:
    def command(self, run_dir: Path, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "kvcached.cli.main", "metrics", "--run-dir", str(run_dir), *arguments]

    def test_once(self, run_dir: Path, chat: PoolProcess) -> None:
        done = subprocess.run(
            self.command(run_dir, "--once", "--timeout", "30"), capture_output=True, text=True, timeout=DEADLINE_S, check=True
        )
        assert Text(done.stdout)["pool_answers{pool=chat}"] == 1
        assert done.stderr == ""

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_it_answers_scrapes_and_ends_when_told(self, run_dir: Path, chat: PoolProcess, number: int) -> None:
        with subprocess.Popen(
            self.command(run_dir, "--listen", "127.0.0.1:0", "--timeout", "30"), stderr=subprocess.PIPE, text=True
        ) as served:
            assert served.stderr is not None
            address = re.search(r"http://127\.0\.0\.1:\d+/metrics", served.stderr.readline())
            assert address is not None
            for taken in (2, 4):
                chat.take(2)
                eventually(lambda taken=taken: self.fetch(address[0])["pool_owned_bytes"] == taken * MIB)
            served.send_signal(number)
            assert served.wait(DEADLINE_S) == 0

    @staticmethod
    def fetch(address: str) -> Text:
        with urllib.request.urlopen(address, timeout=DEADLINE_S) as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=")
            return Text(response.read().decode())

    def test_an_address_that_is_taken(self, run_dir: Path) -> None:
        with subprocess.Popen(self.command(run_dir, "--listen", "127.0.0.1:0"), stderr=subprocess.PIPE, text=True) as served:
            assert served.stderr is not None
            port = re.search(r":(\d+)/", served.stderr.readline())
            assert port is not None
            second = subprocess.run(
                self.command(run_dir, "--listen", f"127.0.0.1:{port[1]}"), capture_output=True, text=True, timeout=DEADLINE_S, check=False
            )
            served.terminate()
        assert second.returncode == 4
        assert "Address already in use" in second.stderr
