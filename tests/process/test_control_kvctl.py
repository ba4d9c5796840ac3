# SPDX-License-Identifier: Apache-2.0
"""`kvctl` against real pools in other processes, registered on a real card."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from control_pool import BUDGET_BYTES, Served
from typer.testing import CliRunner, Result

import kvcached
from kvcached.card import Card
from kvcached.cli.kvctl import app
from kvcached.runtime.control import ControlClient, endpoint_path
from kvcached.testing.stopping import stop_process
from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator


class Machine:
    """A run directory with pools in processes of their own."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.processes: dict[str, Served] = {}

    def start(self, *instances: str) -> None:
        for instance in instances:
            self.processes[instance] = Served(self.run_dir, instance)
        for instance in instances:
            self.processes[instance].wait_ready()

    def kvctl(self, *arguments: str, timeout: str = "10") -> Result:
        environment = {"COLUMNS": "80", "NO_COLOR": "1", "KVCACHED_RUN_DIR": str(self.run_dir), "KVCACHED_IPC_TIMEOUT": timeout}
        return CliRunner().invoke(app, list(arguments), env=environment)

    def json(self, *arguments: str) -> Any:
        result = self.kvctl(*arguments, "--json")
        assert result.stderr == ""
        return json.loads(result.stdout)

    def client(self, instance: str) -> ControlClient:
        return ControlClient(endpoint_path(self.run_dir, instance), 10)

    def close(self) -> None:
        for process in self.processes.values():
            process.close()


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Under a short path: a socket's path may have 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        made = Machine(Path(directory) / "run")
        yield made
        made.close()


class TestList:
    def test_each_pool_is_a_row_of_at_most_80_columns(self, machine: Machine) -> None:
        machine.start("chat", "a-pool-with-a-rather-long-name-012345678")
        result = machine.kvctl("list")
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        assert lines[0] == "card TEST-0 a card for tests"
        assert lines[1] == "budget 100 MiB, leased 36 MiB, free 64 MiB"
        assert lines[2].split() == ["POOL", "LEASE", "OWNED", "CACHED", "PARKED", "RETIRED", "OTHER", "LIMIT", "FLOOR"]
        assert ["chat", "18M", "4M", "6M", "8M", "0", "0", "64M", "0"] in [line.split() for line in lines]
        assert max(len(line) for line in lines) <= 80

    def test_json_has_every_number(self, machine: Machine) -> None:
        machine.start("chat")
        (card,) = machine.json("list")["cards"]
        assert (card["uuid"], card["budget_bytes"], card["leased_bytes"]) == ("TEST-0", BUDGET_BYTES, 18 * MIB)
        (pool,) = card["pools"]
        assert pool["pids"] == [machine.processes["chat"].pid]
        assert (pool["instance"], pool["name"], pool["state"]) == ("chat", "small-model", "live")
        assert (pool["mapped_bytes"], pool["parked_bytes"], pool["limit_bytes"]) == (18 * MIB, 8 * MIB, 64 * MIB)

    def test_a_dead_pool_is_shown_as_dead_and_its_bytes_are_free(self, machine: Machine) -> None:
        machine.start("chat", "code")
        machine.processes["chat"].kill()
        result = machine.kvctl("list")
        assert ["chat", "(dead)", "0", "0", "0", "0", "0", "0", "-", "0"] in [line.split() for line in result.stdout.splitlines()]
        assert "leased 18 MiB" in result.stdout
        (card,) = machine.json("list")["cards"]
        assert sum(pool["lease_bytes"] + pool["other_bytes"] for pool in card["pools"]) == card["leased_bytes"]

    def test_no_limit_is_shown_as_none(self, machine: Machine) -> None:
        machine.start("chat")
        lifted = machine.kvctl("limit", "chat", "none")
        assert (lifted.exit_code, lifted.stdout) == (0, "chat: limit applied: none in force\n")
        assert ["chat", "18M", "4M", "6M", "8M", "0", "0", "-", "0"] in [line.split() for line in machine.kvctl("list").stdout.splitlines()]
        answer = machine.json("limit", "chat", "none")
        assert (answer["holds"], answer["asked_bytes"], answer["in_force_bytes"]) == (True, None, None)
        assert machine.json("list")["cards"][0]["pools"][0]["limit_bytes"] is None
        assert machine.json("explain", "chat")["status"]["limit_bytes"] is None


class TestLimit:
    def test_an_idle_pool_obeys_down_and_up_again(self, machine: Machine) -> None:
        machine.start("chat")
        down = machine.kvctl("limit", "chat", "10MiB")
        assert (down.exit_code, down.stdout) == (0, "chat: limit applied: 10 MiB in force\n")
        assert machine.client("chat").status().mapped_bytes == 10 * MIB
        assert machine.json("list")["cards"][0]["leased_bytes"] == 10 * MIB
        up = machine.kvctl("limit", "chat", "90G")
        assert (up.exit_code, up.stdout) == (
            0,
            "chat: limit clamped: 64 MiB in force, less than the 90 GiB asked (the small pool says clamped)\n",
        )

    def test_what_requests_own_stays_and_the_exit_code_says_so(self, machine: Machine) -> None:
        machine.start("chat")
        result = machine.kvctl("limit", "chat", "1MiB")
        assert result.exit_code == 1
        assert result.stdout == "chat: limit deferred: 1 MiB in force, 3 MiB above it still held (the small pool says deferred)\n"
        answer = machine.json("limit", "chat", "2MiB")
        assert (answer["holds"], answer["overage_bytes"], answer["in_force_bytes"]) == (False, 2 * MIB, 2 * MIB)

    def test_shares_are_of_the_cards_budget(self, machine: Machine) -> None:
        machine.start("chat")
        assert machine.json("limit", "chat", "40%")["in_force_bytes"] == BUDGET_BYTES * 40 // 100
        assert machine.json("limit-percent", "chat", "20")["in_force_bytes"] == BUDGET_BYTES * 20 // 100
        assert machine.json("limit-percent", "chat", "12.5%")["in_force_bytes"] == BUDGET_BYTES // 8
        assert machine.json("floor", "chat", "10%")["in_force_bytes"] == BUDGET_BYTES // 10

    def test_a_late_revision_has_no_effect(self, machine: Machine) -> None:
        machine.start("chat")
        assert machine.kvctl("limit", "chat", "20MiB", "--revision", "7").exit_code == 0
        stale = machine.kvctl("limit", "chat", "30MiB", "--revision", "6")
        assert (stale.exit_code, "limit stale: 20 MiB in force" in stale.stdout) == (1, True)


class TestOtherCommands:
    def test_trim_and_evict_say_what_came_back(self, machine: Machine) -> None:
        machine.start("chat")
        part = machine.kvctl("trim", "chat", "3MiB")
        assert (part.exit_code, part.stdout) == (0, "chat: 3 MiB of 3 MiB given back\n")
        rest = machine.kvctl("trim", "chat")
        assert (rest.exit_code, rest.stdout) == (0, "chat: 5 MiB given back\n")
        too_much = machine.kvctl("evict", "chat", "1G")
        assert (too_much.exit_code, too_much.stdout) == (1, "chat: 6 MiB of 1 GiB given back\n")
        assert machine.json("trim", "chat") == {"pool": "chat", "wanted_bytes": None, "given_bytes": 0}
        assert machine.client("chat").status().mapped_bytes == 4 * MIB

    def test_weight_and_floor_reach_the_card(self, machine: Machine) -> None:
        machine.start("chat")
        assert machine.kvctl("weight", "chat", "2.5").stdout == "chat: weight 2.5\n"
        assert machine.kvctl("floor", "chat", "2MiB").stdout == "chat: floor applied: 2 MiB in force\n"
        pool = machine.json("list")["cards"][0]["pools"][0]
        assert (pool["weight"], pool["floor_bytes"]) == (2.5, 2 * MIB)

    def test_explain_names_a_reason_and_a_way_out_for_each_byte(self, machine: Machine) -> None:
        machine.start("chat")
        result = machine.kvctl("explain", "chat")
        assert result.exit_code == 0
        assert "18 MiB held of a lease of 18 MiB" in result.stdout
        assert "owned by running requests" in result.stdout
        assert max(len(line) for line in result.stdout.splitlines()) <= 80
        answer = machine.json("explain", "chat")
        assert sum(row["size_bytes"] for row in answer["rows"]) == answer["status"]["held_bytes"]

    def test_explain_names_the_pages_of_a_real_pool(self, machine: Machine) -> None:
        with (
            kvcached.open_card("host:0", run_dir=str(machine.run_dir), budget="64MiB", prealloc_enabled=False) as card,
            card.open_pool("real", block_bytes=65_536, blocks=512) as pool,
        ):
            (taken,) = pool.take(100)
            pool.give([(taken[0] + 1, 63), (taken[0] + 65, 35)])
            shown = machine.kvctl("explain", pool.instance).stdout
            answer = machine.json("explain", pool.instance)
        assert "on the same page: page 0 (1 owned of 32 blocks), page 2 (1 owned of 32 blocks)" in " ".join(shown.split())
        assert max(len(line) for line in shown.splitlines()) <= 80
        assert [row["detail"] for row in answer["rows"] if row["reason"].startswith("free blocks")] == [
            "page 0 (1 owned of 32 blocks), page 2 (1 owned of 32 blocks)"
        ]
        assert answer["other_bytes"] == 0

    def test_watch_prints_a_line_for_each_pool_and_look(self, machine: Machine) -> None:
        machine.start("chat", "code")
        lines = machine.kvctl("watch", "--count", "2", "--interval", "0.05").stdout.splitlines()
        assert len(lines) == 4
        assert all("lease=18M owned=4M cached=6M parked=8M" in line for line in lines)
        looks = [json.loads(line) for line in machine.kvctl("watch", "-c", "3", "-n", "0.05", "--json").stdout.splitlines()]
        assert [look["cards"][0]["leased_bytes"] for look in looks] == [36 * MIB] * 3

    def test_watch_redraws_on_a_terminal(self, machine: Machine) -> None:
        machine.start("chat")
        ours, theirs = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        command = [sys.executable, "-m", "kvcached.cli.kvctl", "--run-dir", str(machine.run_dir), "watch", "-c", "2", "-n", "0.05"]
        with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            shown = b""
            try:
                while chunk := os.read(ours, 65536):
                    shown += chunk
            except OSError:  # how a pseudo terminal says that the other end is closed
                pass
        os.close(ours)
        assert process.returncode == 0
        assert b"budget 100 MiB" in shown
        assert b"\x1b[2K" in shown

    def test_watch_ends_quietly_when_interrupted(self, machine: Machine) -> None:
        machine.start("chat")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "kvcached.cli.kvctl", "--run-dir", str(machine.run_dir), "watch", "-n", "30"]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background is started with it ignored
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert "chat" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert (process.wait(60), process.stderr.read()) == (0, "")


class TestWhatGoesWrong:
    def test_an_unknown_pool_is_answered_with_the_names_there_are(self, machine: Machine) -> None:
        machine.start("chat", "code")
        result = machine.kvctl("limit", "chta", "3G")
        assert (result.exit_code, result.stdout, result.stderr) == (3, "", "no pool named 'chta'; there are: chat, code\n")

    def test_a_pool_that_does_not_answer(self, machine: Machine) -> None:
        machine.start("chat")
        stop_process(machine.processes["chat"].pid)
        assert machine.kvctl("trim", "chat", timeout="0.3").exit_code == 4
        assert machine.kvctl("list").exit_code == 0
        machine.processes["chat"].signal(signal.SIGCONT)
        assert machine.kvctl("trim", "chat").exit_code == 0

    def test_a_dead_pool_is_unreachable(self, machine: Machine) -> None:
        machine.start("chat")
        machine.processes["chat"].kill()
        result = machine.kvctl("trim", "chat")
        assert (result.exit_code, "kvctl delete chat" in result.stderr) == (4, True)

    def test_a_refusal_of_the_pool(self, machine: Machine) -> None:
        machine.start("chat")
        result = machine.kvctl("floor", "chat", "1G")
        assert (result.exit_code, "Misuse: a floor of" in result.stderr) == (1, True)
        answer = machine.kvctl("floor", "chat", "1G", "--json")
        error = json.loads(answer.stdout)["error"]
        assert (answer.exit_code, error["type"], error["exit_code"], answer.stderr) == (1, "PeerRefused", 1, "")


class TestDelete:
    def test_a_live_pool_is_refused(self, machine: Machine) -> None:
        machine.start("chat")
        result = machine.kvctl("delete", "chat")
        assert (result.exit_code, f"pid {machine.processes['chat'].pid}" in result.stderr) == (1, True)
        assert machine.client("chat").ping().instance == "chat"

    def test_a_dead_pool_leaves_nothing(self, machine: Machine) -> None:
        machine.start("chat", "code")
        machine.processes["chat"].kill()
        assert endpoint_path(machine.run_dir, "chat").exists()
        result = machine.kvctl("delete", "chat")
        assert (result.exit_code, result.stdout) == (0, "chat: deleted\n")
        assert not endpoint_path(machine.run_dir, "chat").exists()
        assert [entry.instance for card in Card.list_cards(machine.run_dir) for entry in card.entries] == ["code"]
        assert machine.kvctl("delete", "chat").exit_code == 3
        assert machine.client("code").ping().instance == "code"

    def test_a_socket_without_any_card_is_cleared_up_too(self, machine: Machine) -> None:
        machine.start("chat")
        machine.processes["chat"].kill()
        for path in machine.run_dir.glob("*.card"):
            path.unlink()
        path = endpoint_path(machine.run_dir, "chat")
        assert machine.json("delete", "chat")["socket"] is True
        assert not path.exists()

    def test_force_ends_the_process_first(self, machine: Machine) -> None:
        machine.start("chat", "code")
        assert machine.json("delete", "chat", "--force")["deleted"] is True
        assert machine.processes["chat"].wait() == -signal.SIGTERM
        assert [pool["instance"] for pool in machine.json("list")["cards"][0]["pools"]] == ["code"]

    def test_force_waits_for_the_last_thing_that_a_process_has_open(self, machine: Machine) -> None:
        path = endpoint_path(machine.run_dir, "chat")
        program = (
            "import signal, socket, sys, time; from pathlib import Path; from kvcached.card import Card, CardIdentity, EntrySpec, Kind\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
            "card = Card.open(Path(sys.argv[1]), CardIdentity('TEST-0', 'a card', 1000), budget_bytes=0, settle_s=0)\n"
            "Path(sys.argv[2]).parent.mkdir(mode=0o700)\n"
            "listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[2]); listener.listen()\n"
            "entry = card.register(EntrySpec(Kind.KV, 'chat', endpoint=sys.argv[2])); print(flush=True)\n"
            "signal.sigwait({signal.SIGTERM}); entry.close(); time.sleep(0.5)\n"
        )
        command = [sys.executable, "-W", "ignore", "-c", program, str(machine.run_dir), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert machine.json("delete", "chat", "--force")["socket"] is True
        assert not path.exists()

    def test_force_gives_up_on_a_process_that_does_not_end(self, machine: Machine) -> None:
        machine.start("chat")
        stop_process(machine.processes["chat"].pid)
        result = machine.kvctl("delete", "chat", "--force", timeout="0.3")
        assert (result.exit_code, "still alive" in result.stderr) == (4, True)
