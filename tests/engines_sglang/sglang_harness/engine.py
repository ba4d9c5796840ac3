# SPDX-License-Identifier: Apache-2.0
"""A real SGLang scheduler in this process, running its own event loop; requests are handed to it where it looks for new ones."""

from __future__ import annotations

import importlib
import re
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "load_format": "auto",
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.2,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "disable_cuda_graph": True,
    "context_length": 1024,
    "chunked_prefill_size": 128,
    "page_size": 16,
    "random_seed": 1,
}


IDLE_TURNS = 8
END = "end"


class Finished(BaseException):
    """Leaves the event loop. No error, so nobody may take it for one."""


class Rank(NamedTuple):
    """One of several schedulers of an engine, each in a process of its own. They share `ports`; see `ports_of`."""

    number: int
    ports: Any


ALONE = Rank(0, None)


def import_engine() -> tuple[int, ...]:
    """Load what a scheduler process loads, before any plugin runs. Returns the release."""
    import sglang
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry
    import sglang.srt.server_args

    return tuple(int(part) for part in re.findall(r"\d+", sglang.__version__)[:3])


def server_args(model: str, arguments: dict[str, Any]) -> Any:
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path=model, **{**ARGUMENTS, **arguments})
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    return args


def ports_of(args: Any) -> Any:
    from sglang.srt.server_args import PortArgs

    return PortArgs.init_new(args)


class Engine:
    """Make one in a process; of several ranks, every one makes its own at the same time."""

    def __init__(self, release: tuple[int, ...], model: str, rank: Rank = ALONE, **arguments: Any) -> None:
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.plugins import load_plugins

        load_plugins()
        args = server_args(model, arguments)
        self.release = release
        self.has_own_requests = arguments.get("enable_dp_attention", False)
        self.rank = rank
        self.scheduler = Scheduler(args, rank.ports or ports_of(args), *_publish(args, release, rank))
        self.requests: dict[str, Any] = {}
        self.step = self.step_in_run = 0
        self._inbox: list[Any] = []
        self._idle_turns = 0
        self._told: dict[str, str] = {}
        self._on_step: Callable[[Engine], None] = lambda engine: None
        self._take_over_input()

    def _take_over_input(self) -> None:
        holder = type(getattr(self.scheduler, "request_receiver", self.scheduler))
        holder.recv_requests = lambda _, *args, **kwargs: self._receive(*args, **kwargs)
        enqueue = type(self.scheduler)._add_request_to_queue

        def note(scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
            self.requests[req.rid] = req
            return enqueue(scheduler, req, *args, **kwargs)

        type(self.scheduler)._add_request_to_queue = note
        self._note_aborts()

    def _receive(self, *_: Any, local_reqs: Sequence[Any] = (), **__: Any) -> list[Any]:
        """What the event loop calls at the start of every turn."""
        self.step += 1
        self.step_in_run += 1
        self._on_step(self)
        arrived, self._inbox = [*self._inbox, *local_reqs], []
        idle = not arrived and bool(self.requests) and self.scheduler.is_fully_idle()
        self._idle_turns = self._idle_turns + 1 if idle else 0
        arrived = self._share(None if self._idle_turns > IDLE_TURNS else arrived)
        if arrived is None:
            raise Finished
        return arrived

    def _share(self, arrived: list[Any] | None) -> list[Any] | None:
        """The first rank tells the others, as the stock functions do: a stage of a pipeline hears it from the one before, whose loop sends
        it on. What ends the loop is sent here: the loop is left before it can."""
        import torch

        tensor, stages = self.scheduler.tp_group, self.scheduler.pp_group
        if self.has_own_requests:
            told = [None] * tensor.world_size
            torch.distributed.all_gather_object(told, arrived is None, group=tensor.cpu_group)
            return None if all(told) else arrived or []
        if not stages.is_first_rank:
            arrived = self.scheduler._pp_recv_pyobj_from_prev_stage()
            arrived = None if arrived == [END] else arrived
        elif tensor.world_size > 1:
            told = [arrived]
            torch.distributed.broadcast_object_list(told, src=tensor.ranks[0], group=tensor.cpu_group)
            arrived = told[0]
        if arrived is None and not stages.is_last_rank:
            self.scheduler._pp_send_pyobj_to_next_stage([END])
        return arrived

    def send(self, name: str, tokens: Sequence[int], new_tokens: int, *, may_end: bool = False) -> None:
        """A request that the loop finds at its next turn. `may_end`: as far as the engine knows, it may end earlier."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=not may_end)
        sampling.normalize(None)
        takes_array = "array" in str(TokenizedGenerateReqInput.__annotations__["input_ids"])
        ids = array("q", tokens) if takes_array else list(tokens)
        self.put(
            TokenizedGenerateReqInput(
                rid=name,
                input_text="",
                input_ids=ids,
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=sampling,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
            )
        )

    def put(self, message: Any) -> None:
        self._inbox.append(message)

    def run(self, on_step: Callable[[Engine], None] | None = None) -> dict[str, list[int]]:
        """Run the scheduler's own loop until nothing is left to do. Returns their new tokens."""
        self._on_step = on_step or (lambda engine: None)
        self.requests.clear()
        self.step_in_run = 0
        try:
            self.scheduler.run_event_loop()
        except Finished:
            pass
        return {name: list(req.output_ids) for name, req in sorted(self.requests.items())}

    def _note_aborts(self) -> None:
        """What is told to clients whose requests end outside the output stream."""
        from sglang.srt.managers.io_struct import AbortReq

        sender = type(getattr(self.scheduler, "ipc_channels", self.scheduler).send_to_tokenizer)
        send = sender.send_output

        def note(channel: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(output, AbortReq):
                self._told[output.rid] = str(output.finished_reason)
            return send(channel, output, *args, **kwargs)

        sender.send_output = note

    def reasons(self) -> dict[str, str]:
        """Why each request ended."""
        ended = {name: str(req.finished_reason.to_json()) for name, req in self.requests.items() if req.finished_reason}
        return ended | self._told


def _publish(args: Any, release: tuple[int, ...], rank: Rank) -> tuple[Any, ...]:
    """Make the arguments known to the process as a scheduler's. Returns what its constructor takes besides."""
    context = importlib.import_module("sglang.srt.runtime_context") if release >= (0, 5, 14) else None
    if hasattr(context, "SpawnRanks"):
        context.publish(args, role="scheduler", ranks=context.SpawnRanks(world_rank=rank.number, dp_rank=None, gpu_id=0))
        return ()
    if context is not None:
        context.publish(args, role="scheduler")
    stage, number = divmod(rank.number, args.tp_size)
    return (0, number, 0, stage, 0, 0, None)
