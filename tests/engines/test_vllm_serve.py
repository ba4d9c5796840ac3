# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`, unchanged command line, in its usual processes; how it ends; and starts that must be refused."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from harness.cases import load_prompts
from harness.engines import MODELS, PYTHON, environment
from harness.matrix import NEWEST, STOCK
from harness.server import Server
from prometheus_client.parser import text_string_to_metric_families

from kvcached.card.card import Card
from kvcached.runtime.control import ControlClient
from kvcached.runtime.endpoint import endpoint_path
from kvcached.testing.models import ensure_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from prometheus_client.samples import Sample

    from kvcached.runtime.control import PoolStatus

WAIT_S = 120.0
POOL = "pool-of-tiny"  # the model is served as `tiny`


def wait_for(condition: Callable[[], Any]) -> Any:
    """The condition's value once it holds, else its last value."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def leased_bytes(run_dir: Path) -> int:
    return sum(card.leased_bytes for card in Card.list_cards(run_dir))


@pytest.fixture(scope="module", params=NEWEST)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    ensure_model("llama", MODELS / "llama")
    settings = {"KVCACHED_IPC_NAME": POOL, "KVCACHED_HOST_GRANULARITY": "256KiB", "KVCACHED_VIRTUAL": "128MiB", "KVCACHED_LIMIT": "64MiB"}
    server = Server(request.param, tmp_path_factory.mktemp("s"), **settings)
    try:
        yield server.wait_until_ready()
    finally:
        if server.process.poll() is None:
            server.kill()


def control(server: Server) -> ControlClient:
    return ControlClient(endpoint_path(server.run_dir, POOL))


def owned_blocks(status: PoolStatus) -> int:
    return status.owned_bytes // status.block_bytes


def test_answers_are_those_of_the_unhooked_engine_and_memory_comes_and_goes(server: Server, batches: Callable[..., Any]) -> None:
    expected = batches(NEWEST[0], STOCK, False)["cached"]["tokens"]
    prompts = [(index, prompt) for index, prompt in enumerate(load_prompts()) if len(prompt) < 1_900][:24]
    for index, prompt in prompts:
        status, answer = server.complete(prompt)
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == expected[index]
    assert "elastic: on, worker ElasticCPUWorker, scheduler ElasticScheduler" in server.log
    status = wait_for(lambda: (status := control(server).status()).parked_bytes == 0 and status)
    assert status.cached_bytes > 0
    assert owned_blocks(status) == 1
    assert status.lease_bytes < status.limit_bytes


def scrape(server: Server) -> dict[str, Sample]:
    """What `kvcached metrics` prints of the server's pool, by name without `kvcached_`."""
    command = [sys.executable, "-m", "kvcached.cli.main", "metrics", "--once", "--timeout", "20", "--run-dir", str(server.run_dir)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name.removeprefix("kvcached_"): sample for sample in samples if sample.labels.get("pool") == POOL}


def test_a_scrape_while_it_serves_finds_its_pool_and_its_model(server: Server) -> None:
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(server.complete, "Tell me everything.", max_tokens=500)
        assert wait_for(lambda: owned_blocks(control(server).status()) > 1)
        found = scrape(server)
    assert answer.result()[0] == 200
    assert found["pool_info"].labels["model"] == "tiny"
    assert (found["pool_up"].value, found["pool_answers"].value) == (1, 1)
    assert found["pool_mapped_bytes"].value > 0
    assert found["pool_map_seconds_count"].value > 0


def test_an_idle_server_obeys_the_control_endpoint(server: Server) -> None:
    client = control(server)
    page_bytes = client.status().page_bytes
    client.limit(2 * page_bytes)
    assert wait_for(lambda: client.status().lease_bytes <= 2 * page_bytes)
    status, answer = server.complete("Hello!")
    assert (status, len(answer["choices"][0]["token_ids"])) == (200, 24)
    client.limit(64 * 1024 * 1024)


def test_a_prompt_that_can_never_fit_is_an_error_and_the_server_lives(server: Server) -> None:
    client = control(server)
    client.limit(client.status().page_bytes)
    try:
        # The front end asks the pool once a second at most; until then the scheduler's own error comes.
        status, answer = wait_for(lambda: (reply := server.complete("word " * 300))[0] == 400 and reply) or server.complete("word " * 300)
        assert status == 400, answer
        assert "the prompt has 1500 tokens and the KV cache of this engine can hold 480" in answer["error"]["message"]
    finally:
        client.limit(64 * 1024 * 1024)
    assert server.complete("Hello!")[0] == 200


def test_a_client_that_hangs_up_leaves_nothing_behind(server: Server) -> None:
    server.abandon("Tell me everything.", max_tokens=1_900)
    assert wait_for(lambda: owned_blocks(control(server).status()) == 1)


def test_sigterm_leaves_no_lease_and_no_process(server: Server) -> None:
    """Last in this file's order on this server. vLLM itself sometimes waits for ever; then it is killed, and nothing may be left either."""
    server.stop(40.0)
    assert wait_for(lambda: not server.processes())
    assert leased_bytes(server.run_dir) == 0


@pytest.mark.parametrize("version", NEWEST)
def test_kill_9_while_it_works_frees_all_that_was_leased(version: str, tmp_path: Path) -> None:
    server = Server(version, tmp_path, KVCACHED_IPC_NAME="victim", KVCACHED_HOST_GRANULARITY="256KiB", KVCACHED_VIRTUAL="128MiB")
    try:
        server.wait_until_ready()
        server.abandon("Tell me everything.", max_tokens=1_900)
        assert leased_bytes(server.run_dir) > 0
    finally:
        server.kill()
    assert wait_for(lambda: not server.processes())
    assert leased_bytes(server.run_dir) == 0


FORGOTTEN = """
import gc, time
from vllm import LLM, SamplingParams
from kvcached.card.card import Card
from kvcached.config import load_settings
def leased():
    return sum(card.leased_bytes for card in Card.list_cards(load_settings().run_dir))
llm = LLM(model={model!r}, enforce_eager=True, max_model_len=256, dtype='float32', block_size=32)
llm.generate(["Hello!"], SamplingParams(max_tokens=4), use_tqdm=False)
before = leased()
del llm
deadline = time.monotonic() + 120
while leased() and time.monotonic() < deadline:
    gc.collect()
    time.sleep(0.1)
print("leases", before, leased())
"""


@pytest.mark.parametrize("version", NEWEST)
def test_an_engine_that_its_program_drops_leaves_nothing_behind(version: str, tmp_path: Path) -> None:
    ensure_model("llama", MODELS / "llama")
    variables = {"ENABLE_KVCACHED": "true", "KVCACHED_RUN_DIR": str(tmp_path / "run"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    program = FORGOTTEN.format(model=str(MODELS / "llama"))
    done = subprocess.run(
        [str(PYTHON), "-c", program], env=environment(version, **variables), cwd=tmp_path, capture_output=True, text=True, timeout=1_200
    )
    word, before, after = done.stdout.splitlines()[-1].split() if done.stdout else ("", "0", done.stderr[-3000:])
    assert (word, after) == ("leases", "0"), done.stderr[-3000:]
    assert int(before) > 0


START = """import vllm
{change}
from vllm import LLM
LLM(model={model!r}, enforce_eager=True, max_model_len=256, dtype='float32', block_size=32)
"""
REFUSED = {
    "another platform": ("", {"VLLM_TARGET_DEVICE": "cpu"}, "vLLM chose the platform CpuPlatform"),
    "another release": ("vllm.__version__ = '0.99.0'", {}, "vLLM 0.99.0 is not supported"),
    "no room for one request": ("", {"KVCACHED_VIRTUAL": "512KiB"}, "lower --max-model-len; gpu_memory_utilization does not size"),
    "a bad setting": ("", {"KVCACHED_LIMIT": "lots"}, "KVCACHED_LIMIT=lots"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("version", NEWEST)
def test_an_engine_that_cannot_be_elastic_as_asked_does_not_start(version: str, case: str, tmp_path: Path) -> None:
    change, settings, says = REFUSED[case]
    variables = {"ENABLE_KVCACHED": "true", "KVCACHED_RUN_DIR": str(tmp_path / "run"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    program = START.format(change=change, model=str(MODELS / "llama"))
    done = subprocess.run(
        [str(PYTHON), "-c", program], env=environment(version, **(variables | settings)), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert says in done.stderr
