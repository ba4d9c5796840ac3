# SPDX-License-Identifier: Apache-2.0
"""CPU workers that tests put under an engine, elastic or not."""

from pathlib import Path
from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.v1.worker.cpu_worker import CPUWorker


class ProfiledWorker(CPUWorker):
    """For pipelines: it makes the buffers between stages, which vLLM leaves out where the size of the cache is set."""

    def determine_available_memory(self) -> int:
        self.model_runner.profile_run()
        available_bytes: int = super().determine_available_memory()
        return available_bytes


class NotingWorker(CPUWorker):
    """For engine cores whose experts work together. It notes each step without requests: `dummies-N`, in the folder in which the server
    runs, has a byte for each of core N. It brings what vLLM's communicator leaves out on a CPU: rows of unequal number."""

    def init_device(self) -> None:
        CpuCommunicator.all_gatherv = all_gatherv
        CpuCommunicator.reduce_scatterv = reduce_scatterv
        super().init_device()

    def execute_dummy_batch(self) -> Any:
        done = super().execute_dummy_batch()
        with Path(f"dummies-{self.parallel_config.data_parallel_index}").open("ab") as notes:
            notes.write(b".")
        return done


def all_gatherv(self: CpuCommunicator, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The rows of all ranks, one after another; of each tensor where there are several."""
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    rows = sizes or [len(input_)] * self.world_size
    gathered = [input_.new_empty((count, *input_.shape[1:])) for count in rows]
    for rank, part in enumerate(gathered):
        if rank == self.rank_in_group:
            part.copy_(input_)
        torch.distributed.broadcast(part, src=self.ranks[rank], group=self.device_group)
    return torch.cat(gathered)


def reduce_scatterv(self: CpuCommunicator, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """This rank's rows of the sum over all ranks."""
    total = input_.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    rows = sizes or [len(total) // self.world_size] * self.world_size
    return total.split(rows)[self.rank_in_group].contiguous()
