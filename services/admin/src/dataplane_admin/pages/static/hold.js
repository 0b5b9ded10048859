// Live updates move no rows of a list marked data-hold: they update the rows shown, and hold new ones
// back until the reader asks for them.

// Puts the rows shown, in their order, into the list of a fetched part. Returns the number of new rows
// held back, and of shown rows that the fetched list lacks.
export function holdRows(old, fresh) {
  const held = { added: 0, gone: 0, all: false };
  const list = old.querySelector("[data-hold]");
  const wanted = fresh.querySelector("[data-hold]");
  if (!list || !wanted) return held;
  const rows = new Map([...wanted.children].map((row) => [row.dataset.key, row]));
  const kept = [...list.children].map((row) => rows.get(row.dataset.key) || row.cloneNode(true));
  held.gone = kept.filter((row) => !wanted.contains(row)).length;
  held.added = rows.size - (kept.length - held.gone);
  held.all = held.added === rows.size;
  wanted.replaceChildren(...kept);
  return held;
}

// Labels the button above the list; it keeps its place while hidden.
export function offerRows({ added, gone, all }) {
  const button = document.getElementById("newer");
  if (!button) return;
  button.hidden = !added && !gone;
  button.textContent = added ? `Show ${added}${all ? " or more" : ""} new` : "Update list";
}
