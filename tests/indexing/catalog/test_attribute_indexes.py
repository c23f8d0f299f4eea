"""Choosing which names of attributes have an index, while others read, write, verify and die."""

import json
import shutil
import signal
import time
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest
from test_attributes import ask, kept_image, sql, with_attributes

from hashseek.indexing.catalog import Catalog, attributes
from hashseek.indexing.catalog.database import Database, DiskFull
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.indexing.maintenance import attribute_indexes as upkeep
from hashseek.indexing.maintenance import backup
from hashseek.indexing.maintenance.optimize import optimize
from hashseek.indexing.maintenance.repair import Repaired, _mend_rows
from hashseek.indexing.maintenance.restore_in_place import rewind
from support.collections import new_images, random_codes
from support.commands import wait_until

# Two of its names have an index, `gone` has one that no image needs, and two names have none.
SAID = [{"kept": i % 3, "also": f"t{i % 2}", "late": i % 4, "later": {"still": f"s{i % 5}"}} for i in range(20)]
OF_SAID = {'$."kept"', '$."also"', '$."late"', '$."later"."still"'}
ASKED = {
    "kept=1": [i for i in range(1, 21) if (i - 1) % 3 == 1],
    "also=t1": [i for i in range(1, 21) if (i - 1) % 2 == 1],
    "late>=2": [i for i in range(1, 21) if (i - 1) % 4 >= 2],
    "later.still=s3": [i for i in range(1, 21) if (i - 1) % 5 == 3],
    "gone=1": [],
}


def half_indexed(folder):
    """A catalog of which `optimize` has to drop an index and to make two."""
    collection = with_attributes(folder, [{**dict.fromkeys(("kept", "also"), 0), "gone": 1}] * len(SAID))
    with closing(collection), collection.catalog._db.transaction() as db:
        attributes._set_beyond(db)
        db.executemany(
            "UPDATE images SET attributes = ? WHERE id = ?",
            [(json.dumps(said, separators=(",", ":")), i) for i, said in enumerate(SAID, start=1)],
        )
    return folder / CATALOG


def wrong_with(catalog):
    """What a catalog of `half_indexed` answers wrongly, and what `verify` finds."""
    answers = {condition: [i for i in ask(catalog, condition) if i <= len(SAID)] for condition in ASKED}
    return [f"{name} finds {answers[name]}" for name, ids in ASKED.items() if answers[name] != ids] + [
        *catalog.integrity_problems()
    ]


def noted_names(catalog):
    with catalog._db.snapshot() as db:
        return attributes._indexed(db), attributes.is_beyond(db)


def test_every_state_between_two_steps_is_answered_by_readers_and_kept_by_writers(tmp_path, monkeypatch):
    path, states = half_indexed(tmp_path), []
    image = new_images(random_codes(np.random.default_rng(1), 1, 12))[0]
    original = upkeep._step
    with closing(Catalog(path, read_only=True)) as reader, closing(Catalog(path)) as writer:

        @contextmanager
        def step(database):
            with original(database) as db:
                yield db
            number = 100 + len(states)
            said = {"late": 9, f"new {number}": number, "gone": 1} if len(states) < 4 else {"late": 9}
            [(i, _)] = writer.add([replace(image, sha256=f"{number:064x}", key=f"{number}", attributes=said)])
            assert i in ask(reader, "late=9")
            assert len(states) >= 4 or ask(reader, f"new {number}={number}") == [i]
            assert wrong_with(reader) == []
            states.append(noted_names(reader))

        monkeypatch.setattr(upkeep, "_step", step)
        monkeypatch.setattr(attributes, "AT_ONCE", 5)
        upkeep.choose_attributes(path)
        assert len(states) >= 8  # one dropped and two made, then `gone` and four names that came meanwhile
        assert all(is_beyond for _, is_beyond in states)
        assert [len(names) for names, _ in states[:3]] == [2, 3, 4]
        assert noted_names(reader) == (OF_SAID | {'$."gone"', *(f'$."new {100 + i}"' for i in range(4))}, False)
        assert wrong_with(reader) == []
        assert ask(reader, "gone=1") == ask(writer, "gone=1") == [21, 22, 23, 24]


@pytest.mark.parametrize("committed", [False, True])
def test_choosing_can_be_killed_at_every_step(tmp_path, start, committed):
    whole = half_indexed(tmp_path / "whole").parent
    (whole / "checkpoint.safetensors").write_bytes(b"weights")
    n_killed, seen = 0, set()
    while True:
        folder = shutil.copytree(whole, tmp_path / f"{n_killed}", ignore=shutil.ignore_patterns("*-wal", "*-shm"))
        path = folder / CATALOG
        process = start(
            before=f"""
from contextlib import contextmanager
from pathlib import Path
from hashseek.indexing.catalog.database import Database, DiskFull
from hashseek.indexing.maintenance.attribute_indexes import choose_attributes
original, n_steps = Database.transaction, 0
@contextmanager
def transaction(self):
    global n_steps
    with original(self) as db:
        yield db
        if n_steps == {n_killed} and not {committed}: os.kill(os.getpid(), signal.SIGKILL)
    if n_steps == {n_killed}: os.kill(os.getpid(), signal.SIGKILL)
    n_steps += 1
Database.transaction = transaction
choose_attributes(Path({str(path)!r}))
sys.exit()
"""
        )
        code = process.wait()
        with closing(Collection(folder)) as collection:
            assert wrong_with(collection.catalog) == []
            names, is_beyond = noted_names(collection.catalog)
            assert is_beyond or names == OF_SAID
            seen.add((len(names), is_beyond))
            backup.snapshot(collection, folder / "s.tar")
            backup.restore(folder / "s.tar", folder / "restored")
            with closing(Catalog(folder / "restored" / CATALOG)) as restored:
                assert (wrong_with(restored), noted_names(restored)) == ([], (names, is_beyond))
            collection.add([replace(kept_image("50", {"kept": 1, "brought": 1}), key="new")])
            assert ask(collection.catalog, "brought=1") == [len(SAID) + 1]
            upkeep.choose_attributes(path)
            assert wrong_with(collection.catalog) == []
            assert noted_names(collection.catalog) == (OF_SAID | {'$."brought"'}, False)
        if code == 0:
            break
        assert code == -signal.SIGKILL, process.err
        n_killed += 1
    assert n_killed == 7  # a mark, one dropped, two made, not yet sure; a mark again, and sure
    assert seen == {(3, True), (2, True), (4, True), (4, False)}


def test_another_process_adds_while_indexes_are_made(tmp_path, start, monkeypatch):
    """Each index takes a fifth of what the other is willing to wait, all together take longer than that."""
    path = with_attributes(tmp_path / "c", [{f"n{j}": i for j in range(8)} for i in range(9)]).catalog.path
    with closing(Database(path, read_only=False)) as database, database.transaction() as db:
        attributes.forget(db)
    other = start(
        before=f"""
import time
from dataclasses import replace
from pathlib import Path
import hashseek.indexing.catalog.database
hashseek.indexing.catalog.database.BUSY_SECONDS = 4
hashseek.indexing.catalog.attributes.AT_ONCE = 5
from hashseek.indexing.catalog import Catalog, NewImage
catalog, place = Catalog(Path({str(path)!r})), Path({str(tmp_path)!r})
for i in range(10**6):
    if (place / "enough").exists(): break
    image = NewImage("/x", f"{{10**6 + i:064x}}", 1, 1, 1, "image/png", (), numpy.zeros(2, numpy.uint8))
    catalog.add([replace(image, key=f"other {{i}}", attributes={{"n0": 1000 + i, "n7": i}})])
    if i == 0: (place / "begun").touch()
    time.sleep(0.01)
print(i)
sys.exit()
"""
    )
    original = attributes.make

    def slow(db, name):
        original(db, name)
        time.sleep(0.8)

    monkeypatch.setattr(attributes, "AT_ONCE", 5)
    monkeypatch.setattr(attributes, "make", slow)
    wait_until((tmp_path / "begun").exists)
    with closing(Catalog(path, read_only=True)) as catalog:
        upkeep.choose_attributes(path)
        (tmp_path / "enough").touch()
        assert other.wait() == 0, other.err
        n_added = int(other.out)
        assert n_added > 20
        assert noted_names(catalog) == ({f'$."n{j}"' for j in range(8)}, False)
        assert ask(catalog, "n0>=1000") == list(range(10, 10 + n_added))
        assert catalog.integrity_problems() == []


@pytest.mark.parametrize("how", ["added", "updated"])
@pytest.mark.parametrize("name", ["unheard", "gone"])
def test_a_name_that_comes_after_names_were_counted_is_not_forgotten(tmp_path, monkeypatch, how, name):
    monkeypatch.setattr(attributes, "AT_ONCE", 5)
    path, n_counts, original = half_indexed(tmp_path), [], attributes.count_names
    with closing(Catalog(path)) as other:

        def count(db):
            counts = original(db)
            n_counts.append(len(counts))
            if len(n_counts) == 1:  # while names are counted nobody is kept waiting
                key = "key/0" if how == "updated" else "new"
                image = replace(kept_image("0" if how == "updated" else "50", {"kept": 0, name: 7}), key=key)
                assert other.add([image])[0][1] == how
            return counts

        monkeypatch.setattr(attributes, "count_names", count)
        upkeep.choose_attributes(path)
        monkeypatch.setattr(attributes, "count_names", original)
        assert ask(other, f"{name}=7") == ([1] if how == "updated" else [21])
        assert noted_names(other) == (OF_SAID | {f'$."{name}"'}, False)
        assert n_counts[:2] == [4, 5]
        assert other.integrity_problems() == []


def test_names_that_never_stop_coming_leave_it_to_the_next_time(tmp_path, monkeypatch):
    monkeypatch.setattr(attributes, "AT_ONCE", 5)
    path, n_counts, original = half_indexed(tmp_path), [], attributes.count_names
    with closing(Catalog(path)) as other:

        def count(db):
            counts = original(db)
            n_counts.append(len(counts))
            other.add([kept_image(f"{50 + len(n_counts)}", {f"name {len(n_counts)}": 1})])
            return counts

        with monkeypatch.context() as patch:
            patch.setattr(attributes, "count_names", count)
            upkeep.choose_attributes(path)
        assert noted_names(other)[1]
        assert [ask(other, f"name {i}=1") for i in range(1, 7)] == [[21], [22], [23], [24], [25], []]
        assert len(n_counts) == 5
        upkeep.choose_attributes(path)
        assert noted_names(other) == (OF_SAID | {f'$."name {i}"' for i in range(1, 6)}, False)


def test_two_who_choose_at_once_agree_in_the_end(tmp_path, start):
    path = half_indexed(tmp_path / "c")
    choose = f"""
from pathlib import Path
from hashseek.indexing.maintenance.attribute_indexes import choose_attributes
choose_attributes(Path({str(path)!r}))
sys.exit()
"""
    processes = [start(before=choose) for _ in range(3)]
    assert [process.wait() for process in processes] == [0] * 3, [process.err for process in processes]
    with closing(Catalog(path)) as catalog:
        assert wrong_with(catalog) == []
        names, is_beyond = noted_names(catalog)
        assert is_beyond or names == OF_SAID


def test_choosing_drops_only_what_is_not_wanted_and_keeps_what_is(tmp_path):
    path = half_indexed(tmp_path)
    with closing(Catalog(path)) as catalog, catalog._db.reading() as db:
        before = dict(db.execute("SELECT path, id FROM attribute_indexes"))
    upkeep.choose_attributes(path)
    with closing(Catalog(path)) as catalog, catalog._db.reading() as db:
        after = dict(db.execute("SELECT path, id FROM attribute_indexes"))
        assert {name: number for name, number in after.items() if name in before} == {
            name: number for name, number in before.items() if name != '$."gone"'
        }


def test_choosing_makes_again_what_is_noted_and_not_there_and_drops_what_is_there_and_not_noted(tmp_path):
    path = half_indexed(tmp_path)
    sql(path, "DROP INDEX images_by_attribute_1", "DELETE FROM attribute_indexes WHERE id = 2")
    upkeep.choose_attributes(path)
    with closing(Catalog(path)) as catalog:
        assert wrong_with(catalog) == []
        assert noted_names(catalog) == (OF_SAID, False)


def test_damaged_attributes_lose_their_indexes_until_they_are_mended(tmp_path):
    path = half_indexed(tmp_path)
    sql(
        path,
        *(f"DROP INDEX images_by_attribute_{i}" for i in (1, 2, 3)),
        "UPDATE images SET attributes = '{' WHERE id = 2",
    )
    upkeep.choose_attributes(path)
    with closing(Catalog(path)) as catalog:
        assert noted_names(catalog) == (set(), True)
        catalog.remove([2])
    upkeep.choose_attributes(path)
    with closing(Catalog(path)) as catalog:
        assert noted_names(catalog) == (OF_SAID, False)


def test_that_all_names_have_an_index_is_noted_only_where_it_is_sure(tmp_path):
    path = half_indexed(tmp_path)
    upkeep.choose_attributes(path)
    with closing(Database(path, read_only=False)) as database, database.transaction() as db:
        assert attributes.watch(db) is None
        attributes._set_beyond(db)
        mark = attributes.watch(db)
        assert not attributes.settle(db, "of another", OF_SAID)
        assert not attributes.settle(db, mark, {*OF_SAID, '$."one more"'})
        number = attributes.index_of(db, '$."kept"')
        db.execute(f"DROP INDEX images_by_attribute_{number}")
        assert not attributes.settle(db, mark, OF_SAID)
        db.execute(f"CREATE INDEX images_by_attribute_{number} ON images(id)")
        assert not attributes.settle(db, mark, OF_SAID)
        db.execute(f"DROP INDEX images_by_attribute_{number}")
        db.execute(attributes._statement(number, '$."kept"'))
        assert attributes.settle(db, mark, OF_SAID)
        assert not attributes.is_beyond(db)


def test_verify_compares_what_belongs_to_one_moment(tmp_path, monkeypatch):
    path, original = half_indexed(tmp_path), attributes._noted

    def noted(db):
        names = original(db)
        monkeypatch.setattr(attributes, "_noted", original)
        upkeep.choose_attributes(path)  # between what is noted and what is made
        return names

    monkeypatch.setattr(attributes, "_noted", noted)
    with closing(Catalog(path, read_only=True)) as catalog:
        assert catalog.integrity_problems() == []
        assert noted_names(catalog) == (OF_SAID, False)


def out_of_room(path):
    raise DiskFull(f"{path} has no room")


def test_repair_says_what_it_emptied_though_no_index_can_be_made(tmp_path, monkeypatch):
    with_attributes(tmp_path, [{"a": 1}, {"a": 2}]).close()
    with closing(Database(tmp_path / CATALOG, read_only=False)) as database, database.transaction() as db:
        attributes.forget(db)
        db.execute("UPDATE images SET attributes = '{torn' WHERE id = 2")
    monkeypatch.setattr(upkeep, "choose_attributes", out_of_room)
    report = Repaired()
    _mend_rows(tmp_path / CATALOG, report)
    assert report.done == ["emptied the attributes of 1 images, which could not be read: 2"]
    assert [left.partition(" (")[0] for left in report.left] == [
        "some attributes may have no index, so that conditions on them are slow"
    ]
    with closing(Catalog(tmp_path / CATALOG)) as catalog:
        assert (ask(catalog, "a>=0"), catalog.integrity_problems()) == ([1], [])


def test_a_restored_collection_is_complete_though_no_index_can_be_made(tmp_path, monkeypatch, caplog):
    with closing(with_attributes(tmp_path / "c", [{"a": 1}, {"a": 2}])) as collection:
        backup.snapshot(collection, tmp_path / "snapshot.tar")
        collection.remove([1])
        collection.save_index()
    monkeypatch.setattr(upkeep, "choose_attributes", out_of_room)
    rewind(tmp_path / "snapshot.tar", tmp_path / "c")
    assert "`hashseek index optimize` makes them" in caplog.text
    with closing(Collection(tmp_path / "c")) as collection:
        assert ask(collection.catalog, "a>=0") == [1, 2]
        assert not [problem for problem in collection.verify() if "index" in problem]
    assert (tmp_path / "c" / "index" / "manifest.json").exists()


def test_of_names_without_end_the_first_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(attributes, "_MOST_COUNTED", 50)
    said = [{f"n{i}-{j}": j for j in range(20)} | {"common": i} for i in range(20)]
    with closing(with_attributes(tmp_path, said)) as collection:
        with collection.catalog._db.reading() as db:
            counts = attributes.count_names(db)
        assert len(counts) < 50 + 21
        assert counts['$."common"'] == 20
        optimize(collection)
        assert '$."common"' in noted_names(collection.catalog)[0]
        assert ask(collection.catalog, "n19-3=3") == [20]
        assert collection.catalog.integrity_problems() == []
