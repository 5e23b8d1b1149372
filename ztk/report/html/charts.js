"use strict";
// Losses and the Pareto front of the runs that the table shows, drawn by plotly.
function layout(more) {
  const axis = { gridcolor: themed("line"), zerolinecolor: themed("line"), linecolor: themed("faint"), automargin: true };
  const { xaxis, yaxis, ...others } = more;
  return { paper_bgcolor: themed("paper"), plot_bgcolor: themed("paper"), font: { color: themed("ink"), size: 12 }, height: 380,
    margin: { l: 56, r: 16, t: 12, b: 48 }, hoverlabel: { align: "left", namelength: 60 },
    showlegend: false, xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...others };
}

function plot(panel, traces, more, note) {
  const box = document.querySelector(`#${panel} .plot`);
  document.querySelector(`#${panel} > .note`).textContent = note;
  if (!traces.length) { Plotly.purge(box); box.replaceChildren(); return; }
  Plotly.react(box, traces, layout(more), { responsive: true, displaylogo: false, displayModeBar: innerWidth < 600 ? false : "hover", modeBarButtonsToRemove: ["lasso2d", "select2d"] });
}

// Below the chart and not inside it: plotly draws a legend of many rows over the axis of a narrow page.
function legend(panel, arms) {
  const box = document.querySelector(`#${panel} .legend`);
  box.replaceChildren(...(arms.length <= LEGEND ? arms.map((arm) => make("span", {}, swatch(arm), report.arms[arm].name)) : []));
}

const armsOf = (runs) => [...new Set(runs.map((run) => armOf[run]))];
const LEGEND = 8;
const curveKeys = [...new Set(report.curves.map((curve) => curve.key))];
const chosen = { curve: curveKeys[0], log: false, x: null, y: null };

listeners.push((runs) => {
  const arms = armsOf(runs);
  const curves = report.curves.filter((curve) => curve.key === chosen.curve && arms.includes(curve.arm));
  const traces = [];
  for (const curve of curves) {
    const hue = colour(curve.arm);
    const name = quoted(report.arms[curve.arm].name);
    if (curve.low) {
      const band = { x: curve.step, mode: "lines", line: { width: 0, color: hue }, hoverinfo: "skip" };
      traces.push({ ...band, y: curve.low }, { ...band, y: curve.high, fill: "tonexty", fillcolor: `${hue}33` });
    }
    traces.push({ x: curve.step, y: curve.median, name, mode: curve.step.length > 1 ? "lines" : "markers",
      line: { color: hue, dash: dash(curve.arm)[0], width: 2 } });
  }
  const last = Math.max(0, ...curves.map((curve) => curve.step[curve.step.length - 1]));
  const steps = last <= 10 ? { dtick: 1 } : {};
  const every = Math.max(1, ...curves.map((curve) => curve.every));
  const repeats = curves.some((curve) => curve.low) ? "; lines are medians, bands span the smallest and the largest of an arm's repeats" : "";
  const thinned = every > 1 ? `; of long runs every ${every}th logged step or more is drawn` : "";
  const note = curves.length ? `${counted(curves.length, "arm")}${repeats}${thinned}. Colours are those of the table; equal curves cover each other.` : "No shown run has logged a step.";
  plot("panel-losses", traces, { xaxis: { title: { text: "step" }, ...steps }, yaxis: { title: { text: quoted(chosen.curve || "") }, type: chosen.log ? "log" : "linear" } }, note);
  legend("panel-losses", curves.map((curve) => curve.arm));
});

// The arms that no other shown arm beats in both metrics, as Runs.pareto of ztk/report/history.py has them.
function front(points) {
  const costs = points.map((point) => [[chosen.x, point.x], [chosen.y, point.y]].map(([key, value]) => (report.columns[places.get(key)].larger ? -value : value)));
  const beats = (one, two) => one[0] <= two[0] && one[1] <= two[1] && (one[0] < two[0] || one[1] < two[1]);
  return points.filter((_, place) => !costs.some((rival) => beats(rival, costs[place])));
}

function spread(points, axis) {
  const reach = (end) => points.map((point) => (point[`${axis}Low`] === null ? 0 : Math.abs(point[axis] - point[`${axis}${end}`])));
  return { type: "data", symmetric: false, array: reach("High"), arrayminus: reach("Low"), thickness: 1, visible: points.some((point) => point[`${axis}Low`] !== null) };
}

listeners.push((runs) => {
  const points = [];
  for (const arm of armsOf(runs.filter((run) => cell(run, "status") === "done"))) {
    const [x, y] = [report.arms[arm].metrics[chosen.x], report.arms[arm].metrics[chosen.y]];
    if (x && y) points.push({ arm, n: y[0], x: x[1], xLow: x[2], xHigh: x[3], y: y[1], yLow: y[2], yHigh: y[3] });
  }
  const title = (key) => quoted(places.has(key) ? report.columns[places.get(key)].label : "");
  const forms = { bytes: { tickformat: ".3s", ticksuffix: "B" }, share: { tickformat: ".1%" } };
  const form = (key) => (places.has(key) ? forms[report.columns[places.get(key)].form] || {} : {});
  const best = front(points).sort((one, two) => one.x - two.x);
  const traces = points.length ? [
    { x: best.map((point) => point.x), y: best.map((point) => point.y), mode: "lines", name: "front", hoverinfo: "skip", line: { color: themed("faint"), dash: "dot", width: 1.5 } },
    ...points.map((point) => ({ x: [point.x], y: [point.y], mode: "markers", name: quoted(report.arms[point.arm].name),
      error_x: { ...spread([point], "x"), color: colour(point.arm) }, error_y: { ...spread([point], "y"), color: colour(point.arm) },
      text: [`n = ${point.n}${best.includes(point) ? ", on the front" : ""}`],
      marker: { color: colour(point.arm), size: 11, symbol: best.includes(point) ? "circle" : "circle-open", line: { color: colour(point.arm), width: 2 } } })),
  ] : [];
  const note = points.length ? `Medians of the finished runs of ${counted(points.length, "arm")}, with 95 % intervals from 6 runs on${points.length > 1 ? "; filled arms are those that no other shown arm beats in both" : ""}.` : "No shown run has finished with both metrics.";
  const rangemode = points.length > 1 ? "normal" : "tozero"; // around one point the labels of an axis are all alike
  const axis = (key) => ({ title: { text: title(key) }, rangemode, ...form(key) });
  plot("panel-pareto", traces, { xaxis: axis(chosen.x), yaxis: axis(chosen.y) }, note);
  legend("panel-pareto", points.map((point) => point.arm));
});

function buildCharts() {
  const losses = document.querySelector("#panel-losses .controls");
  if (curveKeys.length > 1) losses.append(select("curve", curveKeys.map((key) => [key, key]), chosen.curve, (value) => { chosen.curve = value; update(); }));
  losses.append(make("label", {}, make("input", { type: "checkbox", onchange: (event) => { chosen.log = event.target.checked; update(); } }), "logarithmic"));
  const keys = metrics.map((column) => column.key);
  chosen.x = ["peak_memory.allocator_bytes", "peak_memory.device_bytes"].find((key) => keys.includes(key)) || keys[0];
  chosen.y = ["tokens_per_second", "validation_loss", "final_loss"].find((key) => keys.includes(key)) || keys[keys.length - 1];
  const axes = document.querySelector("#panel-pareto .controls");
  for (const axis of ["x", "y"]) {
    if (keys.length) axes.append(select(axis, metrics.map((column) => [column.key, column.label]), chosen[axis], (value) => { chosen[axis] = value; update(); }));
  }
}
