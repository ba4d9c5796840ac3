# SPDX-License-Identifier: Apache-2.0
"""The unhooked CPU worker for pipelines: it makes the buffers between stages, which vLLM leaves out where the size of the cache is set."""

from vllm.v1.worker.cpu_worker import CPUWorker


class ProfiledWorker(CPUWorker):
    def determine_available_memory(self) -> int:
        self.model_runner.profile_run()
        available_bytes: int = super().determine_available_memory()
        return available_bytes
