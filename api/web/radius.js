// The radius: a slider under the histogram of the distances of all pictures that match the filters.

import { place, refine, wanted } from "/web/url.js";
import { afterPause, bars, counted, percent, ui } from "/web/dom.js";
import { noun, stats } from "/web/service.js";

let counts = []; // pictures at each distance, without the query itself
let sums = []; // pictures within each distance

export const withinDistance = (distance) => (distance < 0 ? 0 : sums[Math.min(distance, sums.length - 1)] ?? 0);

export function showRadius(histogram, max) {
  counts = histogram;
  let sum = 0;
  sums = counts.map((n) => (sum += n));
  const last = counts.findLastIndex((n) => n > 0);
  ui.radius.hidden = last < 0;
  if (last < 0) return;
  ui.max.max = last; // at its right end the slider sets no limit
  ui.histogram.setAttribute("viewBox", `0 0 ${last + 1} 1`);
  if (pending !== place()) ui.max.value = max ?? last; // during a drag, the slider has the newer value
  draw();
}

function draw() {
  const radius = Number(ui.max.value);
  const isAll = radius >= Number(ui.max.max);
  const most = Math.log1p(Math.max(...counts)); // logarithmic: the few nearest matter most
  const heights = counts.map((n) => (n ? 0.04 + (0.96 * Math.log1p(n)) / most : 0));
  ui.inside.setAttribute("d", bars(heights.slice(0, radius + 1)));
  ui.beyond.setAttribute("d", bars(heights.slice(radius + 1), radius + 1));
  const found = withinDistance(radius);
  const text = `${isAll ? "no limit" : counted(radius, "bit")} · ${counted(found, noun())}`;
  ui.within.textContent = ui.max.ariaValueText = text;
  const expected = stats.expected_precision?.[isAll ? stats.n_bits : radius];
  // The calibration is of all pictures; those that pass a filter may be relevant more or less often.
  ui.expected.textContent = expected === undefined || !found || wanted().filters.length ? "" : `About ${percent(expected)} expected to be relevant`;
}

let pending = null; // where the slider was moved
const search = afterPause(250, () => {
  const isElsewhere = pending !== place();
  pending = null;
  if (isElsewhere) return;
  const radius = Number(ui.max.value);
  const max = radius < Number(ui.max.max) ? radius : null;
  if (max !== wanted().max) refine({ max });
});

ui.radius.onsubmit = (event) => event.preventDefault();
ui.max.oninput = () => {
  pending = place();
  draw();
  search();
};
