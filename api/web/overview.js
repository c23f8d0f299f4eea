// What the collection holds: size, model, index, and its labels, each a filter.

import { counted, el, inside, number, pairs, percent, ui } from "/web/dom.js";
import { noun, session, stats } from "/web/service.js";

ui.about.onclick = () => {
  const { n_images, n_bits, backbone, engine, fingerprint, version, labels, index, expected_precision, keeps_features, read_only } = stats;
  pairs(ui.overviewFacts, [
    [noun() === "vector" ? "Vectors" : "Pictures", number(n_images)],
    ["Codes", `${n_bits} bits, ${index.kind} index`],
    ["Network", backbone],
    ["Engine", engine],
    ["Model", fingerprint.slice(0, 12)],
    ["Features", keeps_features ? "kept" : "not kept"],
    ["Calibration", expected_precision ? `${percent(expected_precision.at(-1))} relevant on average` : "none"],
    ["Changes", read_only || session.role === "read" ? "read only" : "allowed"],
    ["Hashseek", version],
    ...(session.key ? [["Signed in", `${session.key} (${session.role})`]] : []),
  ]);
  const counts = Object.entries(labels).sort(([a, n], [b, m]) => m - n || a.localeCompare(b));
  const most = counts[0]?.[1] ?? 1;
  ui.overviewLabels.textContent = counts.length ? counted(counts.length, "label") : "No labels";
  ui.labelBars.replaceChildren(...counts.slice(0, 200).map(([name, n]) => {
    const bar = el("span", { className: "bar", ariaHidden: "true" }, el("span"));
    bar.firstChild.style.width = `${(100 * n) / most}%`;
    return el("li", {}, inside(`?${new URLSearchParams({ label: name })}`, name), el("span", { className: "muted" }, number(n)), bar);
  }));
  ui.signOut.hidden = session.key === null;
  ui.overview.showModal();
};
