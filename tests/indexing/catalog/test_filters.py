"""A filter lets through exactly the images that a plain loop over their records would."""

import json
import operator
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from hashseek.indexing.catalog import NewImage
from hashseek.indexing.catalog.conditions import Condition, parse_condition
from hashseek.indexing.catalog.filters import MAX_CONDITIONS, Filter, make_filter, parse_time
from hashseek.indexing.catalog.records import check_attributes
from hashseek.indexing.collection import Collection
from hashseek.retrieval.errors import BadConfig
from support import hamming_oracle as hamming
from support.collections import ATTRIBUTES, add_with_attributes, code_collection, new_images, random_codes


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """A catalog of one image per entry of ATTRIBUTES; ids from 1."""
    collection = code_collection(tmp_path_factory.mktemp("described"), n_bits=12)
    add_with_attributes(collection, ATTRIBUTES)
    yield collection.catalog
    collection.close()


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("year=2015", [2]),
        ("year>=2015", [2, 3, 4]),
        ("year>2015", [3, 4]),
        ("year<2015", [1]),
        ("year<=2015.5", [1, 2, 4]),
        ('year>="2015"', [3, 5]),
        ('year="2016"', [3]),
        ('year="2015"', []),
        ("year=true", [8]),
        ("year=1", []),
        ("camera=X", [1]),
        ("camera.model=X", [2, 3]),
        (" camera.model = x ", [4]),
        ("title^=ab", [1, 2]),
        ("title^=Ä", [3]),
        ("title^=", [1, 2, 3, 4]),
        ("title=", [4]),
        ("title>abc", [2, 3]),
        ("flag=true", [5, 7]),
        ('flag="true"', [7]),
        ("flag=false", [6]),
        ("flag=1", [8]),
        ("zip=01234", [6, 7]),
        ('zip="01234"', [6]),
        ("zip=1234", [7, 9]),
        ("date>=2015-06-02", [9]),
        ("date<2016", []),
        ('date<"2016"', [8]),
        ("none=1", []),
        ("' OR 1=1", []),
        ("year') OR 1=1 --=x", []),
    ],
)
def test_conditions(described, text, ids):
    assert described.ids_where(make_filter(where=[text])).tolist() == ids


@pytest.mark.parametrize(
    "text", ["", "year", "=2015", "year==2015", "year!=2015", "year=>2015", "year<>1", "a~=b", '"a"=b', "a\0=b"]
)
def test_invalid_conditions_are_refused(text):
    with pytest.raises(BadConfig):
        parse_condition(text)


@pytest.mark.parametrize("text", [" " * 60_000, "a" + " " * 60_000, "a " * 30_000])
def test_long_invalid_conditions_are_refused_in_linear_time(text):  # quadratic: 20 s
    started = time.process_time()
    with pytest.raises(BadConfig):
        parse_condition(text)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("2026-01-31", "2026-01-31T00:00:00Z"),
        ("2026-01-31T15:00:00", "2026-01-31T15:00:00Z"),
        ("2026-01-31 15:00:00+01:00", "2026-01-31T14:00:00Z"),
        ("2026-01-31T23:59:59.5Z", "2026-01-31T23:59:59Z"),
    ],
)
def test_times_are_parsed_to_the_catalogs_format_in_any_time_zone(text, stored, monkeypatch):
    found = {}
    for zone in ("UTC", "JST-9"):
        with monkeypatch.context() as patch:
            patch.setenv("TZ", zone)
            time.tzset()
            found[zone] = parse_time(text)
        time.tzset()
    assert found == {"UTC": stored, "JST-9": stored}


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "1e9", "9999-12-31T23:59:59-10:00"])
def test_invalid_times_are_refused(text):
    with pytest.raises(BadConfig):
        parse_time(text)


@pytest.mark.parametrize("name", ["a\\b", "\\u0061", "a\nb", "é", "$", "[0]", "a'b"])
def test_an_attribute_of_any_name_is_found(tmp_path, name):
    with closing(code_collection(tmp_path / "c", n_bits=16)) as collection:
        add_with_attributes(collection, [{name: "x"}, {"a": "x"}])
        for operator in ("=", "^=", ">="):
            assert collection.catalog.ids_where(Filter(attributes=(Condition(name, operator, "x"),))).tolist() == [1]


def test_large_whole_numbers_are_compared_exactly(tmp_path):
    numbers = [2**63 - 2, 2**63 - 1, 1234567890123456788, 1234567890123456789, 2**53 + 1, -(2**63)]
    with closing(code_collection(tmp_path / "c", n_bits=16)) as collection:
        add_with_attributes(collection, [{"n": n} for n in numbers])
        for image_id, n in enumerate(numbers, start=1):
            assert collection.catalog.ids_where(Filter(attributes=(parse_condition(f"n={n}"),))).tolist() == [image_id]
        above = collection.catalog.ids_where(Filter(attributes=(parse_condition("n>1234567890123456788"),)))
        assert above.tolist() == [1, 2, 4]


def test_attributes_with_a_nul_are_refused():
    for attributes in ({"a": "x\0y"}, {"a\0": 1}, {"a": [{"b": "\0"}]}, {"a": "\\\0"}):
        with pytest.raises(BadConfig):
            check_attributes(attributes)
    assert check_attributes({"a": "\\u0000"}) == r'{"a":"\\u0000"}'


def test_filters_by_id_by_key_and_empty_filters(described):
    assert described.ids_where(Filter(ids=(3, 99, 1, 3, -1, 2**63, 10**40))).tolist() == [1, 3]
    assert described.ids_where(Filter(ids=())).tolist() == []
    assert described.ids_where(Filter(keys=("key/4", "key", "KEY/1", "'"))).tolist() == [5]
    assert described.ids_where(Filter(keys=("key/4\0", "\0"))).tolist() == []
    assert described.ids_by_key(["key/4\0", "\0"]) == {}
    assert described.ids_where(Filter()).tolist() == list(range(1, len(ATTRIBUTES) + 1))
    assert make_filter() is None
    assert make_filter(where=["a=1"] * MAX_CONDITIONS)
    assert make_filter(ids=np.array([3, 1]), no_labels=[]) == Filter(ids=(3, 1))
    assert make_filter(keys=np.array(["a", "b"])) == Filter(keys=("a", "b"))
    refused = [{"all_labels": ["\udcff"]}, {"where": ["a=1"] * (MAX_CONDITIONS + 1)}]
    refused += [{name: "person"} for name in ("all_labels", "any_labels", "no_labels", "where", "keys")]
    refused += [{"all_labels": ["a"] * (MAX_CONDITIONS + 1)}]
    refused += [{name: []} for name in ("any_labels", "ids", "keys")]
    for options in refused:
        with pytest.raises(BadConfig):
            make_filter(**options)


COMPARE = {"=": operator.eq, ">=": operator.ge, "<": operator.lt}


def lets_through(chosen, image):
    """The same in Python, for integer attributes only."""
    labels = set(image.labels)
    return (
        (not chosen.any_labels or bool(labels & set(chosen.any_labels)))
        and labels >= set(chosen.all_labels)
        and not labels & set(chosen.no_labels)
        and all(
            c.path in image.attributes and COMPARE[c.operator](image.attributes[c.path], int(c.value))
            for c in chosen.attributes
        )
        and (chosen.ids is None or image.id in chosen.ids)
        and (chosen.keys is None or image.key in chosen.keys)
        and (chosen.added_after is None or image.added_at >= chosen.added_after)
        and (chosen.added_before is None or image.added_at < chosen.added_before)
    )


@pytest.mark.parametrize("few", [0, 0.05, 1])  # look every condition up, as usual, or test images one by one
def test_random_filters_agree_with_a_loop_and_searches_among_them_with_the_oracle(tmp_path, monkeypatch, few):
    monkeypatch.setattr("hashseek.indexing.catalog.filters._FEW", few)
    rng = np.random.default_rng(7)
    collection = code_collection(tmp_path, n_bits=36)
    truth = {}

    def some(values, n):
        return tuple(rng.choice(values, int(rng.integers(0, n + 1)), replace=False).tolist())

    def add(n, start, day):
        monkeypatch.setattr("hashseek.indexing.catalog.catalog.now", lambda: f"2026-01-{day:02}T00:00:00Z")
        codes = random_codes(rng, n, 36, 5)
        images = [
            replace(
                image,
                labels=some(["a", "b", "c", "rare", "a/b"], 3),
                attributes={} if i % 3 == 0 else {"n": int(rng.integers(5)), "m": i},
                key=f"k{start + i}" if i % 2 else None,
            )
            for i, image in enumerate(new_images(codes, start=start))
        ]
        for (image_id, _), code in zip(collection.add(images), codes, strict=True):
            truth[image_id] = code

    start = 0
    for step in range(6):
        n = int(rng.integers(20, 60))
        add(n, start, step + 1)
        start += n
        gone = rng.choice(sorted(truth), 5, replace=False).tolist()
        collection.remove(gone)
        for image_id in gone:
            del truth[image_id]
        if step == 3:
            collection.save_index()
        images = collection.catalog.page(after=0, limit=10_000)
        query = random_codes(rng, 1, 36)
        filters = [Filter(no_labels=("a",)), Filter(no_labels=("b", "rare")), Filter(no_labels=("unused",))]
        filters += [
            Filter(
                any_labels=some(["a", "rare", "unused", "a/b"], 2),
                all_labels=some(["a", "b"], 1),
                no_labels=some(["b", "c", "unused"], 2),
                attributes=tuple(Condition("n", str(op), "2") for op in some(list(COMPARE), 1)),
                ids=None if rng.random() < 0.8 else some(range(300), 50),
                keys=None if rng.random() < 0.8 else some([f"k{i}" for i in range(300)], 50),
                added_after=None if rng.random() < 0.7 else "2026-01-02T00:00:00Z",
                added_before=None if rng.random() < 0.7 else "2026-01-04T00:00:00Z",
            )
            for _ in range(25)
        ]
        for chosen in filters:
            wanted = [image.id for image in images if lets_through(chosen, image)]
            assert collection.catalog.ids_where(chosen).tolist() == wanted, chosen
            for _ in range(2):  # asked again, the answer is remembered
                [(distances, ids)] = collection.search(query, k=20, among=chosen)
                codes = np.array([truth[i] for i in wanted], np.uint8).reshape(-1, 5)
                expected, at = hamming.search(query, codes, k=min(20, len(wanted))) if wanted else ([[]], [[]])
                assert distances.tolist() == list(expected[0])
                assert ids.tolist() == [wanted[i] for i in at[0]]
    collection.close()


def test_cached_filters_are_invalidated_by_changes_of_any_process(tmp_path):
    collection = code_collection(tmp_path, n_bits=12)
    first, second = new_images(np.zeros((2, 2), np.uint8), labels=("cat",))
    collection.add([first])
    beside, query, cats = Collection(tmp_path), np.zeros((1, 2), np.uint8), Filter(all_labels=("cat",))
    assert collection.search(query, k=9, among=cats)[0][1].tolist() == [1]
    beside.add([second])
    assert collection.search(query, k=9, among=cats)[0][1].tolist() == [1, 2]
    beside.remove([1])
    assert collection.search(query, k=9, among=cats)[0][1].tolist() == [2]
    for n in range(40):  # more filters than are remembered
        assert collection.search(query, k=9, among=Filter(ids=(2, 100 + n)))[0][1].tolist() == [2]
    assert len(collection.index.current().filtered) <= 8
    collection.close()
    beside.close()


def test_filter_options_of_the_commands(own_collection, pictures, hashseek):
    with closing(Collection(own_collection)) as collection:
        code = collection.catalog.code_of(1).code
        made = [
            NewImage(
                f"/{n}.jpg",
                f"{n:064x}",
                1,
                1,
                1,
                "image/jpeg",
                ("made", *(["odd"] if n == 4 else [])),
                code,
                f"k{n}",
                {"n": n},
            )
            for n in range(5)
        ]
        collection.add(made)
    search = ("search", own_collection, pictures / "picture 00.jpg", "-k", 99, "--json", "--device", "cpu")
    for options, keys in (
        (("--label", "made", "--where", "n>=3", "--added-after", "2020-01-01"), {"k3", "k4"}),
        (("--any-label", "made", "--any-label", "none", "--without", "odd"), {"k0", "k1", "k2", "k3"}),
        (("--key", "k2"), {"k2"}),
        (("--added-before", "2020-01-01"), set()),
        (("--added-after", "2200-01-01"), set()),
    ):
        code, out, err = hashseek(*search, *options)
        assert (code, {hit["key"] for hit in json.loads(out)["hits"]}) == (0, keys), err
        if "--key" not in options:
            assert f" {len(keys)} image" in hashseek("index", "remove", own_collection, *options)[2]
    for options in (("--where", "n!=3"), ("--added-after", "soon")):
        code, out, err = hashseek(*search, *options)
        assert (code, out, err.count("\n"), repr(options[1]) in err) == (2, "", 1, True)
    assert hashseek("index", "remove", own_collection, 1, "--key", "k3", "--key", "none")[0] == 2
    assert hashseek("index", "remove", own_collection, 1, "--key", "k3", "--key", "k3")[1].startswith("removed 2;")
    assert hashseek("index", "remove", own_collection, "--key", "k1")[1].startswith("removed 1;")
