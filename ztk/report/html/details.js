"use strict";
// Failures, differences of configurations, predictions; and the start of the page.
const labelOf = (run) => {
  const arm = report.arms[armOf[run]];
  return arm.runs > 1 ? `${arm.name} (repeat ${cell(run, "repeat")})` : arm.name;
};

function buildFailures() {
  const box = document.querySelector("#panel-failures .body");
  if (!report.failures.length) { box.append(make("p", { class: "note" }, "No run failed, was refused or died.")); return; }
  for (const failure of report.failures) {
    const title = make("summary", {}, make("span", { class: failure.status }, failure.status), ` ${labelOf(failure.run)} (${cell(failure.run, "run")})`);
    const parts = [make("p", {}, failure.error || "It has left no error.")];
    if (failure.end) parts.push(make("p", { class: "note" }, `the end of ${failure.log}`), make("pre", {}, failure.end));
    box.append(make("details", { open: report.failures.length <= 3 }, title, ...parts));
  }
}

function settingsTable(head, rows) {
  const cells = (row) => row.map((value) => make("td", { class: "text", title: value }, written(value, "")));
  return make("table", {}, make("thead", {}, make("tr", {}, ...head.map((text) => make("th", {}, text)))), make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells(row)))));
}

function buildDifferences() {
  const [controls, box] = [document.querySelector("#panel-differences .controls"), document.querySelector("#panel-differences .wide")];
  const settings = report.columns.filter((column) => column.kind === "setting");
  const other = report.runs.findIndex((_, run) => armOf[run] !== armOf[0]);
  const pair = [0, other < 0 ? Math.min(1, report.runs.length - 1) : other];
  const equal = report.runs.length > 1 ? "These two runs have the same configuration." : "There is only one run.";
  const show = () => {
    const differing = settings.filter((column) => cell(pair[0], column.key) !== cell(pair[1], column.key));
    const rows = differing.map((column) => [column.key, ...pair.map((run) => cell(run, column.key))]);
    const same = Object.entries(report.same);
    const rest = make("details", {}, make("summary", {}, `${same.length} settings are the same in all runs`), settingsTable(["key", "value"], same));
    box.replaceChildren(rows.length ? settingsTable(["key", "first", "second"], rows) : make("p", { class: "note" }, equal), rest);
  };
  const choices = report.runs.map((_, run) => [run, labelOf(run)]);
  if (report.runs.length > 1) ["first", "second"].forEach((name, place) => controls.append(select(name, choices, pair[place], (value) => { pair[place] = Number(value); show(); })));
  if (report.runs.length) show();
}

const formOf = (quantity) => (quantity.includes("_bytes") ? "bytes" : "number");

listeners.push((runs) => {
  const found = report.predictions.filter((one) => runs.includes(one.run));
  const box = document.querySelector("#panel-predictions .wide");
  const quantities = [...new Set(found.map((one) => one.quantity))];
  const traces = armsOf(found.map((one) => one.run)).map((arm) => {
    const own = found.filter((one) => armOf[one.run] === arm && one.predicted > 0 && one.measured > 0);
    return { x: own.map((one) => one.measured / one.predicted), y: own.map((one) => one.quantity), type: "scatter", mode: "markers", name: quoted(report.arms[arm].name),
      marker: { color: colour(arm), size: 9, symbol: "circle-open", line: { width: 2 } }, showlegend: false };
  });
  const note = found.length ? "Measured over predicted: 1 is a prediction that came true. Seconds of a plan are those of its hardware."
    : report.predictions.length ? "No shown run has a plan." : "No finished run has a plan: plan.json in its folder, or a run of task=plan with the same model, layout and batch.";
  plot("panel-predictions", traces, { height: 120 + 26 * quantities.length, xaxis: { title: { text: "measured / predicted" } },
    yaxis: { type: "category", categoryarray: [...quantities].reverse(), tickfont: { size: 10 } },
    shapes: [{ type: "line", x0: 1, x1: 1, yref: "paper", y0: 0, y1: 1, line: { color: themed("faint"), dash: "dot" } }] }, note);
  const rows = found.map((one) => make("tr", {}, make("td", { class: "arm" }, labelOf(one.run)), make("td", {}, one.quantity),
    ...[one.predicted, one.measured].map((value) => make("td", { class: "number", title: value }, written(value, formOf(one.quantity)))),
    make("td", { class: "number" }, one.predicted ? (one.measured / one.predicted).toFixed(3) : "")));
  const head = ["run", "quantity", "predicted", "measured", "measured / predicted"].map((text) => make("th", {}, text));
  box.replaceChildren(...(found.length ? [make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows))] : []));
});

buildControls();
buildCharts();
buildParallel();
buildFailures();
buildDifferences();
update();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; buildParallel(); update(); } });
