// An overview of the collection: a map of its codes, how they use their bits, and its labels.

import { alike, go } from "/web/url.js";
import { bars, counted, el, inside, number, pairs, percent, ui } from "/web/dom.js";
import { api, imagePath, noun, ofVectors, session, stats } from "/web/service.js";

const NEAR = 24; // pixels from a dot within which a click counts for it
const COLOURS = ui.map.children.length - 1; // the first path has all other dots
let points = []; // {id, labels, left, top}: shares of the map's width and height
let labels = []; // that have a colour

export async function overview(signal) {
  document.title = "Overview · Hashseek";
  const [answer, { reports }] = await Promise.all([api("v1/overview", { signal }), api("/v1/reports", { signal })]);
  const { n_bits, backbone, engine, fingerprint, version, index, expected_precision, keeps_features, read_only } = stats;
  pairs(ui.overviewFacts, [
    [noun() === "vector" ? "Vectors" : "Pictures", number(answer.n_images)],
    ["Codes", `${n_bits} bits, ${index.kind} index`],
    ["Network", backbone],
    ["Engine", engine],
    ["Model", fingerprint.slice(0, 12)],
    ["Features", keeps_features ? "stored" : "not stored"],
    ["Calibration", expected_precision ? `${percent(expected_precision.at(-1))} relevant on average` : "none"],
    ["Changes", read_only || session.role === "read" ? "read only" : "allowed"],
    ["Hashseek", version],
    ...(session.key ? [["Signed in", `${session.key} (${session.role})`]] : []),
  ]);
  ui.reports.hidden = !reports.length;
  ui.reportLinks.replaceChildren(...reports.map(({ name, url }) => el("li", {}, el("a", { href: url }, name))));
  ui.codes.hidden = !answer.bits;
  if (answer.bits) {
    showMap(answer);
    showCodes(answer);
  }
  const n = Object.keys(stats.labels).length;
  const { length } = answer.labels;
  ui.overviewLabels.textContent = n ? `${counted(n, "label")}${length < n ? `, the ${number(length)} most frequent` : ""}` : "No labels";
  ui.labelTable.hidden = !answer.labels.length;
  ui.labelRows.replaceChildren(...answer.labels.map(({ label, n_images, within, to_others }) => {
    const numbers = [number(n_images), ...[within, to_others].map((bits) => bits?.toFixed(1) ?? "–")];
    const link = inside(`?${new URLSearchParams({ label })}`, label);
    return el("tr", {}, el("th", { scope: "row" }, link), ...numbers.map((text) => el("td", {}, text)));
  }));
}

function showCodes({ n_sampled, n_images, n_bits, bits: { balance, n_constant, mean_correlation, max_correlation, n_distinct, most_common }, distances }) {
  const n = distances.reduce((sum, one) => sum + one, 0);
  const mean = distances.reduce((sum, one, bits) => sum + one * bits, 0) / n;
  const shares = [Math.min(...balance), Math.max(...balance)].map((share) => Math.round(100 * share));
  const facts = [
    ["Different codes", `${number(n_distinct)} of ${number(n_sampled)}`,
      `A search cannot tell ${noun()}s with the same code apart; the most frequent code is shared by ${number(most_common)}.`],
    ["Ones per bit", `${shares.join(" to ")}%`,
      `A bit carries the most information if half of the ${noun()}s have a one; ${n_constant || "none"} of the ${n_bits} ${n_constant === 1 ? "is" : "are"} the same for all.`],
    ["Correlation of two bits", `${mean_correlation.toFixed(2)}, at most ${max_correlation.toFixed(2)}`,
      "At 0, each bit carries information of its own; at 1, two bits always carry the same."],
    ["Distance of a pair", n ? `${mean.toFixed(1)} bits` : "–",
      `Two random ${noun()}s should differ in about half of the ${n_bits} bits, and similar ones in far fewer.`],
  ];
  ui.codeFacts.replaceChildren(...facts.map(([name, value, why]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value), el("dd", { className: "muted" }, why))));
  ui.sampled.textContent = n_sampled < n_images ? `Measured on ${number(n_sampled)} random ${noun()}s.` : "";
  for (const [svg, heights] of [[ui.balance, balance], [ui.apartness, distances.map((one) => one / Math.max(...distances))]]) {
    svg.setAttribute("viewBox", `0 0 ${heights.length} 1`);
    svg.lastElementChild.setAttribute("d", bars(heights));
  }
}

function showMap({ map, explained, n_images }) {
  const scale = (values) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return (value) => (high > low ? 0.02 + (0.96 * (value - low)) / (high - low) : 0.5);
  };
  const [left, top] = [scale(map.map(({ x }) => x)), scale(map.map(({ y }) => -y))];
  points = map.map((point) => ({ ...point, left: left(point.x), top: top(-point.y) }));
  const counts = new Map();
  for (const point of points) for (const label of point.labels) counts.set(label, (counts.get(label) ?? 0) + 1);
  labels = [...counts].sort(([a, n], [b, m]) => m - n || a.localeCompare(b)).slice(0, COLOURS).map(([label]) => label);
  ui.mapText.textContent = `Each dot is one ${noun()}${points.length < n_images ? ` (${number(points.length)} of ${number(n_images)} are shown)` : ""}; click one to search with it. `
    + `Similar codes are close together; the two axes explain ${percent(explained)} of the variance of the codes.`;
  ui.legend.replaceChildren(...labels.map((label, at) => {
    const button = el("button", { type: "button", className: `chip c${at}`, ariaPressed: "false" }, label);
    button.onclick = () => {
      const alone = button.ariaPressed === "false";
      for (const other of ui.legend.querySelectorAll("button")) other.ariaPressed = `${alone && other === button}`;
      draw(alone ? label : null);
    };
    return el("li", {}, button);
  }));
  draw(null);
}

// Colours the dots with one label; with null, each dot gets the colour of the rarest of its labels in the legend.
function draw(only) {
  const paths = Array.from(ui.map.children, () => "");
  for (const { labels: own, left, top } of points) {
    const at = only === null ? labels.findLastIndex((label) => own.includes(label)) : own.includes(only) ? labels.indexOf(only) : -1;
    paths[at + 1] += `M${left.toFixed(4)} ${top.toFixed(4)}h.0001`; // WebKit does not scale dots of length 0
  }
  paths.forEach((path, at) => ui.map.children[at].setAttribute("d", path));
}

function nearest({ clientX, clientY }) {
  const box = ui.map.getBoundingClientRect();
  const away = ({ left, top }) => Math.hypot(box.left + left * box.width - clientX, box.top + top * box.height - clientY);
  const point = points.reduce((one, other) => (away(other) < away(one) ? other : one));
  return away(point) < NEAR ? point : null;
}

ui.map.onpointermove = (event) => {
  const point = event.pointerType === "mouse" ? nearest(event) : null;
  ui.map.classList.toggle("on-dot", point !== null);
  ui.mapHint.hidden = point === null;
  if (point === null || ui.mapHint.dataset.id === `${point.id}`) return;
  ui.mapHint.dataset.id = point.id;
  ui.mapHint.style.left = `${100 * point.left}%`;
  ui.mapHint.style.top = `${100 * point.top}%`;
  ui.mapHint.style.transform = `translate(${point.left > 0.5 ? "calc(-100% - 12px)" : "12px"}, ${-100 * point.top}%)`;
  ui.mapHint.replaceChildren(...(ofVectors() ? [] : [el("img", { alt: "", src: `${imagePath(point.id)}/file?size=256` })]), point.labels.join(", ") || `${point.id}`);
};
ui.map.onpointerleave = () => (ui.mapHint.hidden = true);
ui.map.onclick = (event) => {
  const point = nearest(event);
  if (point) go(alike(point.id));
};
