"""API keys: who may read, write or administer. `hashseek keys` changes the file that the service reads."""

import hashlib
import logging
import os
import re
import secrets
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from hmac import compare_digest
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from pydantic import ConfigDict, StringConstraints, ValidationError
from pydantic.dataclasses import dataclass

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import locked, write_atomically

log = logging.getLogger("hashseek")

Role = Literal["read", "write", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)  # each may do what those before it may


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Key:
    """An API key without its secret."""

    name: str
    role: Role
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    created_at: str

    def may(self, role: Role) -> bool:
        """Whether it may do what `role` may."""
        return ROLES.index(self.role) >= ROLES.index(role)


def hash_of(secret: str) -> str:
    """The SHA-256 of a key, which is all that the file keeps of it. 256 random bits need no slow hash."""
    return hashlib.sha256(secret.encode()).hexdigest()


def read_keys(file: Path) -> dict[str, Key]:
    """The keys in a file by name.

    Raises:
        BadConfig: it does not exist, or is not a key file.
    """
    try:
        content: Mapping[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
        return {name: Key(name=name, **entry) for name, entry in content.items()}
    except FileNotFoundError:
        path = shlex.quote(str(file))
        raise BadConfig(
            f"there is no key file {path}: create it with `hashseek keys create NAME --keys {path}`"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        raise BadConfig(f"{file}: {first['loc'][-1]} is {first['input']!r}: {first['msg']}") from None
    except (OSError, ValueError, TypeError) as error:
        raise BadConfig(f"{file} is not a valid key file: {error}") from None


class KeyFile:
    """The keys that a service accepts. A change to the file takes effect with the next request."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._version: object = None
        self._keys: dict[str, Key] = {}

    def find(self, secret: str) -> Key | None:
        """The key with this secret. All are compared in constant time, so that the time taken reveals nothing.

        No key is accepted while the file is missing or damaged.
        """
        try:
            state = self._file.stat()
            version = state.st_ino, state.st_mtime_ns, state.st_size
            if version != self._version:
                self._keys = read_keys(self._file)
                self._version = version
        except (OSError, BadConfig) as error:
            self._keys, self._version = {}, None
            log.error("no key is accepted: %s", error)
        given = hash_of(secret)
        found = [key for key in self._keys.values() if compare_digest(key.sha256, given)]
        return found[0] if found else None


app = typer.Typer()
_File = Annotated[Path, typer.Option("--keys", envvar="HASHSEEK_KEYS", help="Key file, as given to `hashseek serve`.")]
_Name = Annotated[str, typer.Argument(help="Name of the person or program that uses the key.")]


@app.command()
def create(
    name: _Name,
    file: _File,
    role: Annotated[
        Role, typer.Option(help="read: search; write: also add, change and delete images; admin: everything.")
    ] = "read",
) -> None:
    """Create a key and print it. Only its hash is kept, so it cannot be shown again."""
    if re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII) is None:
        raise BadConfig(f"{name!r} is not a valid key name: use up to 64 letters, digits, dots, dashes and underscores")
    secret = f"hsk_{secrets.token_urlsafe(32)}"
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.parent):
        keys = read_keys(file) if file.exists() else {}
        if name in keys:
            raise BadConfig(f"{file} already has a key {name!r}: revoke it first, or choose another name")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        _write(file, {**keys, name: Key(name=name, role=role, sha256=hash_of(secret), created_at=now)})
    typer.echo(secret)


@app.command("list")
def show(file: _File) -> None:
    """List the keys by name, with their role and creation date."""
    for key in read_keys(file).values():
        typer.echo(f"{key.name}  {key.role}  {key.created_at}")


@app.command()
def revoke(name: _Name, file: _File) -> None:
    """Remove a key. A running service refuses it from then on."""
    with locked(file.parent):
        keys = read_keys(file)
        if keys.pop(name, None) is None:
            raise BadConfig(f"{file} has no key {name!r}; `hashseek keys list` shows the names")
        _write(file, keys)
    typer.echo(f"revoked {name}")


def _write(file: Path, keys: Mapping[str, Key]) -> None:
    import tomli_w

    content = {name: {k: v for k, v in asdict(key).items() if k != "name"} for name, key in keys.items()}
    before = os.umask(0o022)  # the service may run as another user; a key cannot be computed from its hash
    try:
        write_atomically(file, tomli_w.dumps(content).encode())
    finally:
        os.umask(before)
