# SPDX-License-Identifier: Apache-2.0
"""vLLM with an elastic KV cache on a Ray cluster that is there already, behind Ray Serve.

    python examples/ray_serve.py chat=Qwen/Qwen3-8B coder=Qwen/Qwen2.5-Coder-7B-Instruct --gpus 0.5 -- --max-model-len 8192

Each model becomes an application of Ray Serve with vLLM's whole OpenAI API below its name. Two models that ask for half of a GPU each get
one together, and KVCacheD divides its memory. What follows `--` are vLLM's own arguments. The package has to be in the environment of
the cluster's workers, as vLLM has. `serve shutdown` ends it all.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

import ray
from fastapi import FastAPI
from ray import serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


def main() -> None:
    """Deploy the models, and print what the gateway's file needs to know of them."""
    asked = arguments()
    ray.init(address="auto", log_to_driver=False)
    serve.start(http_options={"host": asked.host, "port": asked.port}, proxy_location="EveryNode")
    targets = [serve.RunTarget(application(name, model, asked), name=name, route_prefix=f"/{name}") for name, model in asked.models]
    serve.run_many(targets)  # returns when all are ready: engines start side by side
    host = ray.util.get_node_ip_address() if asked.host == "0.0.0.0" else asked.host
    print("models:")
    for name, _ in asked.models:
        print(f"  {name}: {{engine: remote, address: http://{host}:{asked.port}/{name}}}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=name_and_model, metavar="NAME=MODEL", help="how clients call it, and what vLLM loads")
    parser.add_argument("--replicas", type=int, default=1, help="engines for each model, one at most on a node")
    parser.add_argument("--gpus", type=float, default=0, help="part of a GPU that an engine asks Ray for")
    parser.add_argument("--host", default="127.0.0.1", help="where each node listens; 0.0.0.0: on all of its addresses")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--not-elastic", action="store_true", help="without KVCacheD, to compare")
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    return parser.parse_args(given[:end], argparse.Namespace(options=given[end + 1 :]))


def name_and_model(text: str) -> tuple[str, str]:
    name, equals, model = text.partition("=")
    if not (name and equals and model):
        raise argparse.ArgumentTypeError(f"{text}: write NAME=MODEL")
    return name, model


def application(name: str, model: str, asked: argparse.Namespace) -> serve.Application:
    """All that KVCacheD needs is its variables in the replica's process."""
    command_line = ["--model", model, "--served-model-name", name, *asked.options]
    variables = {"ENABLE_KVCACHED": "false" if asked.not_elastic else "true", "KVCACHED_NAME": name}

    def app() -> FastAPI:  # called in the replica
        return openai_app(command_line)

    return serve.deployment(
        serve.ingress(app)(),
        name=name,
        num_replicas=asked.replicas,
        max_replicas_per_node=1,
        max_ongoing_requests=256,
        ray_actor_options={"num_gpus": asked.gpus, "runtime_env": {"env_vars": variables}},
    ).bind()


def openai_app(command_line: Sequence[str]) -> FastAPI:
    """An application that starts its engine, and then is vLLM's own; Ray Serve waits for it before it sends requests."""

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        make_arg_parser, build_async_engine_client, build_app, init_app_state = vllm_parts()
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        options = make_arg_parser(FlexibleArgumentParser()).parse_args(list(command_line))
        async with build_async_engine_client(options) as engine:
            tasks = await engine.get_supported_tasks()
            server = build_app(options, tasks, engine.model_config)
            await init_app_state(engine, server.state, options, tasks)
            app.mount("", server)
            yield

    return FastAPI(lifespan=life, openapi_url=None)


def vllm_parts() -> tuple[Any, ...]:
    """What vLLM's server is made of, which its releases keep in different modules."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.api_server import build_app, build_async_engine_client, init_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    return make_arg_parser, build_async_engine_client, build_app, init_app_state


if __name__ == "__main__":
    main()
