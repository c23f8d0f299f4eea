"""Finds the images to add for `index add`: files, folders, glob patterns, lists, tar files and URLs."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from hashseek.indexing.ingest.manifests import KINDS, ImageSource, described, find_manifest, is_in_split, read_manifest
from hashseek.indexing.remote import is_remote
from hashseek.indexing.uris import stored_path
from hashseek.retrieval.errors import BadConfig, BadDataset, BadImage
from hashseek.retrieval.images import SUFFIXES
from hashseek.retrieval.label_files import OnError, Problem, refuse
from hashseek.retrieval.tar_members import Member, list_members, member_path, read_member, without_place

Found = ImageSource | Problem
KeyFrom = Literal["path", "name"]

_CHUNK = 50_000  # names in a folder that are sorted together; all of them might not fit in memory
_MAGIC = frozenset("*?[")
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")  # compressed ones are refused when they are read
_SIDECARS = (".json", ".cls", ".txt")  # metadata next to an image in a tar


def find_sources(paths: Sequence[str | Path], *, split: str | None = None) -> Iterator[Found]:
    """The images that `paths` name, and problems found on the way, lazily and in constant memory.

    Args:
        paths: image files; folders, searched with their subfolders unless they have a `labels.csv` or `labels.jsonl`;
            lists (`indexing.ingest.manifests`); tar files; URLs; glob patterns (`*`, `?`, `[]`, `**`).
        split: use only this split of lists and tar files.

    Raises:
        BadDataset: at once if a path is empty or missing or a pattern matches nothing; later if a list cannot be read,
            or `split` is given for anything but a list or a tar file.
    """
    for path in paths:
        if not isinstance(path, str | Path):
            raise BadConfig(f"{path!r:.60} is not a path: pass each image, folder or list separately")
        path = str(path)
        if not path:  # Path("") would mean the current folder
            raise BadDataset("a path is empty: pass files or folders (is a shell variable unset?)")
        try:
            if not is_remote(path) and next(_matching(path), None) is None:
                Path(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            nothing = "no file matches the pattern" if _MAGIC & set(path) else "there is no file or folder"
            raise BadDataset(f"{nothing} {path}: correct the path") from None
        except (OSError, ValueError) as error:  # no permission, too long, or it contains NUL
            raise BadDataset(f"{path} cannot be read: {error}") from None
    return (found for path in paths for found in _with_note(str(path), split))


def count_images(paths: Sequence[str | Path], *, split: str | None = None, on_error: OnError = "skip") -> int:
    """The number of images that `paths` name; with on_error="stop", problems are reported before any work is done.

    Raises:
        BadDataset: see `find_sources`; or there are problems, the first of which are in the message.
    """
    n = 0
    for path in paths:
        problems: list[Problem] = []
        for found in find_sources([path], split=split):
            if isinstance(found, ImageSource):
                n += 1
            elif on_error == "stop" and found.skipped:
                problems.append(found)
        if problems:
            refuse(find_manifest(Path(path)) or Path(path), problems, skip="--on-error skip")
    return n


def describe(
    sources: Iterable[Found], *, labels: Sequence[str] = (), key_from: KeyFrom | None = None
) -> Iterator[Found]:
    """The sources with additional labels, and with their path or file name as key if they have none."""
    for found in sources:
        if isinstance(found, ImageSource):
            key = found.key
            if key is None and key_from is not None:
                path = stored_path(found.uri)
                key = without_place(path) if key_from == "path" else PurePosixPath(path).name
            found = replace(found, key=key, labels=tuple(dict.fromkeys((*found.labels, *labels))))
        yield found


def walk(folder: Path) -> Iterator[Path | Problem]:
    """Image files below `folder`: first those of a folder, then its subfolders, by name.

    Links to folders are not followed, so there are no loops. Hidden files and folders are left out.
    """
    waiting = [folder]
    while waiting:
        folders: list[Path] = []
        place = waiting.pop()
        try:
            for entry in _entries(place):
                if entry.name.startswith("."):  # such as trash and thumbnail caches
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif _is_picture(entry.name) and not (entry.is_symlink() and Path(entry.path).is_dir()):
                    yield Path(entry.path)
        except OSError as error:
            yield Problem(str(place), f"this folder cannot be read: {error.strerror}")
        waiting += sorted(folders, reverse=True)


def images_in(folder: Path) -> Iterator[Found]:
    """The images that `walk` finds in a folder, and folders that cannot be read."""
    return (ImageSource(found) if isinstance(found, Path) else found for found in walk(folder))


def _with_note(path: str, split: str | None) -> Iterator[Found]:
    """The images and problems at `path`; a note if there are none."""
    found = None
    for found in _sources(path, split):
        yield found
    if found is None:
        reason = (
            "no images were found there; of a folder, only files with the suffix of an image are read: name others, "
            "such as 'FOLDER/*.tar', or list them in a .txt file"
        )
        if split is not None:
            reason = f"no image of the split {split!r} was found there"
        yield Problem(path, reason, skipped=False)


def _sources(path: str, split: str | None) -> Iterator[Found]:
    """The images and problems at a URL, at a path, or at all paths that match a pattern."""
    if is_remote(path):
        _refuse_split(path, split)
        yield ImageSource(path)
    elif not Path(path).exists():
        is_all = PurePosixPath(path).parts[-2:] == ("**", "*")  # includes what is in a matched folder
        for match in _matching(path):
            if (match.is_dir() and not is_all) or match.suffix.lower() in (*SUFFIXES, *KINDS, ".tar"):
                yield from _sources_of(match, split)
    else:
        yield from _sources_of(Path(path), split)


def _sources_of(path: Path, split: str | None) -> Iterator[Found]:
    """The images and problems of a list, a folder or a tar, or the image itself."""
    manifest = find_manifest(path)
    if manifest is not None:
        yield from read_manifest(manifest, split=split)
    elif path.name.lower().endswith(_TARS) and not path.is_dir():
        yield from _shard(path, split)
    else:
        _refuse_split(str(path), split)
        yield from images_in(path) if path.is_dir() else [ImageSource(path)]


def _refuse_split(path: str, split: str | None) -> None:
    if split is not None:
        raise BadDataset(f"{path} has no splits: leave --split out, or pass a list with a column `split`")


def _shard(shard: Path, split: str | None) -> Iterator[Found]:
    """Images in a tar, with metadata from files that differ only in their suffix, as in WebDataset."""
    try:
        for stem, members in groupby(
            list_members(shard), key=lambda found: str(PurePosixPath(found[0]).with_suffix(""))
        ):
            pictures: list[tuple[str, Member]] = []
            sidecars: dict[str, Member] = {}
            for name, member in members:
                suffix = PurePosixPath(name).suffix.lower()
                if _is_picture(PurePosixPath(name).name):
                    pictures.append((name, member))
                elif suffix in _SIDECARS:
                    sidecars[suffix] = member
            if ".cls" in sidecars and not pictures:
                reason = "is not next to its picture in the tar, so it is not used: sort the tar (tar --sort=name)"
                yield Problem(f"{shard.name}: {stem}.cls", reason, skipped=False)
            for name, member in pictures:
                path = member_path(shard, f"{member.offset}+{member.size}/{name}")
                try:
                    row = _row_of(sidecars)
                    if not is_in_split(row, split):
                        continue
                    notes, source = described(path, row, where=f"{shard.name}: {name}", beside={"split"})
                except (ValueError, BadImage) as error:
                    yield Problem(f"{shard.name}: {name}", str(error))
                else:
                    yield from notes
                    yield source
    except BadDataset as error:
        yield Problem(str(shard), str(error).removeprefix(f"{shard} "))
    except OSError as error:
        yield Problem(str(shard), f"cannot be read: {error.strerror or error}")


def _row_of(sidecars: dict[str, Member]) -> dict[str, Any]:
    """The metadata of an image in a tar, as a row of a list."""
    texts: dict[str, str] = {}
    for suffix, member in sidecars.items():
        try:
            texts[suffix] = read_member(member, name=f"the {suffix} file").decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError(f"its {suffix} file is not UTF-8 text") from None
    row: dict[str, Any] = {}
    if ".json" in texts:
        try:
            content = json.loads(texts[".json"])
        except (ValueError, RecursionError):
            raise ValueError("its .json file is not JSON") from None
        row = content if isinstance(content, dict) else {"labels": content}
    if row.get("labels") in (None, "", []):
        row["labels"] = texts.get(".cls", "").split() or texts.get(".txt", "").replace("\n", ";")
    return row


def _is_picture(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES  # noqa: PTH122 - millions of times


def _entries(folder: Path) -> Iterator["os.DirEntry[str]"]:
    with os.scandir(folder) as entries:
        while chunk := list(islice(entries, _CHUNK)):
            yield from sorted(chunk, key=lambda entry: entry.name)


def _matching(pattern: str) -> Iterator[Path]:
    """Paths that match a glob pattern, sorted in chunks; `**` follows no links.

    Hidden files are left out unless a part of the pattern starts with a dot.
    """
    if not _MAGIC & set(pattern):
        return
    parts = list(Path(pattern).parts)
    first = next(number for number, part in enumerate(parts) if _MAGIC & set(part))
    folder, wild = Path(*parts[:first]), parts[first:]
    while wild and wild[-1] == "**":  # `**` matches the folder itself, which is searched with its subfolders
        wild.pop()
    matches: Iterator[Path] = folder.glob("/".join(wild)) if wild else filter(Path.exists, [folder])
    hidden = any(part.startswith(".") for part in wild)
    while chunk := list(islice(matches, _CHUNK)):
        for path in sorted(chunk):
            if hidden or not any(part.startswith(".") for part in path.relative_to(folder).parts):
                yield path
