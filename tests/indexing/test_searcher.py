"""The searcher: an image in, hits out."""

from contextlib import closing

import pytest

from hashseek.indexing.collection import Collection
from hashseek.indexing.ingest.batch import ImageSource, ingest
from hashseek.indexing.searcher import Searcher, SearchOptions
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadConfig, BadImage, ForeignCodes, UnknownImage
from hashseek.retrieval.images import decode
from support.pictures import draw, labels_of


@pytest.fixture(scope="module")
def searcher(indexed):
    collection = Collection(indexed, read_only=True)
    yield Searcher.open(collection, device="cpu")
    collection.close()


def test_every_stored_picture_finds_itself_first_with_its_record(searcher, pictures):
    files = sorted(path for path in pictures.rglob("*") if path.is_file())
    for file in files:
        picture = decode(file.read_bytes(), at_least=searcher.image_encoder.preprocessing.shorter_side)
        answer = searcher.search(picture.image, SearchOptions(k=len(files), rank="hamming"))
        assert [hit.rank for hit in answer.hits] == list(range(1, len(files) + 1))
        assert [(h.distance, h.image.id) for h in answer.hits] == sorted((h.distance, h.image.id) for h in answer.hits)
        own = next(hit for hit in answer.hits if hit.image.path == str(file))
        assert own.distance == 0
        assert set(own.image.labels) == set(labels_of(file))


def test_a_large_jpeg_finds_itself_at_distance_0(own_collection, tmp_path):
    """Indexing decodes no more pixels than it needs; a search has to do the same."""
    noise = draw(50, (1500, 1100))
    noise.paste(draw(51, (900, 600)).effect_spread(40), (200, 200))
    file = tmp_path / "large.jpg"
    noise.save(file, quality=60)
    with closing(Collection(own_collection)) as collection:
        searcher = Searcher.open(collection, device="cpu")
        [report] = ingest(collection, searcher.encoder, [ImageSource(file)])
        assert report.added == 1
        picture = decode(file.read_bytes(), at_least=searcher.image_encoder.preprocessing.shorter_side)
        answer = searcher.search(picture.image, SearchOptions(k=1))
        assert (answer.hits[0].distance, answer.hits[0].image.path) == (0, str(file))


def test_similar_gives_the_image_itself_first_and_refuses_unknown_ids(searcher):
    assert searcher.similar(5, SearchOptions(k=1)).hits[0].image.id == 5
    for image_id in (0, -1, 99, 2**63, 2**200):
        with pytest.raises(UnknownImage, match=str(image_id)):
            searcher.similar(image_id, SearchOptions(k=1))


def test_max_distance_limits_the_hits(searcher):
    everything = searcher.similar(3, SearchOptions(k=100)).hits
    for limit in (0, everything[4].distance, 48):
        hits = searcher.similar(3, SearchOptions(k=100, max_distance=limit)).hits
        assert [hit.image.id for hit in hits] == [hit.image.id for hit in everything if hit.distance <= limit]


def test_options_outside_their_limits_are_refused():
    for options in ({"k": 0}, {"k": -3}, {"max_distance": -1}, {"max_distance": 5, "min_precision": 0.7}):
        with pytest.raises(BadConfig):
            SearchOptions(**options)


def test_a_broken_picture_is_refused_by_name(searcher):
    with pytest.raises(BadImage, match=r"^cat\.jpg "):
        searcher.encode_file(b"text", name="cat.jpg")


def test_an_encoder_of_another_checkpoint_is_refused(indexed, other_checkpoint):
    with closing(Collection(indexed, read_only=True)) as collection:
        fingerprints = f"{collection.fingerprint[:12]}.*{load_header(other_checkpoint).fingerprint[:12]}"
        with pytest.raises(ForeignCodes, match=fingerprints):
            Searcher.open(collection, checkpoint=other_checkpoint)


def test_an_image_removed_while_it_is_found_is_no_hit(own_collection, monkeypatch):
    with closing(Collection(own_collection)) as collection:
        searcher = Searcher.open(collection, device="cpu")
        search = collection.search

        def search_then_remove(*arguments, **options):
            found = search(*arguments, **options)
            collection.remove([int(found[0][1][0])])
            return found

        monkeypatch.setattr(collection, "search", search_then_remove)
        hits = searcher.similar(4, SearchOptions(k=3)).hits
    assert [hit.rank for hit in hits] == [1, 2]
    assert 4 not in [hit.image.id for hit in hits]
