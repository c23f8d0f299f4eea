// The page of Hashseek: one query (a new picture or a stored one), its hits, and the stored pictures.
// The address bar is the state: ?id=12&k=24&max_distance=10&rank=float. Every change of query goes through it and
// then through show(), so that links, reload, Back and Forward all take the same path.

const PAGE = 48; // stored pictures fetched at a time
const DEFAULT_K = 24;
const CHIPS = 5; // labels on a hit before "+n"; the dialog has them all

const ui = Object.fromEntries([...document.querySelectorAll("[id]")].map((node) => [node.id, node]));
const uploads = new Map(); // key in history.state -> {file, url, stored}: Back finds a dropped picture again
let stats = { holds: "images", n_images: null, n_bits: 1024, read_only: true, keeps_features: false }; // until the service has told
let current = { hits: [], labels: new Set() }; // what the grid shows
let open = null; // the picture in the dialog
let running = new AbortController(); // the search under way
let page = 0; // counts fills of the stored list, so that a late page of an older filter is dropped

// --- small helpers

function el(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}

const number = (value) => value.toLocaleString("en");
const counted = (n, one) => `${number(n)} ${one}${n === 1 ? "" : "s"}`;
const ms = (value) => `${value < 10 ? value.toFixed(1) : number(Math.round(value))} ms`;
const bytes = (n) => (n < 1e3 ? counted(n, "byte") : n < 1e6 ? `${(n / 1e3).toFixed(1)} kB` : `${(n / 1e6).toFixed(1)} MB`);
const percent = (share) => `${(100 * share).toFixed(share > 0.995 || share < 0.1 ? 1 : 0)} %`;
const ofVectors = () => stats.holds === "vectors";
const noun = () => (ofVectors() ? "vector" : "picture");
const titled = (id) => `${ofVectors() ? "Vector" : "Picture"} ${id}`;
const named = (image) => image.path || image.key; // a vector has no path
const described = (image) => image.labels.join(", ") || named(image);
const imagePath = (id) => `/v1/images/${encodeURIComponent(id)}`;

function pairs(list, entries) {
  list.replaceChildren(...entries.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function chips(labels, shared = new Set(), most = Infinity) {
  const ordered = [...labels].sort((a, b) => shared.has(b) - shared.has(a)); // stable: shared ones first
  const unseen = () => el("span", { className: "unseen" }, " (shared with the query)");
  const items = ordered.slice(0, most).map((label) => (shared.has(label)
    ? el("li", { className: "chip shared" }, label, unseen())
    : el("li", { className: "chip" }, label)));
  const rest = ordered.slice(most);
  return rest.length ? [...items, el("li", { className: "chip rest", title: rest.join(", ") }, `+${rest.length}`)] : items;
}

// How likely a hit at this distance is relevant; nothing where the collection is not calibrated.
function likely({ relevance }) {
  return relevance === null ? [] : [el("span", { className: "likely" }, ` · ${percent(relevance)} likely`,
    el("span", { className: "unseen" }, " to be relevant"))];
}

function thumbnail(image) {
  const { url, width, height } = image;
  if (url === null) return el("span", { className: "name" }, named(image)); // a vector has no picture
  // loading comes before src: set afterwards it would be too late to be lazy
  return el("img", { loading: "lazy", decoding: "async", draggable: false, alt: described(image), width, height,
    srcset: `${url}?size=256, ${url}?size=512 2x`, src: `${url}?size=256` });
}

// --- the service

// The JSON answer, or an Error whose message is one sentence for the reader.
async function api(path, options = {}) {
  for (;;) {
    const response = await fetch(path, options).catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new Error("The service cannot be reached. Is it still running?");
    });
    const starting = response.status === 503;
    ui.starting.textContent = starting ? "The service is starting. This page goes on by itself when it is ready." : "";
    if (response.ok) return response.status === 204 ? null : response.json();
    if (!starting) throw Object.assign(new Error(await sentence(response)), { final: response.status < 500 });
    await new Promise((done) => setTimeout(done, 1000));
    options.signal?.throwIfAborted();
  }
}

async function sentence(response) {
  const { detail, title } = await response.json().catch(() => ({}));
  return detail || title || `The service answered ${response.status} ${response.statusText}.`;
}

function fail(error, retry = show) {
  if (error.name === "AbortError") return;
  ui.errorText.textContent = error.message;
  ui.retry.hidden = !retry || error.final; // asking again would give the same answer
  ui.retry.onclick = retry;
  ui.error.hidden = false;
}

function clearMessages() {
  ui.error.hidden = true;
  ui.notice.textContent = "";
}

// --- the address bar

function readAddress() {
  const params = new URLSearchParams(location.search);
  const whole = (name, low, high, otherwise) => {
    const text = params.get(name) ?? "";
    return /^\d+$/.test(text) ? Math.min(Math.max(Number(text), low), high) : otherwise;
  };
  const id = whole("id", 0, Number.MAX_SAFE_INTEGER, null);
  const upload = id === null ? uploads.get(history.state?.upload) : undefined;
  const rank = params.get("rank");
  return { id, upload, k: whole("k", 1, 200, DEFAULT_K), max: whole("max_distance", 0, stats.n_bits, null),
    rank: canRank(rank, id) ? rank : "" };
}

// Whether the service can order hits so: of a stored query no outputs are known. "" leaves the choice to the service.
const canRank = (rank, id) => ({ "": true, hamming: true, asymmetric: id === null && !ofVectors(), float: stats.keeps_features })[rank] ?? false;

// "?id=12&k=24&max_distance=10&rank=float" with the settings that the controls show now.
function address(id) {
  const params = new URLSearchParams();
  if (id !== null) params.set("id", id);
  if (ui.k.validity.valid) params.set("k", ui.k.value);
  if (ui.max.validity.valid && ui.max.value) params.set("max_distance", ui.max.value);
  if (ui.rank.value && canRank(ui.rank.value, id)) params.set("rank", ui.rank.value);
  return `?${params}`;
}

async function go(id, upload) {
  history.pushState(upload ? { upload } : null, "", address(id));
  if (!(await show())) return;
  scrollTo(0, 0);
  ui.resultsTitle.focus({ preventScroll: true }); // the link that had the focus is gone
}

// --- searching

// Shows what the address says. True when there are results to look at.
async function show() {
  running.abort();
  running = new AbortController();
  const { signal } = running;
  clearMessages();
  ui.picture.close();
  const wanted = readAddress();
  const searching = wanted.id !== null || Boolean(wanted.upload);
  fillControls(wanted);
  showQuery(wanted);
  markStored(wanted.id);
  if (!searching) return showResults(false);
  ui.results.ariaBusy = "true";
  try {
    const [answer, image] = await Promise.all([ask(wanted, signal), wanted.id !== null && api(imagePath(wanted.id), { signal })]);
    if (image) showStoredQuery(image);
    showAnswer(wanted, answer, image ? image.labels : []);
    return showResults(true);
  } catch (error) {
    if (signal.aborted) return false;
    fail(error);
    return showResults(false); // hits of another query beside this error would mislead
  } finally {
    if (!signal.aborted) ui.results.ariaBusy = "false";
  }
}

function fillControls({ id, k, max, rank }) {
  ui.k.value = k;
  ui.max.value = max ?? "";
  for (const option of ui.rank.options) option.hidden = option.disabled = !canRank(option.value, id);
  ui.rank.value = rank;
}

function ask({ id, upload, k, max, rank }, signal) {
  const fields = new Map([["k", k]]);
  if (max !== null) fields.set("max_distance", max);
  if (rank) fields.set("rank", rank);
  if (id !== null) return api(`${imagePath(id)}/similar?${new URLSearchParams([...fields])}`, { signal });
  const body = new FormData();
  body.set("image", upload.file);
  fields.forEach((value, name) => body.set(name, value));
  return api("/v1/search", { method: "POST", body, signal });
}

// Without results the stored pictures have the room, as a grid; beside results they are a strip.
function showResults(shown) {
  ui.results.hidden = !shown;
  ui.stored.dataset.view = shown ? "strip" : "grid";
  ui.storedTitle.textContent = shown ? `Stored ${noun()}s` : ofVectors() ? "Pick a stored vector" : "Or pick a stored picture";
  ui.empty.hidden = shown || stats.n_images !== 0;
  return shown;
}

// What is known before the answer is there: the picture itself, at once.
function showQuery({ id, upload }) {
  const searching = id !== null || Boolean(upload);
  document.body.dataset.mode = searching ? "search" : "home";
  ui.queryCard.hidden = !searching;
  ui.add.hidden = true; // offered with the answer: a file that cannot be read cannot be added
  ui.queryOpen.disabled = true;
  ui.queryOpen.hidden = ofVectors();
  ui.queryOpen.classList.remove("broken");
  ui.summary.replaceChildren();
  ui.queryLabels.replaceChildren();
  const title = upload ? upload.file.name : titled(id);
  document.title = searching ? `${title} · Hashseek` : "Hashseek";
  if (!searching) return;
  ui.queryTitle.textContent = title;
  ui.queryNote.textContent = upload ? `New picture, ${bytes(upload.file.size)}` : "";
  ui.queryImage.alt = "The query picture";
  ui.queryImage.src = upload ? upload.url : ofVectors() ? "" : `${imagePath(id)}/file?size=512`;
}

function showStoredQuery(image) {
  ui.queryNote.textContent = named(image).split("/").pop();
  ui.queryNote.title = named(image);
  ui.queryLabels.replaceChildren(...chips(image.labels, new Set(), 12));
  ui.queryOpen.disabled = false;
  ui.queryOpen.ariaLabel = `Open ${noun()} ${image.id}`;
  ui.queryOpen.onclick = () => openPicture(image);
}

function showAnswer({ id, upload, max }, answer, labels) {
  const { hits, n_bits, n_images, ranked_by, encode_ms } = answer;
  current = { hits, labels: new Set(labels), n_bits, id };
  pairs(ui.summary, [
    ["Code", counted(n_bits, "bit")],
    ["Collection", counted(n_images, noun())],
    ["Encode", encode_ms > 0 ? ms(encode_ms) : "stored code"],
    ["Search", ms(answer.search_ms)],
    ["Hits", number(hits.length)],
    ["Ordered by", { hamming: "Hamming distance", asymmetric: "real outputs", float: "features" }[ranked_by]],
  ]);
  const distances = hits.map((hit) => hit.distance); // not ascending where outputs or features order the hits
  const [nearest, furthest] = [Math.min(...distances), Math.max(...distances)];
  const range = hits.length ? `, ${nearest < furthest ? `${nearest} to ` : ""}${counted(furthest, "bit")} away` : "";
  ui.status.textContent = `${counted(hits.length, "hit")}${range}`;
  ui.hits.replaceChildren(...hits.map(hitCard));
  ui.add.hidden = !upload || upload.stored !== null || stats.read_only;
  ui.nothing.hidden = hits.length > 0;
  ui.unlimit.hidden = max === null || n_images === 0;
  ui.nothingText.textContent = n_images === 0 ? "The collection is empty, so there is nothing to find yet."
    : max === null ? `No ${noun()} was found.` : `No ${noun()} is within ${counted(max, "bit")} of this one.`;
}

function hitCard(hit) {
  const picture = el("button", { type: "button", className: "frame", ariaLabel: `Open ${noun()} ${hit.id}` }, thumbnail(hit));
  picture.onclick = () => openPicture(hit);
  const bar = el("span", { className: "bar", ariaHidden: "true" }, el("span"));
  bar.firstChild.style.width = `${(100 * hit.distance) / current.n_bits}%`;
  const like = hit.id === current.id
    ? el("span", { className: "muted" }, "the query")
    : likeLink(hit.id, "More like this", `More like this: ${noun()} ${hit.id}`);
  return el("li", { className: "hit" }, picture,
    el("div", { className: "caption" }, el("span", { className: "distance" }, counted(hit.distance, "bit"), ...likely(hit)), like),
    bar, el("ul", { className: "chips", ariaLabel: "Labels" }, ...chips(hit.labels, current.labels, CHIPS)));
}

// A real link (a new tab works); plain clicks are taken over by the listener on the document.
function likeLink(id, content, label) {
  const link = el("a", { href: address(id), ariaLabel: label }, content);
  link.dataset.id = id;
  return link;
}

// --- the collection

async function loadStats() {
  stats = await api("/v1/stats");
  const { n_images, n_bits, backbone, fingerprint, version, labels, read_only } = stats;
  ui.facts.textContent = `${counted(n_images, noun())} · ${n_bits} bits`;
  ui.drop.hidden = ofVectors();
  ui.model.textContent = `${backbone} · model ${fingerprint.slice(0, 8)} · v${version}${read_only ? " · read only" : ""}`;
  ui.model.title = `Fingerprint ${fingerprint}`;
  ui.max.max = n_bits;
  ui.stored.hidden = n_images === 0;
  ui.emptyText.textContent = read_only || ofVectors() ? `${ofVectors() ? "Vectors" : "Pictures"} appear here once they have been indexed.`
    : "Index a folder of pictures from the command line, or choose one here and add it.";
  const chosen = ui.label.value;
  const names = Object.entries(labels).sort(([a, n], [b, m]) => m - n || a.localeCompare(b));
  ui.label.replaceChildren(new Option("All labels", ""), ...names.map(([name, n]) => new Option(`${name} (${number(n)})`, name)));
  ui.label.value = Object.hasOwn(labels, chosen) ? chosen : "";
  ui.filter.hidden = names.length === 0;
}

// Fills the list of stored pictures, or adds the page that follows picture `after`.
async function loadStored(after = null) {
  const mine = (page += 1);
  const params = new URLSearchParams({ limit: PAGE });
  if (after !== null) params.set("after", after);
  if (ui.label.value) params.set("label", ui.label.value);
  const { images, next } = await api(`/v1/images?${params}`);
  if (mine !== page) return;
  const items = images.map((image) => {
    const link = likeLink(image.id, thumbnail(image), `Search with ${noun()} ${image.id}: ${described(image)}`);
    link.className = "frame";
    return el("li", {}, link);
  });
  if (next !== null) items.push(moreButton(next));
  if (after === null) ui.storedList.replaceChildren();
  ui.storedList.querySelector(".more")?.remove();
  ui.storedList.append(...items);
  if (after !== null) items[0]?.firstChild.focus({ preventScroll: true }); // the button that had the focus is gone
  markStored(readAddress().id);
}

function moreButton(next) {
  const button = el("button", { type: "button", className: "frame" }, "Show more");
  button.onclick = () => loadStored(next).catch((error) => fail(error, null));
  return el("li", { className: "more" }, button);
}

function markStored(id) {
  for (const link of ui.storedList.querySelectorAll("a")) link.ariaCurrent = link.dataset.id === String(id) ? "true" : null;
}

async function addPicture(event) {
  event.preventDefault();
  const { upload } = readAddress();
  const body = new FormData();
  body.set("image", upload.file);
  if (ui.addLabels.value.trim()) body.set("labels", ui.addLabels.value.trim());
  clearMessages();
  ui.addButton.disabled = true;
  try {
    const { id, created } = await api("/v1/images", { method: "POST", body });
    upload.stored = id;
    ui.addLabels.value = "";
    await refresh();
    ui.notice.textContent = created ? `Added as picture ${id}.` : `Already in the collection, as picture ${id}.`;
  } catch (error) {
    fail(error, null);
  } finally {
    ui.addButton.disabled = false;
  }
}

async function deletePicture() {
  const { id } = open;
  if (!(await confirmed(`${titled(id)} (${named(open)}) leaves the collection. This cannot be undone.`))) return;
  ui.picture.close();
  try {
    await api(imagePath(id), { method: "DELETE" });
    for (const upload of uploads.values()) if (upload.stored === id) upload.stored = null;
    if (readAddress().id === id) history.replaceState(null, "", address(null));
    await refresh();
    ui.notice.textContent = `${titled(id)} was deleted.`;
  } catch (error) {
    fail(error, null);
  }
}

// After the collection changed: its numbers, the stored pictures and the hits.
const refresh = () => loadStats().then(() => Promise.all([loadStored(), show()]));

function confirmed(text) {
  ui.confirmTitle.textContent = `Delete this ${noun()}?`;
  ui.confirmText.textContent = text;
  ui.confirm.returnValue = ""; // Escape must not repeat the last answer
  ui.confirm.showModal();
  return new Promise((done) => {
    ui.confirm.addEventListener("close", () => done(ui.confirm.returnValue === "delete"), { once: true });
  });
}

// --- the picture dialog

function openPicture(image) {
  open = image;
  ui.pictureTitle.textContent = titled(image.id);
  const { url, width, height } = image;
  Object.assign(ui.pictureImage, { alt: described(image), width, height, src: url ? `${url}?size=1024` : "", hidden: !url });
  ui.pictureLabels.replaceChildren(...chips(image.labels, current.labels));
  ui.pictureMore.dataset.id = image.id;
  ui.pictureMore.href = address(image.id);
  ui.pictureOriginal.href = url ?? "";
  ui.pictureOriginal.hidden = url === null;
  ui.pictureDelete.hidden = stats.read_only;
  const place = placeOf(image);
  ui.steps.hidden = place < 0;
  ui.previous.disabled = place <= 0;
  ui.next.disabled = place === current.hits.length - 1;
  showFacts(image);
  if (!ui.picture.open) ui.picture.showModal();
  // A hit does not carry the bytes and the date; the dialog does not wait for them.
  if (image.bytes !== undefined) return;
  api(imagePath(image.id)).then((whole) => open === image && showFacts({ ...whole, ...image })).catch(() => {});
}

function showFacts(image) {
  const rows = image.path ? [["Path", image.path], ["Size", `${image.width} × ${image.height} px`]] : [["Key", image.key]];
  if ((image.relevance ?? null) !== null) rows.unshift(["Relevant", `${percent(image.relevance)} likely at this distance`]);
  if ((image.score ?? null) !== null) rows.unshift(["Score", image.score.toFixed(3)]); // what orders the hits
  if (image.distance !== undefined) rows.unshift(["Distance", counted(image.distance, "bit")]);
  if (image.bytes !== undefined) rows.push([image.path ? "File" : "Size", bytes(image.bytes)]);
  if (image.added_at) rows.push(["Added", new Date(image.added_at).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })]);
  pairs(ui.pictureFacts, rows);
}

const placeOf = (image) => current.hits.findIndex((hit) => hit.id === image.id);

function step(by) {
  const hit = by && !ui.steps.hidden && current.hits[placeOf(open) + by];
  if (hit) openPicture(hit);
}

// --- events

function take(file) {
  if (ofVectors()) return fail(new Error("This collection holds vectors, which a picture cannot be compared with."), null);
  if (!file || !/^(image\/|$)/.test(file.type)) return fail(new Error("That was not a picture file."), null);
  const key = `${performance.timeOrigin} ${uploads.size}`; // unique over reloads, so a stale history entry finds nothing
  uploads.set(key, { file, url: URL.createObjectURL(file), stored: null });
  return go(null, key);
}

let soon; // a value typed digit by digit is one search, not several
function settingsChanged() {
  clearTimeout(soon);
  if (!ui.controls.checkValidity()) return;
  soon = setTimeout(() => {
    history.replaceState(history.state, "", address(readAddress().id));
    show();
  }, 300);
}

const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-id]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
  event.preventDefault();
  go(link.dataset.id === "" ? null : Number(link.dataset.id));
});
document.addEventListener("dragover", (event) => {
  if (!holdsFiles(event)) return;
  event.preventDefault();
  ui.dropping.hidden = false;
});
document.addEventListener("dragleave", (event) => (ui.dropping.hidden ||= !event.relatedTarget)); // null: left the window
document.addEventListener("drop", (event) => {
  ui.dropping.hidden = true;
  if (!holdsFiles(event)) return;
  event.preventDefault();
  take(event.dataTransfer.files[0]);
});
document.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) take(event.clipboardData.files[0]); // text goes where it was pasted
});
document.addEventListener("keydown", (event) => {
  if (ui.picture.open && !ui.confirm.open) step({ ArrowLeft: -1, ArrowRight: 1 }[event.key]);
});
ui.file.onchange = () => {
  if (ui.file.files.length) take(ui.file.files[0]);
  ui.file.value = ""; // so that choosing the same file again is a change
};
ui.queryImage.onerror = () => ui.queryOpen.classList.add("broken"); // a format that only the service can read
ui.controls.oninput = settingsChanged;
ui.controls.onchange = () => ui.controls.reportValidity();
ui.controls.onsubmit = (event) => event.preventDefault();
ui.add.onsubmit = addPicture;
ui.label.onchange = () => loadStored().catch((error) => fail(error, null));
ui.unlimit.onclick = () => {
  ui.max.value = "";
  settingsChanged();
};
ui.pictureClose.onclick = () => ui.picture.close();
ui.picture.onclick = (event) => event.target === ui.picture && ui.picture.close(); // the backdrop
ui.previous.onclick = () => step(-1);
ui.next.onclick = () => step(1);
ui.pictureDelete.onclick = deletePicture;
ui.skip.onclick = (event) => {
  event.preventDefault(); // a change of the hash would be a step in the history
  (ui.results.hidden ? ui.storedList.querySelector("a") : ui.resultsTitle)?.focus();
};

addEventListener("popstate", show);

function start() {
  clearMessages();
  refresh().catch((error) => fail(error, start));
}

fillControls(readAddress()); // at once: a picture may be dropped while the service is still starting
start();
