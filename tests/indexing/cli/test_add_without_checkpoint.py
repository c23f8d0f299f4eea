"""`hashseek index add` of a new collection without a checkpoint, and `index refit`."""

import json
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing

from hashseek.indexing.cli.fitting import fit_progress
from hashseek.indexing.cli.output import Output
from hashseek.indexing.collection import Collection
from hashseek.indexing.remote import MAX_BYTES
from hashseek.retrieval.download import download
from support.collections import n_stored
from support.commands import wait_until
from support.pictures import save
from support.web import serving

FIT = ("--backbone", "squeezenet1_1", "--preprocessing", "size=64,mean=0.5,std=0.25/0.25/0.25", "--bits", 6)
PAUSE = """
import time, hashseek.indexing.{module} as m
function = m.{name}
m.{name} = lambda *a, **k: (print("here", file=__import__("sys").stderr), time.sleep(600), function(*a, **k))[2]
"""


def test_pictures_alone_make_a_collection_that_the_printed_commands_search(hashseek, tmp_path, pictures, weights):
    folder = tmp_path / "my photos"
    command = ("index", "add", folder, pictures, *FIT, "--weights", weights, "--device", "cpu")
    assert hashseek(*command[:-1], "cuda:99")[0] == 2
    code, out, err = hashseek(*command)
    assert (code, err) == (0, "")
    fitted, counts, _, search, serve = out.splitlines()
    assert re.match("fitted 6 bits to 12 images without labels", fitted)
    assert re.fullmatch(rf"added 12, already stored 0, skipped 0; {folder} holds 12 images; [\d.]+ s", counts)
    assert serve == f"  hashseek serve '{folder}'"
    fitted = json.loads(hashseek("index", "stats", folder, "--json")[1])["fit"]
    assert fitted == {"method": "weighted_itq", "images": 12, "backbone": "squeezenet1_1"}
    image = search.partition("' ")[2].strip("'")
    code, out, _ = hashseek("search", folder, image, "-k", 3, "--device", "cpu")
    assert code == 0
    assert image in out.splitlines()[1]
    # The same command again, with all or none of its options, and options that contradict the collection.
    for again in (command, ("index", "add", folder, pictures, "--device", "cpu")):
        assert hashseek(*again)[:2] == (0, f"added 0, already stored 12, skipped 0; {folder} holds 12 images\n")
    for option in (("--bits", 8), ("--backbone", "resnet18"), ("--preprocessing", "size=96"), ("--weights", image)):
        assert hashseek("index", "add", folder, pictures, *option)[0] == 2


def test_pixels_need_no_weights(hashseek, tmp_path, pictures):
    folder = tmp_path / "c"
    assert hashseek("index", "add", folder, pictures, "--backbone", "pixels", "--bits", 8, "--device", "cpu")[0] == 0
    with closing(Collection(folder, read_only=True)) as opened:
        image = opened.catalog.page(after=0, limit=1)[0]
    code, out, _ = hashseek("search", folder, image.path, "-k", 1, "--json", "--device", "cpu")
    assert (code, json.loads(out)["hits"][0]["id"]) == (0, image.id)


def test_watching_does_not_encode_the_images_of_the_fit_again(start, tmp_path, pictures):
    watched = tmp_path / "watched"
    shutil.copytree(pictures, watched)
    command = ("index", "add", tmp_path / "c", watched, "--backbone", "pixels", "--bits", 8, "--device", "cpu")
    (watched / "labels.csv").write_text("file,label\nnothing.png,cat\n")  # not read, as in every round
    without_encoder = "from hashseek.retrieval.encoder import Encoder; Encoder.features_and_outputs = None"
    process = start(*command, "--watch", "--label", "seen", before=without_encoder)
    wait_until(lambda: "added 12" in process.out or process.ended)
    process.send(signal.SIGTERM)
    assert process.wait() == 143, process.err
    assert n_stored(tmp_path / "c") == 12


def test_a_run_killed_while_it_fits_leaves_nothing_and_one_killed_later_continues(
    hashseek, start, tmp_path, pictures, weights
):
    folder = tmp_path / "c"
    command = ("index", "add", folder, pictures, *FIT, "--weights", weights, "--device", "cpu")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process = start(*command, before=PAUSE.format(module="fitting", name="fit_head"))
        wait_until(lambda process=process: "here" in process.err)
        process.send(number)
        assert process.wait() == {signal.SIGINT: 130}.get(number, -number)
        assert len(process.err.splitlines()) == (2 if number == signal.SIGINT else 1)  # says that nothing was written
        assert not folder.exists()
    process = start(*command, before=PAUSE.format(module="catalog", name="Catalog.add"))
    wait_until(lambda: "here" in process.err)
    process.send(signal.SIGKILL)
    assert process.wait() != 0
    assert hashseek(*command)[0] == 0
    assert n_stored(folder) == 12


def test_a_download_before_the_fit_has_the_terminal_to_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    monkeypatch.setenv("TERM", "xterm")
    (tmp_path / "weights.pth").write_bytes(bytes(100))
    with fit_progress(Output()) as progress:
        with serving(tmp_path) as url:
            download(f"{url}/weights.pth", tmp_path / "cache" / "weights.pth")
        shown = capsys.readouterr().err
        progress(0, 12)
    assert "downloading" in shown
    assert "computing features" not in shown
    assert "computing features" in capsys.readouterr().err


# Runs each of the commands in `sys.argv[1]`, and prints how it ended, whether it loaded torch, and its seconds.
PROGRAM = """
import json, sys
from hashseek.retrieval.models import torchvision_weights
torchvision_weights._SOURCE = "http://127.0.0.1:9/"
from hashseek.api.cli import main
for command in json.loads(sys.argv[1]):
    try:
        main(command)
    except SystemExit as ending:
        print(ending.code, "torch" in sys.modules)
"""


def test_what_cannot_work_is_refused_before_torch_is_imported(tmp_path, pictures, weights):
    (tmp_path / "empty").mkdir()
    for name in "abc":
        save(tmp_path / "alike" / f"{name}.png", 1)
    cases = [
        (pictures, (), "http://127.0.0.1:9/mobilenet_v3_large-5c1a4163.pth"),
        (pictures, ("--backbone", "resnet5"), "resnet50"),
        (pictures, ("--backbone", "timm:convnext_atom"), "timm"),
        (pictures, ("--weights", "none.safetensors"), "none.safetensors"),
        (pictures, ("--weights", str(weights)), "--backbone"),
        (pictures, ("--preprocessing", "means=0.5"), "means"),
        (pictures, ("--bits", "0"), "0"),
        (pictures, ("--checkpoint", "model.safetensors", "--bits", "64"), "--checkpoint"),
        (tmp_path / "empty", (), "images"),
        (tmp_path / "alike", (), "3 images"),
    ]
    commands = [["index", "add", str(tmp_path / "c"), str(place), *options] for place, options, _ in cases]
    environment = {"TORCH_HOME": str(tmp_path / "torch"), "HOME": str(tmp_path)}
    command = (sys.executable, "-c", PROGRAM, json.dumps(commands))
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    for (_, options, named), ended, err in zip(cases, done.stdout.splitlines(), done.stderr.splitlines(), strict=True):
        assert ended == "2 False", options
        assert named in err
    assert not (tmp_path / "c").exists()


def test_refit_fits_to_what_the_collection_holds_by_now(hashseek, tmp_path, pictures, weights):
    folder, few = tmp_path / "c", tmp_path / "few"
    few.mkdir()
    for name in ("picture 00.jpg", "picture 01.jpg", "picture 04.jpg"):
        shutil.copy(pictures / name, few / name)
    create = ("index", "add", folder, few, *FIT, "--weights", weights, "--device", "cpu")
    code, out, _ = hashseek(*create)
    assert code == 0
    assert "index refit" in out
    code, out, _ = hashseek("index", "add", folder, pictures, "--device", "cpu")
    assert (code, "index refit" in out) == (0, True)  # it has grown from 3 images to 12
    code, out, _ = hashseek("index", "refit", folder, "--drop-old", "--device", "cpu")
    assert code == 0
    assert "index refit" not in out
    assert n_stored(folder) == 12
    with closing(Collection(folder, read_only=True)) as opened:
        refitted, n_bits = opened.fingerprint, opened.n_bits
        assert [space.state for space in opened.catalog.spaces.all()] == ["ready"]
    # A collection that was made of all of them in the first place has the same hash layer.
    whole = ("index", "add", tmp_path / "whole", few, pictures, *FIT, "--weights", weights, "--device", "cpu")
    assert hashseek(*whole)[0] == 0
    with closing(Collection(tmp_path / "whole", read_only=True)) as opened:
        assert (opened.fingerprint, opened.n_bits) == (refitted, n_bits)
    assert hashseek("index", "refit", folder, "--device", "cpu")[0] == 0
    with closing(Collection(folder, read_only=True)) as opened:  # nothing has changed
        assert (opened.fingerprint, len(opened.catalog.spaces.all())) == (refitted, 1)
    assert hashseek("index", "refit", folder, "--bits", 5, "--device", "cpu")[0] == 0
    assert hashseek("search", folder, few / "picture 00.jpg", "--device", "cpu")[0] == 0


def test_features_of_the_fit_are_kept_and_a_refit_replaces_them(hashseek, tmp_path, pictures, weights):
    folder = tmp_path / "kept"
    fit = (*FIT, "--weights", weights, "--device", "cpu")
    assert hashseek("index", "add", folder, pictures, *fit, "--keep-features")[0] == 0
    picture = pictures / "picture 00.jpg"
    code, out, _ = hashseek("search", folder, picture, "--rank", "float", "-k", 2, "--device", "cpu")
    assert (code, str(picture) in out.splitlines()[1]) == (0, True)
    assert hashseek("index", "refit", folder, "--bits", 5, "--device", "cpu")[0] == 0
    assert n_stored(folder) == 12  # verify finds a feature for every code
    again = hashseek("search", folder, picture, "--rank", "float", "-k", 2, "--device", "cpu")[1]
    assert again.splitlines()[1].split()[1] == out.splitlines()[1].split()[1]  # the same cosine


def test_a_refit_reads_urls_above_the_usual_limit(hashseek, tmp_path, weights):
    web, folder = tmp_path / "web", tmp_path / "c"
    for seed in range(12):
        save(web / f"{seed}.png", seed)
    with (web / "0.png").open("ab") as file:
        file.write(bytes(MAX_BYTES))
    with serving(web) as url:
        (tmp_path / "urls.txt").write_text("\n".join(f"{url}/{seed}.png" for seed in range(12)))
        create = ("index", "add", folder, tmp_path / "urls.txt", *FIT, "--weights", weights, "--device", "cpu")
        assert hashseek(*create, "--allow-private", "--url-megabytes", 40, "--strict")[0] == 0
        sample = "import hashseek.indexing.fitting; hashseek.indexing.fitting.MAX_FITTED = 8"
        refit = ("index", "refit", folder, "--bits", 5, "--allow-private", "--device", "cpu")
        code, out, err = hashseek(*refit, before=sample)
        assert code == 0, err
        assert "8 images" in out.splitlines()[0]
