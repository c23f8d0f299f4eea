"""Killing `hashseek` at random moments, and cutting the power, with a ledger of what had been acknowledged by then.

`tests/indexing/maintenance/test_faults.py` does it a few times, `bench/faults.py` as often as you like.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hashseek.indexing.catalog import StoredImage
from hashseek.indexing.collection import Collection, open_or_create
from hashseek.indexing.maintenance.backup import restore
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadCollection
from support import hamming_oracle as hamming
from support.collections import file_of, new_images, random_codes
from support.commands import Command, wait_until
from support.paths import ROOT
from support.pictures import draw, png

OPERATIONS = ("first", "add", "build", "delete", "optimize", "reencode", "refit", "snapshot")

# Runs in the process that will be killed and writes to the ledger what was acknowledged and what was begun: between the
# commit and the acknowledgement, either outcome is right.
LEDGER = """
import json, os
import hashseek.indexing.ingest.batch, hashseek.indexing.maintenance.reencode
from hashseek.indexing.catalog import Catalog
hashseek.indexing.ingest.batch.BATCH = hashseek.indexing.maintenance.reencode.BATCH = 3
ledger = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
def note(*what): os.write(ledger, (json.dumps(what) + "\\n").encode())
def add(self, images, original=Catalog.add):
    outcome = original(self, images)
    note("added", [[i, image.sha256] for (i, what), image in zip(outcome, images) if what == "added"])
    return outcome
def remove(self, ids, *, original=Catalog.remove, **options):
    note("removing", list(ids))
    original(self, ids, **options)
    note("removed", list(ids))
Catalog.add, Catalog.remove = add, remove
"""


@dataclass
class Ledger:
    """What a killed process had acknowledged."""

    path: Path
    present: dict[int, str] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    unsure: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        for line in lines:
            what, items = json.loads(line)
            if what == "added":
                self.present |= {int(i): sha256 for i, sha256 in items}
            elif what == "removing":
                self.unsure |= set(items)
            else:
                self.unsure -= set(items)
                if what == "removed":
                    self.gone |= set(items)
        for i in self.gone:
            self.present.pop(i, None)

    def settle(self, found: set[int]) -> None:
        """Record the outcome of removals that were not acknowledged: from now on it must not change."""
        for what, items in (("removed", self.unsure - found), ("kept", self.unsure & found)):
            if items:
                self.note(what, sorted(items))

    def note(self, what: str, items: list[Any]) -> None:
        """Add a line."""
        with self.path.open("a") as file:
            file.write(json.dumps([what, items]) + "\n")


def check(folder: Path, ledger: Ledger) -> list[str]:
    """What is wrong after a crash, before any repair; empty if nothing."""
    wrong = []
    with closing(Collection(folder, read_only=True)) as collection:
        images = collection.catalog.page(after=0, limit=10**7)
        found = {image.id: image.sha256 for image in images}
        lost = {i: s for i, s in ledger.present.items() if found.get(i) != s and i not in ledger.unsure}
        back = set(found) & ledger.gone
        if lost:
            wrong.append(f"lost: {lost}")
        if back:
            wrong.append(f"removed and back: {back}")
        if len(set(found.values())) != len(found):
            wrong.append("an image is there twice")
        wrong += collection.verify()
        if len(indexes := [*folder.glob("index/*")]) > 2:
            wrong.append(f"more than one index is left of killed writers: {indexes}")
        for image in images:
            if not collection.owns(image) or not file_of(collection, image).is_file():
                continue  # `verify` reports missing files
            if hashlib.sha256(file_of(collection, image).read_bytes()).hexdigest() != image.sha256:
                wrong.append(f"the file of image {image.id} has changed")
        wrong += check_search(collection)
    return wrong


def check_search(collection: Collection) -> list[str]:
    """Compare searches with the oracle over the catalog."""
    images = collection.catalog.page(after=0, limit=10**7)
    of = collection.catalog.spaces.codes_of([image.id for image in images])
    ids = np.array(sorted(of), np.int64)
    if not len(ids):
        return [] if len(collection) == 0 else ["an empty collection that finds something"]
    codes = np.stack([of[int(i)].code for i in ids])
    queries = random_codes(np.random.default_rng(0), 3, collection.n_bits)
    distances, positions = hamming.search(queries, codes, k=len(ids))
    for row, (d, i) in enumerate(collection.search(queries, k=10**7)):
        if not np.array_equal(d, distances[row]) or not np.array_equal(i, ids[positions[row]]):
            return ["a search found what it should not, or not what it should"]
    return []


def upload(collection: Collection, seed: int) -> tuple[int, str]:
    """Store a drawn picture that the collection keeps, with some code and feature; its id and content hash."""
    data = png(seed, (40, 30))
    [image] = new_images(random_codes(np.random.default_rng(seed), 1, collection.n_bits))
    feature = np.zeros(512, np.float16)  # as wide as those of SqueezeNet
    described = replace(image, sha256=hashlib.sha256(data).hexdigest(), labels=("kept",), feature=feature)
    return collection.add_with_file(described, data, suffix=".png")[0], described.sha256


def fill(
    collection: Collection, n: int, *, start: int = 0, keep: Callable[[int], bool] = lambda number: number % 2 == 0
) -> list[int]:
    """Add images with random codes, keys, attributes, and some with kept files; their ids."""
    codes = random_codes(np.random.default_rng(start), n, collection.n_bits)
    ids = []
    for number, image in enumerate(new_images(codes, start=start, labels=("cat",)), start=start):
        data = f"content {number}".encode()
        described = replace(
            image,
            sha256=hashlib.sha256(data).hexdigest(),
            key=f"key/{number}" if number % 3 == 0 else None,
            attributes={"number": number},
            engine="drawn",
        )
        if keep(number):
            ids.append(collection.add_with_file(described, data, suffix=".jpg")[0])
        else:
            ids.append(collection.add([described])[0][0])
    return ids


def content(collection: Collection) -> tuple[list[StoredImage], dict[int, tuple[bytes, str]], dict[str, bytes]]:
    """All that a collection holds: records, codes, engines, and the bytes of kept files."""
    images = collection.catalog.page(after=0, limit=10**6)
    codes = collection.catalog.spaces.codes_of([image.id for image in images])
    kept = {image.path: file_of(collection, image).read_bytes() for image in images if collection.owns(image)}
    return images, {i: (code.code.tobytes(), code.engine) for i, code in codes.items()}, kept


def found(collection: Collection, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """The results of some searches for everything."""
    queries = random_codes(np.random.default_rng(seed), 3, collection.n_bits)
    return [(d.tolist(), i.tolist()) for d, i in collection.search(queries, k=10**6)]


@dataclass
class Killed:
    """The result of a series of kills: how many hit each operation, how many came too late, and what was wrong."""

    hit: dict[str, int]
    late: dict[str, int]
    wrong: list[str]


def kill_again_and_again(
    start: Callable[..., Command],
    place: Path,
    *,
    checkpoints: tuple[Path, Path],
    n_kills: int,
    seed: int,
    operations: tuple[str, ...] = OPERATIONS,
    report: Callable[[str], Any] = lambda line: None,
) -> Killed:
    """Kill one operation after the other with SIGKILL at random moments, and check the collection each time.

    It is created without a checkpoint and keeps features. "first" creates another one of the same kind.

    Args:
        start: starts `hashseek` with arguments and Python code that runs before.
        place: an empty folder.
        checkpoints: the hash layers are fitted to the features of the first; "reencode" changes to one of them.
        n_kills: how many must hit a running process.
        seed: of the moments and of what is done.
        operations: which.
        report: called with a line for each kill.
    """
    rng, folder, other, number = random.Random(seed), place / "collection", place / "other", 0
    ledger, ledger_of_other = place / "ledger", place / "ledger of the other"
    killed = Killed(dict.fromkeys(operations, 0), dict.fromkeys(operations, 0), [])
    seconds: dict[str, float] = {}
    last: dict[str, list[object]] = {}  # arguments of each operation

    def pictures() -> Path:
        nonlocal number
        batch = place / f"pictures {number}"
        batch.mkdir()
        for _ in range(10):
            draw(10_000 * seed + number, (60, 40)).save(batch / f"{number}.png")
            number += 1
        return batch

    def arguments(operation: str) -> list[object]:
        if operation in ("add", "first"):
            target = folder if operation == "add" else other
            fit = ["--weights", checkpoints[0], "--bits", 6, "--keep-features"]
            is_new = not (target / "catalog.sqlite").exists()
            return ["add", target, pictures(), *(fit if is_new else []), "--device", "cpu"]
        with closing(Collection(folder, read_only=True)) as collection:
            ids = [image.id for image in collection.catalog.page(after=0, limit=10**6)]
            n_bits, fingerprint = collection.n_bits, collection.fingerprint
        if operation == "delete":
            return ["remove", folder, *rng.sample(ids, min(4, len(ids)))]
        if operation == "reencode":
            new = next(c for c in checkpoints if load_header(c).fingerprint != fingerprint)
            return ["reencode", folder, "--checkpoint", new, "--drop-old", "--device", "cpu"]
        if operation == "refit":  # to a length that differs, so that the hash layer does, too
            bits = rng.choice([n for n in (5, 6, 7) if n != n_bits])
            fit = ["--weights", checkpoints[0], "--bits", bits]
            return ["refit", folder, *fit, "--drop-old", "--device", "cpu"]
        if operation == "snapshot":
            return ["snapshot", folder, place / "snapshots" / f"{time.monotonic_ns()}.tar"]
        return [operation, folder]

    def ledger_of(operation: str) -> str:
        return str(ledger_of_other if operation == "first" else ledger)

    def repeat_first() -> list[str]:
        """What is wrong with the other collection after its creation ended or was killed, and after it is repeated."""
        wrong = check(other, Ledger(ledger_of_other)) if (other / "catalog.sqlite").exists() else []
        again = start("index", *last["first"], before=LEDGER.format(path=ledger_of("first")))
        if again.wait() != 0:
            return [*wrong, f"repeated: {again.err}"]
        wrong += check(other, Ledger(ledger_of_other))
        with closing(Collection(other, read_only=True)) as collection:
            wrong += [] if len(collection) == 10 else [f"repeated: {len(collection)} images"]
        shutil.rmtree(other)
        ledger_of_other.unlink()
        return wrong

    def run(operation: str, *, whole: bool) -> bool:
        """Run an operation to its end or kill it; returns whether it was killed."""
        if not [*folder.glob("files/*/*")] or rng.random() < 0.3:
            with closing(Collection(folder)) as collection:
                stored = upload(collection, 10_000 * seed + 5_000 + rng.randrange(5_000))
            Ledger(ledger).note("added", [stored])
        last[operation] = arguments(operation)
        command = start("index", *last[operation], before=LEDGER.format(path=ledger_of(operation)))
        began, pid = time.monotonic(), command.pid
        if not whole:
            time.sleep(rng.random() * seconds[operation])
            if not command.ended:
                with suppress(ProcessLookupError):  # it may end just now
                    os.kill(pid, signal.SIGKILL)
        code, took = command.wait(), time.monotonic() - began
        if code == 0:
            seconds[operation] = (seconds.get(operation, took) + took) / 2
        elif code != -signal.SIGKILL:
            killed.wrong.append(f"{operation} ended with {code}: {command.err}")
        return code == -signal.SIGKILL

    (place / "snapshots").mkdir()
    first = start("index", *arguments("add"), before=LEDGER.format(path=ledger_of("add")))
    assert first.wait() == 0, first.err
    for operation in operations:
        run(operation, whole=True)
        killed.wrong += repeat_first() if operation == "first" else []
    turn = 0
    while sum(killed.hit.values()) < n_kills:
        operation = operations[turn % len(operations)]
        turn += 1
        hit = run(operation, whole=False)
        (killed.hit if hit else killed.late)[operation] += 1
        wrong = check(folder, Ledger(ledger))
        with closing(Collection(folder, read_only=True)) as collection:
            Ledger(ledger).settle({image.id for image in collection.catalog.page(after=0, limit=10**7)})
        if operation == "first":
            wrong += repeat_first()
        for file in (place / "snapshots").glob("*.tar"):  # complete, or not there
            restored = place / "restored"
            restore(file, restored)
            wrong += [f"in a snapshot: {problem}" for problem in check(restored, Ledger(place / "no ledger"))]
            shutil.rmtree(restored)
            file.unlink()
        if wrong:
            killed.wrong.append(f"turn {turn}, {operation}: {wrong}")
        report(f"{turn:4} {operation:9} {'killed' if hit else 'late':7} {'; '.join(wrong) or 'ok'}")
    if "refit" in operations:
        run("refit", whole=True)
        with closing(Collection(folder, read_only=True)) as collection:
            for space in collection.catalog.spaces.all():
                if space.state == "building" and "fit" in load_header(folder / space.checkpoint).training:
                    killed.wrong.append(f"a refit left the half-built space {space.id}")
    return killed


# ---------------------------------------------------------------- the power

# A process that adds with and without files, removes, saves, optimizes, snapshots, and creates other collections, until
# the power is cut.
BUSY = """
import random, shutil, sys
from contextlib import closing
from pathlib import Path
sys.path.insert(0, {tests!r})
from support.faults import upload
from support.collections import new_images, random_codes
import numpy as np
from hashseek.indexing.maintenance.backup import snapshot
from hashseek.indexing.collection import Collection, open_or_create
from hashseek.indexing.maintenance.optimize import optimize
folder, new, rng = Path({folder!r}), Path({folder!r}).with_name("new"), random.Random({seed})
with closing(Collection(folder)) as collection:
    for turn in range(10**6):
        what = rng.random()
        ids = [image.id for image in collection.catalog.page(after=0, limit=10**6)]
        if len(ids) > 200:
            collection.remove(rng.sample(ids, 100))
        elif what < 0.5 or len(ids) < 5:
            upload(collection, rng.randrange(10**9))
        elif what < 0.7:
            collection.add(new_images(random_codes(np.random.default_rng(turn), 3, collection.n_bits), start=10 * turn))
        elif what < 0.8:
            collection.remove(rng.sample(ids, 2))
        elif what < 0.9:
            if new.exists():
                shutil.rmtree(new.rename(new.with_name("old")))
            open_or_create(new, checkpoint=Path({checkpoint!r})).close()
        elif what < 0.95:
            collection.save_index()
        elif what < 0.97:
            optimize(collection)
        else:
            for old in folder.parent.glob("*.tar"): old.unlink()
            snapshot(collection, folder.parent / f"{{turn}}.tar")
"""


class NoDisk(Exception):
    """This machine cannot create a file system for the test; the message says why."""


@contextmanager
def disk(place: Path, *, megabytes: int = 48) -> Iterator[tuple[Path, Path]]:
    """A mounted ext4 file system in a file in memory: (where it is mounted, the file).

    What the system has not written yet is in its cache and not in the file, so a copy of the file is what a disk holds
    when the power goes.
    """
    missing = [tool for tool in ("mkfs.ext4", "mount", "umount") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing or not os.access("/dev/shm", os.W_OK):
        raise NoDisk(f"a file system of its own needs root, /dev/shm and {', '.join(missing) or 'its tools'}")
    image, mounted = Path(f"/dev/shm/hashseek-{os.getpid()}-{time.monotonic_ns()}"), place / "disk"
    mounted.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(megabytes * 2**20)
        _system("mkfs.ext4", "-q", "-F", str(image))
        _system("mount", "-o", "loop", str(image), str(mounted))
        try:
            yield mounted, image
        finally:
            _system("umount", "--lazy", str(mounted))
    finally:
        image.unlink()


def _system(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoDisk(f"{' '.join(command)}: {done.stderr.strip()}")


def cut_the_power(
    start: Callable[..., Command],
    place: Path,
    checkpoint: Path,
    *,
    n_cuts: int,
    seed: int,
    report: Callable[[str], Any] = lambda line: None,
) -> tuple[list[int], list[str]]:
    """Let a process change a collection, and at random moments discard whatever it has not synced to disk.

    Returns:
        (how many images were acknowledged at each cut, what was wrong with what was left).

    Raises:
        NoDisk: this machine cannot create a file system for the test.
    """
    rng, acknowledged, wrong = random.Random(seed), [], []
    ledger = place / "ledger"
    with disk(place) as (mounted, image):
        folder = mounted / "collection"
        open_or_create(folder, checkpoint=checkpoint).close()
        busy = BUSY.format(tests=str(ROOT / "tests"), folder=str(folder), checkpoint=str(checkpoint), seed=seed)
        command = start("--version", before=LEDGER.format(path=str(ledger)) + busy)
        wait_until(lambda: ledger.exists() or command.ended)
        for cut in range(n_cuts):
            time.sleep(0.05 + rng.random() * 0.3)
            if command.ended:
                wrong.append(f"the process ended: {command.err}")
                break
            os.kill(command.pid, signal.SIGSTOP)
            time.sleep(0.01)  # system calls in progress end
            shutil.copy(ledger, place / "ledger at the cut")
            copy = _still(image)
            os.kill(command.pid, signal.SIGCONT)
            try:
                then = Ledger(place / "ledger at the cut")
                acknowledged.append(len(then.present))
                problems = _look(copy, place, checkpoint, then)
            finally:
                copy.unlink()
            wrong += [f"cut {cut}: {problem}" for problem in problems]
            report(f"{cut:4} power cut, {len(then.present):5} acknowledged  {'; '.join(problems) or 'ok'}")
        command.send(signal.SIGKILL)
        command.wait()
    return acknowledged, wrong


def _still(image: Path) -> Path:
    """A copy of the disk at one moment: copied until two copies are equal, since the system may be writing."""
    copies = [image.with_name(f"{image.name}-{number}") for number in range(2)]
    shutil.copy(image, copies[0])
    while True:
        shutil.copy(image, copies[1])
        if copies[0].read_bytes() == copies[1].read_bytes():
            copies[1].unlink()
            return copies[0]
        copies.reverse()


def _look(copy: Path, place: Path, checkpoint: Path, ledger: Ledger) -> list[str]:
    """Mount the disk as it was at the cut, and check it; also that a creation that was cut can be repeated."""
    mounted = place / "after the cut"
    mounted.mkdir(exist_ok=True)
    _system("mount", "-o", "loop", str(copy), str(mounted))
    try:
        problems = [
            # Images without a picture of their own point nowhere.
            problem
            for problem in check(mounted / "collection", ledger)
            if "'/nowhere/" not in problem
        ]
        for file in mounted.glob("*.tar"):
            restore(file, place / "restored")
            shutil.rmtree(place / "restored")
        open_or_create(mounted / "new", checkpoint=checkpoint).close()
        return problems + check(mounted / "new", Ledger(place / "no ledger"))
    except BadCollection as error:
        return [f"unreadable: {error}"]
    finally:
        _system("umount", "--lazy", str(mounted))
