// Groups of near-duplicates, to be reviewed one by one: delete some of the pictures, or keep them all.

import { alike, refine, remember, wanted } from "/web/url.js";
import { afterPause, bytes, clearMessages, confirmed, counted, el, fail, inside, oneAtATime, ui } from "/web/dom.js";
import { chips, day, described, named, thumbnail } from "/web/pictures.js";
import { api, imagePath, json, loadStats, mayChange, noun, stats, titled } from "/web/service.js";
import { forgetStored } from "/web/uploads.js";

const PAGE = 20;
const MOST = 8; // bits that the service accepts

let total = 0; // groups that nobody has reviewed
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
  total = answer.total;
  ui.groups.append(...answer.groups.map(groupItem));
  count();
}

function count() {
  const shown = ui.groups.children.length;
  ui.duplicatesStatus.textContent = total ? `${counted(total, "group")} to review` : "";
  ui.noGroups.hidden = total > 0;
  ui.noGroups.textContent = `No groups of ${noun()}s within ${counted(radius(), "bit")} are left to review.`;
  ui.moreGroups.hidden = shown >= total;
  remember({ loaded: shown });
}

function groupItem({ size, images }) {
  const title = el("h3", { tabIndex: -1 }, counted(size, noun()));
  const remove = el("button", { className: "quiet danger", type: "button", disabled: true }, "Delete selected");
  const keep = el("button", { className: "quiet", type: "button" }, "Keep all");
  const item = el("li", { className: "group" }, el("div", { className: "bar-row" }, title), el("ul", { className: "grid" }, ...images.map(card)));
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
        await api(imagePath(id), { method: "DELETE" });
        forgetStored(id);
        images = images.filter((image) => image.id !== id);
        size -= 1;
      }
      await loadStats();
    });
    replace(item, size > 1 ? groupItem({ size, images }) : null);
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
    inside(alike(id), thumbnail(image), { className: "frame", ariaLabel: `Search with ${noun()} ${id}: ${described(image)}` }),
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
  const near = rest ?? item.nextElementSibling ?? item.previousElementSibling;
  if (rest) item.replaceWith(rest);
  else {
    item.remove();
    total -= 1;
    count();
    if (!ui.groups.firstChild && total) showMore();
  }
  (near?.querySelector("h3") ?? ui.duplicatesTitle).focus();
}

const showMore = oneAtATime(() => page(PAGE, ui.groups.children.length).then(add).catch((error) => fail(error, showMore)));

ui.moreGroups.onclick = showMore;
ui.apart.oninput = () => {
  tell();
  search();
};
const search = afterPause(250, () => refine({ radius: Number(ui.apart.value) }));
