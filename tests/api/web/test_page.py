"""The search page in a real browser, with a real service."""

import os
import re
import shutil
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import expect, sync_playwright

import hashseek
from hashseek.api.client import Client
from hashseek.api.keys import create
from hashseek.indexing.calibration import calibrate_collection
from hashseek.indexing.collection import open_or_create
from hashseek.indexing.ingest.batch import ImageSource, ingest
from hashseek.indexing.opening import open_store
from hashseek.indexing.searcher import Searcher
from support.commands import wait_until
from support.pictures import draw, encoded, labels_of
from support.service import listening
from support.vector_files import clustered

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

expect.set_options(timeout=20_000)  # ms; the machine may be busy

N = 150  # more than three pages of hits
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="module")
def many(tmp_path_factory, checkpoint):
    """A collection of N pictures with labels, keys and an attribute, calibrated; ids are numbers of pictures + 1."""
    folder = tmp_path_factory.mktemp("many")
    sources = []
    for seed in range(N):
        path = folder / f"picture {seed:03}.jpg"
        draw(seed, (48, 36)).save(path)
        sources.append(ImageSource(path, labels_of(path), key=f"key-{seed}", attributes={"year": 2000 + seed}))
    with closing(open_or_create(folder / "collection", checkpoint=checkpoint)) as collection:
        list(ingest(collection, Searcher.open(collection, device="cpu").encoder, sources))
        collection.save_index()
        calibrate_collection(collection, n_queries=50)
    return folder / "collection"


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def browse(chromium):
    """Open a page of a service: (address, options) -> page. Nothing may be loaded from elsewhere, nothing go wrong."""
    wrong, contexts = [], []

    def open_page(url, **options):
        contexts.append(chromium.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        origin = "/".join(url.split("/")[:3])
        page.on("request", lambda request: request.url.startswith((origin, "blob:")) or wrong.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console", lambda message: message.type == "error" and wrong.append(f"{message.text} {message.location}")
        )
        page.goto(url)
        return page

    open_page.wrong = wrong
    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def site(many):
    with listening(many, read_only=True) as url:
        yield url


@pytest.fixture
def own_site(many, tmp_path, chromium):
    report = tmp_path / "reports" / "evaluation-best" / "report.html"
    report.parent.mkdir(parents=True)
    report.write_text("<!doctype html><title>Report</title><style>p { color: #123456 }</style><p>mAP@100 is 0.5")
    with listening(shutil.copytree(many, tmp_path / "collection"), reports=tmp_path / "reports") as url:
        yield url
        for context in chromium.contexts:  # or what a page still loads would fail when the service has stopped
            context.close()


def ask(page, path):
    """The service's own answer."""
    return page.request.get(page.url.split("/?")[0].rstrip("/") + path).json()


def shown(page):
    """The ids of the hits that the page shows, in order."""
    labels = page.locator("#hits .frame").evaluate_all("nodes => nodes.map((node) => node.ariaLabel)")
    return [int(label.split()[-1]) for label in labels]


def photograph(page, name):
    """Save what the page shows, if HASHSEEK_SCREENSHOTS names a folder."""
    if folder := os.environ.get("HASHSEEK_SCREENSHOTS"):
        page.wait_for_load_state("networkidle")
        page.screenshot(path=Path(folder) / f"{name}.png")


def add_filter(page, kind, text):
    page.select_option("#kind", kind)
    page.fill("#condition", text)
    page.press("#condition", "Enter")


def place_of(page, selector):
    return page.locator(selector).evaluate("node => node.getBoundingClientRect().top")


def test_hits_are_those_of_the_service_without_the_query_with_ranks_and_ties(browse, site):
    page = browse(f"{site}/?id=7")
    expect(page.locator("#hits > li").first).to_be_visible()
    answer = ask(page, f"/v1/images/7/similar?k={N}&rank=hamming")
    others = [hit for hit in answer["hits"] if hit["id"] != 7]
    first = shown(page)
    assert first == [hit["id"] for hit in others[: len(first)]]
    distances = [hit["distance"] for hit in others]
    photograph(page, "results")
    ranks = page.locator("#hits .rank > [aria-hidden]").all_text_contents()
    assert any("–" in rank for rank in ranks)
    for rank, distance in zip(ranks, distances, strict=False):
        low = 1 + sum(other < distance for other in distances)
        high = low - 1 + distances.count(distance)
        assert rank == (str(low) if low == high else f"{low}–{high}")
    page.locator("#hits .frame").first.click()
    facts = dict(
        page.locator("#pictureFacts div").evaluate_all(
            "all => all.map((one) => [...one.children].map((n) => n.textContent))"
        )
    )
    assert (facts["Key"], facts["year"]) == (f"key-{others[0]['id'] - 1}", str(1999 + others[0]["id"]))
    title = page.locator("#pictureTitle")
    page.keyboard.press("ArrowRight")
    expect(title).to_have_text(f"Picture {others[1]['id']}")
    page.locator("#previous").click()
    expect(title).to_have_text(f"Picture {others[0]['id']}")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    expect(title).to_have_text(f"Picture {others[1]['id']}")
    assert page.locator("#pictureOriginal").get_attribute("href").endswith(f"/v1/images/{others[1]['id']}/file")
    page.locator("#pictureMore").click()
    expect(page.locator("#queryTitle")).to_have_text(f"Picture {others[1]['id']}")
    expect(page.locator("#picture")).to_be_hidden()


def hand_over(page, kind, *files):
    """Drop or paste files on the page; whether the browser would then open them itself."""
    return page.evaluate(
        """([kind, files]) => {
          const data = new DataTransfer();
          for (const [name, bytes] of files) {
            data.items.add(new File([new Uint8Array(bytes)], name, { type: "image/png" }));
          }
          const options = { bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data };
          const event = kind === "drop" ? new DragEvent(kind, options) : new ClipboardEvent(kind, options);
          return document.body.dispatchEvent(event);
        }""",
        [kind, [(name, list(data)) for name, data in files]],
    )


def test_hits_that_are_not_ordered_by_distance_show_the_score_that_orders_them(browse, site):
    page = browse(f"{site}/?id=7&max_distance=47")
    expect(page.locator("#hits > li").first).to_be_visible()
    hand_over(page, "paste", ("new.png", encoded(draw(901))))
    expect(page.locator("#hits .score").first).to_be_visible()
    assert page.url == f"{site}/", "the limit was of the former query"
    photograph(page, "scores")
    scores = [float(text.split()[-1]) for text in page.locator("#hits .score").all_text_contents()]
    assert len(scores) > 10
    assert scores == sorted(scores, reverse=True)
    assert page.locator("#hits .rank > [aria-hidden]").first.text_content() == "1"
    expect(page.locator("#addOpen")).to_be_hidden()  # read-only

    title, status = page.locator("#queryTitle"), page.locator("#status")
    add_filter(page, "label", "even")
    expect(status).to_have_text(f"{N // 2} pictures")
    page.select_option("#rank", "hamming")
    expect(page.locator("#hits .score")).to_have_count(0)
    page.select_option("#rank", "asymmetric")
    expect(page.locator("#hits .score").first).to_be_visible()
    page.go_back()  # an order is not a step
    expect(status).to_have_text(f"{N} pictures")
    expect(title).to_have_text("new.png")
    page.go_forward()
    expect(status).to_have_text(f"{N // 2} pictures")
    page.locator("#chosen a").click()
    expect(status).to_have_text(f"{N} pictures")
    expect(title).to_have_text("new.png")
    page.locator("#hits").get_by_role("link").first.click()  # a stored code has no outputs for this order
    expect(status).to_have_text(f"{N - 1} pictures")
    assert "rank" not in page.url
    expect(page.locator("#rank")).to_have_value("")
    assert page.locator("#hits .score").count() == 0, "ordered by distance"


def to_the_end(page):
    """Scroll until all hits are there."""
    expect(page.locator("#hits > li").first).to_be_visible()
    while page.locator("#more").is_visible():
        page.mouse.wheel(0, 3000)
        page.wait_for_timeout(50)


def test_results_go_on_to_the_last_and_back_returns_to_the_place(browse, site):
    page = browse(f"{site}/?id=7")
    expect(page.locator("#more")).to_be_visible()
    page.locator("#more").focus()
    expect(page.locator("#hits > li").nth(47).get_by_role("button")).to_be_focused()  # the first of those that follow
    to_the_end(page)
    expect(page.locator("#hits > li")).to_have_count(N - 1)
    hits = ask(page, f"/v1/images/7/similar?k={N}")["hits"]
    assert shown(page) == [hit["id"] for hit in hits if hit["id"] != 7]
    last = page.locator("#hits > li").last
    last.scroll_into_view_if_needed()
    page.wait_for_timeout(300)
    before = page.evaluate("scrollY")
    assert before > 1000
    page.reload()
    wait_until(lambda: abs(page.evaluate("scrollY") - before) < 50)
    last.get_by_role("link").click()
    page.wait_for_url(re.compile(rf"id={hits[-1]['id']}"))
    expect(page.locator("#queryTitle")).to_have_text(f"Picture {hits[-1]['id']}")
    expect(page.locator("#status")).to_have_text(f"{N - 1} pictures")
    wait_until(lambda: page.evaluate("scrollY") == 0)  # once the hits are there
    page.go_back()
    expect(page.locator("#hits > li")).to_have_count(N - 1)
    wait_until(lambda: abs(page.evaluate("scrollY") - before) < 50)


def hold(page, pattern, method="GET"):
    """Keep matching requests waiting: `wait()` until there is one, `answer()` lets them, and later ones, through."""
    held, is_open = [], []

    def handle(route):
        if is_open or route.request.method != method:
            route.fallback()
        else:
            held.append(route)

    def answer():
        is_open.append(True)
        for route in held:
            route.continue_()
        page.wait_for_timeout(300)

    page.route(pattern, handle)

    def wait():
        wait_until(lambda: page.wait_for_timeout(20) or held, 20)

    return SimpleNamespace(wait=wait, answer=answer)


def delete_shown(page):
    """Delete the picture in the dialog."""
    page.locator("#pictureDelete").click()
    page.locator("#confirm").get_by_role("button", name="Delete").click()


def test_hits_appear_once_after_a_deletion(browse, own_site):
    page = browse(f"{own_site}/?id=7")
    to_the_end(page)
    page.route("**/similar?*offset=48*", lambda route: (page.wait_for_timeout(500), route.fallback()))
    page.locator("#hits .frame").nth(100).click()
    delete_shown(page)
    expect(page.locator("#notice")).to_contain_text("was deleted")
    page.wait_for_timeout(1000)
    expect(page.locator("#hits > li")).to_have_count(N - 2)
    assert len(set(shown(page))) == N - 2


def test_an_answer_that_arrives_after_its_page_was_left_changes_nothing(browse, own_site):
    page = browse(f"{own_site}/?id=7")
    expect(page.locator("#hits > li").first).to_be_visible()
    more = hold(page, "**/similar?*offset=48*")
    page.locator("#more").scroll_into_view_if_needed()
    more.wait()
    page.locator("#clear").click()
    expect(page.locator("#storedList a").first).to_be_visible()
    more.answer()
    expect(page.locator("#error")).to_be_hidden()

    page.goto(f"{own_site}/?id=7")
    page.locator("#hits .frame").first.click()
    title = page.locator("#pictureTitle").text_content()
    deletion = hold(page, "**/v1/images/*", "DELETE")
    delete_shown(page)
    deletion.wait()
    page.locator("#clear").click()
    expect(page.locator("#storedTitle")).to_have_text(f"{N} pictures")
    deletion.answer()
    expect(page.locator("#notice")).to_have_text(f"{title} was deleted.")
    expect(page.locator("#storedTitle")).to_have_text(f"{N - 1} pictures")

    page.goto(f"{own_site}/?id=7&max_distance=30&rank=hamming")
    page.locator("#queryOpen").click()
    delete_shown(page)
    expect(page.locator("#storedTitle")).to_have_text(f"{N - 2} pictures")
    assert page.url == f"{own_site}/"
    page.close()


def test_labels_that_are_saved_late_leave_the_hits_of_another_query_alone(browse, own_site):
    page = browse(f"{own_site}/?id=1")
    cards = "nodes => Object.fromEntries(nodes.map((node) => [node.querySelector('.frame').ariaLabel, node.innerText]))"
    expect(page.locator("#hits > li").first).to_be_visible()
    before = page.locator("#hits > li").evaluate_all(cards)
    page.locator("#hits").get_by_role("link").first.click()
    wait_until(lambda: page.locator("#hits > li").evaluate_all(cards) != before, 20)
    name = next(
        name
        for name, text in page.locator("#hits > li").evaluate_all(cards).items()
        if before.get(name, text).split()[:2] != text.split()[:2]
    )
    page.get_by_role("button", name=name, exact=True).click()
    page.locator("#pictureRelabel").click()
    saving = hold(page, "**/v1/images/*", "PATCH")
    page.fill("#newLabels", "late")
    page.press("#newLabels", "ArrowRight")  # within the text, not to the next picture
    page.press("#newLabels", "Enter")
    saving.wait()
    page.go_back()
    wait_until(lambda: {f"Open picture {number}" for number in shown(page)} == set(before), 20)
    saving.answer()
    expect(page.locator("#names option[value=late]")).to_have_count(1)
    assert page.locator("#hits > li").evaluate_all(cards)[name] == before[name]


def test_the_next_picture_takes_the_place_of_the_former_one_at_once(browse, site):
    page = browse(f"{site}/?id=7")
    expect(page.locator("#hits > li").first).to_be_visible()
    first, second = shown(page)[:2]
    late = hold(page, f"**/v1/images/{first}")
    page.locator("#hits .frame").first.click()
    image, facts = page.locator("#pictureImage"), page.locator("#pictureFacts")
    wait_until(lambda: image.evaluate("image => image.naturalWidth"))
    former = image.screenshot()
    following = hold(page, "**/file?size=1024")
    page.locator("#next").click()
    following.wait()
    assert image.screenshot() != former
    following.answer()
    expect(facts).to_contain_text("Added")
    late.answer()
    expect(facts).to_contain_text(f"key-{second - 1}")


def test_many_attributes_leave_the_picture_and_the_buttons_in_the_window(browse, own_site):
    page = browse(f"{own_site}/?id=1", viewport={"width": 1280, "height": 720})
    expect(page.locator("#hits > li").first).to_be_visible()
    attributes = {f"exif {number:02}": number for number in range(34)}
    assert page.request.patch(f"{own_site}/v1/images/{shown(page)[0]}", data={"attributes": attributes}).ok
    page.reload()
    page.locator("#hits .frame").first.click()
    expect(page.locator("#pictureFacts")).to_contain_text("exif 33")
    for part in ("#pictureImage", "#next"):
        box = page.locator(part).bounding_box()
        assert 0 <= box["y"] <= box["y"] + box["height"] <= 720


def test_a_query_picture_that_could_not_be_shown_is_loaded_again(browse, site):
    page = browse(site)
    page.route("**/file?size=512", lambda route: route.abort())
    page.goto(f"{site}/?id=7")
    expect(page.locator("#queryOpen")).to_have_text("No preview")
    page.unroute("**/file?size=512")
    page.evaluate("history.pushState(null, '', location.href); history.back()")
    expect(page.locator("#queryOpen img")).to_be_visible()
    browse.wrong.clear()  # the request that failed


def without_histogram(route):
    """Answer as for a collection in Milvus."""
    answer = route.fetch()
    route.fulfill(response=answer, json={**answer.json(), "histogram": None})


def test_what_the_service_lists_at_most_is_said(browse, many, site):
    page = browse(site)
    page.route("**/similar?*", without_histogram)
    page.goto(f"{site}/?id=7")
    to_the_end(page)
    expect(page.locator("#end")).to_have_text(f"Showing all {N - 1}.")
    assert page.locator("#status").text_content() == ""
    for max_k in (96, 10):
        with listening(many, read_only=True, max_k=max_k) as url:
            page = browse(url)
            for _ in range(2):
                page.goto(f"{url}/?id=7")
                to_the_end(page)
                expect(page.locator("#end")).to_have_text(
                    f"Showing the first {max_k - 1}, the most that this service lists."
                )
                page.route("**/similar?*", without_histogram)
            page.close()


def test_the_query_does_not_count_itself_among_many_copies(browse, own_site):
    with Client(own_site) as client:
        list(client.add_many((client.file(1), {"key": f"copy {n}", "labels": ["copy"]}) for n in range(50)))
    page = browse(f"{own_site}/?id={N + 50}")
    expect(page.locator("#status")).to_have_text(f"{N + 49} pictures")
    page.goto(f"{own_site}/?id={N + 50}&label=copy")
    to_the_end(page)
    expect(page.locator("#status")).to_have_text("49 pictures")
    expect(page.locator("#within")).to_contain_text("49 pictures")
    assert page.locator("#hits .rank > [aria-hidden]").last.text_content() == "1–49"


def test_a_crop_is_of_the_shown_picture_and_has_at_most_2048_pixels_a_side(browse, own_site):
    scan = {"image": ("scan.tif", encoded(draw(8), "TIFF"))}  # Chromium shows only its thumbnail
    httpx.post(f"{own_site}/v1/images", files=scan).raise_for_status()
    page = browse(f"{own_site}/?id={N + 1}")
    page.locator("#crop").click()
    expect(page.locator("#cropSearch")).to_be_enabled()
    page.keyboard.press("Escape")
    page.locator("#hits").get_by_role("link").first.click()
    expect(page.locator("#queryTitle")).not_to_have_text(f"Picture {N + 1}")
    slow = hold(page, "**/file")
    page.locator("#crop").click()
    expect(page.locator("#cropSearch")).to_be_disabled()
    assert page.locator("#cropImage").evaluate("image => image.naturalWidth") == 0
    slow.answer()
    page.keyboard.press("Escape")
    wide = {"name": "wide.png", "mimeType": "image/png", "buffer": encoded(draw(7, (4000, 40)))}
    page.set_input_files("#file", wide)
    expect(page.locator("#queryTitle")).to_have_text("wide.png")
    page.locator("#crop").click()
    page.locator("#cropSearch").click()
    expect(page.locator("#queryTitle")).to_have_text("Part of wide.png")
    wait_until(lambda: page.locator("#queryOpen img").evaluate("image => image.naturalWidth") == 2048, 20)
    page.evaluate("() => { HTMLCanvasElement.prototype.toBlob = (done) => done(null); }")
    page.locator("#crop").click()
    page.locator("#cropSearch").click()
    expect(page.locator("#error")).to_contain_text("could not be cut out")
    page.close()


def test_a_dialog_closes_only_on_a_click_outside_it(browse, own_site):
    page = browse(own_site)
    data = encoded(draw(900), "JPEG")
    page.set_input_files("#file", {"name": "new.jpg", "mimeType": "image/jpeg", "buffer": data})
    page.locator("#addOpen").click()
    page.fill("#addLabels", "typed before")
    dialog, field = page.locator("#add").bounding_box(), page.locator("#addLabels").bounding_box()
    page.mouse.click(dialog["x"] + 5, dialog["y"] + 5)
    expect(page.locator("#add")).to_be_visible()
    page.mouse.move(field["x"] + 30, field["y"] + 10)
    page.mouse.down()
    page.mouse.move(5, 5)
    page.mouse.up()
    expect(page.locator("#add")).to_be_visible()
    page.mouse.click(5, 5)
    expect(page.locator("#add")).to_be_hidden()
    page.locator("#addOpen").click()
    page.locator("#add").get_by_role("button", name="Cancel").click()
    expect(page.locator("#add")).to_be_hidden()
    page.locator("#crop").click()
    page.mouse.click(5, 5)
    expect(page.locator("#cropper")).to_be_hidden()
    assert ask(page, "/v1/stats")["n_images"] == N


def test_what_went_wrong_is_said_and_disappears_with_it(browse, site):
    page = browse(f"{site}/?id=7")
    expect(page.locator("#hits > li").first).to_be_visible()
    page.route("**/similar?*offset=48*", lambda route: route.fulfill(status=500), times=1)
    page.locator("#more").scroll_into_view_if_needed()
    page.locator("#retry").click()
    expect(page.locator("#error")).to_be_hidden()
    expect(page.locator("#hits > li").nth(50)).to_be_attached()

    answers = [
        (503, {"type": "urn:hashseek:NotReady"}),
        (500, {"type": "urn:hashseek:NotLoaded", "detail": "the model is missing"}),
        (429, {"detail": "too many uploads"}),
    ]
    page.route("**/v1/stats", lambda route: route.fulfill(status=answers[0][0], json=answers.pop(0)[1]), times=3)
    page.reload()
    expect(page.locator("#error")).to_contain_text("the model is missing")
    expect(page.locator("#starting")).to_be_empty()
    page.locator("#retry").click()
    expect(page.locator("#starting")).to_contain_text("too many uploads")
    expect(page.locator("#hits > li").first).to_be_visible()
    expect(page.locator("#starting")).to_be_empty()

    page.evaluate("() => { File.prototype.arrayBuffer = () => Promise.reject(new Error('changed on disk')); }")
    page.set_input_files("#file", {"name": "gone.jpg", "mimeType": "image/jpeg", "buffer": b"-"})
    expect(page.locator("#errorText")).to_have_text("The file cannot be read. Choose it again.")
    page.close()
    assert all(re.search("429|500|503", message) for message in browse.wrong)
    browse.wrong.clear()


def test_a_slider_that_was_just_moved_does_not_limit_the_next_page(browse, site):
    page = browse(f"{site}/?id=7")
    expect(page.locator("#max")).to_be_visible()
    page.locator("#max").evaluate(
        "slider => { slider.value = 3; slider.oninput(); document.querySelector('#clear').click(); }"
    )
    expect(page.locator("#storedList a").first).to_be_visible()
    page.wait_for_timeout(500)
    assert page.url == f"{site}/"


def test_filters_apply_to_the_search_and_are_in_the_address(browse, site):
    page = browse(f"{site}/?id=7")
    add_filter(page, "label", "three")
    expect(page.locator("#chosen li")).to_have_count(1)
    add_filter(page, "without", "odd")
    expect(page.locator("#chosen li")).to_have_count(2)
    add_filter(page, "where", "year>=2030")
    expect(page.locator("#chosen li")).to_have_count(3)
    wanted = {seed + 1 for seed in range(N) if seed % 6 == 0 and seed >= 30}
    expect(page.locator("#hits > li")).to_have_count(len(wanted))
    assert set(shown(page)) == wanted
    expect(page.locator("#status")).to_contain_text(f"{len(wanted)} pictures")
    page.reload()
    expect(page.locator("#hits > li")).to_have_count(len(wanted))
    page.locator("#clear").click()  # the filters stay, and hold for the list
    expect(page.locator("#storedTitle")).to_have_text(f"{len(wanted)} of {N} pictures")
    expect(page.locator("#storedList a")).to_have_count(len(wanted))
    page.get_by_role("link", name="Remove the filter not odd").click()
    expect(page.locator("#storedTitle")).to_have_text(f"{N // 3 - 10} of {N} pictures")
    page.go_back()
    expect(page.locator("#storedTitle")).to_have_text(f"{len(wanted)} of {N} pictures")
    add_filter(page, "label", "no such label")
    expect(page.locator("#storedList a")).to_have_count(0)
    expect(page.locator("#empty")).to_be_visible()
    assert "such" in page.url
    page.goto(f"{site}/?id=7&any_label=three&any_label=even")
    expect(page.locator("#status")).to_contain_text(f"{sum(s % 2 == 0 or s % 3 == 0 for s in range(N)) - 1} pictures")


def test_the_radius_counts_as_it_moves_and_then_limits_the_search(browse, site):
    page = browse(f"{site}/?id=7&label=even")
    expect(page.locator("#hits > li").first).to_be_visible()
    counts = ask(page, "/v1/images/7/similar?k=1&label=even&include=histogram")["histogram"]
    counts[0] -= 1  # the query
    radius = next(r for r in range(48) if sum(counts[: r + 1]) >= 5)
    precision = ask(page, "/v1/stats")["expected_precision"][radius]
    page.locator("#max").focus()
    page.keyboard.press("Home")
    for _ in range(radius):
        page.keyboard.press("ArrowRight")
    found = sum(counts[: radius + 1])
    expect(page.locator("#within")).to_have_text(re.compile(rf"^{radius} bits? · {found} pictures$"))
    expect(page.locator("#expected")).to_be_empty()  # it is of all pictures
    page.wait_for_url(re.compile(f"max_distance={radius}"))
    expect(page.locator("#hits > li")).to_have_count(found)
    assert page.locator("#max").evaluate("node => node === document.activeElement")
    page.goto(page.url.replace("&label=even", ""))
    expect(page.locator("#expected")).to_contain_text(f"{100 * precision:.0f}%")
    page.go_back()
    expect(page.locator("#hits > li")).to_have_count(found)
    page.locator("#max").press("End")
    page.wait_for_url(lambda url: "max_distance" not in url)


def test_the_list_jumps_to_any_position_with_few_nodes(browse, site):
    page = browse(site, viewport={"width": 1000, "height": 500})
    expect(page.locator("#storedList a").first).to_be_visible()
    with page.context.expect_page() as another:
        page.locator("#storedList a").first.click(modifiers=["ControlOrMeta"])
    another.value.close()
    assert page.url == f"{site}/"
    page.locator("#position").focus()
    page.keyboard.press("End")
    last = page.locator(f'#storedList li[aria-posinset="{N}"] a')
    expect(last).to_be_visible()
    assert last.get_attribute("href") == f"?id={N}"
    assert page.locator("#storedList li").count() < N / 2
    page.wait_for_timeout(300)
    before = page.evaluate("scrollY")
    last.click()
    expect(page.locator("#queryTitle")).to_have_text(f"Picture {N}")
    page.go_back()
    expect(last).to_be_visible()
    assert page.evaluate("scrollY") == before


KEPT = """new Promise((done) => {
  indexedDB.open("hashseek").onsuccess = ({ target: { result } }) => {
    const counting = result.transaction("uploads").objectStore("uploads").count();
    counting.onsuccess = () => done(counting.result);
  };
})"""  # how many uploads the browser keeps


def test_an_upload_outlives_a_reload_and_can_be_cropped_with_the_keyboard(browse, site, tmp_path):
    name, picture = "<i>mine</i>.png", Image.new("RGB", (480, 360), "red")
    picture.paste("blue", (0, 144, 298, 360))  # the part below
    page = browse(site)
    page.set_input_files("#file", {"name": name, "mimeType": "image/png", "buffer": encoded(picture)})
    expect(page.locator("#queryTitle")).to_have_text(name)
    expect(page.locator("#hits > li").first).to_be_visible()
    before = shown(page)
    page.reload()
    expect(page.locator("#queryTitle")).to_have_text(name)
    expect(page.locator("#hits > li").first).to_be_visible()
    assert shown(page) == before
    page.locator("#crop").press("Enter")
    expect(page.locator("#box")).to_be_focused()
    expect(page.locator("#cropSize")).to_have_text("288 × 216 of 480 × 360 px")
    page.locator("#box").drag_to(page.locator("#cropSearch"), force=True)  # stops in the corner
    for _ in range(100):
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("Shift+ArrowRight")
    expect(page.locator("#cropSize")).to_have_text("298 × 216 of 480 × 360 px")
    page.locator("#cropSearch").press("Enter")
    expect(page.locator("#queryTitle")).to_have_text(f"Part of {name}")
    part = page.locator("#queryOpen img")
    wait_until(lambda: part.evaluate("image => image.naturalWidth") == 298)
    assert part.evaluate(
        """image => {
          const canvas = new OffscreenCanvas(298, 216).getContext("2d");
          canvas.drawImage(image, 0, 0);
          return canvas.getImageData(0, 0, 298, 216).data.every((value, at) => at % 4 !== 0 || value < 50);
        }"""
    ), "some of it is red"
    page.go_back()
    expect(page.locator("#queryTitle")).to_have_text(name)
    page.clock.set_fixed_time(datetime.now(UTC) + timedelta(days=2))
    page.reload()
    expect(page.locator("#notice")).not_to_be_empty()
    expect(page.locator("#storedList a").first).to_be_visible()
    assert page.evaluate(KEPT) == 0


def test_several_pictures_are_one_query(browse, own_site):
    page = browse(own_site)
    expect(page.locator("#storedList a").first).to_be_visible()
    files = [(f"{n}.png", encoded(draw(n))) for n in (3, 4)]
    assert not hand_over(page, "drop", *files)
    expect(page.locator("#queryTitle")).to_have_text("2 pictures")
    expect(page.locator("#hits > li").first).to_be_visible()
    expect(page.locator("#addOpen")).to_be_hidden()
    parts = [("image", file) for file in files]
    hits = httpx.post(f"{own_site}/v1/search", files=parts, data={"k": 48}).json()["hits"]
    assert shown(page)[:48] == [hit["id"] for hit in hits]


def test_adding_relabelling_and_deleting(browse, own_site):
    page = browse(own_site)
    data = encoded(draw(900), "JPEG")
    page.set_input_files("#file", {"name": "<i>new.jpg", "mimeType": "image/jpeg", "buffer": data})
    page.locator("#addOpen").click()
    page.fill("#addLabels", "odd; <b>bold</b>")
    page.route("**/v1/images", lambda route: route.abort(), times=1)
    page.press("#addLabels", "Enter")
    expect(page.locator("#error")).to_be_visible()
    page.locator("#addOpen").click()  # with the labels that were typed
    page.press("#addLabels", "Enter")
    expect(page.locator("#notice")).to_contain_text(str(N + 1))
    expect(page.locator("#error")).to_be_hidden()
    expect(page.locator("#addOpen")).to_be_hidden()
    assert set(ask(page, f"/v1/images/{N + 1}")["labels"]) == {"odd", "<b>bold</b>"}
    page.goto(f"{own_site}/?id=1&label=<b>bold</b>")
    expect(page.locator("#chosen")).to_contain_text("<b>bold</b>")
    expect(page.locator("#hits .chip").filter(has_text="<b>bold</b>")).to_be_visible()
    expect(page.locator("#hits .name-line")).to_have_text("<i>new.jpg")
    page.locator("#hits .frame").click()
    page.locator("#pictureRelabel").click()
    page.fill("#newLabels", "even; fresh")
    page.press("#newLabels", "Enter")
    expect(page.locator("#pictureLabels")).to_contain_text("fresh")
    expect(page.locator("#hits .chips")).to_contain_text("fresh")
    assert ask(page, f"/v1/images/{N + 1}")["labels"] == ["even", "fresh"]
    expect(page.locator("#names option[value=fresh]")).to_have_count(1)
    page.locator("#pictureDelete").click()
    expect(page.locator("#confirm")).to_contain_text("<i>new.jpg")
    page.keyboard.press("Enter")  # the first button keeps it
    assert ask(page, "/v1/stats")["n_images"] == N + 1
    page.route("**/v1/images/*", lambda route: route.abort(), times=1)
    delete_shown(page)
    expect(page.locator("#error")).to_be_visible()
    page.locator("#hits .frame").click()
    delete_shown(page)
    expect(page.locator("#notice")).to_contain_text(str(N + 1))
    assert ask(page, "/v1/stats")["n_images"] == N
    page.locator("#queryOpen").click()
    page.locator("#pictureDelete").click()
    page.mouse.click(5, 5)  # outside: this does not repeat the last answer
    expect(page.locator("#confirm")).to_be_hidden()
    page.keyboard.press("Escape")
    page.locator("#clear").click()
    expect(page.locator("#storedTitle")).to_contain_text(f"{N} pictures")
    assert ask(page, "/v1/stats")["n_images"] == N
    assert all("ERR_FAILED" in message for message in browse.wrong)
    browse.wrong.clear()


def test_new_labels_of_the_query_are_compared_with_those_of_the_hits(browse, own_site):
    page = browse(f"{own_site}/?id=1")
    shared = page.locator("#hits .chip.shared")
    expect(shared.first).to_be_visible()
    page.locator("#queryOpen").click()
    page.locator("#pictureRelabel").click()
    page.fill("#newLabels", "x" * 1000)
    page.press("#newLabels", "Enter")
    expect(page.locator("#relabelError")).not_to_be_empty()
    page.fill("#newLabels", "of its own")
    page.press("#newLabels", "Enter")
    expect(page.locator("#queryLabels")).to_have_text("of its own")
    expect(shared).to_have_count(0)
    # Two labels, were they typed here.
    httpx.patch(f"{own_site}/v1/images/1", json={"labels": ["a; b"]}).raise_for_status()
    page.reload(wait_until="networkidle")
    page.locator("#queryOpen").click()
    expect(page.locator("#pictureDelete")).to_be_visible()
    expect(page.locator("#pictureRelabel")).to_be_hidden()
    assert all("422" in message for message in browse.wrong)
    browse.wrong.clear()


def test_what_the_page_cannot_do_is_said(browse, site):
    page = browse(f"{site}/?label=even&<i>added_after=2030-01-01")
    expect(page.locator("#notice")).to_contain_text("<i>added_after")
    data = encoded(draw(1), "JPEG")
    page.set_input_files("#file", [{"name": f"{n}.jpg", "mimeType": "image/jpeg", "buffer": data} for n in range(17)])
    expect(page.locator("#error")).to_contain_text("17")
    page.locator("#storedList a").first.click()
    expect(page.locator("#radius")).to_be_visible()
    assert page.locator("#error, #notice").locator("visible=true").count() == 0
    page.set_input_files("#file", {"name": "broken.jpg", "mimeType": "image/jpeg", "buffer": data[:500]})
    expect(page.locator("#error")).to_be_visible()
    assert page.locator("#radius, #crop, #addOpen, #summary dt").locator("visible=true").count() == 0
    assert all("422" in message for message in browse.wrong)
    browse.wrong.clear()


def groups_shown(page):
    """The ids in each group that the page shows."""
    lists = page.locator("#groups > li").evaluate_all(
        "nodes => nodes.map((node) => [...node.querySelectorAll('.frame')].map((a) => a.getAttribute('href')))"
    )
    return [[int(href.removeprefix("?id=")) for href in hrefs] for hrefs in lists]


def test_a_link_that_is_followed_before_the_page_is_ready_leads_there(browse, site):
    page = browse(site)
    expect(page.locator("#storedList a").first).to_be_visible()  # so that the request held below is the reload's
    session = hold(page, "**/v1/session")
    page.reload()
    session.wait()
    page.locator("#toDuplicates").click()
    session.answer()
    expect(page.locator("#duplicatesTitle")).to_be_focused()
    page.locator("#skip").press("Enter")
    expect(page.locator("#duplicatesTitle")).to_be_focused()
    stored = hold(page, "**/v1/images?*")
    page.locator("h1 a").click()
    stored.wait()
    page.locator("#toOverview").click()
    expect(page.locator("#overviewTitle")).to_be_focused()
    stored.answer()
    expect(page.locator("#stored")).to_be_hidden()


def test_duplicates_are_decided_group_by_group(browse, own_site):
    answers = [httpx.get(f"{own_site}/v1/duplicates?radius={radius}&limit=100").json() for radius in range(9)]
    radius = next(radius for radius in range(1, 9) if answers[radius]["total"] >= 4)
    expected = [[image["id"] for image in group["images"]] for group in answers[radius]["groups"]]
    page = browse(own_site)
    page.locator("#toDuplicates").click()
    expect(page.locator("#duplicatesTitle")).to_be_focused()
    page.locator("#apart").focus()
    for _ in range(radius):
        page.keyboard.press("ArrowRight")
    page.wait_for_url(re.compile(f"radius={radius}"))
    expect(page.locator("#groups > li")).to_have_count(min(len(expected), 20))
    assert groups_shown(page) == expected[:20]
    photograph(page, "duplicates")
    first, rest = expected[0], expected[1:]
    page.locator("#groups input").first.press("Space")
    page.locator("#groups").get_by_role("button", name="Delete 1 picture").press("Enter")
    page.keyboard.press("Enter")  # the first button keeps it
    assert ask(page, "/v1/stats")["n_images"] == N
    page.route("**/v1/images/*", lambda route: route.abort(), times=1)
    for message in ("#error", "#notice"):
        for choice in page.locator("#groups input").all()[:2]:
            choice.check()
        page.locator("#groups").get_by_role("button", name="Delete 2 pictures").click()
        page.locator("#confirm").get_by_role("button", name="Delete").click()
        expect(page.locator(message)).to_be_visible()
    assert ask(page, "/v1/stats")["n_images"] == N - 2
    left = [first[2:], *rest] if len(first) > 3 else rest
    assert groups_shown(page)[0] == left[0]
    page.locator("#groups > li").first.get_by_role("button", name="Keep all").press("Enter")
    expect(page.locator("#duplicatesStatus")).to_contain_text(f"{len(left) - 1} group")
    expect(page.locator("#groups h3").first).to_be_focused()
    page.locator("#groups .frame").first.click()
    expect(page.locator("#queryTitle")).to_have_text(f"Picture {left[1][0]}")
    page.go_back()
    expect(page.locator("#apartText")).to_contain_text(f"{radius} bit")
    assert groups_shown(page)[0] == left[1]
    for group in ask(page, "/v1/duplicates?radius=0&limit=100")["groups"]:
        kept = {"ids": [image["id"] for image in group["images"]]}
        assert page.request.post(f"{own_site}/v1/duplicates/kept", data=kept).ok
    page.goto(f"{own_site}/?view=duplicates")
    expect(page.locator("#noGroups")).to_be_visible()
    assert all("ERR_FAILED" in message for message in browse.wrong)
    browse.wrong.clear()


def test_a_double_click_on_a_button_of_duplicates_counts_once(browse, own_site):
    with Client(own_site) as client:
        assert len(list(client.add_many((client.file(n), {"key": f"copy of {n}"}) for n in range(1, N, 3)))) == 50
    page = browse(f"{own_site}/?view=duplicates")
    expect(page.locator("#groups > li")).to_have_count(20)
    expected = ask(page, "/v1/duplicates?radius=0&limit=100")
    assert expected["total"] > 40
    twice = "button => { button.click(); button.click(); }"
    page.locator("#moreGroups").evaluate(twice)
    page.wait_for_load_state("networkidle")
    expect(page.locator("#groups > li")).to_have_count(40)
    assert groups_shown(page) == [[image["id"] for image in group["images"]] for group in expected["groups"][:40]]
    page.locator("#groups").get_by_role("button", name="Keep all").first.evaluate(twice)
    page.wait_for_load_state("networkidle")
    expect(page.locator("#groups > li")).to_have_count(39)
    expect(page.locator("#duplicatesStatus")).to_have_text(f"{expected['total'] - 1} groups to review")
    page.locator("#groups .frame").first.click()
    expect(page.locator("#hits > li").first).to_be_visible()
    page.go_back()
    expect(page.locator("#duplicates")).to_be_visible()
    expect(page.locator("#groups > li")).to_have_count(39)


def test_pictures_deleted_elsewhere_and_parts_of_groups_hide_no_other_group(browse, own_site):
    with Client(own_site) as client:
        list(
            client.add_many((client.file(n), {"key": f"{copy} copy of {n}"}) for n in range(1, 91, 3) for copy in "ab")
        )
    page = browse(f"{own_site}/?view=duplicates")
    expect(page.locator("#groups > li")).to_have_count(20)
    expected = ask(page, "/v1/duplicates?radius=0&limit=100")["groups"]
    assert 20 < len(expected) < 40
    groups = [[image["id"] for image in group["images"]] for group in expected]
    for at in range(20):
        item = page.locator("#groups > li").nth(at)
        item.locator("input").first.dispatch_event("click")  # without waiting until it could be clicked on
        item.get_by_role("button", name="Delete 1 picture").dispatch_event("click")
        if at == 0:  # it is deleted elsewhere, too
            httpx.delete(f"{own_site}/v1/images/{groups[0][0]}").raise_for_status()
        page.locator("#confirm").get_by_role("button", name="Delete").dispatch_event("click")
        expect(item.locator("input")).to_have_count(len(groups[at]) - 1)
    expect(page.locator("#error")).to_be_hidden()
    httpx.post(f"{own_site}/v1/duplicates/kept", json={"ids": groups[19][1:]}).raise_for_status()

    def all_groups():
        page.locator("#moreGroups").evaluate("button => { if (!button.hidden) button.click(); }")
        page.wait_for_timeout(100)
        return groups_shown(page)

    wait_until(lambda: all_groups() == [group[1:] for group in groups[:20]] + groups[20:], 20)
    page.close()
    assert all("404" in message for message in browse.wrong)
    browse.wrong.clear()


def test_the_overview_has_a_map_whose_dots_lead_to_searches(browse, site):
    page = browse(f"{site}/?id=7")
    page.locator("#toOverview").click()
    expect(page.locator("#overviewTitle")).to_be_focused()
    answer = ask(page, "/v1/overview")
    assert page.locator("#labelRows tr").first.text_content().startswith(f"even{N // 2}")
    before = page.locator("#map path").evaluate_all("paths => paths.map((path) => path.getAttribute('d'))")
    assert sum(path.count("h.0001") for path in before) == N
    page.locator("#legend").get_by_role("button", name="three").press("Enter")
    photograph(page, "overview")
    dots = page.locator("#map path").evaluate_all("paths => paths.map((path) => path.getAttribute('d'))")
    assert sorted(path.count("h.0001") for path in dots)[-2:] == [N // 3, N - N // 3]
    page.locator("#legend").get_by_role("button", name="three").press("Enter")
    assert page.locator("#map path").evaluate_all("paths => paths.map((path) => path.getAttribute('d'))") == before
    mean = sum(bits * n for bits, n in enumerate(answer["distances"])) / sum(answer["distances"])
    expect(page.locator("#codeFacts")).to_contain_text(f"{mean:.1f} bits")
    box = page.locator("#map").bounding_box()
    points = {point["id"]: (point["x"], -point["y"]) for point in answer["map"]}
    (_, right), (top, bottom) = ((min(axis), max(axis)) for axis in zip(*points.values(), strict=True))
    target = next(i for i, (x, _) in points.items() if x == right)
    same = {i for i, place in points.items() if place == points[target]}
    share = [0.98, 0.02 + 0.96 * (points[target][1] - top) / (bottom - top)]
    page.mouse.move(box["x"] + share[0] * box["width"], box["y"] + share[1] * box["height"])
    expect(page.locator("#mapHint img")).to_be_visible()
    page.mouse.down()
    page.mouse.up()
    page.wait_for_url(re.compile(r"\?id="))
    assert int(page.url.rpartition("=")[2]) in same
    page.go_back()
    page.locator("#labelRows").get_by_role("link", name="three").click()
    expect(page.locator("#storedTitle")).to_contain_text(f"{N // 3} of {N}")


def test_the_overview_links_to_evaluation_reports(browse, site, own_site):
    page = browse(f"{own_site}/?view=overview")
    page.get_by_role("link", name="reports/evaluation-best").click()
    expect(page.get_by_text("mAP@100")).to_have_css("color", "rgb(18, 52, 86)")
    page.go_back()
    expect(page.locator("#reports")).to_be_visible()
    page = browse(f"{site}/?view=overview")
    expect(page.locator("#overviewFacts")).to_contain_text("Calibration")
    expect(page.locator("#reports")).to_be_hidden()


def test_the_files_of_the_page_are_asked_for_again_after_an_upgrade(site):
    for path in ("/", "/web/app.js", "/web/style.css"):
        first = httpx.get(site + path)
        again = httpx.get(site + path, headers={"If-None-Match": first.headers["ETag"]})
        assert first.headers["Cache-Control"] == again.headers["Cache-Control"] == "no-cache"
        assert again.status_code == (304 if "web" in path else 200)


def test_a_read_only_service_offers_no_changes(browse, site):
    page = browse(f"{site}/?id=7")
    page.locator("#hits .frame").first.click()
    expect(page.locator("#pictureMore")).to_be_visible()
    assert page.locator("#pictureDelete, #pictureRelabel, #addOpen").locator("visible=true").count() == 0
    page.goto(f"{site}/?view=duplicates&radius=2")
    expect(page.locator("#groups > li").first).to_be_visible()
    assert page.locator("#groups :is(button, input)").count() == 0


@pytest.mark.milvus
@pytest.mark.xdist_group("milvus")
def test_what_a_collection_in_milvus_refuses_is_not_offered(browse, site, milvus_name, checkpoint):
    links = "#toDuplicates, #toOverview"
    expect(browse(site).locator(links).locator("visible=true")).to_have_count(2)
    with closing(open_store(Path(milvus_name), checkpoint=checkpoint, create=True)):
        pass
    with listening(Path(milvus_name), checkpoint=checkpoint) as url:
        page = browse(url)
        expect(page.locator("#empty")).to_be_visible()
        assert page.locator(links).locator("visible=true").count() == 0
        page.set_input_files("#file", {"name": "new.png", "mimeType": "image/png", "buffer": encoded(draw(77))})
        expect(page.locator("#nothing")).to_be_visible()
        expect(page.locator("#addOpen")).to_be_hidden()  # the service would answer 422


def test_a_service_with_keys_asks_for_one_and_shows_what_it_allows(browse, many, tmp_path, capsys):
    create("reader", tmp_path / "keys.toml", "read")
    secret = capsys.readouterr().out.strip()
    with listening(many, keys=tmp_path / "keys.toml") as url:
        page = browse(f"{url}/?id=7")
        for wrong, is_key in (("hsk_…", False), (" wrong ", True)):
            page.fill("#key", wrong)
            page.press("#key", "Enter")
            assert page.locator("#key").evaluate("key => key.checkValidity()") == is_key
        expect(page.locator("#signInError")).not_to_be_empty()
        page.keyboard.press("Escape")
        expect(page.locator("#errorText")).to_have_text("Sign in to continue.")
        page.locator("#retry").click()
        page.fill("#key", secret)
        page.press("#key", "Enter")
        expect(page.locator("#hits > li").first).to_be_visible()
        wait_until(lambda: page.locator("#hits img").first.evaluate("image => image.naturalWidth"))
        assert secret not in page.evaluate("document.cookie + JSON.stringify({...localStorage, ...sessionStorage})")
        page.locator("#hits .frame").first.click()
        expect(page.locator("#pictureMore")).to_be_visible()
        assert not page.locator("#pictureDelete").is_visible()
        page.keyboard.press("Escape")
        page.set_input_files("#file", {"name": "new.png", "mimeType": "image/png", "buffer": encoded(draw(77))})
        expect(page.locator("#hits .score").first).to_be_visible()
        assert page.evaluate(KEPT) == 1
        page.locator("#toOverview").click()
        page.route("**/v1/session", lambda route: route.abort(), times=1)
        page.locator("#signOut").click()
        expect(page.locator("#error")).to_contain_text("Cannot reach the service")
        page.locator("#signOut").click()
        expect(page.locator("#key")).to_be_visible()
        assert page.evaluate(KEPT) == 0
    assert all(re.search("401|ERR_FAILED", message) for message in browse.wrong)
    browse.wrong.clear()


def test_several_collections_can_be_chosen_and_keep_apart(browse, several):
    names = [f"v{n}" for n in range(20)]
    hashseek.create_vector_collection(several / "v", clustered(20), names, n_bits=16).close()
    with listening(several) as url:
        page = browse(url, bypass_csp=True)
        expect(page).to_have_url(f"{url}/collections/a/")
        expect(page.locator("#storedTitle")).to_contain_text("12 pictures")
        assert page.locator("#collection option").all_inner_texts() == ["a", "b c", "v"]
        assert Axe().run(page).response["violations"] == []
        page.select_option("#collection", "b c")
        expect(page).to_have_url(f"{url}/collections/b%20c/")
        expect(page.locator("#storedTitle")).to_contain_text("9 pictures")
        page.locator("#storedList a").first.click()
        expect(page).to_have_url(f"{url}/collections/b%20c/?id=4")
        expect(page.locator("#hits > li")).to_have_count(8)
        wait_until(lambda: page.locator("#hits img").first.evaluate("image => image.naturalWidth"))
        page.set_input_files("#file", {"name": "new.png", "mimeType": "image/png", "buffer": encoded(draw(77))})
        page.locator("#addOpen").click()
        page.locator("#add button[value=add]").click()
        expect(page.locator("#notice")).to_contain_text("Added")
        page.locator("h1 a").click()
        expect(page).to_have_url(f"{url}/collections/b%20c/")
        expect(page.locator("#storedTitle")).to_contain_text("10 pictures")
        page.locator("#toOverview").click()
        expect(page.locator("#overviewFacts")).to_contain_text("Pictures10")
        page.locator("#toDuplicates").click()
        expect(page.locator("#apartHelp")).to_contain_text("equal")
        page.select_option("#collection", "v")
        expect(page.locator("#storedTitle")).to_have_text("20 vectors")
        page.locator("#storedList").get_by_text("v7", exact=True).click()
        expect(page.locator("#queryNote")).to_have_text("v7")
        expect(page.locator("#hits > li")).to_have_count(19)
        expect(page.locator("#status")).to_have_text("19 vectors")
        hand_over(page, "paste", ("new.png", encoded(draw(77))))
        expect(page.locator("#error")).to_be_visible()
        page.locator("#hits .frame").first.click()
        expect(page.locator("#pictureFacts")).to_contain_text("Added")
        pictures = "#sources, #queryOpen, #crop, #hits img, #pictureImage, #pictureOriginal"
        assert page.locator(pictures).locator("visible=true").count() == 0
        page.keyboard.press("Escape")
        page.locator("#toOverview").click()
        expect(page.locator("#overviewFacts")).to_contain_text("Vectors20")


def test_a_missing_file_shows_a_message(browse, own_site, many):
    missing = many.parent / "picture 003.jpg"
    hidden = missing.rename(missing.with_suffix(".away"))
    try:  # before the browser has the thumbnail: later, it would show its copy
        page = browse(f"{own_site}/?where=year<=2004")
        expect(page.locator("#storedList")).to_contain_text("File missing")
        assert page.locator("#storedList img").count() == 4
        page.goto(f"{own_site}/?id=1&where=year=2003")
        expect(page.locator("#hits .frame")).to_contain_text("File missing")  # a click on what is replaced is lost
        page.locator("#hits .frame").click()
        expect(page.locator("#pictureGone")).to_have_text("File missing")
    finally:
        hidden.rename(missing)
    page.route("**/file?*", lambda route: route.fulfill(status=503))
    page.goto(f"{own_site}/?where=year<=2004")
    expect(page.locator("#storedList").get_by_text("Cannot be shown now")).to_have_count(5)
    assert all(re.search("410|503", message) for message in browse.wrong)
    browse.wrong.clear()


def test_a_filter_that_lets_nothing_through_offers_the_way_out(browse, site):
    page = browse(f"{site}/?id=7&label=odd&max_distance=0&label=even")
    expect(page.locator("#nothing")).to_be_visible()
    page.locator("#unlimit").click()
    expect(page.locator("#unlimit")).to_have_text("Search without filters")
    page.locator("#unlimit").click()
    expect(page).to_have_url(f"{site}/?id=7")
    expect(page.locator("#hits > li").first).to_be_visible()
    page.goto(f"{site}/?where=<i>nonsense")
    expect(page.locator("#error")).to_contain_text("<i>nonsense")
    page.goto(f"{site}/?id=7&rank=float")  # it keeps no features: no other order is shown instead
    expect(page.locator("#error")).to_contain_text("features")
    assert all("422" in message for message in browse.wrong)
    browse.wrong.clear()


def test_on_a_phone_the_pictures_begin_near_the_top_and_nothing_is_cut_off(browse, site):
    page = browse(f"{site}/?id=7", **PHONE)
    expect(page.locator("#hits > li").first).to_be_visible()
    assert place_of(page, "#hits") < 300
    photograph(page, "phone")
    assert not page.locator("#radius").is_visible()
    page.locator("#panel summary").click()
    expect(page.locator("#radius")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.goto(site)
    expect(page.locator("#storedList a").first).to_be_visible()
    assert place_of(page, "#storedList") < 220
    assert page.locator("#photo").get_attribute("capture") == "environment"


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1280)])
def test_axe_finds_nothing_that_keeps_anybody_out(browse, own_site, scheme, width, request):
    page = browse(own_site, color_scheme=scheme, viewport={"width": width, "height": 844}, bypass_csp=True)

    def check():
        violations = Axe().run(page).response["violations"]
        assert [(found["id"], [node["html"] for node in found["nodes"]]) for found in violations] == []

    expect(page.locator("#storedList img").first).to_be_visible()
    if (scheme, width) == ("dark", 1280):
        photograph(page, "dark")
    check()
    page.goto(f"{own_site}/?id=7&label=odd&without=three&max_distance=47")
    page.locator("#hits .frame").first.click()
    page.locator("#pictureRelabel").click()
    check()
    page.keyboard.press("Escape")
    page.locator("#crop").click()
    check()
    page.keyboard.press("Escape")
    check()
    page.goto(f"{own_site}/?view=overview")
    expect(page.locator("#legend button").first).to_be_visible()
    page.locator("#legend button").first.click()
    check()
    page.goto(f"{own_site}/?view=duplicates&radius=2")
    page.locator("#groups input").first.check()
    check()
