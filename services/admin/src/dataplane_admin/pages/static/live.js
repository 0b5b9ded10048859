// Follows the service's event stream: when something changed, the page is fetched once more and the
// parts marked data-live are swapped. At most once a second, and not while nobody looks.
import { visit } from "./swap.js";

const AT_MOST_EVERY_MS = 1000;
const RETRY_MS = 10_000;
// Below the root path, as this file is: /static/<digest>/live.js.
const STREAM = new URL("../../api/v1/live", import.meta.url);

export function follow() {
  const sign = document.getElementById("live");
  const parts = () => [...document.querySelectorAll("[data-live][id]")].map((part) => part.id);
  if (!sign || !parts().length || !window.EventSource) return;
  sign.hidden = false;
  let due = 0;
  let last = performance.now();
  let stream = null;

  const tell = (state, words) => {
    sign.dataset.state = state;
    sign.textContent = words;
  };
  const refresh = async () => {
    due = 0;
    last = performance.now();
    try {
      if (await visit(location.href, parts(), { quietly: true })) tell("live", "live");
      else changed();
    } catch (error) {
      if (error.name === "AbortError") changed();
      else tell("late", error.message === "404" ? "no longer there" : "not answering");
    }
  };
  const changed = () => {
    if (due || document.hidden) return;
    due = setTimeout(refresh, Math.max(0, AT_MOST_EVERY_MS - (performance.now() - last)));
  };
  const listen = () => {
    stream = new EventSource(STREAM);
    stream.addEventListener("open", () => tell("live", "live"));
    stream.addEventListener("changed", changed);
    stream.addEventListener("error", () => {
      tell("late", "reconnecting");
      // A refusal (too many watch, or the session ended) closes it for good.
      if (stream.readyState === EventSource.CLOSED) setTimeout(listen, RETRY_MS);
    });
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) changed(); });
  addEventListener("pagehide", () => stream?.close());
  addEventListener("pageshow", (event) => { if (event.persisted) listen(); });
  listen();
}
