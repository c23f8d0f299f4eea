// The query and its hits.

import { alike, canRank, refine, remember, urlWith, wanted } from "/web/url.js";
import { bytes, counted, el, fail, inside, ms, number, oneAtATime, pairs, percent, ui, unseen } from "/web/dom.js";
import { openPicture } from "/web/picture.js";
import { chips, described, named, thumbnail } from "/web/pictures.js";
import { showRadius, withinDistance } from "/web/radius.js";
import { api, imagePath, inFolder, mayChange, noun, ofVectors, stats, titled } from "/web/service.js";

const PAGE = 48; // hits asked for at a time, unless the service lists fewer
const CHIPS = 5; // labels on a hit before "+n"; the dialog has them all
const RANKINGS = { hamming: "Hamming distance", asymmetric: "asymmetric score", float: "cosine of features" };

export let query = null; // {id, upload, urls, labels}
export let hits = []; // what the grid shows
let current = null; // the signal that ends what is fetched
let next = null; // the offset of the hits that follow
let isCut = false; // whether hits may follow that the service does not list
let histogram = []; // pictures at each distance, without the query itself; empty if the store does not count them
let isLeftOut = false; // whether the histogram had the query
let seen = 0; // 1 once the query was found among its own hits, which are numbered without it
let ranked = "hamming";

// Shows what is known before the answer arrives: the picture itself, at once.
export function showQuery({ id }, upload) {
  const searching = id !== null || Boolean(upload);
  document.body.dataset.mode = searching ? "search" : "home";
  ui.queryCard.hidden = !searching;
  ui.addOpen.hidden = true; // offered with the answer: a file that cannot be read cannot be added
  ui.order.hidden = !searching;
  for (const option of ui.rank.options) option.hidden = option.disabled = !canRank(option.value, id);
  ui.rank.value = wanted().rank;
  const files = upload?.files ?? [];
  const title = files.length > 1 ? `${files.length} pictures` : files.length ? files[0].name : titled(id);
  document.title = searching ? `${title} · Hashseek` : "Hashseek";
  if (!searching) {
    ui.radius.hidden = true;
    ui.summary.replaceChildren();
    query = next = null;
    hits = [];
    return;
  }
  const urls = upload?.urls ?? [`${imagePath(id)}/file`];
  const isSame = query && !query.isBroken && query.id === id && query.upload === upload;
  if (!isSame) {
    query = { id, upload, urls, labels: new Set() };
    Object.assign(ui.queryOpen, { disabled: true, ariaLabel: null });
    ui.queryOpen.hidden = ofVectors();
    ui.queryOpen.replaceChildren(...(ofVectors() ? [] : urls.map((url) => queryImage(upload ? url : `${url}?size=512`))));
    ui.crop.hidden = true; // offered with the answer
    ui.queryLabels.replaceChildren();
    ui.queryTitle.textContent = title;
    ui.queryNote.textContent = files.length > 1 ? "New pictures, combined into one query" : files.length ? `New picture, ${bytes(files[0].size)}` : "";
  }
  ui.clear.href = urlWith({ id: null, max: null, rank: "" });
}

function queryImage(src) {
  const of = query;
  const broken = () => { // a format that only the service can read, a missing file, or the service is down
    of.isBroken = true; // the next search tries again
    image.replaceWith(el("span", {}, "No preview"));
  };
  const image = el("img", { alt: "The query picture", decoding: "async", onerror: broken, src });
  return image;
}

function showStoredQuery(image) {
  query.labels = new Set(image.labels);
  ui.queryNote.textContent = named(image);
  ui.queryLabels.replaceChildren(...chips(image.labels, new Set(), 12));
  ui.queryOpen.disabled = false;
  ui.queryOpen.ariaLabel = `Open ${noun()} ${image.id}`;
  ui.queryOpen.onclick = () => openPicture(image);
}

const pageSize = () => Math.min(PAGE, stats.max_k);

function ask(offset) {
  const { id, max, rank, filters } = wanted();
  const fields = [["k", pageSize()], ["offset", offset], ...filters];
  if (max !== null) fields.push(["max_distance", max]);
  if (rank) fields.push(["rank", rank]);
  if (offset === 0) fields.push(["include", "histogram"]);
  if (id !== null) return api(`${imagePath(id)}/similar?${new URLSearchParams(fields)}`, { signal: current });
  const body = new FormData();
  for (const file of query.upload.files) body.append("image", file);
  for (const [name, value] of fields) body.append(name, value);
  return api("v1/search", { method: "POST", body, signal: current });
}

// Fills the results; `least` is how many there were before Back or a reload.
export async function search(signal, least) {
  const { id, max, filters } = wanted();
  current = signal;
  ui.more.hidden = true; // or hits that are restored here would be fetched by showMore(), too
  const [answer, image] = await Promise.all([ask(0), id === null ? null : api(imagePath(id), { signal })]);
  if (image) showStoredQuery(image);
  hits = [];
  seen = 0;
  ranked = answer.ranked_by;
  ui.hits.replaceChildren();
  histogram = answer.histogram ?? [];
  isLeftOut = false;
  showRadius(histogram, max);
  if (id !== null && !filters.length) leaveOutQuery();
  addHits(answer);
  showSummary(answer);
  while (hits.length < least && next !== null) addHits(await ask(next));
  showCounts();
}

// A stored query that matches the filters is counted at distance 0, but is not a result.
function leaveOutQuery() {
  if (isLeftOut || !histogram.length) return;
  isLeftOut = true;
  histogram[0] -= 1;
  showRadius(histogram, wanted().max);
}

function addHits(answer) {
  next = answer.next_offset;
  isCut = next === null && answer.hits.length === pageSize();
  if (answer.hits.some(({ id }) => id === query.id)) leaveOutQuery();
  for (const hit of answer.hits) {
    if (hit.id === query.id) seen = 1;
    else hits.push({ ...hit, ...rankOf(hit.rank - seen, hit.distance) });
  }
  ui.hits.append(...hits.slice(ui.hits.children.length).map(hitCard));
}

function showCounts() {
  const { max } = wanted();
  const found = histogram.length ? withinDistance(max ?? Infinity) : null;
  ui.status.textContent = hits.length && found !== null ? `${counted(found, noun())}${max === null ? "" : ` within ${counted(max, "bit")}`}` : "";
  ui.more.hidden = next === null;
  ui.end.hidden = next !== null || (hits.length < PAGE && !isCut);
  ui.end.textContent = isCut && hits.length !== found ? `Showing the first ${number(hits.length)}, the most that this service lists.` : `Showing all ${number(hits.length)}.`;
  remember({ loaded: hits.length });
}

function showSummary({ n_images, n_bits, encode_ms, search_ms, is_exact }) {
  const { max, filters } = wanted();
  pairs(ui.summary, [
    ["Code", counted(n_bits, "bit")],
    ["Encode", encode_ms > 0 ? ms(encode_ms) : "stored code"],
    ["Search", `${ms(search_ms)}${is_exact || ranked !== "hamming" ? "" : ", approximate"}`],
    ["Ordered by", RANKINGS[ranked]],
  ]);
  ui.crop.hidden = ofVectors() || query.urls.length > 1;
  ui.addOpen.hidden = query.upload?.files.length !== 1 || query.upload.stored !== null || !mayChange() || !inFolder();
  ui.nothing.hidden = hits.length > 0;
  ui.unlimit.hidden = n_images === 0 || (max === null && !filters.length);
  ui.unlimit.textContent = max === null ? "Search without filters" : "Search without a limit";
  ui.unlimit.href = urlWith(max === null ? { filters: [] } : { max: null });
  ui.nothingText.textContent = n_images === 0 ? "The collection is empty, so there is nothing to find yet."
    : max !== null ? `No ${noun()} is within ${counted(max, "bit")} of this one.` : `No other ${noun()} was found.`;
}

// The rank, or the ranks that hits at the same distance share: "3", "4–7".
function rankOf(rank, distance) {
  const first = withinDistance(distance - 1) + 1;
  const last = withinDistance(distance);
  if (ranked !== "hamming" || first >= last) return { rank: number(rank), rankWords: `Rank ${number(rank)}` };
  return { rank: `${number(first)}–${number(last)}`, rankWords: `Ranks ${number(first)} to ${number(last)}, tied at the same distance` };
}

function hitCard(hit) {
  const picture = el("button", { type: "button", className: "frame", ariaLabel: `Open ${noun()} ${hit.id}` }, thumbnail(hit));
  picture.onclick = () => openPicture(hit);
  const bar = el("span", { className: "bar", ariaHidden: "true" }, el("span"));
  bar.firstChild.style.width = `${(100 * hit.distance) / stats.n_bits}%`;
  const likely = hit.relevance === null ? [] : [el("span", { className: "likely", title: "How likely a picture at this distance is relevant" },
    ` · ${percent(hit.relevance)}`, unseen(" likely to be relevant"))];
  const score = ranked === "hamming" ? [] : [el("span", { className: "score", title: `Score, by which hits are ordered: ${RANKINGS[ranked]}` },
    ` · score ${hit.score.toPrecision(3)}`)];
  return el("li", { className: "hit" }, picture,
    el("span", { className: "rank", title: hit.rankWords }, el("span", { ariaHidden: "true" }, hit.rank), unseen(hit.rankWords)),
    el("div", { className: "caption" }, el("span", { className: "distance" }, counted(hit.distance, "bit"), ...score, ...likely),
      inside(alike(hit.id), "More like this", { ariaLabel: `More like this: ${noun()} ${hit.id}` })),
    bar,
    ...(hit.url === null ? [] : [el("p", { className: "name-line", title: named(hit) }, named(hit))]),
    el("ul", { className: "chips", ariaLabel: "Labels" }, ...chips(hit.labels, query.labels, CHIPS)));
}

export function showAgain(hit) { // after its labels changed
  const card = ui.hits.children[hits.indexOf(hit)];
  if (!card) return; // of a search that is no longer shown
  card.querySelector(".chips").replaceChildren(...chips(hit.labels, query.labels, CHIPS));
  for (const image of card.querySelectorAll("img")) image.alt = described(hit);
}

const showMore = oneAtATime(async () => {
  const { length } = hits;
  const signal = current;
  const byKeyboard = document.activeElement === ui.more;
  ui.error.hidden = true;
  try {
    const answer = await ask(next);
    if (signal.aborted) return;
    addHits(answer);
    showCounts();
    if (byKeyboard) ui.hits.children[length]?.querySelector("button").focus({ preventScroll: true });
    nearEnd.unobserve(ui.more); // it reports only changes, but the end may still be near
    nearEnd.observe(ui.more);
  } catch (error) {
    fail(error, showMore);
  }
});

ui.more.onclick = showMore;
const nearEnd = new IntersectionObserver(([entry]) => entry.isIntersecting && showMore(), { rootMargin: "800px" });
nearEnd.observe(ui.more);
ui.rank.onchange = () => refine({ rank: ui.rank.value });
