"""Health and statistics."""

from importlib.metadata import version

from fastapi import APIRouter

from hashseek.api.collections.overview import make_overview
from hashseek.api.messages.problems import NotLoaded, NotReady
from hashseek.api.messages.schemas import Health, Overview, Stats
from hashseek.api.routes.dependencies import CollectionsDep, NoQueryDep, SearcherDep, ServiceDep, local
from hashseek.indexing.calibration import stored_calibration
from hashseek.retrieval.errors import BadCollection

router = APIRouter(tags=["service"])
probes = APIRouter(tags=["service"])  # need no key


@probes.get("/healthz/live")
async def live() -> Health:
    """Whether the process answers."""
    return Health(status="live")


@probes.get("/healthz/ready")
def ready(collections: CollectionsDep) -> Health:
    """Whether collections and models are loaded. Until then, or if none could be loaded, 503 with the reason."""
    failures: list[str] = []
    services = list(collections)
    for service in services:
        try:
            service.searcher.collection.check_readable()
        except (NotLoaded, BadCollection) as error:
            failures.append(str(error))
    if failures and len(failures) == len(services):
        raise NotReady(failures[0])
    return Health(status="ready")


@router.get("/v1/overview", dependencies=[NoQueryDep])
def overview(service: ServiceDep, searcher: SearcherDep) -> Overview:
    """Labels, statistics of the codes, and a map of them; computed once for each state of the collection."""
    return service.computed.get("overview", local(searcher).catalog, lambda: make_overview(local(searcher)))


@router.get("/v1/stats", dependencies=[NoQueryDep])
def stats(service: ServiceDep, searcher: SearcherDep) -> Stats:
    """What the collection holds."""
    collection, header = searcher.collection, searcher.encoder.header
    stored = stored_calibration(collection)
    return Stats(
        holds="vectors" if header.preprocessing is None else "images",
        n_images=len(collection),
        n_bits=collection.n_bits,
        fingerprint=collection.fingerprint,
        backbone=header.backbone,
        engine=searcher.encoder.engine,
        labels=collection.label_counts(),
        engines=collection.engines(),
        read_only=service.read_only,
        keeps_features=collection.keeps_features,
        max_k=service.settings.max_k,
        expected_precision=None if stored is None else list(stored.calibration.within_radius),
        version=version("hashseek"),
        index=collection.describe_index(),
    )
