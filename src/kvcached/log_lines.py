# SPDX-License-Identifier: Apache-2.0
"""How an event of the log is written: one line for people, or one JSON object for programs."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import Any, Final

_FIELDS: Final = "kvcached_fields"


def fields(event: str, **values: Any) -> dict[str, Any]:
    """For `extra` of a call of the log: the event's name and its facts, each under its own name in JSON."""
    return {_FIELDS: {"event": event, **values}}


class OneLine(logging.Formatter):
    """One event, one line, also with a traceback."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " | ")


class JsonLine(logging.Formatter):
    """One event, one JSON object in one line; `time` is UTC."""

    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        return json.dumps(values, ensure_ascii=False, default=str)
