# SPDX-License-Identifier: Apache-2.0
"""`kvcached metrics`, as far as it needs no prometheus-client."""

from __future__ import annotations

import importlib.util
from pathlib import Path  # noqa: TC003  # typer looks at the annotations
from typing import Annotated

import typer

from kvcached.cli.output import ExitCode, reporting, warn
from kvcached.cli.serving import parse_address
from kvcached.config import load_settings

_MISSING = "kvcached metrics needs prometheus-client: pip install 'kvcached-elastic[metrics]'"


def metrics(
    listen: Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Where scrapes are answered.")] = "127.0.0.1:9461",
    once: Annotated[bool, typer.Option("--once", help="Print the text once, and end.")] = False,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory; default: the setting KVCACHED_RUN_DIR.")] = None,
    timeout: Annotated[float, typer.Option(min=0.01, max=60, help="Seconds that a scrape waits for the pools.")] = 1.0,
) -> None:
    """Export all cards and pools of this machine for Prometheus.

    The cards' records are read, and each pool's control endpoint is asked for its counters; no engine's thread takes part. Nobody is
    asked for a password: whoever can reach the address can read names and sizes. Ends at SIGINT or SIGTERM.

    Exit codes: 0 ended or shown, 1 prometheus-client is missing, 2 usage or a bad setting, 4 the address cannot be had.
    """
    host, port = parse_address(listen)
    if importlib.util.find_spec("prometheus_client") is None:
        warn(_MISSING)
        raise typer.Exit(int(ExitCode.REFUSED))
    from kvcached.cli.metrics.exporter import print_once, serve  # prometheus-client is loaded only where it is used

    with reporting(as_json=False):
        where = (run_dir or load_settings().run_dir).absolute()
        if once:
            print_once(where, timeout)
        else:
            serve(where, host, port, timeout, lambda address: warn(f"kvcached metrics: listening at {address}"))
