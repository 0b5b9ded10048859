// Fetches pages of this service and swaps parts of the one that is shown.
import { holdRows, offerRows } from "./hold.js";
import { morph } from "./morph.js";

const NONE = { added: 0, gone: 0, all: false };
let current = null;

// Swaps the parts with these ids, then emits `swapped` on the document. Only one fetch runs at a time:
// a live update returns false if another one runs; any other fetch aborts the running one. `isPaused` returns
// whether to skip a part; it is called after the fetch, since the focus may move during it.
export async function visit(url, ids, { live = false, isPaused = () => false } = {}) {
  if (live && current) return false;
  if (current) current.abort();
  const own = new AbortController();
  current = own;
  try {
    const answer = await fetch(url, { signal: own.signal, headers: { Accept: "text/html" } });
    if (answer.redirected || !answer.ok) throw new Error(answer.redirected ? "302" : `${answer.status}`);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const id of ids) {
      const old = document.getElementById(id);
      const wanted = fresh.getElementById(id);
      if (!old || !wanted || isPaused(old)) continue;
      // The service could not read its content, so a live update retains the content shown.
      if (live && "unread" in wanted.dataset) continue;
      if (old.querySelector("[data-hold]")) offerRows(live ? holdRows(old, wanted) : NONE);
      morph(old, wanted);
    }
    document.dispatchEvent(new CustomEvent("swapped"));
    return true;
  } finally {
    if (current === own) current = null;
  }
}

// A page that was opened without a run shows the newest one; its link names this run.
export function linkOfPage() {
  const url = new URL(location.href);
  const shown = document.querySelector("[data-run]")?.dataset.run;
  if (shown && !url.searchParams.get("run")) url.searchParams.set("run", shown);
  return url.href;
}

// Links with data-swap="id id", on them or on their group, swap these parts; data-history="replace"
// adds no history entry.
export function swapOnClick() {
  const here = () => location.pathname + location.search;
  let shown = here();
  document.addEventListener("click", async (event) => {
    const link = event.target.closest?.("a");
    const options = link?.closest("[data-swap]")?.dataset;
    if (!options || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    const url = hrefOf(link);
    try {
      await visit(url, options.swap.split(" "));
    } catch (error) {
      if (error.name !== "AbortError") location.assign(url);
      return;
    }
    history[options.history === "replace" ? "replaceState" : "pushState"]({}, "", url);
    shown = here();
    const say = document.getElementById("say");
    if (say) say.textContent = link.getAttribute("aria-label") || "";
    document.getElementById(link.dataset.focus || "")?.focus();
  });
  // A change of only the fragment also emits popstate.
  addEventListener("popstate", () => {
    if (here() !== shown) location.reload();
  });
}

function hrefOf(link) {
  return typeof link.href === "string" ? link.href : new URL(link.href.baseVal, location.href).href;
}
