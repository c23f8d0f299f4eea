// The dialog of one picture: what is known about it, its labels to edit, deleting it.

import { alike, urlWith } from "/web/url.js";
import { bytes, clearMessages, confirmed, counted, fail, focusTitle, pairs, percent, splitLabels, ui } from "/web/dom.js";
import { showFilters } from "/web/filters.js";
import { chips, day, described, named, whyBroken } from "/web/pictures.js";
import { hits, query, showAgain } from "/web/search.js";
import { api, deleteImage, imagePath, json, loadStats, mayChange, noun, titled } from "/web/service.js";
import { forgetStored } from "/web/uploads.js";

let open = null; // the picture in the dialog
let changed = null; // what app.js does after the collection changed
export const onChange = (listener) => (changed = listener);

const placeOf = (image) => hits.findIndex((hit) => hit.id === image.id);

export function openPicture(image) {
  open = image;
  ui.pictureTitle.textContent = titled(image.id);
  const { url, width, height } = image;
  ui.pictureGone.hidden = true;
  ui.pictureImage.removeAttribute("src"); // or the former picture would stay until this one has arrived
  Object.assign(ui.pictureImage, { alt: described(image), width, height, hidden: !url }, url && { src: `${url}?size=1024` });
  ui.pictureMore.href = alike(image.id);
  ui.pictureMore.hidden = image.id === query?.id;
  ui.pictureOriginal.href = url ?? "";
  ui.pictureOriginal.hidden = url === null;
  ui.pictureDelete.hidden = !mayChange();
  ui.pictureRelabel.hidden = !mayChange() || image.labels.some((label) => label.includes(";")); // it separates labels here
  const place = placeOf(image);
  ui.steps.hidden = place < 0;
  ui.previous.disabled = place <= 0;
  ui.next.disabled = place === hits.length - 1;
  showLabels();
  showFacts(image);
  if (!ui.picture.open) ui.picture.showModal();
  // A hit has no file size and date; the dialog does not wait for them.
  if (image.bytes !== undefined) return;
  api(imagePath(image.id)).then((whole) => open === image && showFacts({ ...whole, ...image })).catch(() => {});
}

function showFacts(image) {
  const rows = [];
  if (image.rank !== undefined) rows.push([image.rank.includes("–") ? "Ranks (tied)" : "Rank", image.rank]);
  if (image.distance !== undefined) rows.push(["Distance", counted(image.distance, "bit")]);
  if ((image.score ?? null) !== null) rows.push(["Score", image.score.toFixed(3)]); // what orders the hits
  if ((image.relevance ?? null) !== null) rows.push(["Relevant", `${percent(image.relevance)} likely at this distance`]);
  if (image.key) rows.push(["Key", image.key]);
  if (image.path && image.path !== image.key) rows.push(["Path", image.path]);
  if (image.path) rows.push(["Size", `${image.width} × ${image.height} px`]);
  if (image.bytes !== undefined) rows.push([image.path ? "File" : "Size", bytes(image.bytes)]);
  if (image.added_at) rows.push(["Added", day(image.added_at, { timeStyle: "short" })]);
  for (const [name, value] of Object.entries(image.attributes)) rows.push([name, typeof value === "string" ? value : JSON.stringify(value)]);
  pairs(ui.pictureFacts, rows);
}

function showLabels(editing = false) {
  const wasEditing = !ui.relabel.hidden;
  ui.pictureLabels.replaceChildren(...chips(open.labels, open.id === query?.id ? new Set() : query?.labels));
  ui.pictureLabels.hidden = editing;
  ui.relabel.hidden = !editing;
  ui.relabelError.textContent = "";
  if (editing) {
    ui.newLabels.value = open.labels.join("; ");
    ui.newLabels.focus();
  } else if (wasEditing) ui.pictureRelabel.focus();
}

ui.pictureRelabel.onclick = () => showLabels(true);
ui.keepLabels.onclick = () => showLabels();
ui.relabel.onsubmit = async (event) => {
  event.preventDefault();
  const image = open;
  try {
    const { labels } = await api(imagePath(image.id), json("PATCH", { labels: splitLabels(ui.newLabels.value) }));
    if (image.id === query?.id) return await changed(); // every hit shows which labels it shares with the query
    image.labels = labels;
    showAgain(image);
    if (open === image) showLabels();
    await loadStats();
    showFilters(); // it suggests labels
  } catch (error) {
    ui.relabelError.textContent = error.message;
  }
};

ui.pictureDelete.onclick = async () => {
  const { id } = open;
  if (!(await confirmed(`Delete this ${noun()}?`, `${titled(id)} (${named(open)}) will be removed from the collection. This cannot be undone.`))) return;
  ui.picture.close();
  clearMessages();
  try {
    await deleteImage(id);
    forgetStored(id);
    if (query?.id === id) history.replaceState(null, "", urlWith({ id: null, max: null, rank: "" }));
    await changed();
    if (document.activeElement === document.body) focusTitle(); // what had it may be gone
    ui.notice.textContent = `${titled(id)} was deleted.`;
  } catch (error) {
    fail(error);
  }
};

function step(by) {
  const hit = by && !ui.steps.hidden && hits[placeOf(open) + by];
  if (hit) openPicture(hit);
}

ui.previous.onclick = () => step(-1);
ui.next.onclick = () => step(1);
document.addEventListener("keydown", (event) => {
  if (!ui.picture.open || ui.confirm.open || !ui.relabel.hidden) return;
  step({ ArrowLeft: -1, ArrowRight: 1 }[event.key]);
});
ui.pictureImage.onerror = async () => {
  const image = open;
  const reason = await whyBroken(ui.pictureImage.src);
  if (open !== image) return;
  ui.pictureImage.hidden = true;
  Object.assign(ui.pictureGone, { textContent: reason, hidden: false });
};
