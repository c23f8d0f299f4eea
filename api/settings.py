"""Settings of the service, from options of `hashseek serve` or environment variables (`HASHSEEK_...`)."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings and limits of the service; docs/how-to/back-up-and-repair.md lists them."""

    model_config = SettingsConfigDict(env_prefix="HASHSEEK_", frozen=True)

    collection: Path
    checkpoint: Path | None = None
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    read_only: bool = False
    device: str = "auto"
    precision: str = "auto"
    engine: str = "torch"
    max_upload_bytes: int = Field(default=32 * 2**20, ge=1)
    max_k: int = Field(default=10_000, ge=1)
