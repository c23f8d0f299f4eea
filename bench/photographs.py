"""The whole workflow on real photographs, with the commands a user would type: train, evaluate, index, serve, search.

    HASHSEEK_DATA=../shared/data make photographs                      # frozen backbone, about 8 minutes on two cores
    HASHSEEK_DATA=../shared/data make photographs ARGS=mirflickr25k_mobilenet_v2_hyp2_48_finetuned

Finished steps are not repeated. At the end, ten query photographs are searched over HTTP.
"""

import csv
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx

NAME = sys.argv[1] if len(sys.argv) > 1 else "mirflickr25k_mobilenet_v2_hyp2_48"


def hashseek(*arguments: object) -> list[str]:
    """The command line of a subcommand."""
    return [sys.executable, "-m", "hashseek", *(str(argument) for argument in arguments)]


def step(*arguments: object) -> None:
    """Run a subcommand, with its time."""
    print(f"$ hashseek {' '.join(str(argument) for argument in arguments)}", flush=True)
    started = time.perf_counter()
    subprocess.run(hashseek(*arguments), check=True)
    print(f"({time.perf_counter() - started:.0f} s)", flush=True)


def search_ten(address: str, root: Path) -> None:
    """Search with ten query photographs and print how many of the ten nearest share a label with each."""
    with (root / "labels.csv").open(newline="") as file:
        queries = [row for row in csv.DictReader(file) if row["split"] == "query"][:: 793 // 10][:10]
    shared_by_all = []
    with httpx.Client(base_url=address, timeout=60) as client:
        while client.get("/healthz/ready").status_code != 200:
            time.sleep(0.2)
        for row in queries:
            started = time.perf_counter()
            answer = client.post(
                "/v1/search", files={"image": (root / row["file"]).read_bytes()}, data={"k": "10", "rank": "hamming"}
            ).raise_for_status()
            milliseconds = 1000 * (time.perf_counter() - started)
            hits, labels = answer.json()["hits"], set(row["labels"].split(";"))
            shared = sum(bool(labels & set(hit["labels"])) for hit in hits)
            shared_by_all.append(shared / len(hits))
            bits = [hit["distance"] for hit in hits]
            print(
                f"{row['file']:22} {shared:2}/{len(hits)} relevant, {bits[0]} to {bits[-1]} bits, {milliseconds:.0f} ms"
            )
    print(f"precision@10 of the ten searches: {sum(shared_by_all) / len(shared_by_all):.2f}")


def main() -> None:
    """Train unless there is a finished run, then evaluate, index, serve and search."""
    if "HASHSEEK_DATA" not in os.environ:
        raise SystemExit("set HASHSEEK_DATA to the folder with mirflickr25k_128 and backbones")
    root, run = Path(os.environ["HASHSEEK_DATA"]) / "mirflickr25k_128", Path("runs") / NAME
    checkpoint, collection = run / "best.safetensors", run / "collection"
    if not (run / "last.safetensors").is_file():
        step("train", NAME, "--out", run, *(["--resume"] if run.exists() else []))
    if not (run / "evaluation" / "report.md").is_file():
        step("evaluate", checkpoint, "--out", run / "evaluation")
    step("index", "add", collection, root / "labels.csv", "--split", "database", "--checkpoint", checkpoint)
    step("index", "verify", collection)
    server = subprocess.Popen(hashseek("serve", collection, "--port", 0), stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        [address] = re.findall(r"http://[^,]+", server.stderr.readline())[:1]
        print(f"$ hashseek serve {collection}   ({address})", flush=True)
        search_ten(address, root)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
