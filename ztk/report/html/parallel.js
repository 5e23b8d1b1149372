"use strict";
// Parallel coordinates: a line per run, an axis per setting and metric. A range dragged on an axis filters the table; a click removes it.
const TOP = 44, BOTTOM = 24, TALL = 360, BIN = 12;
const axes = report.columns.filter((column) => column.kind === "metric" || (column.kind === "setting" && column.named)).map(makeAxis).filter(Boolean);

// position: value -> 0 (bottom) to 1 (top), null where the run has none. Settings with few values are set apart evenly.
function makeAxis(column) {
  const values = [...new Set(report.runs.map((_, run) => cell(run, column.key)))].filter((value) => value !== null);
  if (values.length < 2) return null;
  const numeric = values.every((value) => typeof value === "number");
  if (numeric && !(column.kind === "setting" && values.length <= BIN)) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return { column, ticks: [low, (low + high) / 2, high].map((value) => [(value - low) / (high - low), written(value, column.form)]),
      position: (run) => (cell(run, column.key) === null ? null : (cell(run, column.key) - low) / (high - low)) };
  }
  values.sort(compareValues);
  const place = new Map(values.map((value, index) => [value, index / (values.length - 1)]));
  const ticks = values.length <= 24 ? values.map((value) => [place.get(value), clipped(written(value, column.form))]) : [];
  return { column, ticks, position: (run) => (cell(run, column.key) === null ? null : place.get(cell(run, column.key))) };
}

function clipped(text, length = 16) { return text.length > length ? `${text.slice(0, length - 1)}\u2026` : text; }

function setBrush(axis, one, two) {
  const [low, high] = [Math.max(0, Math.min(one, two)), Math.min(1, Math.max(one, two))];
  if (high - low < 0.01) state.brushes.delete(axis.column.key);
  else state.brushes.set(axis.column.key, { low, high, contains: (run) => { const at = axis.position(run); return at !== null && at >= low - 0.005 && at <= high + 0.005; } });
  update();
}

const height = (at) => TOP + (1 - at) * (TALL - TOP - BOTTOM);

function dragged(axis, handle) {
  let start = null;
  const at = (event) => 1 - (event.clientY - handle.ownerSVGElement.getBoundingClientRect().top - TOP) / (TALL - TOP - BOTTOM);
  handle.addEventListener("pointerdown", (event) => { start = at(event); handle.setPointerCapture(event.pointerId); event.preventDefault(); });
  handle.addEventListener("pointermove", (event) => { if (start !== null) setBrush(axis, start, at(event)); });
  handle.addEventListener("pointerup", (event) => { if (start !== null) setBrush(axis, start, at(event)); start = null; });
  handle.addEventListener("pointercancel", () => { start = null; });
}

let lines = null;
let brushes = null;

function buildParallel() {
  const box = document.querySelector("#panel-parallel .wide");
  const note = document.querySelector("#panel-parallel .note");
  if (axes.length < 2) { note.textContent = "Fewer than two settings or metrics differ."; return; }
  note.textContent = "Drag along an axis to choose a range: the table and the other panels show the runs within it. Click on the axis to remove it.";
  const gap = Math.max(112, Math.min(220, (box.clientWidth - 130) / (axes.length - 1)));
  const wide = gap * (axes.length - 1) + 130;
  lines = draw("g");
  brushes = draw("g");
  const svg = draw("svg", { class: "coordinates", width: wide, height: TALL, role: "img", "aria-label": "parallel coordinates" }, lines);
  axes.forEach((axis, index) => {
    axis.x = 50 + index * gap;
    const title = draw("text", { x: axis.x, y: index % 2 ? 30 : 14, "text-anchor": "middle", "font-weight": 600 }, clipped(axis.column.label, 28));
    svg.append(title, draw("line", { class: "axis", x1: axis.x, x2: axis.x, y1: TOP, y2: TALL - BOTTOM }));
    for (const [at, text] of axis.ticks) svg.append(draw("text", { x: axis.x + 6, y: height(at) + 4 }, text));
    const handle = draw("rect", { class: "handle", "data-key": axis.column.key, x: axis.x - 16, y: TOP - 8, width: 32, height: TALL - TOP - BOTTOM + 16 });
    dragged(axis, handle);
    svg.append(handle);
  });
  svg.append(brushes);
  box.replaceChildren(svg);
}

function drawLine(run, isIn) {
  const points = axes.map((axis) => [axis.x, axis.position(run)]).filter(([, at]) => at !== null);
  const path = points.map(([x, at], index) => `${index ? "L" : "M"}${x} ${height(at).toFixed(1)}`).join("");
  return draw("path", { d: path, stroke: isIn ? colour(armOf[run]) : themed("line"), "stroke-width": isIn ? 1.8 : 0.8, "stroke-opacity": isIn ? 0.85 : 0.5 });
}

listeners.push((runs) => {
  if (!lines) return;
  const within = new Set(runs);
  const order = [...report.runs.keys()].sort((one, two) => within.has(one) - within.has(two));
  lines.replaceChildren(...order.map((run) => drawLine(run, within.has(run))));
  brushes.replaceChildren(...axes.filter((axis) => state.brushes.has(axis.column.key)).map((axis) => {
    const { low, high } = state.brushes.get(axis.column.key);
    return draw("rect", { class: "brush", x: axis.x - 7, y: height(high), width: 14, height: height(low) - height(high) });
  }));
});
