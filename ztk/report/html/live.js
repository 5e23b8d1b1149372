"use strict";
// A page that follows runs loads itself again. What the reader has chosen survives in the tab's storage; while an axis is brushed it waits.
const LIVE = `ztk.live ${location.pathname}`;

function restoreChoices() {
  const kept = JSON.parse(sessionStorage.getItem(LIVE) || "null");
  if (!kept) return;
  sessionStorage.removeItem(LIVE);
  state.words = document.getElementById("words").value = kept.words;
  [state.sort, state.down] = [kept.sort, kept.down];
  const baseline = report.arms.findIndex((arm) => arm.arm === kept.baseline);
  state.baseline = document.querySelector("#controls select").value = baseline;
  update();
  if (kept.typing) document.getElementById("words").focus({ preventScroll: true });
  scrollTo(0, kept.top);
}

function reload() {
  if (state.brushes.size) { setTimeout(reload, 1000); return; }
  const baseline = state.baseline < 0 ? null : report.arms[state.baseline].arm;
  const typing = document.activeElement === document.getElementById("words");
  sessionStorage.setItem(LIVE, JSON.stringify({ words: state.words, sort: state.sort, down: state.down, baseline, typing, top: scrollY }));
  location.reload();
}

restoreChoices();
if (report.live) {
  document.getElementById("overview").append(`; live: written at ${report.live.written}, loaded again every ${report.live.seconds} s`);
  setTimeout(reload, 1000 * report.live.seconds);
}
