// Groups of links that are one stop of the Tab key (data-rove); arrows move inside.
// "line": left and right. "lanes": left and right within a lane, up and down to the nearest row.

const PAGE = 10;

export function rove() {
  const settle = () => document.querySelectorAll("[data-rove]").forEach(settleOne);
  document.addEventListener("swapped", settle);
  document.addEventListener("focusin", (event) => {
    const stop = event.target.closest?.("[data-stop]");
    const group = stop?.closest("[data-rove]");
    if (!group) return;
    for (const one of stops(group)) one.setAttribute("tabindex", one === stop ? "0" : "-1");
    read(group, stop);
  });
  document.addEventListener("pointerover", (event) => {
    const stop = event.target.closest?.("[data-stop]");
    const group = stop?.closest("[data-rove]");
    if (group) read(group, stop);
  });
  document.addEventListener("keydown", (event) => {
    if (event.metaKey || event.ctrlKey || event.altKey) return;
    const stop = event.target.closest?.("[data-stop]");
    const group = stop?.closest("[data-rove]");
    if (!group) return;
    const next = (group.dataset.rove === "lanes" ? inLanes : inLine)(event.key, stop, stops(group));
    if (!next) return;
    event.preventDefault();
    next.focus({ preventScroll: group.dataset.rove === "lanes" });
    document.dispatchEvent(new CustomEvent("roved", { detail: next }));
  });
  settle();
}

function settleOne(group) {
  const all = stops(group);
  const current =
    all.find((one) => one === document.activeElement) ||
    all.find((one) => one.hasAttribute("aria-current")) ||
    all.find((one) => one.getAttribute("tabindex") === "0") ||
    all[0];
  for (const one of all) one.setAttribute("tabindex", one === current ? "0" : "-1");
}

function stops(group) {
  return [...group.querySelectorAll("[data-stop]")];
}

function read(group, stop) {
  const readout = document.getElementById(group.dataset.readout || "");
  if (readout) readout.textContent = stop.getAttribute("aria-label");
}

function inLine(key, stop, all) {
  const at = all.indexOf(stop);
  const to = {
    ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1,
    PageUp: Math.max(0, at - PAGE), PageDown: Math.min(all.length - 1, at + PAGE),
  }[key];
  return to === undefined ? null : all[to] || stop;
}

function inLanes(key, stop, all) {
  const here = placeOf(stop);
  if (key === "Home") return all[0];
  if (key === "End") return all[all.length - 1];
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const lane = all.filter((one) => one.dataset.lane === stop.dataset.lane);
    return lane[lane.indexOf(stop) + (key === "ArrowLeft" ? -1 : 1)] || stop;
  }
  if (key !== "ArrowUp" && key !== "ArrowDown") return null;
  const down = key === "ArrowDown" ? 1 : -1;
  const rows = all.map(placeOf).filter((one) => (one.row - here.row) * down > 0);
  const nearest = rows.reduce((least, one) => Math.min(least, (one.row - here.row) * down), Infinity);
  const row = rows.filter((one) => (one.row - here.row) * down === nearest);
  const best = row.reduce((found, one) => (!found || apart(one, here) < apart(found, here) ? one : found), null);
  return best ? best.stop : stop;
}

function placeOf(stop) {
  return { stop, row: Number(stop.dataset.row), from: Number(stop.dataset.from), to: Number(stop.dataset.to) };
}

// How far two stretches of time are from each other; of those that overlap, their middles decide.
function apart(one, other) {
  const gap = Math.max(0, one.from - other.to, other.from - one.to);
  return gap * 1e6 + Math.abs(one.from + one.to - other.from - other.to);
}
