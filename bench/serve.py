"""The HTTP service under load, compared with the library in a tight loop on the same cores; as a Markdown table.

    HASHSEEK_DATA=../shared/data make bench-serve      # or: python bench/serve.py [--images N] [--codes N] [--engine E]

A real `hashseek serve`, and clients in a process of their own (`bench/http_load.py`). Every round runs each case for
some seconds, one after the other, so that a busy moment affects all of them; figures are medians over the rounds,
ratios medians of the ratios within a round. The library decodes, encodes and searches one picture after the
other, and looks up the records of the hits, as the service does. Uploads are query photographs that are not stored.
"CPU ms" is CPU time of the library or the service, of all its processes, per request: it depends less on other load.
"""

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import IO, Any

import numpy as np
from records import record

import hashseek
from hashseek.indexing.collection import Collection
from hashseek.indexing.searcher import Searcher, SearchOptions
from hashseek.retrieval.devices import n_cores

LOAD = Path(__file__).with_name("http_load.py")
Outcome = dict[str, Any]


def make_collection(folder: Path, data: Path, n_images: int, n_codes: int) -> Path:
    """A collection of photographs, and of records with random codes if `n_codes` is more; kept for the next run."""
    target = folder / f"{n_images}-{n_codes}"
    if not (target / "index").exists():
        listing = folder / "photographs.csv"
        with (data / "labels.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["split"] != "query"][:n_images]
        lines = ["file,labels", *(f"{data / row['file']},{row['labels']}" for row in rows)]
        listing.write_text("\n".join(lines) + "\n")
        weights = data.parent / "backbones" / "mobilenet_v2_qat.safetensors"
        hashseek.create_collection(target, listing, n_bits=48, backbone="mobilenet_v2", weights=weights).close()
        with closing(Collection(target)) as collection:
            fill(collection, n_codes)
            collection.save_index()
    return target


def fill(collection: Collection, n: int) -> None:
    """Add records with random codes until there are `n`."""
    rng = np.random.default_rng(0)
    for start in range(len(collection), n, 10_000):
        codes = rng.integers(0, 256, (min(10_000, n - start), 6), dtype=np.uint8)
        collection.add([record(start + i, code, ("sky", "sea", "people")[: i % 4]) for i, code in enumerate(codes)])


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[int, int, IO[str]]]:
    """A ready `hashseek serve`; its port, process id and log. Fails if it does not end cleanly on SIGTERM."""
    command = [sys.executable, "-m", "hashseek", "serve", str(folder), "--port", "0"]
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *options], stderr=log, text=True)
        try:
            while "http://127.0.0.1:" not in (text := _content(log)):
                assert process.poll() is None, text
                time.sleep(0.05)
            port = int(text.split("http://127.0.0.1:")[1].split(",")[0])
            while True:
                with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz/ready"):
                    break
                time.sleep(0.05)
            print(f"ready after {time.perf_counter() - started:.1f} s")
            yield port, process.pid, log
        finally:
            process.terminate()
            code = process.wait()
        assert code in (0, -signal.SIGTERM), f"the service ended with {code}"


def _content(file: Any) -> str:
    return os.pread(file.fileno(), 10_000, 0).decode()


def start_load(port: int, seconds: float, clients: int, **order: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-S", str(LOAD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    json.dump({"port": port, "seconds": seconds, "clients": clients, **order}, process.stdin)
    process.stdin.close()
    return process


def outcome_of(process: subprocess.Popen[str]) -> Outcome:
    assert process.stdout is not None
    outcome: Outcome = json.loads(process.stdout.read())
    assert process.wait() == 0
    assert set(outcome["statuses"]) == {"200"}, outcome["statuses"]
    return outcome


def with_decoders(pid: int) -> list[Path]:
    """The folders in /proc of a service and of the processes that decode its images."""
    children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    return [Path("/proc") / one for one in (str(pid), *children.split())]


def cpu_seconds(pid: int) -> float:
    """Processor time that a service has used, with the processes that decode its images."""
    stats = [(process / "stat").read_text().rpartition(")")[2].split() for process in with_decoders(pid)]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def percentile(outcome: Outcome, share: float) -> float:
    return float(np.percentile(outcome["latencies"], 100 * share))


def loop(seconds: float, work: Callable[[int], object]) -> Outcome:
    """The library in a tight loop."""
    latencies: list[float] = []
    cpu_before = time.process_time()
    started = now = time.perf_counter()
    while now - started < seconds:
        before = now
        work(len(latencies))
        now = time.perf_counter()
        latencies.append(1000 * (now - before))
    cpu_ms = 1000 * (time.process_time() - cpu_before) / len(latencies)
    return {"per_second": len(latencies) / (now - started), "latencies": latencies, "cpu_ms": cpu_ms}


class Bench:
    """Measures the cases of one round after the other and keeps their outcomes."""

    def __init__(
        self, port: int, pid: int, searcher: Searcher, files: list[Path], seconds: float, uploads: bool
    ) -> None:
        self.port, self.pid, self.searcher, self.seconds, self.uploads = port, pid, searcher, seconds, uploads
        self.files = [str(file) for file in files]
        self.contents = [file.read_bytes() for file in files]
        known = np.random.default_rng(1).permutation(searcher.collection.index.current().built.index.ids)
        self.ids = [int(image_id) for image_id in known[:5000]]
        self.rounds: list[dict[str, Outcome]] = []

    def client(self, clients: int, **order: Any) -> Outcome:
        """The outcome of some clients alone."""
        before = cpu_seconds(self.pid)
        outcome = outcome_of(start_load(self.port, self.seconds, clients, **order))
        return outcome | {"cpu_ms": 1000 * (cpu_seconds(self.pid) - before) / len(outcome["latencies"])}

    def round(self) -> None:
        """Run every case once."""
        found: dict[str, Outcome] = {}
        if self.uploads:
            options = SearchOptions(k=10)
            n = len(self.contents)
            found["library, uploads"] = loop(
                self.seconds, lambda i: self.searcher.search_files([self.contents[i % n]], options)
            )
            for clients in (1, 4, 16):
                found[f"uploads, {clients} clients"] = self.client(clients, files=self.files, k=10)
            rate = found["uploads, 16 clients"]["per_second"] / 2
            found["uploads at half that rate"] = self.client(16, files=self.files, k=10, rate=rate)
            background = start_load(self.port, self.seconds + 1, 16, files=self.files, k=10)
            time.sleep(0.7)
            found["live during 16 uploads"] = self.client(1, paths=["/healthz/live"], rate=100)
            outcome_of(background)
        for k in (10, 100):
            options = SearchOptions(k=k)
            found[f"library, by id, k = {k}"] = loop(
                self.seconds, lambda i, options=options: self.searcher.similar(self.ids[i % len(self.ids)], options)
            )
            paths = [f"/v1/images/{image_id}/similar?k={k}" for image_id in self.ids]
            for clients in (1, 4):
                found[f"by id, k = {k}, {clients} clients"] = self.client(clients, paths=paths)
        found["live alone"] = self.client(1, paths=["/healthz/live"])
        self.rounds.append(found)

    def print_table(self) -> None:
        """Medians over the rounds."""
        print("\n| case | per second | of the library | CPU ms | p50, ms | p99, ms |\n|---|---:|---:|---:|---:|---:|")
        library = ""
        for name in self.rounds[0]:
            outcomes = [found[name] for found in self.rounds]
            library = name if name.startswith("library") else library
            beside = [
                found[name]["per_second"] / found[library]["per_second"] for found in self.rounds if library in found
            ]
            ratio = f"{median(beside):.2f}" if name not in ("live alone", "live during 16 uploads") else ""
            figures = (median(percentile(outcome, share) for outcome in outcomes) for share in (0.5, 0.99))
            speed = median(outcome["per_second"] for outcome in outcomes)
            cpu = median(outcome["cpu_ms"] for outcome in outcomes) if "during" not in name else ""
            print(
                f"| {name} | {speed:.0f} | {ratio} | {cpu:.3} | {' | '.join(f'{figure:.1f}' for figure in figures)} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=4_000, help="photographs in the collection")
    parser.add_argument("--codes", type=int, default=0, help="add records with random codes up to this total")
    parser.add_argument("--engine", default="auto", help="auto, torch or openvino")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3, help="duration of each case in each round")
    parser.add_argument("--no-uploads", action="store_true", help="only searches by id")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hashseek-bench-serve")
    options = parser.parse_args()
    if "HASHSEEK_DATA" not in os.environ:
        raise SystemExit("set HASHSEEK_DATA to the folder with mirflickr25k_128 and backbones")
    data = Path(os.environ["HASHSEEK_DATA"]) / "mirflickr25k_128"
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = make_collection(options.folder, data, options.images, options.codes)
    with (data / "labels.csv").open(newline="") as file:
        queries = [data / row["file"] for row in csv.DictReader(file) if row["split"] == "query"]
    with closing(Collection(folder, read_only=True)) as collection:
        searcher = Searcher.open(collection, engine=options.engine)
        print(
            f"{len(collection):,} images, {searcher.encoder.engine}, {n_cores()} cores, load {os.getloadavg()[0]:.1f}"
        )
        with serving(folder, "--read-only", "--engine", options.engine) as (port, pid, _):
            bench = Bench(port, pid, searcher, queries, options.seconds, not options.no_uploads)
            for _ in range(options.rounds):
                bench.round()
            bench.print_table()


if __name__ == "__main__":
    main()
