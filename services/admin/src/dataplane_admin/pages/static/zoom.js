// Zooms a waterfall in time: by dragging, by buttons, by the keys + - 0, by ctrl and wheel.
const MAX_SCALE = 400;
const DIGIT = 6; // width of a digit of the ruler's font in pixels, which is wider than a space
const SVG = "http://www.w3.org/2000/svg";

export function zoom() {
  const chart = document.querySelector("[data-zoom]");
  if (!chart) return;
  const scroll = chart.querySelector(".chart-scroll");
  const time = chart.querySelector("svg.time");
  const buttons = document.getElementById("zoom");
  let scale = 1;

  // Zooms so that the moment at fraction `share` of the time range is `at` pixels from the left edge.
  const zoomTo = (next, share, at) => {
    scale = Math.min(MAX_SCALE, Math.max(1, next));
    time.setAttribute("width", `${100 * scale}%`);
    scroll.scrollLeft = share * scroll.clientWidth * scale - at;
    drawTicks(time, scale);
  };
  const shareAt = (at) => (scroll.scrollLeft + at) / (scroll.clientWidth * scale);
  const zoomBy = (factor, at = scroll.clientWidth / 2) => zoomTo(factor ? scale * factor : 1, shareAt(at), at);
  const aroundFocus = (factor) => {
    const bar = document.activeElement?.closest?.("[data-stop]");
    if (!bar || !factor) return zoomBy(factor);
    const middle = (Number(bar.dataset.from) + Number(bar.dataset.to)) / 200;
    zoomTo(scale * factor, middle, scroll.clientWidth / 2);
  };

  if (buttons) {
    buttons.addEventListener("click", (event) => {
      const factor = event.target.closest("button")?.dataset.factor;
      if (factor !== undefined) zoomBy(Number(factor));
    });
  }
  chart.addEventListener("keydown", (event) => {
    const factor = { "+": 1.6, "=": 1.6, "-": 1 / 1.6, "0": 0 }[event.key];
    if (factor === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    aroundFocus(factor);
  });
  scroll.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoomBy(event.deltaY < 0 ? 1.25 : 0.8, event.clientX - scroll.getBoundingClientRect().left);
  }, { passive: false });
  document.addEventListener("arrowed", (event) => {
    const bar = event.detail;
    if (!chart.contains(bar)) return;
    const width = scroll.clientWidth * scale;
    const from = (width * Number(bar.dataset.from)) / 100;
    const to = (width * Number(bar.dataset.to)) / 100;
    if (to < scroll.scrollLeft + 20 || from > scroll.scrollLeft + scroll.clientWidth - 20) {
      scroll.scrollLeft = from - 40;
    }
    const seen = bar.getBoundingClientRect();
    if (seen.top < 60 || seen.bottom > innerHeight) bar.scrollIntoView({ block: "center", inline: "nearest" });
  });
  document.addEventListener("swapped", () => drawTicks(time, scale));
  addEventListener("resize", () => drawTicks(time, scale));
  drawTicks(time, scale);
  dragging(scroll, time, (from, to) => {
    const left = shareAt(from);
    const share = shareAt(to) - left;
    zoomTo(1 / share, left, 0);
  });
}

// Calls `done` with the range of pixels that was dragged, unless it is a click.
function dragging(scroll, time, done) {
  let from = null;
  let mark = null;
  const at = (event) => {
    const box = scroll.getBoundingClientRect();
    return Math.min(box.width, Math.max(0, event.clientX - box.left));
  };
  const draw = (left, right) => {
    const box = time.getBoundingClientRect();
    const offset = scroll.getBoundingClientRect().left - box.left;
    mark.setAttribute("x", String(left + offset));
    mark.setAttribute("width", String(right - left));
  };
  time.addEventListener("dragstart", (event) => event.preventDefault());
  time.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.pointerType !== "touch") from = at(event);
  });
  addEventListener("pointermove", (event) => {
    if (from === null) return;
    const to = at(event);
    if (!mark && Math.abs(to - from) < 5) return;
    if (!mark) {
      mark = document.createElementNS(SVG, "rect");
      mark.setAttribute("class", "chosen");
      mark.setAttribute("y", "0");
      mark.setAttribute("height", "100%");
    }
    if (!mark.isConnected) time.append(mark); // a live update removes it
    draw(Math.min(from, to), Math.max(from, to));
  });
  addEventListener("pointerup", (event) => {
    const began = from;
    from = null;
    if (!mark) return;
    mark.remove();
    mark = null;
    const to = at(event);
    // Ignore the click event that follows a drag.
    const swallow = (click) => { click.preventDefault(); click.stopPropagation(); };
    addEventListener("click", swallow, { capture: true });
    setTimeout(() => removeEventListener("click", swallow, { capture: true }), 0);
    if (Math.abs(to - began) > 4) done(Math.min(began, to), Math.max(began, to));
  });
}

function drawTicks(time, scale) {
  const ticks = time.querySelector(".ticks");
  const seconds = Number(time.dataset.seconds);
  if (!ticks || !(seconds > 0)) return;
  const narrow = time.parentNode.clientWidth < 600;
  const distance = roundDistance(seconds / scale / (narrow ? 4 : 9));
  const width = time.parentNode.clientWidth * scale;
  const height = time.getAttribute("height");
  const fresh = document.createDocumentFragment();
  let free = width; // left edge of the label to the right
  for (let place = Math.floor((seconds * (1 + 1e-9)) / distance); place >= 0; place -= 1) {
    const share = (place * distance) / seconds;
    const x = `${100 * share}%`;
    const line = document.createElementNS(SVG, "line");
    for (const [name, value] of [["x1", x], ["x2", x], ["y1", "0"], ["y2", height], ["class", "tick"]]) {
      line.setAttribute(name, value);
    }
    const text = document.createElementNS(SVG, "text");
    text.textContent = labelOf(place * distance, distance, seconds);
    // The last label must not be cut off at the right edge.
    const needed = 8 + DIGIT * text.textContent.length;
    const isLast = (1 - share) * width < needed;
    const right = share * width + (isLast ? 0 : needed);
    text.setAttribute("class", "faint");
    text.setAttribute("y", "13");
    text.setAttribute("x", x);
    text.setAttribute("dx", isLast ? "-4" : "4");
    if (isLast) text.setAttribute("text-anchor", "end");
    fresh.prepend(line);
    if (right > free) continue;
    free = right - needed;
    line.after(text);
  }
  ticks.replaceChildren(fresh);
}

// The functions below do the same as `ticks` in observability/views/quantities.py.
const ROUND = [60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

function roundDistance(minimum) {
  if (minimum > 20 && minimum <= 30) return 30;
  if (minimum > 30 && minimum <= 86400) return ROUND.find((distance) => distance >= minimum);
  const scale = minimum > 86400 ? 86400 : 1;
  const power = scale * 10 ** Math.floor(Math.log10(minimum / scale));
  return power * [1, 2, 5, 10, 20].find((factor) => minimum <= power * factor);
}

function labelOf(time, distance, total) {
  if (total < 1) {
    const [unit, scale] = total >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
    return `${(time / scale).toFixed(digitsOf(distance / scale))} ${unit}`;
  }
  const parts = [];
  let rest = Number(time.toFixed(9));
  for (const [unit, scale] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (rest < scale) continue;
    parts.push(`${Math.floor(rest / scale)} ${unit}`);
    rest %= scale;
  }
  const text = rest.toFixed(digitsOf(distance));
  if (Number(text) || !parts.length) parts.push(`${Number(text) ? text : 0} s`);
  return parts.join(" ");
}

function digitsOf(distance) {
  return Math.min(20, Math.max(0, -Math.floor(Math.log10(distance) + 1e-9)));
}
