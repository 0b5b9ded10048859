// Live updates move no rows of a list marked data-hold: they update the rows shown, and hold new
// ones back until the reader asks for them. Panels of curves are rows, too, but are added at once
// before the first input on the page.
let used = false;
for (const name of ["pointermove", "pointerdown", "keydown", "wheel"]) {
  addEventListener(name, () => { used = true; }, { once: true, passive: true });
}

// Puts the rows shown, in their order, into the lists of a fetched part, and removes lists that are
// not shown yet. A list whose data-hold has another value shows another run. Returns the number of
// new rows held back, and of shown rows that the fetched lists lack.
export function holdRows(old, fresh) {
  const held = { added: 0, gone: 0, all: true };
  const shown = [...old.querySelectorAll("[data-hold]")];
  [...fresh.querySelectorAll("[data-hold]")].forEach((wanted, place) => {
    const list = shown[place];
    if (!used && wanted.matches(".curves")) return;
    if (!list) {
      held.added += wanted.children.length;
      wanted.closest("[data-key]").remove();
      return;
    }
    if (list.dataset.hold !== wanted.dataset.hold) return;
    const rows = new Map([...wanted.children].map((row) => [row.dataset.key, row]));
    const kept = [...list.children].map((row) => rows.get(row.dataset.key) || row.cloneNode(true));
    const gone = kept.filter((row) => !wanted.contains(row)).length;
    held.gone += gone;
    held.added += rows.size - (kept.length - gone);
    held.all &&= kept.length === gone;
    wanted.replaceChildren(...kept);
  });
  return held;
}

// Labels the button above the list; it keeps its place while hidden.
export function offerRows({ added, gone, all }) {
  const button = document.getElementById("newer");
  if (!button) return;
  button.hidden = !added && !gone;
  button.textContent = added ? `Show ${added}${all ? " or more" : ""} new` : "Update list";
}
