"""Indexes on attributes: conditions find the same with and without them, whatever happens to the catalog."""

import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from test_filters import ATTRIBUTES

from hashseek.indexing.catalog import Catalog, attributes
from hashseek.indexing.catalog.conditions import Condition, parse_condition
from hashseek.indexing.catalog.database import Database
from hashseek.indexing.catalog.filters import MAX_CONDITIONS, Filter, make_filter
from hashseek.indexing.collection import CATALOG, Collection, open_or_create
from hashseek.indexing.maintenance import backup
from hashseek.indexing.maintenance.attribute_indexes import choose_attributes
from hashseek.indexing.maintenance.optimize import optimize
from hashseek.indexing.maintenance.repair import Repaired, _mend_file, _mend_rows
from hashseek.indexing.maintenance.restore_in_place import rewind
from hashseek.retrieval.errors import BadCollection, BadConfig
from support.collections import code_collection, new_images, random_codes
from support.models import tiny_checkpoint


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
            assert attributes.is_beyond(db)
        choose_attributes(collection.catalog.path)
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


UNMATCHED = "1 indexes on attributes are missing, were altered, or belong to no name"


def test_an_index_that_is_gone_or_altered_is_noticed_and_made_again(tmp_path):
    with_attributes(tmp_path, [{"a": 1}, {"b": 2}]).close()
    sql(tmp_path / CATALOG, "DROP INDEX images_by_attribute_1")
    with closing(Catalog(tmp_path / CATALOG)) as catalog:
        assert catalog.integrity_problems() == [
            "1 indexes on attributes are missing, were altered, or belong to no name"
        ]
    sql(tmp_path / CATALOG, "DELETE FROM attribute_indexes")
    with closing(Catalog(tmp_path / CATALOG)) as catalog:
        assert catalog.integrity_problems() == [
            UNMATCHED,
            "2 names of attributes have no index, so that no condition on them finds an image",
        ]
    report = Repaired()
    _mend_rows(tmp_path / CATALOG, report)
    assert [done.partition(":")[0] for done in report.done] == ["made the indexes on attributes again"] * 2
    with closing(Catalog(tmp_path / CATALOG)) as catalog:
        assert catalog.integrity_problems() == []
        [(name, made)] = catalog._db._reader.execute(
            "SELECT name, sql FROM sqlite_master WHERE name GLOB 'images_by_attribute_*' AND sql GLOB '*\"a\"*'"
        ).fetchall()
    # An index under its name that holds other images would answer wrongly, and to SQLite it is sound.
    sql(tmp_path / CATALOG, f"DROP INDEX {name}")
    sql(tmp_path / CATALOG, f"{made} AND id > 1")
    with closing(Catalog(tmp_path / CATALOG)) as catalog:
        assert catalog.integrity_problems() == [
            "1 indexes on attributes are missing, were altered, or belong to no name"
        ]
    _mend_rows(tmp_path / CATALOG, Repaired())
    with closing(Catalog(tmp_path / CATALOG)) as catalog:
        assert catalog.integrity_problems() == []
        assert (ask(catalog, "a=1"), ask(catalog, "b=2")) == ([1], [2])


def test_names_as_frequent_as_each_other_keep_their_indexes(tmp_path):
    names = [f"name {i}" for i in range(attributes.MOST + 8)]
    collection = with_attributes(tmp_path, [dict.fromkeys(names, 1), dict.fromkeys(names[::-1], 1)])
    with closing(collection), collection.catalog._db.reading() as db:
        before = db.execute("SELECT id, path FROM attribute_indexes").fetchall()
        choose_attributes(collection.catalog.path)
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


def test_a_long_name_has_no_index_and_is_found_all_the_same(tmp_path):
    long = "n" * attributes.LONGEST
    said = [{"a": 1, long: 5}, {"a": 2, long: 6}, {"a": 3, "in": {long: 5}}, {"a" * (attributes.LONGEST - 4): 1}]
    with closing(with_attributes(tmp_path, said)) as collection:
        assert indexed_names(collection.catalog) == {'$."a"', f'$."{"a" * (attributes.LONGEST - 4)}"'}
        assert ask(collection.catalog, f"{long}=5") == [1]
        assert ask(collection.catalog, f"{long}>=5", "a>=2") == [2]
        assert ask(collection.catalog, f"in.{long}=5") == [3]
        assert ask(collection.catalog, f"{'a' * (attributes.LONGEST - 4)}=1") == [4]
        assert collection.catalog.integrity_problems() == []


@pytest.mark.parametrize("text", ['{"a":NaN}', '{"a":-Infinity}', '{"\\ud800":1}', '{"a":"\\udfff"}'])
def test_what_only_python_takes_for_json_is_emptied(tmp_path, text):
    with_attributes(tmp_path, [{"a": 1}, {"a": 2}, {"a": 3}]).close()
    with closing(Database(tmp_path / CATALOG, read_only=False)) as database, database.transaction() as db:
        attributes.forget(db)
        db.execute("UPDATE images SET attributes = ? WHERE id = 2", (text,))
    report = Repaired()
    _mend_rows(tmp_path / CATALOG, report)
    assert report.done == ["emptied the attributes of 1 images, which could not be read: 2"]
    assert report.left == []
    with closing(Catalog(tmp_path / CATALOG)) as catalog:
        assert (ask(catalog, "a>=0"), catalog.integrity_problems()) == ([1, 3], [])
