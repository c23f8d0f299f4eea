// Groups of near-duplicates, to be reviewed one by one: delete some of the pictures, or keep them all.

import { place, refine, remember, wanted } from "/web/url.js";
import { afterPause, bytes, clearMessages, confirmed, counted, el, fail, oneAtATime, ui } from "/web/dom.js";
import { chips, day, named, searchLink } from "/web/pictures.js";
import { api, deleteImage, json, loadStats, mayChange, noun, stats, titled } from "/web/service.js";
import { forgetStored } from "/web/uploads.js";

const PAGE = 20;
const MOST = 8; // bits that the service accepts

let total = 0; // groups that nobody has reviewed
let next = null; // the offset of the groups that follow, or a smaller one; null: none follow
let current = null; // the signal that ends what is fetched

const radius = () => Math.min(wanted().radius ?? 0, MOST, stats.n_bits - 1);

const page = (limit, offset) => api(`v1/duplicates?${new URLSearchParams({ radius: radius(), limit, offset })}`, { signal: current });

// Shows the groups; `least` is how many there were before Back or a reload.
export async function duplicates(signal, least) {
  current = signal;
  document.title = "Near-duplicates · Hashseek";
  Object.assign(ui.apart, { max: Math.min(MOST, stats.n_bits - 1), value: radius() });
  tell();
  const answer = await page(Math.min(Math.max(PAGE, least), 100), 0);
  ui.groups.replaceChildren();
  add(answer);
}

function tell() {
  const bits = counted(Number(ui.apart.value), "bit");
  ui.apartText.textContent = ui.apart.ariaValueText = bits;
  ui.apartHelp.textContent = ui.apart.value === "0" ? "All codes in a group are equal, but the pictures may still differ."
    : `Every ${noun()} in a group differs by at most ${bits} from at least one other.`;
}

function add(answer) {
  const listed = new Set(Array.from(ui.groups.children, ({ dataset }) => Number(dataset.first)));
  ui.groups.append(...answer.groups.filter(({ images }) => !listed.has(images[0].id)).map(groupItem));
  total = Math.max(answer.total, ui.groups.children.length); // what is left of a group may be none for the service
  next = answer.next_offset;
  count();
}

function count() {
  const shown = ui.groups.children.length;
  ui.duplicatesStatus.textContent = total ? `${counted(total, "group")} to review` : "";
  ui.noGroups.hidden = total > 0;
  ui.noGroups.textContent = radius() ? `No groups of ${noun()}s within ${counted(radius(), "bit")} are left to review.` : "No groups with equal codes are left to review.";
  ui.moreGroups.hidden = next === null;
  remember({ loaded: shown });
}

function groupItem({ size, images }) {
  const title = el("h3", { tabIndex: -1 }, counted(size, noun()));
  const remove = el("button", { className: "quiet danger", type: "button", disabled: true }, "Delete selected");
  const keep = el("button", { className: "quiet", type: "button" }, "Keep all");
  const item = el("li", { className: "group" }, el("div", { className: "bar-row" }, title), el("ul", { className: "grid" }, ...images.map(card)));
  item.dataset.first = images[0].id;
  if (mayChange()) title.after(el("div", { className: "actions" }, remove, ...(size === images.length ? [keep] : [])));
  if (size > images.length) item.append(el("p", { className: "muted" }, `The first ${images.length} are shown. Choose a smaller radius for smaller groups.`));
  const chosen = () => [...item.querySelectorAll(":checked")].map((box) => Number(box.value));
  item.onchange = () => {
    const { length } = chosen();
    remove.disabled = !length;
    remove.textContent = length ? `Delete ${counted(length, noun())}` : "Delete selected";
  };
  remove.onclick = oneAtATime(async () => {
    const ids = chosen();
    const what = ids.length === 1 ? titled(ids[0]) : `${counted(ids.length, noun())} (${ids.join(", ")})`;
    if (!(await confirmed(`Delete ${counted(ids.length, noun())}?`, `${what} will be removed from the collection. This cannot be undone.`))) return;
    await decide(`Deleted: ${what}.`, async () => {
      for (const id of ids) {
        await deleteImage(id);
        forgetStored(id);
        images = images.filter((image) => image.id !== id);
        size -= 1;
      }
      await loadStats();
    });
    replace(item, size > 1 && images.length ? groupItem({ size, images }) : null);
  });
  keep.onclick = oneAtATime(() => decide(`Kept: ${counted(size, noun())}.`, async () => {
    await api("v1/duplicates/kept", json("POST", { ids: images.map(({ id }) => id) }));
    replace(item, null);
  }));
  return item;
}

function card(image) {
  const { id, width, height, url } = image;
  const facts = [...(url ? [`${width} × ${height} px`] : []), bytes(image.bytes), day(image.added_at)];
  return el("li", { className: "hit" },
    searchLink(image),
    ...(mayChange() ? [el("label", { className: "choose" }, el("input", { type: "checkbox", value: id, ariaLabel: `Choose ${noun()} ${id}` }), titled(id))] : []),
    el("p", { className: "name-line", title: named(image) }, named(image)),
    el("p", { className: "facts" }, facts.map((fact) => fact.replaceAll(" ", "\u00a0")).join(" · ")),
    el("ul", { className: "chips", ariaLabel: "Labels" }, ...chips(image.labels, new Set(), 5)));
}

async function decide(done, work) {
  clearMessages();
  try {
    await work();
    ui.notice.textContent = done;
  } catch (error) {
    fail(error);
  }
}

// What is left of a group takes its place; null: nothing. The focus stays near.
function replace(item, rest) {
  if (next) next -= 1; // the service may no longer have the group
  const near = rest ?? item.nextElementSibling ?? item.previousElementSibling;
  if (rest) item.replaceWith(rest);
  else {
    item.remove();
    total -= 1;
    count();
    if (!ui.groups.firstChild && next !== null) showMore();
  }
  (near?.querySelector("h3") ?? ui.duplicatesTitle).focus();
}

const showMore = oneAtATime(async () => {
  try {
    const { length } = ui.groups.children;
    do add(await page(PAGE, next)); while (next !== null && ui.groups.children.length === length);
  } catch (error) {
    fail(error, showMore);
  }
});

ui.moreGroups.onclick = showMore;
let pending = null; // where the slider was moved
ui.apart.oninput = () => {
  pending = place();
  tell();
  search();
};
const search = afterPause(250, () => pending === place() && refine({ radius: Number(ui.apart.value) }));
