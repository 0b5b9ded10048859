// Downloads tables as CSV or JSON. Of a table marked data-all, which can have more rows than the page shows,
// it reads all rows: it fetches the page with that table's maximum number of rows, then the next pages.

import { linkOfPage } from "./swap.js";

const TYPES = { csv: "text/csv", json: "application/json" };
const WRITERS = { csv: csvOf, json: jsonOf };
const MAX_ROWS = 100_000;
const MAX_CHARACTERS = 100_000_000;
const PLACES = ["cursor", "start", "count"]; // parameters that select a page of a list
const TIMEOUT_MS = 60_000;
const SUBJECTS = ["run", "group", "id", "a", "b"]; // parameters that name what a page shows
const MAX_PART = 60;
const MAX_NAME = 200;
const ABSENT = ["-", "n/a", "never", "no events"]; // in a column of numbers or times

let busy = false;

export function downloadTables() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-download]");
    if (button) download(button.parentElement, button.dataset.download);
  });
}

// The download controls of the page's tables.
export function tables() {
  return [...document.querySelectorAll(".download")].filter((controls) => tableOf(controls)?.rows.length);
}

export function nameOf(controls) {
  const table = tableOf(controls);
  const heading = table.closest("section")?.querySelector("h2") || document.querySelector("h1");
  return table.caption?.textContent || (heading ? textOf(heading) : document.title);
}

export async function download(controls, format) {
  if (busy) return;
  busy = true;
  const state = controls.querySelector("output");
  try {
    const head = [...(tableOf(controls).tHead?.rows[0]?.cells || [])];
    const units = [];
    const { rows, cut } = controls.dataset.all ? await readAll(controls, state, units) : { rows: rowsOf(tableOf(controls), units) };
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([WRITERS[format](columnsOf(head, rows, units))], { type: `${TYPES[format]};charset=utf-8` }));
    link.download = `${fileNameOf(controls)}${cut ? `-only-${rows.length}-rows` : ""}.${format}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    state.textContent = cut ? `Only the first ${rows.length.toLocaleString("en")} rows.` : "";
  } catch {
    state.textContent = "Download failed.";
  } finally {
    busy = false;
  }
}

// Returns the names of the page, its subject and the table: run-math-7-step-ranges.
function fileNameOf(controls) {
  const { pathname, searchParams } = new URL(linkOfPage());
  const heading = tableOf(controls).closest("section")?.querySelector("h2")?.cloneNode(true);
  heading?.querySelectorAll("small, .axes").forEach((part) => part.remove());
  const subjects = [document.querySelector("[data-of-run]")?.dataset.ofRun || "", ...SUBJECTS.flatMap((name) => searchParams.getAll(name))];
  const parts = [pathname.split("/").slice(-1)[0] || "overview", ...subjects, heading ? textOf(heading) : ""];
  return parts.map((part) => part.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, MAX_PART)).filter(Boolean).join("-").slice(0, MAX_NAME);
}

function tableOf(controls) {
  return controls.previousElementSibling?.querySelector("table");
}

// Returns the rows of a table, and whether a limit of this script or of the server cut some.
async function readAll(controls, state, units) {
  const { all } = controls.dataset;
  const rows = [];
  let characters = 0;
  let url = new URL(location.href);
  for (const name of PLACES) url.searchParams.delete(name);
  for (;;) {
    url.searchParams.set("all", all);
    const answer = await fetch(url, { headers: { Accept: "text/html" }, signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (answer.redirected || !answer.ok) throw new Error(`${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const own = page.querySelector(`[data-all="${all}"]`);
    if (!own) return { rows, cut: false }; // its rows were removed
    for (const row of rowsOf(tableOf(own), units)) {
      rows.push(row);
      for (const { text } of row) characters += text.length;
      if (characters > MAX_CHARACTERS || rows.length > MAX_ROWS) return { rows: rows.slice(0, -1), cut: true };
    }
    if (!own.dataset.next) return { rows, cut: "omitted" in own.dataset };
    state.textContent = `${rows.length.toLocaleString("en")} rows read.`;
    url = new URL(own.dataset.next, location.href);
  }
}

// Returns the plain text of all cells, and whether a cell has a number or boolean. Writes the units of the columns to `units`.
function rowsOf(table, units) {
  return [...table.tBodies].flatMap((body) => [...body.rows]).map((row) => [...row.cells].map((cell, at) => {
    units[at] ||= cell.querySelector("[data-unit]")?.dataset.unit;
    const text = textOf(cell);
    const isNumber = cell.classList.contains("n") || Boolean(cell.querySelector("data"));
    if (text === "-" || (isNumber && ABSENT.includes(text))) return { text: "", isNumber };
    return { text: isNumber && /^\d{1,3}(,\d{3})+$/.test(text) ? text.replaceAll(",", "") : text, isNumber };
  }));
}

// Returns the columns' names, and the rows. Columns without any text, and those of links that act on a row
// (data-no-export), are left out.
function columnsOf(head, rows, units) {
  const width = rows.reduce((most, row) => Math.max(most, row.length), head.length);
  const used = [...Array(width).keys()].filter((at) => !head[at]?.hasAttribute("data-no-export") && rows.some((row) => row[at]?.text));
  const names = used.map((at) => ((head[at] && textOf(head[at])) || `column ${at + 1}`) + (units[at] ? ` (${units[at]})` : ""));
  return { names: names.map((name, at) => (names.indexOf(name) < at ? `${name} ${at + 1}` : name)), rows: rows.map((row) => used.map((at) => row[at] || { text: "" })) };
}

// Returns what a screen reader reads: the description of a drawing, nothing of hidden elements. Of a
// formatted number or time, it returns the value.
function textOf(node) {
  if (node.nodeType === Node.TEXT_NODE) return node.nodeValue;
  if (node.nodeType !== Node.ELEMENT_NODE || node.getAttribute("aria-hidden") === "true") return "";
  if (node.localName === "data") return node.value;
  if (node.localName === "time") return node.dateTime;
  const own = node.localName === "svg" ? node.getAttribute("aria-label") || "" : [...node.childNodes].map(textOf).join(node.childElementCount ? " " : "");
  return own.replace(/\s+/g, " ").trim();
}

function jsonOf({ names, rows }) {
  return JSON.stringify(rows.map((row) => Object.fromEntries(row.map((cell, at) => [names[at], valueOf(cell)]))), null, 2) + "\n";
}

// Returns a number or boolean, null without a value, and otherwise the text. An integer that JavaScript cannot represent
// stays text.
function valueOf({ text, isNumber }) {
  if (!text) return null;
  if (isNumber && ["true", "false"].includes(text)) return text === "true";
  const number = isNumber && /^-?\d+(\.\d+)?(e[+-]?\d+)?$/i.test(text) ? Number(text) : NaN;
  return Number.isFinite(number) && (Number.isSafeInteger(number) || !Number.isInteger(number) || /[.e]/i.test(text)) ? number : text;
}

function csvOf({ names, rows }) {
  return [names, ...rows.map((row) => row.map(({ text }) => text))].map((row) => row.map(cell).join(",") + "\r\n").join("");
}

// A spreadsheet would run a text that begins like a formula.
function cell(text) {
  const safe = /^[=@\t\r]/.test(text) || (/^[+-]/.test(text) && !/^[+-]?[\d.,]+(e[+-]?\d+)?$/i.test(text)) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
