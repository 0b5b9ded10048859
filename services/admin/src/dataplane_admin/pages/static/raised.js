// The raised alerts keep the height that they have at load, so that a further one moves nothing below:
// the list scrolls, and a button shows all of it.

export function holdHeight() {
  const rows = document.getElementById("raised-rows");
  const button = document.getElementById("all-raised");
  if (!rows || !button) return;
  const fit = () => {
    rows.style.height = "";
    rows.style.height = `${rows.offsetHeight}px`;
    offer();
  };
  const offer = () => { button.hidden = rows.scrollHeight <= rows.clientHeight; };
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width !== innerWidth) fit();  // on a phone, scrolling changes the height
    width = innerWidth;
  });
  button.addEventListener("click", fit);
  document.addEventListener("swapped", offer);
  fit();
}
