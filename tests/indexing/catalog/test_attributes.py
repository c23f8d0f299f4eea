"""Indexes on attributes: filters find the same with and without them, whatever happens to the catalog."""

import re
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from hashseek.indexing.catalog import attributes
from hashseek.indexing.catalog.conditions import Condition, parse_condition
from hashseek.indexing.catalog.filters import Filter, make_filter
from support.collections import ATTRIBUTES, add_with_attributes, code_collection, new_images, random_codes


def with_attributes(folder, each):
    """An open collection of one image per object of attributes; ids from 1."""
    collection = code_collection(folder, n_bits=12)
    add_with_attributes(collection, each)
    return collection


@pytest.fixture
def image():
    return new_images(random_codes(np.random.default_rng(1), 1, 12), start=1000)[0]


def ask(catalog, *where):
    return catalog.ids_where(make_filter(where=where)).tolist()


def indexed(catalog):
    with catalog._db.reading() as db:
        return set(attributes.indexed_paths(db))


def test_names_that_a_condition_can_name_are_indexed_until_there_are_too_many(tmp_path, image):
    with closing(with_attributes(tmp_path, ATTRIBUTES)) as collection:
        names = {"year", "camera", "title", "camera.model", "flag", "zip", "date"}
        first = {*(f'$."{name}"' for name in names), '$."camera"."model"'}
        assert indexed(collection.catalog) == first
        odd = {'quo"ted': 1, "a.b": {"c": 1}, "list": [1], "none": None, "deep": {"er": {"still": True}}}
        collection.add([replace(image, key="odd", attributes=odd)])
        assert indexed(collection.catalog) - first == {'$."deep"."er"."still"'}
        many = {f"n{i}": i for i in range(attributes.MAX_INDEXED)}
        collection.add([replace(image, key="many", attributes=many)])
        assert len(indexed(collection.catalog)) == attributes.MAX_INDEXED
        for i in range(attributes.MAX_INDEXED):  # with an index or without
            assert ask(collection.catalog, f"n{i}={i}") == [len(ATTRIBUTES) + 2]
        assert ask(collection.catalog, "year>=2015") == [2, 3, 4]
        assert ask(collection.catalog, "nowhere=1") == []
        assert collection.catalog.verify() == ([], True)


def test_conditions_find_the_same_with_and_without_indexes(tmp_path, monkeypatch):
    texts = ["a", "ab", "ab\U0010fffe", "ab\ud7ff", "ac", "\ud7ff", "\ud7ffx", "\ue000", "\U0010fffe", "é"]
    texts += ["10", "9", "1e1"]
    values = [*texts, 9, 10, 10.5, -1, 2**53 + 1, True, False, None, [1], {"n": 1}]
    conditions = [Condition("n", operator, v) for operator in ("=", "<", "<=", ">", ">=", "^=") for v in (*texts, "")]
    conditions += [Condition("n", operator, v, is_text=True) for operator in ("=", "<", ">=") for v in ("10", "9")]
    conditions += [Condition("n", "=", v) for v in ("true", "false", "null", "9007199254740993")]

    def answers(folder):
        with closing(with_attributes(folder, [{"n": value} for value in values])) as collection:
            found = [collection.catalog.ids_where(Filter(attributes=(c,))).tolist() for c in conditions]
            return found, indexed(collection.catalog)

    by_index, names = answers(tmp_path / "a")
    assert names == {'$."n"', '$."n"."n"'}
    monkeypatch.setattr(attributes, "MAX_INDEXED", 0)
    monkeypatch.setattr("hashseek.indexing.catalog.storing.MAX_INDEXED", 0)
    assert answers(tmp_path / "b") == (by_index, set())
    for condition, found in zip(conditions, by_index, strict=True):
        if condition.operator == "^=":
            assert found == [i for i, text in enumerate(texts, start=1) if text.startswith(condition.value)]


def test_indexes_follow_updates_and_removals_and_know_only_what_is_stored(tmp_path, image):
    with closing(with_attributes(tmp_path, [{"n": i} for i in range(5)])) as collection:
        collection.add([replace(image, key="key/3", attributes={"n": 30})])
        collection.remove([5])
        assert ask(collection.catalog, "n>=3") == [4]
        assert ask(collection.catalog, "n=3") == []
        known = replace(image, attributes={"not": "stored"})
        assert collection.add([known]) == [(4, "known")]
        assert indexed(collection.catalog) == {'$."n"'}
        # true in place of 1 is another value
        assert collection.add([replace(image, key="key/1", attributes={"n": True})]) == [(2, "updated")]
        assert ask(collection.catalog, "n=true") == [2]
        assert collection.catalog.verify() == ([], True)


def test_a_selective_condition_reads_no_image(tmp_path):
    collection = with_attributes(tmp_path, [{"n": i % 100, "text": f"t{i % 50}"} for i in range(500)])
    with closing(collection), collection.catalog._db.reading() as db:
        asked = []
        db.set_trace_callback(asked.append)
        attributes.ids_with(db, parse_condition("n>=98"))
        attributes.ids_with(db, parse_condition("text^=t4"))
        db.set_trace_callback(None)
        queries = [query for query in asked if "INDEXED BY" in query]
        assert len(queries) == 3  # numbers, strings that spell one, and strings
        for query in queries:
            plan = str(db.execute(f"EXPLAIN QUERY PLAN {query}").fetchall())
            assert re.search("SEARCH images USING (COVERING )?INDEX", plan)
