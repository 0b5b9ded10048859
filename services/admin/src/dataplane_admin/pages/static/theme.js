// Switches between the light, dark and system theme. A cookie passes the theme to the server, so that
// no page flashes. Its path is the root path: this file is /static/<digest>/theme.js below it.
const PATH = new URL("../../", import.meta.url).pathname;
const NEXT = { auto: "light", light: "dark", dark: "auto" };

export function switchTheme() {
  const button = document.getElementById("theme");
  if (!button) return;
  const root = document.documentElement;
  const name = () => `Theme: ${root.dataset.theme || "auto"}. Switch to ${NEXT[root.dataset.theme || "auto"]}`;
  button.setAttribute("aria-label", name());
  button.title = name();
  button.addEventListener("click", () => {
    const next = NEXT[root.dataset.theme || "auto"];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    const age = next === "auto" ? 0 : 31_536_000;
    document.cookie = `dataplane_theme=${next}; Path=${PATH}; Max-Age=${age}; SameSite=Strict`;
    button.setAttribute("aria-label", name());
    button.title = name();
  });
}
