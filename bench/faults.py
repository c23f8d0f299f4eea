"""Kill -9 and power cuts at many random moments: `python bench/faults.py --kills 200 --cuts 200`.

Prints one line per moment, and at the end how many hit which operation and what was wrong. Exits with code 1 if
anything was. The power cuts need root and a loop device; without these, they are skipped and the reason is printed.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.commands import Command, command_starter
from support.faults import OPERATIONS, NoDisk, cut_the_power, kill_again_and_again
from support.models import tiny_checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="number of kills that hit a working process")
    parser.add_argument("--cuts", type=int, default=200, help="number of power cuts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=OPERATIONS, help="kill only this operation")
    options = parser.parse_args()
    wrong = []
    with tempfile.TemporaryDirectory() as name, command_starter() as starter:
        place = Path(name)

        def start(*arguments: object, before: str = "") -> Command:
            return starter(Path(tempfile.mkdtemp(dir=place)), *arguments, before=before)

        checkpoints = (
            tiny_checkpoint(place / "a.safetensors", n_bits=48, seed=1),
            tiny_checkpoint(place / "b.safetensors", n_bits=36, seed=2),
        )
        began = time.monotonic()
        if options.kills:
            (place / "kills").mkdir()
            killed = kill_again_and_again(
                start,
                place / "kills",
                checkpoints=checkpoints,
                n_kills=options.kills,
                seed=options.seed,
                operations=OPERATIONS if options.only is None else (options.only,),
                report=print,
            )
            wrong += killed.wrong
            hit = ", ".join(f"{operation} {n}" for operation, n in killed.hit.items())
            print(f"{sum(killed.hit.values())} kills hit ({hit}); {sum(killed.late.values())} came too late")
        if options.cuts:
            (place / "cuts").mkdir()
            try:
                acknowledged, problems = cut_the_power(
                    start, place / "cuts", checkpoints[0], n_cuts=options.cuts, seed=options.seed, report=print
                )
                wrong += problems
                print(f"{len(acknowledged)} power cuts, up to {max(acknowledged)} images acknowledged")
            except NoDisk as error:
                print(f"power cuts left out: {error}")
        print(f"{len(wrong)} problems in {time.monotonic() - began:.0f} s", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
