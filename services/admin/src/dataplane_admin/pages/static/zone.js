// Chooses the time zone of the times on the pages. A cookie passes it to the server. Its path is the
// root path: this file is /static/<digest>/zone.js below it.
const PATH = new URL("../../", import.meta.url).pathname;
const YEAR_S = 31_536_000;

export function chooseZone() {
  const shown = document.getElementById("zone");
  if (!shown) return;
  const current = shown.textContent;
  const zones = [...new Set(["UTC", Intl.DateTimeFormat().resolvedOptions().timeZone, current])];
  if (zones.length < 2) return;
  const select = document.createElement("select");
  select.setAttribute("aria-label", "Time zone");
  for (const zone of zones) select.append(new Option(zone, zone, false, zone === current));
  select.addEventListener("change", () => showIn(select.value));
  shown.replaceChildren(select);
}

export function showIn(zone) {
  document.cookie = `dataplane_zone=${encodeURIComponent(zone)}; Path=${PATH}; Max-Age=${zone === "UTC" ? 0 : YEAR_S}; SameSite=Strict`;
  location.reload();
}
