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
