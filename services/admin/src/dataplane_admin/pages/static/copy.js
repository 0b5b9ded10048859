// Copies the text of a button's data-copy.

const SHOWN_MS = 1500;

export function copyOnClick() {
  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("[data-copy]");
    if (!button) return;
    const copied = await copy(button.dataset.copy);
    document.getElementById("say").textContent = copied ? "Copied" : "Copying failed";
    button.dataset.state = copied ? "copied" : "failed";
    setTimeout(() => delete button.dataset.state, SHOWN_MS);
  });
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without https the clipboard is reachable only through a selection.
    const field = document.createElement("textarea");
    field.value = text;
    field.className = "offscreen";
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    return copied;
  }
}
