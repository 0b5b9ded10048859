// Keys of the pages: / searches, j and k move through rows, ? lists the keys, Ctrl+K opens the palette.
import { openPalette } from "./palette.js";

const OFF = "dataplane.keys.off";

export function listenToKeys() {
  const help = document.getElementById("keys");
  if (!help) return;
  const box = help.querySelector("input[type=checkbox]");
  box.checked = localStorage.getItem(OFF) === null;
  box.addEventListener("change", () => {
    if (box.checked) localStorage.removeItem(OFF);
    else localStorage.setItem(OFF, "1");
  });
  const actions = { "/": search, j: () => step(1), k: () => step(-1), "?": () => help.showModal() };
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.altKey && !event.shiftKey) {
      event.preventDefault();
      openPalette();
      return;
    }
    const action = Object.hasOwn(actions, event.key) && actions[event.key];
    if (!action || !box.checked || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest?.("input, textarea, select, [contenteditable], #api")) return;
    event.preventDefault();
    action();
  });
}

// Lets the arrow keys scroll what is wider than the screen.
export function focusScrollable() {
  const mark = () => {
    for (const part of document.querySelectorAll(".wide, pre")) {
      if (part.scrollWidth > part.clientWidth || part.localName === "pre") part.tabIndex = 0;
      else part.removeAttribute("tabindex");
    }
  };
  mark();
  addEventListener("resize", mark);
  document.addEventListener("swapped", mark);
}

export function showKeys() {
  document.getElementById("keys").showModal();
}

function search() {
  const fields = [...document.querySelectorAll("main input[type=search], .quick input")];
  const field = fields.find((each) => each.offsetParent);
  if (field) field.select();
  else openPalette();
}

let focused = { link: null, at: 0 }; // by the last step

// Focuses the link of the next row with a link. If no row has the focus, starts at the first or last; if a
// live update removed the row with the focus, at its place.
function step(by) {
  const links = [...document.querySelectorAll("main tbody tr")]
    .map((row) => [...row.querySelectorAll("a[href]")].find((link) => link.offsetParent))
    .filter(Boolean);
  if (!links.length) return;
  const row = document.activeElement.closest("tr");
  let at = row ? links.findIndex((link) => link.closest("tr") === row) : -1;
  if (at < 0 && document.activeElement === document.body && focused.link?.isConnected === false) at = by > 0 ? focused.at - 1 : focused.at;
  else if (at < 0) at = by > 0 ? -1 : links.length;
  const next = Math.min(links.length - 1, Math.max(0, at + by));
  focused = { link: links[next], at: next };
  links[next].focus({ preventScroll: true });
  links[next].scrollIntoView({ block: "nearest" });
}
