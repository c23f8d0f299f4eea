// All pictures that match the filters, in one long list of which only the rows near the window exist. So the scroll bar,
// or the slider above the list, goes to any position at once.

import { wanted } from "/web/url.js";
import { afterPause, counted, el, fail, number, ui } from "/web/dom.js";
import { searchLink } from "/web/pictures.js";
import { api, inFolder, noun, stats } from "/web/service.js";

const BLOCK = 120; // pictures fetched at a time
const HIGHEST = 15_000_000; // pixels that browsers lay out reliably

let total = 0;
let blocks = new Map(); // number of a block -> its images, or null while they are fetched
let items = new Map(); // position from 0 -> its list item
let shape = { columns: 1, height: 1 }; // of the grid, in pixels
let current = null; // the signal that ends what is fetched

// Fetches the first block and shows the list.
export async function browse(signal, y) {
  current = signal;
  const first = await page(0);
  blocks = new Map([[0, first.images]]);
  total = first.total;
  items = new Map();
  ui.storedList.replaceChildren();
  const { filters } = wanted();
  ui.storedTitle.textContent = filters.length ? `${number(total)} of ${counted(stats.n_images, noun())}` : counted(total, noun());
  ui.stored.hidden = total === 0;
  ui.empty.hidden = total > 0;
  ui.emptyTitle.textContent = filters.length ? `No ${noun()} matches the filters` : "The collection is empty";
  ui.emptyText.textContent = filters.length ? "Remove one of them." : stats.read_only || stats.holds === "vectors" || !inFolder()
    ? "Items appear here once they have been indexed." : "Index a folder of pictures from the command line, or choose a picture here and add it.";
  draw();
  scrollTo(0, y);
  draw();
}

const page = (block) => api(`v1/images?${new URLSearchParams([["offset", block * BLOCK], ["limit", BLOCK], ...wanted().filters])}`,
  { signal: current });

function measure() {
  const style = getComputedStyle(ui.storedList);
  const gap = parseFloat(style.rowGap);
  shape = { columns: style.gridTemplateColumns.split(" ").length, height: ui.storedList.firstChild.getBoundingClientRect().height + gap };
}

// Makes the rows from one screen above the window to one below it, and room for the others.
function draw() {
  if (ui.stored.hidden || total === 0) return;
  if (!ui.storedList.firstChild) place(0, 1);
  measure();
  const { columns, height } = shape;
  const rows = Math.min(Math.ceil(total / columns), Math.floor(HIGHEST / height));
  const onScreen = Math.floor((innerHeight - ui.storedBar.offsetHeight) / height);
  const top = scrollY - ui.storedList.offsetTop;
  const first = Math.max(0, Math.min(Math.floor((top - innerHeight) / height), rows - 1));
  const last = Math.min(rows, Math.ceil((top + 2 * innerHeight) / height));
  ui.storedList.style.paddingTop = `${first * height}px`;
  ui.storedList.style.paddingBottom = `${Math.max(rows - last, 0) * height}px`;
  ui.storedEnd.hidden = rows * columns >= total;
  ui.storedEnd.textContent = `The list ends at ${number(rows * columns)}; use filters to see others.`;
  place(first * columns, Math.min(last * columns, total));
  // The row below the bar is the current position.
  const here = Math.min(Math.max(0, Math.round((top + ui.storedBar.offsetHeight) / height)) * columns, total - 1);
  ui.jump.hidden = rows < 2 * onScreen;
  Object.assign(ui.position, { step: columns, max: Math.max(rows - onScreen, 0) * columns + 1, value: here + 1 });
  ui.place.textContent = `${number(here + 1)} of ${number(total)}`;
  ui.position.ariaValueText = ui.place.textContent;
  if (visibleBlocks().some((block) => !blocks.has(block))) load();
}

function place(from, to) {
  for (const [at, item] of items) {
    if (at >= from && at < to) continue;
    item.remove();
    items.delete(at);
  }
  let before = null; // items stay where they are, so that the focus stays, too
  for (let at = to - 1; at >= from; at -= 1) {
    if (!items.has(at)) {
      items.set(at, el("li", { ariaPosInSet: at + 1, ariaSetSize: total }, cell(at)));
      ui.storedList.insertBefore(items.get(at), before);
    }
    before = items.get(at);
  }
}

function cell(at) {
  const image = blocks.get(Math.floor(at / BLOCK))?.[at % BLOCK];
  if (!image) return el("span", { className: "frame" });
  return searchLink(image);
}

function visibleBlocks() {
  const positions = [...items.keys()];
  const [from, to] = [Math.floor(Math.min(...positions) / BLOCK), Math.floor(Math.max(...positions) / BLOCK)];
  return Array.from({ length: to - from + 1 }, (_, at) => from + at);
}

const load = afterPause(60, () => { // nothing is fetched during fast scrolling
  for (const block of visibleBlocks()) {
    if (blocks.has(block)) continue;
    const here = blocks;
    here.set(block, null);
    page(block).then(({ images }) => {
      if (here !== blocks) return; // of an older filter
      here.set(block, images);
      for (const [at, item] of items) if (Math.floor(at / BLOCK) === block) item.replaceChildren(cell(at));
    }).catch((error) => {
      here.delete(block);
      fail(error, draw);
    });
  }
});

let drawing = 0;
const drawSoon = () => (drawing ||= requestAnimationFrame(() => {
  drawing = 0;
  draw();
}));
addEventListener("scroll", drawSoon, { passive: true });
new ResizeObserver(drawSoon).observe(ui.stored);
ui.position.oninput = () => {
  const row = Math.floor((ui.position.value - 1) / shape.columns);
  scrollTo(0, row && row * shape.height + ui.storedList.offsetTop - ui.storedBar.offsetHeight);
};
