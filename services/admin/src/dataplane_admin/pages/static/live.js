// Follows the service's event stream. After each change, it fetches the page and swaps the parts marked
// data-live: at most once a second, and not while the page is hidden. Without changes, it does so every ten
// seconds, since ages grow. It skips a part marked data-pause while the pointer or the focus is in it, so
// that no link changes under a click.
import { linkOfPage, visit } from "./swap.js";

const MIN_INTERVAL_MS = 1000;
const MAX_INTERVAL_MS = 10_000;
const RETRY_MS = 10_000;
// On a touch screen, the last element touched stays hovered.
const IN_USE = matchMedia("(hover: hover)").matches ? ":is(:hover, :focus-within)" : ":focus-within";
// By status of the answer. A session that has expired is redirected to the login page.
const PROBLEMS = { 302: "signed out", 404: "not found", 422: "invalid request", 503: "unavailable", 504: "timed out" };
// Relative to this file, /static/<digest>/live.js below the root path.
const STREAM = new URL("../../api/v1/live", import.meta.url);

export function follow() {
  const indicator = document.getElementById("live");
  const parts = () => [...document.querySelectorAll("[data-live][id]")].map((part) => part.id);
  if (!indicator || !parts().length || !window.EventSource) return;
  indicator.hidden = false;
  let due = 0;
  let last = performance.now();
  let stream = null;

  const show = (state, words) => {
    indicator.dataset.state = state;
    indicator.textContent = words;
  };
  const isPaused = (part) => {
    if (!part.matches(`[data-pause]${IN_USE}`)) return false;
    for (const end of ["mouseleave", "focusout"]) part.addEventListener(end, changed, { once: true });
    return true;
  };
  const refresh = async () => {
    due = 0;
    last = performance.now();
    try {
      if (await visit(linkOfPage(), parts(), { live: true, isPaused })) show("live", "live");
      else changed();
    } catch (error) {
      if (error.name === "AbortError") changed();
      else show("late", PROBLEMS[error.message] || "not responding");
    }
  };
  const changed = () => {
    if (due || document.hidden) return;
    due = setTimeout(refresh, Math.max(0, MIN_INTERVAL_MS - (performance.now() - last)));
  };
  const listen = () => {
    stream = new EventSource(STREAM);
    stream.addEventListener("open", () => show("live", "live"));
    stream.addEventListener("changed", changed);
    stream.addEventListener("error", () => {
      show("late", "reconnecting");
      // After a refusal (too many subscribers, or an expired session) the browser does not retry.
      if (stream.readyState === EventSource.CLOSED) setTimeout(listen, RETRY_MS);
    });
  };
  document.getElementById("newer")?.addEventListener("click", async () => {
    try {
      await visit(linkOfPage(), parts());
      document.getElementById("main").focus({ preventScroll: true });
    } catch (error) {
      if (error.name !== "AbortError") location.reload();
    }
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) changed(); });
  setInterval(() => { if (performance.now() - last >= MAX_INTERVAL_MS) changed(); }, MAX_INTERVAL_MS / 4);
  addEventListener("pagehide", () => stream?.close());
  addEventListener("pageshow", (event) => { if (event.persisted) listen(); });
  listen();
}
