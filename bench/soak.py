"""The service under mixed load for a long time: nothing fails, nothing is lost, memory stays flat.

    HASHSEEK_DATA=../shared/data make soak ARGS="--minutes 30"              # with attacks at the same time: --hostile

A real `hashseek serve` with keys on a fresh collection, and two client processes with eight connections each. They
search by upload and by id, list, add, relabel and delete, first as fast as they can (the capacity), then at a share of
that. With `--hostile`, a third process sends malformed pictures and requests (`bench/hostile.py`). At the end, the
service gets SIGTERM, `index verify` runs, and the catalog is compared with the answers that the clients got. Exits with
code 1 if anything is wrong.
"""

import argparse
import csv
import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, redirect_stdout, suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from http_load import MIX, REFUSALS, Client, Stored

MEMORY = 2048  # MB that the service may take beyond what it needs when it is idle
GROWTH = 100  # MB by which it may grow between the end of the warm-up and the end
FILES = 20  # open files by which it may grow: SQLite keeps those of closed connections for the next ones


def run_client(order: dict[str, Any]) -> dict[str, Any]:
    return Client(order).run()


def measure(pid: int) -> dict[str, int]:
    """Memory of a service with the processes that decode its images (MB), and its own threads and open files."""
    from serve import with_decoders  # it loads Hashseek, which clients do not need

    rss = 0
    for process in with_decoders(pid):
        with suppress(OSError):  # it may have ended
            rss += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    threads, files = (len(os.listdir(f"/proc/{pid}/{name}")) for name in ("task", "fd"))  # noqa: PTH208
    return {"rss": rss // 2**20, "threads": threads, "files": files}


def compare(found: Stored, told: Stored, unsure: set[str]) -> list[str]:
    """Differences between what is stored and what should be, one line each."""
    keys = (found.keys() | told.keys()) - unsure
    return [f"{key}: {found.get(key)}, not {told.get(key)}" for key in sorted(keys) if found.get(key) != told.get(key)]


def read_stored(folder: Path) -> Stored:
    from hashseek.indexing.collection import Collection

    with closing(Collection(folder, read_only=True)) as collection:
        images = collection.browse(None, limit=10**9).images
        return {image.key or f"id {image.id}": (image.id, image.sha256, image.labels) for image in images}


def is_wrong(operation: str, status: int) -> bool:
    """Whether no client should get this answer; 0 is a closed connection, which malformed requests may get."""
    if operation in MIX:
        return status not in (MIX[operation][1], *REFUSALS)
    if operation == "guessed key":
        return status != 401
    return (status >= 500 and status not in REFUSALS) or (
        status == 0 and operation not in ("malformed request", "slow connection")
    )


def verdict(
    samples: list[dict[str, int]], idle: dict[str, int], end: dict[str, int], counts: Counter[tuple[str, int]]
) -> list[str]:
    """Print the figures; returns what is wrong with them."""
    warm = samples[len(samples) // 5 :]  # the first fifth is the warm-up
    before, after = (median(sample["rss"] for sample in part) for part in (warm[:50], warm[-50:]))
    slope = np.polyfit([sample["seconds"] / 3600 for sample in warm], [sample["rss"] for sample in warm], 1)[0]
    peak = max(sample["rss"] for sample in samples)
    print(f"RSS: {before:.0f} MB after the warm-up, {after:.0f} at the end, {slope:+.0f} an hour, at most {peak}")
    print(
        f"threads and open files: {idle['threads']}, {idle['files']} idle, {end['threads']}, {end['files']} at the end"
    )
    for operation in dict.fromkeys(operation for operation, _ in counts):
        print(f"{operation}:", {status: n for (name, status), n in sorted(counts.items()) if name == operation})
    wrong = [f"{n} times {name} {status}" for (name, status), n in counts.items() if is_wrong(name, status)]
    if after - before > GROWTH:
        wrong.append(f"memory grew by {after - before:.0f} MB")
    if peak - idle["rss"] > MEMORY:
        wrong.append(f"{peak - idle['rss']} MB more than idle were needed")
    if end["files"] - idle["files"] > FILES:
        wrong.append(f"{end['files'] - idle['files']} more files are open")
    return wrong


def main() -> int:
    from serve import make_collection, serving

    from hashseek.api.keys import create

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--share", type=float, default=0.8, help="share of the capacity")
    parser.add_argument("--images", type=int, default=4_000, help="photographs in the collection at the start")
    parser.add_argument("--calibrate", type=float, default=15, help="seconds for measuring the capacity")
    parser.add_argument("--hostile", action="store_true", help="attack the service at the same time")
    parser.add_argument("--mutants", type=int, default=20_000, help="with --hostile: number of malformed pictures")
    parser.add_argument("--seed", type=int, default=0, help="with --hostile: seed of the attacks")
    options = parser.parse_args()
    if "HASHSEEK_DATA" not in os.environ:
        raise SystemExit("set HASHSEEK_DATA to the folder with mirflickr25k_128 and backbones")
    data = Path(os.environ["HASHSEEK_DATA"]) / "mirflickr25k_128"
    with (data / "labels.csv").open(newline="") as file:
        queries = [str(data / row["file"]) for row in csv.DictReader(file) if row["split"] == "query"]
    with tempfile.TemporaryDirectory() as name, multiprocessing.get_context("spawn").Pool(3) as pool:
        folder = make_collection(Path(name), data, options.images, 0)
        told, unsure, counts = read_stored(folder), set[str](), Counter[tuple[str, int]]()
        with redirect_stdout(io.StringIO()) as printed:
            create("soak", Path(name, "keys.toml"), "admin")
        order = {"secret": printed.getvalue().strip(), "ids": [image_id for image_id, _, _ in told.values()]}

        def take(outcome: dict[str, Any]) -> None:
            told.update(outcome["stored"])
            unsure.update(outcome["unsure"])
            counts.update(outcome["counts"])

        with serving(folder, "--keys", str(Path(name, "keys.toml"))) as (port, pid, log):
            order.update(port=port, files=queries)
            idle = measure(pid)

            def start(phase: str, seconds: float, rate: float | None) -> list[Any]:
                orders = [{**order, "name": f"{phase}-{n}", "seconds": seconds, "rate": rate} for n in range(2)]
                return [pool.apply_async(run_client, (one,)) for one in orders]

            alone = [result.get() for result in start("capacity", options.calibrate, None)]
            rate = sum(len(outcome["latencies"]) for outcome in alone) / options.calibrate * options.share
            print(f"{options.images:,} images, load {os.getloadavg()[0]:.1f}, {rate:.0f} requests/s; idle: {idle}")
            running = start("load", 60 * options.minutes, rate / 2)
            if options.hostile:
                from hostile import attack

                attacks = {"seconds": 60 * options.minutes, "mutants": options.mutants, "seed": options.seed}
                running.append(pool.apply_async(attack, ({**order, **attacks},)))
            samples, began = [], time.monotonic()
            while not all(result.ready() for result in running):
                time.sleep(1)
                samples.append({"seconds": round(time.monotonic() - began), **measure(pid)})
                if len(samples) % 10 == 0:
                    print(samples[-1], flush=True)
            outcomes = [result.get() for result in running]
            time.sleep(20)  # idle connections are closed after 15
            end = measure(pid)
            for outcome in (*alone, *outcomes):
                take(outcome)
            lines = os.pread(log.fileno(), 10**6, 0).decode(errors="replace").splitlines()[1:]
        verify = subprocess.run(
            [sys.executable, "-m", "hashseek", "index", "verify", str(folder)], capture_output=True, text=True
        )
        wrong = verdict(samples, idle, end, counts)
        print(f"{len(lines)} lines of log", *lines[:10], sep="\n")
        wrong += [f"log: {line}" for line in lines if not options.hostile or line.startswith("Traceback")]
        wrong += compare(read_stored(folder), told, unsure)
    if verify.returncode:
        wrong.append(f"verify: {verify.stdout} {verify.stderr}")
    slow = np.percentile([latency for outcome in outcomes for latency in outcome["latencies"]], (50, 99))
    print(f"p50 and p99: {slow[0]:.0f} and {slow[1]:.0f} ms; {len(told):,} images stored, {len(unsure)} unsure")
    print(*wrong[:50], f"{len(wrong)} wrong", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
