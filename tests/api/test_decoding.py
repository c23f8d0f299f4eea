"""Images are decoded in other processes: the same pixels, errors that stay with their image, and limits."""

import io
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hashseek.api import decoding
from hashseek.api.decoding import Budget, Decoders, OutOfMemory, Overloaded
from hashseek.retrieval.errors import BadImage
from hashseek.retrieval.images import Preprocessing, load_file
from support.commands import wait_until
from support.pictures import draw, encoded, png

PREPROCESSING = Preprocessing(64, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), interpolation="bicubic")


@pytest.fixture
def decoders():
    observed = []
    with closing(Decoders(lambda *stage: observed.append(stage))) as started:
        started.observed = observed
        yield started


@pytest.fixture(scope="module")
def slow():
    """A picture of 100 megapixels, which takes a second to decode."""
    return encoded(Image.new("RGB", (10_000, 10_000), "red"))


def running(decoders):
    return [one._process.pid for one in decoders._idle]


def test_the_network_gets_the_same_pixels_as_in_the_same_process(decoders, tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("raise SystemExit")  # the current folder may hold anything
    monkeypatch.chdir(tmp_path)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF"):
        data = encoded(draw(3, (400, 300)), kind)
        expected, found = load_file(data, PREPROCESSING), decoders.load(data, PREPROCESSING)
        assert np.array_equal(found.pixels, expected.pixels)
        assert found[1:] == expected[1:] == (400, 300, f"image/{kind.lower()}")
        assert [name for name, _ in decoders.observed] == ["wait", "decode"]
        decoders.observed.clear()


def test_a_bad_image_is_an_error_with_its_name_and_the_process_goes_on(decoders):
    decoders.load(png(1), PREPROCESSING)
    before = running(decoders)
    for data in (b"", b"no image", png(1)[:400], encoded(Image.new("1", (10_001, 10_000)))):
        with pytest.raises(BadImage, match="é.png"):
            decoders.load(data, PREPROCESSING, name="é.png")
        with pytest.raises(BadImage, match="é.png"):
            decoders.thumbnail(data, 64, name="é.png")
    assert running(decoders) == before


def test_a_jpeg_needs_a_process_only_if_it_is_large(decoders, monkeypatch):
    data = encoded(draw(3, (400, 300)), "JPEG")
    here = decoders.thumbnail(data, 64)
    assert running(decoders) == []
    monkeypatch.setattr(decoding, "SMALL", 1000)
    assert decoders.thumbnail(data, 64) == here
    assert len(running(decoders)) == 1


def test_damaged_metadata_writes_nothing_into_the_log(decoders, capfd):
    buffer = io.BytesIO()
    draw(3).save(buffer, "PNG", exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0")
    assert decoders.load(buffer.getvalue(), PREPROCESSING).width == 96
    assert capfd.readouterr().err == ""


def test_threads_share_as_many_processes_as_there_are_cores(decoders):
    files = [png(number) for number in range(40)]
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda data: decoders.load(data, PREPROCESSING), files))
    assert all(
        np.array_equal(one.pixels, load_file(data, PREPROCESSING).pixels)
        for one, data in zip(found, files, strict=True)
    )
    assert 1 <= len(running(decoders)) <= decoding.n_cores()
    assert decoders.waiting == 0


def test_an_image_that_takes_too_long_is_refused_and_its_process_ended(decoders, slow, monkeypatch):
    decoders.load(png(1), PREPROCESSING)
    [process] = running(decoders)
    with monkeypatch.context() as impatient:
        impatient.setattr(decoding, "DECODE_SECONDS", 0.05)
        with pytest.raises(BadImage):
            decoders.load(slow, PREPROCESSING)
    assert not Path(f"/proc/{process}").exists()
    assert decoders.load(png(1), PREPROCESSING).width == 96


@pytest.mark.parametrize(("number", "error"), [(signal.SIGSEGV, BadImage), (signal.SIGKILL, OutOfMemory)])
def test_an_image_that_ends_its_process_is_refused_and_others_are_decoded(decoders, slow, number, error):
    """Linux sends SIGKILL if the memory runs out, which says nothing about the image."""
    decoders.load(png(1), PREPROCESSING)
    [process] = running(decoders)
    with ThreadPoolExecutor(1) as thread:
        image = thread.submit(decoders.load, slow, PREPROCESSING)
        wait_until(lambda: any(name == "wait" for name, _ in decoders.observed[2:]))
        os.kill(process, number)
        with pytest.raises(error):
            image.result()
    assert decoders.load(png(1), PREPROCESSING).width == 96


def test_a_process_that_fails_by_itself_is_not_taken_for_one_that_was_killed(decoders):
    with pytest.raises(BadImage):
        decoders._in_process({"name": "a task without its other parts"}, png(1), time.perf_counter())
    assert running(decoders) == []


def test_a_process_that_ended_while_it_was_idle_is_replaced(decoders):
    decoders.load(png(1), PREPROCESSING)
    [process] = running(decoders)
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: "Z" in Path(f"/proc/{process}/stat").read_text())
    assert decoders.load(png(1), PREPROCESSING).width == 96
    assert process not in running(decoders)


def test_signals_to_the_whole_group_do_not_end_a_process_but_close_does(decoders):
    """Ctrl-C in a terminal and systemd send them to all processes, while the service still answers."""
    decoders.load(png(1), PREPROCESSING)
    [process] = running(decoders)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process, number)
    time.sleep(0.2)
    decoders.load(png(1), PREPROCESSING)
    assert running(decoders) == [process]
    decoders.close()
    assert not Path(f"/proc/{process}").exists()


def test_a_memory_budget_lets_one_thread_on_and_holds_back_what_does_not_fit():
    budget, entered = Budget(100), []

    def use(n_bytes):
        with budget.hold(n_bytes):
            entered.append(n_bytes)

    with budget.hold(1000):  # more than there is, but nobody else uses any
        waiting = threading.Thread(target=use, args=(1,))
        waiting.start()
        waiting.join(0.1)
        assert entered == []
    waiting.join(20)
    with budget.hold(60):
        use(40)
    assert entered == [1, 40]


def test_a_budget_lets_as_many_on_as_fit_and_every_thread_at_last(monkeypatch):
    budget, inside, most = Budget(3), [], []

    def use(number):
        for _ in range(20):
            with budget.hold(number % 2 + 1):
                inside.append(number % 2 + 1)
                most.append(sum(inside))
                time.sleep(1e-4)
                inside.remove(number % 2 + 1)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(use, range(16)))
    assert max(most) <= 3
    assert (len(most), budget.waiting) == (320, 0)
    monkeypatch.setattr(decoding, "WAIT_SECONDS", 0.01)
    with budget.hold(3), pytest.raises(Overloaded), budget.hold():
        pass
    with budget.hold(3):
        assert budget.waiting == 0
