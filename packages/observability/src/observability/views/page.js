"use strict";
// Optional: without this script, bars have the tooltips of the browser, and the page has no zoom.
(() => {
  const tip = document.getElementById("tip");
  for (const title of document.querySelectorAll(".bar > title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  document.addEventListener("pointermove", (event) => {
    const bar = event.target.closest ? event.target.closest(".bar") : null;
    tip.hidden = !bar;
    if (!bar) return;
    if (tip.textContent !== bar.dataset.tip) tip.textContent = bar.dataset.tip;
    const right = event.clientX + 16 + tip.offsetWidth > innerWidth;
    const below = event.clientY + 16 + tip.offsetHeight > innerHeight;
    tip.style.left = Math.max(4, right ? event.clientX - 12 - tip.offsetWidth : event.clientX + 16) + "px";
    tip.style.top = Math.max(4, below ? event.clientY - 12 - tip.offsetHeight : event.clientY + 16) + "px";
  });
  for (const card of document.querySelectorAll(".waterfall")) {
    const scroll = card.querySelector(".chart-scroll");
    const time = card.querySelector(".time");
    let scale = 1;
    const zoom = (factor, at) => {
      const next = factor ? Math.min(64, Math.max(1, scale * factor)) : 1;
      const left = (scroll.scrollLeft + at) * next / scale - at;
      scale = next;
      time.style.width = 100 * scale + "%";
      scroll.scrollLeft = left;
    };
    const buttons = card.querySelector(".zoom");
    buttons.hidden = false;
    buttons.addEventListener("click", (event) => {
      const factor = event.target.dataset.zoom;
      if (factor !== undefined) zoom(Number(factor), scroll.clientWidth / 2);
    });
    scroll.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(event.deltaY < 0 ? 1.25 : 0.8, event.clientX - scroll.getBoundingClientRect().left);
    }, { passive: false });
  }
  const unfold = () => {
    const step = location.hash && document.getElementById(location.hash.slice(1));
    const details = step && step.querySelector("details");
    if (details) details.open = true;
  };
  addEventListener("hashchange", unfold);
  unfold();
})();
