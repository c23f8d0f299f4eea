"""Decoding and encoding take turns: never both at once, and neither waits for ever."""

import threading
import time

from hashseek.retrieval.decode_encode_lock import DecodeEncodeLock


def test_no_thread_decodes_while_one_encodes_and_every_thread_gets_a_turn():
    turns = DecodeEncodeLock()
    state = {"decoding": 0, "encoding": 0, "most": 0, "decoded": 0, "encoded": 0}
    lock, wrong = threading.Lock(), []

    def enter(kind, change):
        with lock:
            state[kind] += change
            state["most"] = max(state["most"], state["decoding"])
            if state["encoding"] and (state["decoding"] or state["encoding"] > 1):
                wrong.append(dict(state))

    def work(kind, turn, n):
        for _ in range(n):
            with turn():
                enter(kind, 1)
                time.sleep(0.0005)
                enter(kind, -1)
        with lock:
            state[kind.replace("ing", "ed")] += n

    threads = [threading.Thread(target=work, args=("decoding", turns.decoding, 60), daemon=True) for _ in range(4)]
    threads += [threading.Thread(target=work, args=("encoding", turns.encoding, 30), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert (state["decoded"], state["encoded"]) == (240, 60)
    assert state["most"] > 1  # several decode at once


def test_a_turn_ends_where_an_error_does():
    turns = DecodeEncodeLock()
    for turn in (turns.decoding, turns.encoding):
        try:
            with turn():
                raise OSError
        except OSError:
            pass
    with turns.encoding():
        pass
    with turns.decoding():
        pass
