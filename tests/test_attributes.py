"""Indexes on attributes: conditions find the same with and without them, whatever happens to the catalog."""

import json
import shutil
import signal
import sqlite3
import time
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest
from conftest import code_collection, new_images, random_codes, tiny_checkpoint, wait_until
from test_filters import ATTRIBUTES

from indexing.catalog import Catalog, attributes
from indexing.catalog.conditions import Condition, parse_condition
from indexing.catalog.database import Database
from indexing.catalog.filters import MAX_CONDITIONS, Filter, make_filter
from indexing.collection import CATALOG, Collection, open_or_create
from indexing.upkeep import attribute_indexes as upkeep
from indexing.upkeep import backup
from indexing.upkeep.optimize import optimize
from indexing.upkeep.repair import Repaired, _mend_file, _mend_rows
from indexing.upkeep.rewind import rewind
from retrieval.errors import BadCollection, BadConfig


def sql(path, *statements):
    db = sqlite3.connect(path)
    with db:
        for statement in statements:
            db.execute(statement)
    db.close()


def with_attributes(folder, each):
    """An open collection of one image per object of attributes; ids from 1."""
    collection = code_collection(folder, n_bits=12)
    images = new_images(random_codes(np.random.default_rng(0), len(each), 12))
    collection.add(
        [
            replace(image, attributes=said, key=f"key/{i}")
            for i, (image, said) in enumerate(zip(images, each, strict=True))
        ]
    )
    return collection


def test_a_catalog_in_which_attributes_were_damaged_is_refused_not_searched_wrongly(tmp_path):
    with_attributes(tmp_path, [{"a": 1}, {"a": 2}]).close()
    with pytest.raises(sqlite3.OperationalError, match="malformed JSON"):  # the index stands in the way
        sql(tmp_path / CATALOG, "UPDATE images SET attributes = '{torn' WHERE id = 1")
    sql(
        tmp_path / CATALOG,
        "DROP INDEX images_by_attribute_1",
        "UPDATE images SET attributes = '{torn' WHERE id = 1",
    )
    remedy = "damaged; save what can be read with `hashseek index verify --repair`"
    with closing(Catalog(tmp_path / CATALOG, read_only=True)) as catalog, pytest.raises(BadCollection, match=remedy):
        catalog.ids_where(make_filter(where=["a=1"]))
    sql(tmp_path / CATALOG, "DELETE FROM attribute_indexes", "INSERT INTO meta VALUES ('attributes_beyond', '')")
    with closing(Catalog(tmp_path / CATALOG, read_only=True)) as catalog, pytest.raises(BadCollection, match="JSON"):
        catalog.ids_where(make_filter(where=["a=1"]))


def indexed_names(catalog):
    with catalog._db.reading() as db:
        return attributes.known_paths(db)


def test_every_name_that_can_be_asked_for_has_an_index_until_there_are_too_many(tmp_path):
    with closing(with_attributes(tmp_path, ATTRIBUTES)) as collection:
        names = {"year", "camera", "title", "camera.model", "flag", "zip", "date"}
        assert indexed_names(collection.catalog) == {
            *(f'$."{name}"' for name in names),
            '$."camera"."model"',
        }
        image = new_images(random_codes(np.random.default_rng(1), 1, 12))[0]
        odd = {'quo"ted': 1, "a.b": {"c": 1}, "list": [1], "none": None, "deep": {"er": {"still": True}}}
        collection.add([replace(image, key="odd", attributes=odd)])
        assert indexed_names(collection.catalog) - {'$."camera"."model"'} == {
            *(f'$."{name}"' for name in names),
            '$."deep"."er"."still"',
        }
        many = {f"n{i}": i for i in range(attributes.MOST)}
        collection.add([replace(image, key="many", attributes=many)])
        assert indexed_names(collection.catalog) is None
        ask = collection.catalog.ids_where
        for i in range(attributes.MOST):  # with an index or without
            assert ask(make_filter(where=[f"n{i}={i}"])).tolist() == [len(ATTRIBUTES) + 2]
        assert ask(make_filter(where=["year>=2015"])).tolist() == [2, 3, 4]
        assert ask(make_filter(where=["nowhere=1"])).tolist() == []
        collection.add([replace(image, sha256="f" * 64, key="more", attributes={f"n{attributes.MOST - 1}": 7})])
        optimize(collection)  # by now the last name has two images, and comes before the others
        with collection.catalog._db.reading() as db:
            names = {row[0] for row in db.execute("SELECT path FROM attribute_indexes")}
        assert names >= {f'$."n{attributes.MOST - 1}"', '$."year"'}
        assert len(names) == attributes.MOST
        assert ask(make_filter(where=["year>=2015"])).tolist() == [2, 3, 4]
        assert collection.catalog.integrity_problems() == []


def test_a_new_name_in_a_large_catalog_gets_its_index_later(tmp_path, monkeypatch):
    with closing(with_attributes(tmp_path, [{"a": i} for i in range(5)])) as collection:
        monkeypatch.setattr(attributes, "AT_ONCE", 5)
        image = new_images(random_codes(np.random.default_rng(1), 1, 12))[0]
        collection.add([replace(image, key="new", attributes={"a": 7, "b": 1})])
        ask = collection.catalog.ids_where
        assert indexed_names(collection.catalog) is None
        assert (ask(make_filter(where=["b=1"])).tolist(), ask(make_filter(where=["a>=4"])).tolist()) == ([6], [5, 6])
        optimize(collection)
        assert indexed_names(collection.catalog) == {'$."a"', '$."b"'}
        assert ask(make_filter(where=["b=1"])).tolist() == [6]


def test_conditions_find_the_same_with_and_without_indexes(tmp_path):
    texts = [
        "a",
        "ab",
        "ab\U0010ffff",
        "ab\U0010ffffz",
        "ac",
        "\ud7ff",
        "\ud7ffx",
        "\ue000",
        "\U0010ffff",
        "é",
        "10",
        "9",
        "1e1",
    ]
    values = [*texts, 9, 10, 10.5, -1, 2**53 + 1, True, False, None, [1], {"n": 1}]
    with closing(with_attributes(tmp_path, [{"n": value} for value in values])) as collection:
        conditions = [
            Condition("n", operator, v) for operator in ("=", "<", "<=", ">", ">=", "^=") for v in (*texts, "")
        ]
        conditions += [Condition("n", operator, v, is_text=True) for operator in ("=", "<", ">=") for v in ("10", "9")]
        conditions += [Condition("n", "=", v) for v in ("true", "false", "null", "9007199254740993")]
        ask = collection.catalog.ids_where
        by_index = [ask(Filter(attributes=(condition,))).tolist() for condition in conditions]
        with collection.catalog._db.transaction() as db:
            attributes.forget(db)
        by_reading = [ask(Filter(attributes=(condition,))).tolist() for condition in conditions]
        assert by_index == by_reading
        begun = [ask(Filter(attributes=(Condition("n", "^=", v),))).tolist() for v in texts]
        assert begun == [[i for i, text in enumerate(texts, start=1) if text.startswith(v)] for v in texts]
        with collection.catalog._db.transaction() as db:
            attributes.rebuild(db)
        assert indexed_names(collection.catalog) == {'$."n"', '$."n"."n"'}
        assert [ask(Filter(attributes=(condition,))).tolist() for condition in conditions] == by_index


def test_indexes_follow_updates_and_removals(tmp_path):
    with closing(with_attributes(tmp_path, [{"n": i} for i in range(5)])) as collection:
        image = new_images(random_codes(np.random.default_rng(1), 1, 12))[0]
        collection.add([replace(image, key="key/3", attributes={"n": 30})])
        collection.remove([5])
        ask = collection.catalog.ids_where
        assert ask(make_filter(where=["n>=3"])).tolist() == [4]
        assert ask(make_filter(where=["n=3"])).tolist() == []
        assert collection.catalog.integrity_problems() == []


def test_a_selective_condition_reads_no_image(tmp_path):
    collection = with_attributes(tmp_path, [{"n": i % 100, "text": f"t{i % 50}"} for i in range(500)])
    with closing(collection), collection.catalog._db.reading() as db:
        asked = []
        db.set_trace_callback(asked.append)
        attributes.ids_with(db, parse_condition("n>=98"))
        attributes.ids_with(db, parse_condition("text^=t4"))
        db.set_trace_callback(None)
        queries = [query for query in asked if "INDEXED BY" in query]
        assert len(queries) == 3  # numbers, texts that spell one, and texts
        for query in queries:
            assert "SEARCH images USING INDEX" in str(db.execute(f"EXPLAIN QUERY PLAN {query}").fetchall())


def ask(catalog, *where):
    return catalog.ids_where(make_filter(where=where)).tolist()


def plain_file(path):
    """The catalog as one file, without a log beside it."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.execute("PRAGMA journal_mode = DELETE")
    db.close()


def test_a_truth_value_in_place_of_a_number_is_an_update(tmp_path):
    with closing(with_attributes(tmp_path, [{"flag": 1}])) as collection:
        image = new_images(random_codes(np.random.default_rng(0), 1, 12))[0]
        assert collection.add([replace(image, key="key/0", attributes={"flag": True})]) == [(1, "updated")]
        assert ask(collection.catalog, "flag=true") == [1]
        assert collection.add([replace(image, key="key/0", attributes={"flag": True})]) == [(1, "known")]


def test_only_what_is_stored_is_indexed(tmp_path):
    with closing(with_attributes(tmp_path, [{}])) as collection:
        image = new_images(random_codes(np.random.default_rng(0), 1, 12))[0]
        again = replace(image, attributes={f"n{i}": i for i in range(40)})
        assert collection.add([again]) == [(1, "known")]
        assert indexed_names(collection.catalog) == set()


def test_damaged_attributes_are_replaced_by_those_that_are_given(tmp_path):
    with_attributes(tmp_path, [{"a": 1}, {"a": 2}]).close()
    with closing(Database(tmp_path / CATALOG, read_only=False)) as database, database.transaction() as db:
        attributes.forget(db)
        db.execute("UPDATE images SET attributes = '{torn' WHERE id = 1")
    with closing(Catalog(tmp_path / CATALOG)) as catalog:
        image = new_images(random_codes(np.random.default_rng(0), 1, 12))[0]
        assert catalog.add([replace(image, key="key/0", attributes={"a": 5})]) == [(1, "updated")]
        assert ask(catalog, "a>=2") == [1, 2]


def test_an_index_that_is_gone_is_noticed_and_made_again(tmp_path):
    with_attributes(tmp_path, [{"a": 1}, {"b": 2}]).close()
    sql(tmp_path / CATALOG, "DROP INDEX images_by_attribute_1")
    with closing(Catalog(tmp_path / CATALOG)) as catalog:
        assert catalog.integrity_problems() == ["1 indexes on attributes are missing, or belong to no name"]
    sql(tmp_path / CATALOG, "DELETE FROM attribute_indexes")
    with closing(Catalog(tmp_path / CATALOG)) as catalog:
        assert catalog.integrity_problems() == [
            "1 indexes on attributes are missing, or belong to no name",
            "2 names of attributes have no index, so that no condition on them finds an image",
        ]
    report = Repaired()
    _mend_rows(tmp_path / CATALOG, report)
    assert [done.partition(":")[0] for done in report.done] == ["made the indexes on attributes again"] * 2
    with closing(Catalog(tmp_path / CATALOG)) as catalog:
        assert catalog.integrity_problems() == []
        assert (ask(catalog, "a=1"), ask(catalog, "b=2")) == ([1], [2])


def test_names_as_frequent_as_each_other_keep_their_indexes(tmp_path):
    names = [f"name {i}" for i in range(attributes.MOST + 8)]
    collection = with_attributes(tmp_path, [dict.fromkeys(names, 1), dict.fromkeys(names[::-1], 1)])
    with closing(collection), collection.catalog._db.transaction() as db:
        before = db.execute("SELECT id, path FROM attribute_indexes").fetchall()
        attributes.rebuild(db)
        assert db.execute("SELECT id, path FROM attribute_indexes").fetchall() == before
        assert attributes.is_beyond(db)


@pytest.mark.parametrize("has_indexes", [True, False])
def test_attributes_that_are_no_text_are_emptied_and_the_rest_is_kept(tmp_path, has_indexes):
    collection = with_attributes(tmp_path, [{"a": f"xyzq{i}"} for i in range(5)])
    if not has_indexes:
        with collection.catalog._db.transaction() as db:
            attributes.forget(db)
    collection.close()
    path = tmp_path / CATALOG
    plain_file(path)
    content = path.read_bytes()
    assert b'{"a":"xyzq2"' in content
    path.write_bytes(content.replace(b'{"a":"xyzq2"', b'{"a":"xy\xe9q2"'))
    report = Repaired()
    _mend_file(path, report)
    _mend_rows(path, report)
    assert report.done
    with closing(Catalog(path)) as catalog:
        assert catalog.integrity_problems() == []
        assert ask(catalog, "a^=xyzq") == [1, 2, 4, 5]
        assert indexed_names(catalog) == {'$."a"'}
        assert len(catalog.page(after=0, limit=9)) == 5


def test_a_lost_page_of_names_of_indexes_costs_no_image(tmp_path):
    with_attributes(tmp_path, [{f"name {j:02}": j for j in range(attributes.MOST)} for _ in range(50)]).close()
    path = tmp_path / CATALOG
    plain_file(path)
    content = bytearray(path.read_bytes())
    pages = [content[start : start + 4096] for start in range(0, len(content), 4096)]
    of_indexes = [
        number for number, page in enumerate(pages) if number and page.count(b"CREATE INDEX images_by_attribute_") > 5
    ]
    assert b"CREATE TABLE" not in pages[of_indexes[-1]]
    content[4096 * of_indexes[-1] : 4096 * (of_indexes[-1] + 1)] = bytes(4096)
    path.write_bytes(content)
    report = Repaired()
    _mend_file(path, report)
    _mend_rows(path, report)
    with closing(Catalog(path)) as catalog:
        assert len(catalog) == 50
        assert catalog.integrity_problems() == []
        assert ask(catalog, "name 31=31") == list(range(1, 51))


def kept_image(key, said):
    image = new_images(random_codes(np.random.default_rng(0), 1, 12), start=int(key))[0]
    return replace(image, key=key, attributes=said)


def test_a_snapshot_with_other_names_is_searched_by_them(tmp_path):
    model = tiny_checkpoint(tmp_path / "model.safetensors", n_bits=12, seed=1)
    with closing(open_or_create(tmp_path / "a", checkpoint=model)) as collection:
        collection.add([kept_image("0", {"a": 1})])
        backup.snapshot(collection, tmp_path / "first.tar")
    backup.restore(tmp_path / "first.tar", tmp_path / "b")
    with closing(Collection(tmp_path / "b")) as collection:
        collection.add([kept_image("0", {"year": 2015}), kept_image("1", {f"n{i}": i for i in range(40)})])
        backup.snapshot(collection, tmp_path / "second.tar")
    rewind(tmp_path / "second.tar", tmp_path / "a")
    with closing(Catalog(tmp_path / "a" / CATALOG, read_only=True)) as catalog:
        assert (ask(catalog, "year=2015"), ask(catalog, "n39=39"), ask(catalog, "a=1")) == ([1], [2], [])
        assert catalog.integrity_problems() == []
    rewind(tmp_path / "first.tar", tmp_path / "a")
    with closing(Catalog(tmp_path / "a" / CATALOG, read_only=True)) as catalog:
        assert (ask(catalog, "year=2015"), ask(catalog, "a=1")) == ([], [1])
        assert indexed_names(catalog) == {'$."a"'}


@pytest.mark.parametrize("said", [{None: "x"}, {True: 1}, {"a": {1: 2}}, {"a": [{2.5: 1}]}])
def test_names_that_are_no_text_are_refused(tmp_path, said):
    with closing(code_collection(tmp_path, n_bits=12)) as collection, pytest.raises(BadConfig, match="are texts"):
        collection.add([replace(new_images(random_codes(np.random.default_rng(0), 1, 12))[0], attributes=said)])


def test_too_many_conditions_are_refused():
    assert make_filter(where=["a=1"] * MAX_CONDITIONS)
    with pytest.raises(BadConfig, match="at most 64 conditions on attributes, not 65"):
        make_filter(where=["a=1"] * (MAX_CONDITIONS + 1))


def test_a_process_of_an_older_hashseek_stores_nothing_after_the_catalog_was_brought_up_to_date(tmp_path):
    with closing(with_attributes(tmp_path, [{"a": 1}])) as collection:
        sql(tmp_path / CATALOG, "PRAGMA user_version = 99")
        with pytest.raises(BadCollection, match="was brought to catalog version 99 since it was opened"):
            collection.add(new_images(random_codes(np.random.default_rng(1), 1, 12)))


def test_a_large_catalog_of_the_second_version_is_opened_without_reading_all_of_it(tmp_path, monkeypatch):
    collection = with_attributes(tmp_path, [{"a": i} for i in range(9)])
    with closing(collection), collection.catalog._db.transaction() as db:
        attributes.forget(db)
        db.execute("DROP TABLE attribute_indexes")
        db.execute("DROP INDEX images_by_added_at")
        db.execute("DELETE FROM meta WHERE key = 'attributes_beyond'")
        db.execute("PRAGMA user_version = 2")
    monkeypatch.setattr(attributes, "AT_ONCE", 9)
    with closing(Catalog(tmp_path / CATALOG)) as catalog:
        assert indexed_names(catalog) is None
        assert ask(catalog, "a>=7") == [8, 9]


# ---------------------------------------------------------------- choosing anew, one index after the other

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
from indexing.catalog.database import Database
from indexing.upkeep.attribute_indexes import choose_attributes
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
import indexing.catalog.database
indexing.catalog.database.BUSY_SECONDS = 4
indexing.catalog.attributes.AT_ONCE = 5
from indexing.catalog import Catalog, NewImage
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
from indexing.upkeep.attribute_indexes import choose_attributes
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
