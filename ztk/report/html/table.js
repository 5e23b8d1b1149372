"use strict";
// The table of runs: sorted by a click on a column, filtered by words, states and brushes, with ratios to a baseline.
// A ratio is that of a pair: the run over the baseline's repeat of the same number.
const ratioed = metrics.filter((column) => column.key !== "steps");

function ratio(run, key) {
  if (state.baseline < 0) return null;
  const pair = report.runs.findIndex((_, other) => armOf[other] === state.baseline && cell(other, "repeat") === cell(run, "repeat"));
  const [value, base] = pair < 0 ? [null, null] : [cell(run, key), cell(pair, key)];
  return typeof value === "number" && typeof base === "number" && base !== 0 ? value / base : null;
}

function tableColumns() {
  const found = [];
  for (const column of report.columns) {
    if (column.kind === "setting" && !column.named && !state.allSettings) continue;
    if (column.key === "repeat" && report.runs.every((_, run) => cell(run, "repeat") === 0)) continue;
    found.push({ ...column, id: column.key, value: (run) => cell(run, column.key) });
    if (state.baseline >= 0 && ratioed.includes(column)) {
      found.push({ id: `ratio ${column.key}`, label: `${column.label} / baseline`, form: "ratio", kind: "ratio", value: (run) => ratio(run, column.key) });
    }
  }
  return found;
}

function compareValues(one, two) {
  if (typeof one === "number" && typeof two === "number") return one - two;
  return String(one).localeCompare(String(two), "en", { numeric: true });
}

function sorted(runs, columns) {
  const column = columns.find((found) => found.id === state.sort);
  if (!column) return runs;
  const known = runs.filter((run) => column.value(run) !== null);
  known.sort((one, two) => (state.down ? -1 : 1) * compareValues(column.value(one), column.value(two)));
  return [...known, ...runs.filter((run) => column.value(run) === null)];
}

function tableCell(run, column) {
  const value = column.value(run);
  if (column.key === "arm") return make("td", { class: "arm" }, swatch(armOf[run]), report.arms[armOf[run]].name);
  if (column.form === "ratio") return make("td", { class: "number" }, value === null ? "" : `${value.toFixed(3)}x`);
  const name = typeof value === "number" ? "number" : column.key === "status" ? value : "text";
  return make("td", { class: name, title: value }, written(value, column.form));
}

function sortBy(id) {
  [state.sort, state.down] = state.sort === id ? (state.down ? [null, false] : [id, true]) : [id, false];
  update();
}

listeners.push((runs) => {
  const columns = tableColumns();
  const head = columns.map((column) => {
    const mark = column.id === state.sort ? (state.down ? " \u25bc" : " \u25b2") : "";
    const order = column.id !== state.sort ? "none" : state.down ? "descending" : "ascending";
    const name = ["text"].includes(column.form) ? "" : "number";
    return make("th", { class: name, "aria-sort": order, "data-key": column.id }, make("button", { onclick: () => sortBy(column.id) }, column.label + mark));
  });
  const rows = sorted(runs, columns).map((run) =>
    make("tr", { "data-run": run, class: armOf[run] === state.baseline ? "baseline" : "" }, ...columns.map((column) => tableCell(run, column))));
  document.getElementById("runs").replaceChildren(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  const brushed = state.brushes.size ? `; ${state.brushes.size} brushed axes below` : "";
  document.getElementById("shown").textContent = `${runs.length} of ${counted(report.runs.length, "run")}${brushed}`;
});

function buildControls() {
  const box = document.getElementById("controls");
  const words = make("input", { type: "search", id: "words", placeholder: "stage3 tokens_per_second>1000", "aria-label": "filter",
    oninput: (event) => { state.words = event.target.value; update(); } });
  const arms = [[-1, "none"], ...report.arms.map((arm, place) => [place, arm.name])];
  box.append(make("label", {}, "filter", words));
  box.append(select("baseline", arms, -1, (value) => { state.baseline = Number(value); update(); }));
  const statuses = [...new Set(report.runs.map((_, run) => cell(run, "status")))];
  for (const status of statuses.length > 1 ? statuses : []) {
    const change = (event) => { state.statuses[event.target.checked ? "add" : "delete"](status); update(); };
    box.append(make("label", {}, make("input", { type: "checkbox", onchange: change }), `${status} only`));
  }
  if (report.columns.some((column) => column.kind === "setting" && !column.named)) {
    const change = (event) => { state.allSettings = event.target.checked; update(); };
    box.append(make("label", {}, make("input", { type: "checkbox", onchange: change }), "all values that differ"));
  }
  box.append(make("button", { type: "button", id: "clear", onclick: () => {
    state.words = ""; words.value = ""; state.statuses.clear(); state.brushes.clear();
    for (const tick of box.querySelectorAll("label input[type=checkbox]")) tick.checked = false;
    state.allSettings = false;
    update();
  } }, "show all"));
  const counts = statuses.map((status) => `${report.runs.filter((_, run) => cell(run, "status") === status).length} ${status}`);
  const machine = Object.entries(report.machine).filter(([, values]) => values.length).map(([key, values]) => `${key} ${values.join(", ")}`);
  document.getElementById("overview").textContent = [`${counted(report.runs.length, "run")}: ${counts.join(", ")}`, ...machine].join("; ");
}
