// Downloads the rows that a table shows, as CSV or JSON.

const TYPES = { csv: "text/csv", json: "application/json" };
const WRITERS = { csv: csvOf, json: jsonOf };

export function downloadTables() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-download]");
    const table = button && tableOf(button.parentElement);
    if (table) download(table, button.dataset.download);
  });
}

// The tables of the page that can be downloaded, with their names.
export function tables() {
  return [...document.querySelectorAll(".download")].map(tableOf).filter((table) => table?.rows.length);
}

export function nameOf(table) {
  const heading = table.closest("section")?.querySelector("h2") || document.querySelector("h1");
  return table.caption?.textContent || (heading ? textOf(heading) : document.title);
}

export function download(table, format) {
  const text = WRITERS[format](read(table));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: `${TYPES[format]};charset=utf-8` }));
  link.download = `${nameOf(table).replace(/[^A-Za-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "table"}.${format}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function tableOf(controls) {
  return controls.previousElementSibling?.querySelector("table");
}

// Returns the columns' names and the rows, as text. Columns without any text, and those of links that
// act on a row (data-no-export), are left out.
function read(table) {
  const cells = [...(table.tHead?.rows[0]?.cells || [])];
  const head = cells.map(textOf);
  const rows = [...table.tBodies].flatMap((body) => [...body.rows]).map((row) => [...row.cells].map(textOf));
  const width = Math.max(head.length, ...rows.map((row) => row.length));
  const used = [...Array(width).keys()].filter((at) => !cells[at]?.hasAttribute("data-no-export") && rows.some((row) => row[at]));
  const names = used.map((at) => head[at] || `column ${at + 1}`);
  return { names: names.map((name, at) => (names.indexOf(name) < at ? `${name} ${at + 1}` : name)), rows: rows.map((row) => used.map((at) => row[at] || "")) };
}

// Returns what a screen reader reads: the description of a drawing, nothing of hidden elements.
function textOf(node) {
  if (node.nodeType === Node.TEXT_NODE) return node.nodeValue;
  if (node.nodeType !== Node.ELEMENT_NODE || node.getAttribute("aria-hidden") === "true") return "";
  const own = node.localName === "svg" ? node.getAttribute("aria-label") || "" : [...node.childNodes].map(textOf).join(node.childElementCount ? " " : "");
  return own.replace(/\s+/g, " ").trim();
}

function jsonOf({ names, rows }) {
  return JSON.stringify(rows.map((row) => Object.fromEntries(row.map((text, at) => [names[at], text]))), null, 2) + "\n";
}

function csvOf({ names, rows }) {
  return [names, ...rows].map((row) => row.map(cell).join(",") + "\r\n").join("");
}

// A spreadsheet would run a text that begins like a formula.
function cell(text) {
  const safe = /^[=@\t\r]/.test(text) || (/^[+-]/.test(text) && !/^[+-]?[\d.,]+(e[+-]?\d+)?$/i.test(text) && text !== "-") ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
