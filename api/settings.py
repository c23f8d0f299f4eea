"""Settings of the service; `hashseek serve` takes them from options or environment variables."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Settings and limits of the service; docs/reference/http-api.md lists them."""

    collection: Path
    checkpoint: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    read_only: bool = False
    device: str = "auto"
    precision: str = "auto"
    engine: str = "auto"
    max_upload_bytes: int = 32 * 2**20
    max_k: int = 10_000
    max_uploads: int = 32
    allowed_hosts: tuple[str, ...] = ()
    log_format: str = "text"
    access_log: bool = False

    def hosts(self) -> frozenset[str]:
        """Names in the Host header that are answered; empty: all.

        A service for this machine alone answers to the machine's own names; others may be behind any name.
        """
        own = frozenset(("localhost", "127.0.0.1", "::1"))
        allowed = frozenset(name.lower() for name in self.allowed_hosts)
        return allowed | own if allowed or self.host in own else frozenset()
