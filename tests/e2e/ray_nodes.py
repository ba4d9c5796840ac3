# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine, until standard input ends. A program of its own, for an environment that has Ray.

    python ray_nodes.py

The first line that it prints is the cluster's address. For each line that it reads it prints, as JSON, how many replicas of Ray Serve
are on each node.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster

NODE = {"num_cpus": 8, "num_gpus": 1, "object_store_memory": 100 << 20}  # the GPU is one in name: engines of these tests run on the CPU


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    cluster.add_node(**NODE)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        print(cluster.address, flush=True)
        for _ in sys.stdin:
            print(json.dumps(replicas()), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


def replicas() -> dict[str, int]:
    ours = [actor for actor in actors().values() if "ServeReplica" in actor["ActorClassName"] and actor["State"] == "ALIVE"]
    return Counter(actor["Address"]["NodeID"] for actor in ours)


if __name__ == "__main__":
    main()
