"use strict";
// What all panels share: the data, which runs are shown, colours and texts. Texts of runs reach the page as text nodes alone.
const report = JSON.parse(document.getElementById("data").textContent);
const places = new Map(report.columns.map((column, place) => [column.key, place]));
const cell = (run, key) => report.runs[run][places.get(key)];
const armOf = report.runs.map((_, run) => report.arms.findIndex((arm) => arm.arm === cell(run, "arm")));
const metrics = report.columns.filter((column) => column.kind === "metric");
const state = { words: "", statuses: new Set(), brushes: new Map(), baseline: -1, allSettings: false, sort: null, down: false };
const listeners = [];

const COLOURS = ["#2f7ed8", "#e07b00", "#2a9d4e", "#d64550", "#8a63d2", "#00a0a8", "#c44fa0", "#8c6d31", "#7f8b99", "#9aa500"];
const DASHES = [["solid", ""], ["dash", "6 3"], ["dot", "2 2"], ["dashdot", "6 2 2 2"]];
const colour = (arm) => COLOURS[arm % COLOURS.length];
const dash = (arm) => DASHES[Math.floor(arm / COLOURS.length) % DASHES.length];

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function swatch(arm) {
  const line = draw("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: colour(arm), "stroke-width": 3, "stroke-dasharray": dash(arm)[1] });
  return draw("svg", { class: "swatch", viewBox: "0 0 26 10" }, line);
}

function select(label, options, chosen, change) {
  const list = make("select", { onchange: (event) => change(event.target.value) });
  for (const [value, text] of options) list.append(make("option", { value, selected: String(value) === String(chosen) }, text));
  return make("label", {}, label, list);
}

function digits(value, count = 4) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(count - 2).replace("e+", "e");
  return Number(value.toPrecision(count)).toLocaleString("en", { maximumFractionDigits: 6 });
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit === 0 ? value : value.toPrecision(3)} ${units[unit]}`;
}

function written(value, form) {
  if (value === null || value === undefined) return "";
  if (form === "bytes") return bytes(value);
  if (form === "share") return `${(100 * value).toPrecision(3)} %`;
  return typeof value === "number" ? digits(value) : String(value);
}

const counted = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// plotly reads some markup in its texts.
const quoted = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Filters: every word must fit. KEY>1, KEY<=2, KEY=text test a column; other words are looked for in all cells.
const TEST = /^([^<>=]+)(<=|>=|=|<|>)(.+)$/;

function fits(run, word) {
  const test = word.match(TEST);
  const key = test && (places.has(test[1]) ? test[1] : (report.columns.find((column) => column.label === test[1]) || {}).key);
  if (!key) return report.runs[run].some((value) => value !== null && String(value).toLowerCase().includes(word.toLowerCase()));
  const value = cell(run, key);
  if (value === null) return false;
  if (test[2] === "=") return String(value) === test[3] || (typeof value === "number" && value === Number(test[3]));
  const other = Number(test[3]);
  return { "<": value < other, ">": value > other, "<=": value <= other, ">=": value >= other }[test[2]];
}

function isShown(run) {
  if (state.statuses.size && !state.statuses.has(cell(run, "status"))) return false;
  if (!state.words.split(/\s+/).filter(Boolean).every((word) => fits(run, word))) return false;
  return [...state.brushes.values()].every((brush) => brush.contains(run));
}

function shownRuns() { return report.runs.map((_, run) => run).filter(isShown); }

function update() {
  const runs = shownRuns();
  for (const listener of listeners) listener(runs);
}
