"""Request ids, and the format of log lines: text for people, or JSON for programs."""

import json
import logging
import re
import secrets
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

ID_HEADER = "X-Request-ID"
request_id: ContextVar[str] = ContextVar("request_id", default="")  # of the request that is being answered

_WELL_FORMED = re.compile(r"[A-Za-z0-9._:-]{1,64}")


def make_id(given: str | None) -> str:
    """The id that the client sent, if it is safe to log, or else a new one."""
    return given if given and _WELL_FORMED.fullmatch(given) else secrets.token_hex(8)


class Formatter(logging.Formatter):
    """One line for each record, with the id of its request.

    Args:
        as_json: write a JSON object instead of text, with the fields of the access log, and tracebacks as a string.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__("hashseek: %(message)s")
        self.as_json = as_json

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line as text; a traceback follows it."""
        own = request_id.get()
        return super().formatMessage(record) + (f" [{own}]" if own else "")

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        if not self.as_json:
            return super().format(record)
        own = request_id.get()
        content: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **({"request_id": own} if own else {}),
            **getattr(record, "request", {}),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content)


def configure(*, as_json: bool, access_log: bool) -> None:
    """Format the log of this process, and switch the access log on or off."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(Formatter(as_json=as_json))
    logging.getLogger("hashseek").setLevel(logging.INFO)
    # It warns about malformed bodies, which anyone may send.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    logging.getLogger("hashseek.access").setLevel(logging.INFO if access_log else logging.WARNING)
