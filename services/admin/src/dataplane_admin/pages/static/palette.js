// The command palette: goes to a page, run, partition, sample or trace, or acts on this page.
import { copy } from "./copy.js";
import { showKeys } from "./keys.js";
import { linkOfPage } from "./swap.js";
import { download, nameOf, tables } from "./tables.js";
import { showIn } from "./zone.js";

const ROOT = new URL("../../", import.meta.url);
const MAX_SHOWN = 12;
const TIMEOUT_MS = 5_000;
const MAX_RUNS = 200;

let dialog, input, list;
let entries = [];
let shown = [];
let at = 0;
let isMarked = false; // by an arrow key, since the text was typed
let reading = Promise.resolve(); // of runs and partitions

export function preparePalette() {
  dialog = document.getElementById("palette");
  if (!dialog) return;
  input = dialog.querySelector("input");
  list = dialog.querySelector("ul");
  document.getElementById("open-palette").addEventListener("click", openPalette);
  input.addEventListener("input", () => {
    isMarked = false;
    show(0);
  });
  input.addEventListener("keydown", (event) => {
    const to = { ArrowDown: at + 1, ArrowUp: at - 1 }[event.key];
    if (to !== undefined) {
      isMarked = true;
      mark((to + shown.length) % (shown.length || 1));
    } else if (event.key === "Enter") enter();
    else return;
    event.preventDefault();
  });
  list.addEventListener("click", (event) => {
    const item = event.target.closest("li");
    if (item) choose(shown[[...list.children].indexOf(item)]);
  });
  // A click on the backdrop has the dialog as its target.
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
}

export function openPalette() {
  if (!dialog || dialog.open) return;
  entries = localEntries();
  isMarked = false;
  input.value = "";
  dialog.showModal();
  show(0);
  reading = readEntries();
}

async function readEntries() {
  const read = entries; // the palette may be opened anew meanwhile
  const more = await Promise.all([
    fetchEntries(`api/v1/runs?limit=${MAX_RUNS}`, "runs", ({ run_id }) => linkEntry("run", run_id, "run", { run: run_id })),
    fetchEntries("api/v1/partitions", "partitions", ({ id }) => linkEntry("partition", id, "partition", { id })),
  ]);
  read.push(...more.flat());
  if (dialog.open && read === entries) show(at, isMarked ? shown[at] : null);
}

// Returns the entries that need no request: pages and actions.
function localEntries() {
  const pages = [...document.querySelectorAll(".nav a")].map((link) => ({ kind: "page", name: link.firstChild.nodeValue, go: link.href }));
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const actions = [
    ["Switch the theme", () => document.getElementById("theme").click()],
    ["Copy the link to this page", () => copy(linkOfPage())],
    ["List the keys", showKeys],
    ...[...new Set(["UTC", zone])].map((each) => [`Show times in ${each}`, () => showIn(each)]),
    ...tables().flatMap((table) => ["CSV", "JSON"].map((format) => [`Download ${nameOf(table)} as ${format}`, () => download(table, format.toLowerCase())])),
  ];
  return [...pages, ...actions.map(([name, act]) => ({ kind: "action", name, act }))];
}

function linkEntry(kind, name, path, query) {
  const url = new URL(path, ROOT);
  url.search = new URLSearchParams(query);
  return { kind, name, go: url.href };
}

async function fetchEntries(path, key, entryOf) {
  try {
    const answer = await fetch(new URL(path, ROOT), { signal: AbortSignal.timeout(TIMEOUT_MS) });
    return answer.ok ? (await answer.json())[key].map(entryOf) : [];
  } catch {
    return []; // the other entries are still useful
  }
}

function matchesOf(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const matching = entries.filter(({ kind, name }) => words.every((word) => `${kind} ${name}`.toLowerCase().includes(word)));
  const more = [];
  const id = text.trim().replace(/[\s-]/g, "");
  if (/^[0-9a-f]{32}$/i.test(id)) more.push(linkEntry("trace", id, "trace", { id }));
  else if (text.trim()) more.push(linkEntry("samples", `Ids that begin with ${text.trim()}`, "samples", { q: text.trim() }));
  return [...matching.slice(0, MAX_SHOWN - more.length), ...more];
}

// Lists the matches and marks `chosen` if it is one of them, else the one at `place`.
function show(place, chosen = null) {
  shown = matchesOf(input.value);
  const same = chosen ? shown.findIndex(({ kind, name }) => kind === chosen.kind && name === chosen.name) : -1;
  list.replaceChildren(...shown.map(({ kind, name }, number) => {
    const item = document.createElement("li");
    item.id = `palette-${number}`;
    item.setAttribute("role", "option");
    const label = document.createElement("span");
    label.textContent = name;
    const kindLabel = document.createElement("small");
    kindLabel.textContent = kind;
    item.append(label, kindLabel);
    return item;
  }));
  mark(same < 0 ? Math.min(place, shown.length - 1) : same);
}

function mark(place) {
  at = Math.max(0, place);
  [...list.children].forEach((item, number) => item.setAttribute("aria-selected", number === at));
  const item = list.children[at];
  if (item) input.setAttribute("aria-activedescendant", item.id);
  else input.removeAttribute("aria-activedescendant");
  item?.scrollIntoView({ block: "nearest" });
}

// Awaits the runs and partitions, because an entry of theirs precedes the search for ids.
async function enter() {
  if (!entries.includes(shown[at])) await reading;
  if (dialog.open) choose(shown[at]);
}

function choose(entry) {
  if (!entry) return;
  dialog.close();
  if (entry.go) location.assign(entry.go);
  else entry.act();
}
