# SPDX-License-Identifier: Apache-2.0
"""A process with one pool on a host card; obeys one JSON line at a time, so that tests can stop, kill and fork it."""

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading

from churn import churn

import kvcached.runtime.api  # all of it before a change of user: the interpreter may lie where the other user cannot read
from kvcached.errors import KVCachedError, Misuse
from kvcached.vmm.native import _load_library

MIB = 1 << 20


class Child:
    def __init__(self, options):
        self.card = kvcached.open_card("host:0", **options["card"])
        self.block_bytes = options.get("block_bytes", MIB)
        self.pool = self.card.open_pool(options["name"], block_bytes=self.block_bytes, blocks=options["blocks"], **options.get("pool", {}))
        self.ranges = []

    def take(self, blocks):
        self.ranges += self.pool.take(blocks)
        return self.stats()

    def give(self, keep_ranges=0):
        gone, self.ranges = self.ranges[keep_ranges:], self.ranges[:keep_ranges]
        self.pool.give(gone)
        return self.stats()

    def cache(self):
        """Give everything as cached prefixes."""
        ids = [block for first, count in self.ranges for block in range(first, first + count)]
        self.ranges = []
        self.pool._pool.give_cached(ids, -1, 1)
        return self.stats()

    def hold(self):
        """From here on as if inside one long scheduling step."""
        self.pool._pool.lock.acquire()
        return {}

    def stats(self):
        return self.pool.stats().model_dump()

    def churn(self, rounds, seed, until=()):
        return churn(self.pool, self.block_bytes, rounds, seed, until)

    def write_with_a_wrong_stride(self):
        """Fill the blocks that are held, as a kernel does that takes them for dense."""
        for first, count in self.ranges:
            for block in range(first, first + count):
                ctypes.memset(self.pool.base_address + block * self.block_bytes, 0xAB, self.block_bytes)
        self.pool.advance(1)

    def fork_and_use(self):
        """A forked child must be told that the pool is not its own, whatever lock another thread had; its end must not touch the
        parent's. Exit status of the child: the calls that were refused."""
        pool = self.pool._owner.pool
        calls = (pool.shrink, 1), (pool.take, 1), (self.pool.stats,), (self.pool.trim,), (pool._port.close,), (self.pool.close,)
        pid = self._fork_while_another_thread_holds(pool.lock, pool._port._held.lock)
        if pid == 0:
            signal.alarm(10)
            os._exit(sum(_is_refused(*call) for call in calls))
        return {"child_exit": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "calls": len(calls), **self.stats()}

    def _fork_while_another_thread_holds(self, *locks):
        held, forked = threading.Event(), threading.Event()

        def hold():
            with contextlib.ExitStack() as stack:
                for lock in locks:
                    stack.enter_context(lock)
                held.set()
                forked.wait()

        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        pid = os.fork()
        if pid:
            forked.set()
        return pid


def _is_refused(call, *arguments):
    try:
        call(*arguments)
    except Misuse:
        return True
    return False


def main():
    options = json.loads(sys.argv[1])
    if (uid := options.get("uid")) is not None:
        _load_library()
        os.setgroups([])
        os.setresgid(*[options["card"]["run_group"]] * 3)
        os.setresuid(uid, uid, uid)
    child = Child(options)
    print(json.dumps({"pid": os.getpid(), "instance": child.pool.instance}), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        if name == "close":
            child.card.close()
            print("{}", flush=True)
            return
        try:
            answer = getattr(child, name)(*arguments)
        except KVCachedError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
