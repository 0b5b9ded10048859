// Makes each group of links (data-arrows) a single Tab stop; arrow keys move within it.
// "line": left and right. "lanes": left and right within a lane, up and down to the nearest row.

const PAGE = 10;

export function moveByArrows() {
  const reset = () => document.querySelectorAll("[data-arrows]").forEach(resetGroup);
  document.addEventListener("swapped", reset);
  document.addEventListener("focusin", (event) => {
    const stop = event.target.closest?.("[data-stop]");
    const group = stop?.closest("[data-arrows]");
    if (!group) return;
    for (const link of stops(group)) link.setAttribute("tabindex", link === stop ? "0" : "-1");
    showReadout(group, stop);
  });
  document.addEventListener("pointerover", (event) => {
    const stop = event.target.closest?.("[data-stop]");
    const group = stop?.closest("[data-arrows]");
    if (group) showReadout(group, stop);
  });
  document.addEventListener("keydown", (event) => {
    if (event.metaKey || event.ctrlKey || event.altKey) return;
    const stop = event.target.closest?.("[data-stop]");
    const group = stop?.closest("[data-arrows]");
    if (!group) return;
    const next = (group.dataset.arrows === "lanes" ? inLanes : inLine)(event.key, stop, stops(group));
    if (!next) return;
    event.preventDefault();
    next.focus({ preventScroll: group.dataset.arrows === "lanes" });
    document.dispatchEvent(new CustomEvent("arrowed", { detail: next }));
  });
  reset();
}

// Leaves one link of the group in the Tab order.
function resetGroup(group) {
  const all = stops(group);
  const current =
    all.find((link) => link === document.activeElement) ||
    all.find((link) => link.hasAttribute("aria-current")) ||
    all.find((link) => link.getAttribute("tabindex") === "0") ||
    all[0];
  for (const link of all) link.setAttribute("tabindex", link === current ? "0" : "-1");
}

function stops(group) {
  return [...group.querySelectorAll("[data-stop]")];
}

function showReadout(group, stop) {
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
    const lane = all.filter((link) => link.dataset.lane === stop.dataset.lane);
    return lane[lane.indexOf(stop) + (key === "ArrowLeft" ? -1 : 1)] || stop;
  }
  if (key !== "ArrowUp" && key !== "ArrowDown") return null;
  const down = key === "ArrowDown" ? 1 : -1;
  const rows = all.map(placeOf).filter((place) => (place.row - here.row) * down > 0);
  const nearest = rows.reduce((minimum, place) => Math.min(minimum, (place.row - here.row) * down), Infinity);
  const row = rows.filter((place) => (place.row - here.row) * down === nearest);
  const best = row.reduce((near, next) => (!near || distance(next, here) < distance(near, here) ? next : near), null);
  return best ? best.stop : stop;
}

function placeOf(stop) {
  return { stop, row: Number(stop.dataset.row), from: Number(stop.dataset.from), to: Number(stop.dataset.to) };
}

// Returns the gap between two time ranges; equal gaps are ordered by the distance of their middles.
function distance(a, b) {
  const gap = Math.max(0, a.from - b.to, b.from - a.to);
  return gap * 1e6 + Math.abs(a.from + a.to - b.from - b.to);
}
