// The search page: one query (a new picture or a stored one) with its hits, or the list of all pictures.

import { arrived, go, onMove, remember, urlWith, wanted } from "/web/url.js";
import { browse } from "/web/browse.js";
import { onCrop } from "/web/crop.js";
import { duplicates } from "/web/duplicates.js";
import { afterPause, asked, clearMessages, fail, splitLabels, ui } from "/web/dom.js";
import { showFilters } from "/web/filters.js";
import { overview } from "/web/overview.js";
import { onChange } from "/web/picture.js";
import { query, search, showQuery } from "/web/search.js";
import { api, inFolder, loadStats, noun, ofVectors, session, stats } from "/web/service.js";
import { find, keep } from "/web/uploads.js";

const MOST_FILES = 16; // that the service accepts as one query
const VIEWS = { duplicates, overview };
let running = new AbortController(); // what is under way
const sections = ui.main.querySelectorAll("section"); // only one of them is shown
let settled = false; // whether the page matches the URL, so that any scrolling is the reader's own

// Shows what the URL asks for.
async function show() {
  if (!stats) return; // start() comes back
  running.abort();
  running = new AbortController();
  const { signal } = running;
  settled = false;
  clearMessages();
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
  const { y = 0, loaded = 0 } = history.state ?? {};
  const now = wanted();
  const upload = now.upload && (await find(now.upload));
  if (signal.aborted) return;
  if (now.upload && !upload) ui.notice.textContent = "The picture for this search is no longer available. Choose it again.";
  if (now.unknown.length) ui.notice.textContent = `Parts of the URL are not known to this page and were ignored: ${now.unknown.join(", ")}.`;
  const searching = now.id !== null || Boolean(upload);
  showQuery(now, upload);
  showFilters();
  ui.panel.hidden = now.view !== null;
  ui.toDuplicates.ariaCurrent = now.view === "duplicates" ? "page" : null;
  ui.toOverview.ariaCurrent = now.view === "overview" ? "page" : null;
  const section = searching ? ui.results : ui[now.view]; // none: the list of all pictures, which shows itself
  ui.main.ariaBusy = "true";
  try {
    if (section) await (searching ? search : VIEWS[now.view])(signal, loaded);
    for (const other of sections) if (section || (other !== ui.stored && other !== ui.empty)) other.hidden = other !== section;
    if (section) scrollTo(0, y);
    else await browse(signal, y);
    settled = true;
    ui.main.ariaBusy = "false";
    arrived();
  } catch (error) {
    if (signal.aborted) return;
    // Hits and figures of another query beside this error would mislead.
    for (const other of [...sections, ui.radius, ui.crop]) other.hidden = true;
    ui.summary.replaceChildren();
    ui.main.ariaBusy = "false";
    fail(error, show);
  }
}

// After the collection changed: its numbers, and what is shown.
async function refresh() {
  await loadStats();
  document.body.dataset.holds = stats.holds;
  ui.sources.hidden = ofVectors();
  ui.toDuplicates.hidden = ui.toOverview.hidden = !inFolder();
  ui.signOut.hidden = session.key === null;
  await show();
}

async function take(fileList) {
  let files = [...fileList];
  if (stats && ofVectors()) return fail(new Error("This collection holds vectors, so it cannot be searched with a picture."));
  if (!files.length || !files.every(({ type }) => /^(image\/|$)/.test(type))) return fail(new Error("That is not a picture file."));
  if (files.length > MOST_FILES) return fail(new Error(`${files.length} pictures were chosen. At most ${MOST_FILES} can form one query.`));
  try { // into memory: a file may be a folder, or change on disk before it is sent
    files = await Promise.all(files.map(async (file) => new File([await file.arrayBuffer()], file.name, { type: file.type })));
  } catch {
    return fail(new Error("The file cannot be read. Choose it again."));
  }
  const upload = await keep(files);
  return go(urlWith({ view: null, radius: null, id: null, max: null }), { upload });
}

ui.addOpen.onclick = async () => {
  if ((await asked(ui.add)) !== "add") return;
  const { upload } = query;
  const body = new FormData();
  body.set("image", upload.files[0]);
  for (const label of splitLabels(ui.addLabels.value)) body.append("labels", label);
  try {
    const { id, created } = await api("v1/images", { method: "POST", body });
    upload.stored = id;
    const labelled = ui.addLabels.value && !created;
    ui.addLabels.value = "";
    await refresh();
    ui.notice.textContent = created ? `Added as ${noun()} ${id}.` : `Already in the collection, as ${noun()} ${id}.${labelled ? " Its labels were not changed: open it to edit them." : ""}`;
  } catch (error) {
    fail(error);
  }
};

const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
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
  take(event.dataTransfer.files);
});
document.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) take(event.clipboardData.files); // text goes where it was pasted
});
for (const input of [ui.file, ui.photo]) {
  input.onchange = () => {
    if (input.files.length) take(input.files);
    input.value = ""; // so that choosing the same file again is a change
  };
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-go]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
  event.preventDefault();
  go(link.getAttribute("href"), link === ui.unlimit || link.closest("#chosen") ? { upload: wanted().upload } : null);
});
for (const dialog of document.querySelectorAll("dialog")) {
  const isBackdrop = ({ target, clientX: x, clientY: y }) => {
    const { left, right, top, bottom } = dialog.getBoundingClientRect();
    return target === dialog && (x < left || x > right || y < top || y > bottom);
  };
  let wasPressed = false; // on the backdrop: a drag out of a field ends there, too
  dialog.addEventListener("pointerdown", (event) => (wasPressed = isBackdrop(event)));
  dialog.addEventListener("click", (event) => {
    if ((wasPressed && isBackdrop(event)) || event.target.closest("[data-close]")) dialog.close();
  });
}
ui.skip.onclick = (event) => {
  event.preventDefault(); // a change of the hash would be a step in the history
  ui.main.querySelector("section:not([hidden]) :is(.stored-list a, h2:not(#storedTitle))")?.focus();
};

// Wide windows have room for the panel; on a phone it would be above the pictures.
const wide = matchMedia("(min-width: 900px)");
const fold = () => (ui.panel.open = wide.matches);
wide.onchange = fold;
fold();

history.scrollRestoration = "manual"; // the browser would restore it before the pictures are there
addEventListener("scroll", afterPause(150, () => settled && remember({ y: scrollY })), { passive: true });
addEventListener("popstate", show);
onMove(show);
onChange(refresh);
onCrop(take);

function start() {
  clearMessages();
  refresh().catch((error) => fail(error, start));
}
start();
