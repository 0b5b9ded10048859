// Draws the curves of one run or of several with uPlot, which uPlot.iife.min.js defines. All panels
// share one range of the horizontal axis and one crosshair. The axis is steps, seconds or samples. The
// URL has the state: smooth, metrics, first and last.
const POINTS_PER_PIXEL = 0.5;
const FETCH_DELAY_MS = 50;
const X_AXIS = 22;
const MIN_Y_AXIS = 46;
const DIGIT = 6.6; // width of a digit of the axes' font, and a little more
const MIN_SMOOTHED = 10; // points of a curve; fewer are not smoothed
const SMOOTHED_POINTS = 1000; // the shown range counts as this many points, as in Weights & Biases

export function drawCurves() {
  const section = document.getElementById("learning");
  if (!section || !window.uPlot) return;
  if (!section.querySelector("[data-curve]")) {
    document.addEventListener("swapped", drawCurves, { once: true });
    return;
  }
  const charts = new Map(); // figure to its chart
  const visible = new Set();
  const slider = document.getElementById("smooth");
  const stepOutput = document.getElementById("curve-step");
  const range = { first: parameter("first"), last: parameter("last") };
  const axis = AXES[section.dataset.axis];
  const byRun = "byRun" in section.dataset; // colors distinguish runs, else the curves of a panel
  const inkOf = (curve, place) => (byRun ? curve.run : place);
  let shown = [0, 1]; // range of the axis
  let runs = [];
  let due = 0;

  const colors = () => [...section.querySelectorAll(".curve-colors > *")].map((node) => getComputedStyle(node).color);
  let palette = colors();

  const url = () => {
    const [path, given] = section.dataset.curves.split("?");
    const query = new URLSearchParams(given);
    for (const figure of visible) query.append("name", figure.dataset.curve);
    if (range.first !== null) query.set("first", range.first);
    if (range.last !== null) query.set("last", range.last);
    const width = Math.max(...[...visible].map((figure) => plotOf(figure).clientWidth));
    query.set("max_points", String(Math.min(2000, Math.max(50, Math.round(width * POINTS_PER_PIXEL)))));
    return `${path}?${query}`;
  };
  const load = async () => {
    due = 0;
    if (!visible.size || document.hidden) return;
    const wanted = [...visible];
    let answer;
    try {
      const response = await fetch(url(), { headers: { Accept: "application/json" } });
      if (!response.ok) return;
      answer = await response.json();
    } catch {
      return; // the live indicator shows that the service does not respond
    }
    runs = answer.runs;
    const first = range.first ?? Math.min(...answer.curves.map((curve) => Math.min(...curve.x)));
    const last = range.last ?? Math.max(...answer.curves.map((curve) => Math.max(...curve.x, axis.end(curve))));
    if (Number.isFinite(first) && Number.isFinite(last)) shown = [first, last > first ? last : first + 1];
    for (const figure of wanted) {
      const curves = answer.curves.filter((curve) => belongs(curve, figure));
      show(figure, curves.filter((curve, place) => outputOf(figure, inkOf(curve, place))));
    }
    // Panels that left the screen keep their data, but share the range.
    for (const [figure, chart] of charts) if (!visible.has(figure)) chart.plot.setData(chart.plot.data);
  };
  const changed = () => {
    if (!due) due = setTimeout(load, FETCH_DELAY_MS);
  };

  const show = (figure, curves) => {
    const data = dataOf(curves, Number(slider.value));
    const known = charts.get(figure);
    const inks = curves.map(inkOf).join();
    if (known && known.inks === inks) {
      known.curves = curves;
      known.plot.setData(data);
      showValues(figure, known, known.plot);
      return;
    }
    known?.plot.destroy();
    const chart = { curves, inks, plot: null };
    charts.set(figure, chart);
    chart.plot = new window.uPlot(options(figure, chart), data, plotOf(figure));
  };
  const options = (figure, chart) => {
    const node = plotOf(figure);
    const quiet = () => getComputedStyle(figure.querySelector("figcaption")).color;
    const grid = { stroke: () => getComputedStyle(node).borderTopColor, width: 1 };
    const common = { stroke: quiet, font: "11px system-ui, sans-serif", grid, ticks: { show: false } };
    const series = [{}];
    const bands = [];
    chart.curves.forEach((curve, place) => {
      const color = () => palette[inkOf(curve, place) % palette.length];
      const at = series.length;
      const faint = () => (Number(slider.value) > 0 ? translucent(color(), 0.3) : color());
      series.push(
        { stroke: null, points: { show: false } },
        { stroke: null, points: { show: false } },
        { stroke: faint, width: 1, points: { size: 4, fill: faint, stroke: faint } },
        { stroke: color, width: 1.5, points: { show: false } },
      );
      bands.push({ series: [at, at + 1], fill: () => translucent(color(), 0.16) });
    });
    return {
      width: node.clientWidth,
      height: node.clientHeight,
      legend: { show: false },
      padding: [6, 8, 0, 0],
      cursor: {
        y: false,
        drag: { x: true, y: false, setScale: false },
        points: { size: 5 },
        sync: { key: "learning", scales: ["x", null] },
        dataIdx: (plot, at, nearest) => nearestValue(plot.data[at], nearest),
      },
      scales: { x: { time: false, range: () => shown }, y: { range: (plot, low, high) => yRange(low, high) } },
      axes: [
        { ...common, size: X_AXIS, gap: 2, space: 70, values: (plot, ticks, at, space, distance) => ticks.map((tick) => axis.tick(tick, distance)), incrs: axis.increments, grid: { show: false } },
        { ...common, size: (plot, labels) => widthOf(labels || []), gap: 4, space: 28, values: (plot, ticks, at, space, distance) => ticks.map((tick) => short(tick, distance)) },
      ],
      series,
      bands,
      hooks: { draw: [(plot) => markResumes(chart, plot)], setCursor: [(plot) => showValues(figure, chart, plot)], setSelect: [zoom] },
    };
  };

  // Marks where each run was last resumed.
  const markResumes = (chart, plot) => {
    const steps = JSON.parse(section.dataset.resumed);
    const marks = [...new Map(chart.curves.map((curve) => [curve.run, curve])).values()].map((curve) => {
      const step = steps[curve.run];
      const x = step === null ? null : axis.place(step, curve);
      if (x === null || x < shown[0] || x > shown[1]) return null;
      const mark = document.createElement("i");
      mark.className = "resume";
      mark.title = `${byRun ? `${runs[curve.run]} ` : ""}resumed at step ${step}`;
      mark.style.left = `${plot.valToPos(x, "x")}px`;
      return mark;
    });
    for (const old of plot.over.querySelectorAll(".resume")) old.remove();
    plot.over.append(...marks.filter(Boolean));
  };

  // Writes the values at the crosshair, or the last ones without a crosshair. A curve has no value
  // before its first point and after its end.
  const showValues = (figure, chart, plot) => {
    const at = plot.cursor.idx;
    const isRead = plot.cursor.left >= 0 && at !== null && at !== undefined;
    chart.curves.forEach((curve, place) => {
      const column = plot.data[3 + 4 * place];
      let value = curve.last_value;
      let smoothed = "";
      if (isRead) {
        const x = plot.data[0][at];
        const isInside = x >= curve.x[0] && x <= Math.max(curve.x[curve.x.length - 1], axis.end(curve));
        const nearest = nearestValue(column, at);
        value = isInside ? column[nearest] : null;
        if (isInside && isSmoothed(curve, Number(slider.value))) smoothed = `, smoothed ${text(plot.data[4 + 4 * place][nearest])}`;
      }
      // The last value of a curve is null only if it is not finite.
      outputOf(figure, inkOf(curve, place)).textContent = isRead || value !== null ? text(value) + smoothed : "NaN";
    });
    if (isRead) stepOutput.textContent = axis.text(plot.data[0][at]);
    else stepOutput.textContent = "";
  };
  const zoom = (plot) => {
    if (!(plot.select.width > 4)) return;
    const first = Math.max(0, axis.round(plot.posToVal(plot.select.left, "x")));
    const last = axis.round(plot.posToVal(plot.select.left + plot.select.width, "x"));
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (last > first) limit(first, last);
  };
  const limit = (first, last) => {
    Object.assign(range, { first, last });
    remember({ first, last });
    reset.hidden = first === null;
    changed();
  };
  const reset = document.getElementById("curve-reset");
  reset.hidden = range.first === null;
  reset.addEventListener("click", () => limit(null, null));
  section.addEventListener("dblclick", (event) => {
    if (!event.target.closest(".curve-plot")) return;
    links.hidePopover();
    limit(null, null);
  });

  // A click on a point opens links to the samples and the trace of its step, in each run.
  const links = document.getElementById("step-links");
  const opener = document.getElementById("open-step");
  const openLinks = (left, top, stepOf) => {
    [...links.children].forEach((row, run) => {
      const input = row.querySelector("input");
      input.value = stepOf(run) ?? input.value;
      pointLinks(row);
    });
    links.showPopover();
    links.style.left = `${Math.max(8, Math.min(left, document.documentElement.clientWidth - links.offsetWidth - 8))}px`;
    links.style.top = `${Math.max(8, Math.min(top, innerHeight - links.offsetHeight - 8))}px`;
  };
  const pointLinks = async (row) => {
    const step = row.querySelector("input").value;
    const [samples, trace] = row.querySelectorAll("a");
    samples.href = urlOfStep(samples, step);
    const url = urlOfStep(trace, step);
    trace.removeAttribute("href");
    const traces = await tracesOf(url.search);
    if (step !== row.querySelector("input").value) return;
    trace.textContent = ["No trace", "Trace"][traces.length] || "Traces";
    if (traces.length === 1) trace.href = `${url.pathname.slice(0, -1)}?id=${traces[0].trace_id}`;
    else if (traces.length) trace.href = url;
  };
  const tracesOf = async (search) => {
    try {
      const answer = await fetch(new URL(`../traces${search}&limit=2`, new URL(section.dataset.curves, location)));
      return answer.ok ? (await answer.json()).traces : [];
    } catch {
      return [];
    }
  };
  links.addEventListener("input", (event) => pointLinks(event.target.closest("p")));
  opener.addEventListener("click", () => {
    const box = opener.getBoundingClientRect();
    openLinks(box.left, box.bottom + 4, () => null);
    links.querySelector("input").focus();
  });
  let pressed = 0;
  section.addEventListener("pointerdown", (event) => { pressed = event.clientX; });
  section.addEventListener("click", (event) => {
    const chart = event.target.closest(".u-over") && charts.get(event.target.closest("[data-curve]"));
    if (!chart || Math.abs(event.clientX - pressed) > 4) return; // a drag zooms
    const { plot, curves } = chart;
    const x = plot.data[0][plot.posToIdx(event.clientX - plot.over.getBoundingClientRect().left)];
    openLinks(event.clientX + 8, event.clientY + 8, (run) => axis.step(x, curves.find((curve) => !byRun || curve.run === run)));
    links.querySelector("a").focus();
  });

  // Shows the metrics with the typed text in their name or title.
  const filter = document.getElementById("metric-filter");
  const choose = (opens) => {
    const wanted = filter.value.trim().toLowerCase();
    for (const figure of section.querySelectorAll("[data-curve]")) {
      const words = `${figure.dataset.curve} ${figure.querySelector(".curve-title").textContent}`;
      figure.hidden = !words.toLowerCase().includes(wanted);
    }
    const others = section.querySelector(".more-curves");
    if (others && wanted && opens) others.open = true;
  };
  filter.value = new URLSearchParams(location.search).get("metrics") || "";
  const keep = () => remember({ metrics: filter.value.trim() || null });
  filter.addEventListener("input", () => choose(true));
  filter.addEventListener("change", keep);
  filter.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // the form would load the page without the rest of its state
    keep();
  });
  choose(true);

  const smoothed = () => {
    document.getElementById("smooth-value").textContent = Number(slider.value).toFixed(2);
    for (const { curves, plot } of charts.values()) plot.setData(dataOf(curves, Number(slider.value)));
  };
  slider.addEventListener("input", smoothed);
  slider.addEventListener("change", () => remember({ smooth: Number(slider.value) || null }));

  const paint = () => {
    palette = colors();
    for (const { plot } of charts.values()) plot.redraw();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  new MutationObserver(paint).observe(document.documentElement, { attributeFilter: ["data-theme"] });

  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      charts.get(target.parentNode)?.plot.setSize({ width: target.clientWidth, height: target.clientHeight });
    }
  });
  const sight = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) visible.add(target);
      else visible.delete(target);
    }
    changed();
  }, { rootMargin: "200px" });
  const watched = new WeakSet();
  const watch = () => {
    for (const [figure, { plot }] of charts) {
      if (figure.isConnected) continue;
      plot.destroy();
      charts.delete(figure);
      visible.delete(figure);
    }
    for (const figure of section.querySelectorAll("[data-curve]")) {
      if (watched.has(figure)) continue;
      watched.add(figure);
      sight.observe(figure);
      sizes.observe(plotOf(figure));
    }
  };
  document.addEventListener("swapped", () => { choose(false); watch(); changed(); follow(); });
  section.querySelector(".curve-tools").hidden = false;
  watch();
}

const INTEGERS = [1, 2, 5].flatMap((digit) => Array.from({ length: 15 }, (_, power) => digit * 10 ** power)).sort((a, b) => a - b);
const MINUTE = 60;
const HOUR = 3600;
const DURATIONS = [
  ...[0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30],
  ...[1, 2, 5, 10, 20, 30].map((minutes) => minutes * MINUTE),
  ...[1, 2, 4, 8, 12, ...INTEGERS.map((days) => 24 * days)].map((hours) => hours * HOUR),
];
// `step` returns the step of a curve's point at `x`, `place` the `x` of a step, null if unknown. `end`
// returns where a curve ends, 0 if unknown. The last `x` is only the start of the last bucket.
const AXES = {
  step: { increments: INTEGERS, tick: short, text: (value) => `step ${value}`, round: Math.round, step: (x) => x, place: (step) => step, end: (curve) => curve.last_step },
  time: { increments: DURATIONS, tick: elapsed, text: elapsed, round: (value) => Number(value.toFixed(1)), step: nearestStep, place: placeOf, end: () => 0 },
  samples: { increments: INTEGERS, tick: short, text: (value) => `${Math.round(value).toLocaleString("en")} samples`, round: Math.round, step: nearestStep, place: placeOf, end: () => 0 },
};

function nearestStep(x, curve) {
  if (!curve) return null;
  const distances = curve.x.map((other) => Math.abs(other - x));
  return curve.steps[distances.indexOf(Math.min(...distances))];
}

function placeOf(step, curve) {
  return curve.x[curve.steps.findIndex((other) => other >= step)] ?? null;
}

function urlOfStep(link, step) {
  const url = new URL(link.dataset.to, location);
  url.searchParams.set("step", step);
  return url;
}

function belongs(curve, figure) {
  const { curve: name, attributes } = figure.dataset;
  // Both went through JSON of the service, so their keys have the same order.
  return curve.name === name && (!attributes || JSON.stringify(JSON.parse(attributes)) === JSON.stringify(curve.attributes));
}

function outputOf(figure, ink) {
  return figure.querySelector(`.curve-value[data-ink="${ink}"]`);
}

function plotOf(figure) {
  return figure.querySelector(".curve-plot");
}

function parameter(name) {
  const value = new URLSearchParams(location.search).get(name);
  return value && /^\d{1,15}(\.\d{1,3})?$/.test(value) ? Number(value) : null;
}

// Writes the state to the URL; null removes a parameter.
function remember(changes) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) query.delete(name);
    else query.set(name, value);
  }
  history.replaceState(history.state, "", `?${query}`);
  follow();
}

// Copies parameters of the URL to each link that lists them in data-follows. A live update may have rendered
// the link with older values.
function follow() {
  const state = new URLSearchParams(location.search);
  for (const link of document.querySelectorAll("[data-follows]")) {
    const query = new URLSearchParams(link.search);
    for (const name of link.dataset.follows.split(" ")) {
      if (state.has(name)) query.set(name, state.get(name));
      else query.delete(name);
    }
    link.search = query;
  }
}

// Four columns per curve: largest, smallest, mean, and smoothed mean of each bucket of steps.
function dataOf(curves, smoothing) {
  if (!curves.length) return [[]];
  const ends = curves.flatMap(({ steps }) => [steps[0], steps[steps.length - 1]]).filter(Number.isFinite);
  const range = Math.max(1, Math.max(...ends) - Math.min(...ends));
  return window.uPlot.join(curves.map((curve) => {
    const none = curve.x.map(() => null);
    const high = curve.high.length ? curve.high : none;
    const low = curve.low.length ? curve.low : none;
    return [curve.x, high, low, curve.values, smoothedOf(curve, range, smoothing, none)];
  }));
}

function smoothedOf(curve, range, smoothing, none) {
  if (!(smoothing > 0)) return none;
  return isSmoothed(curve, smoothing) ? average(curve, range, smoothing) : curve.values;
}

function isSmoothed(curve, smoothing) {
  return smoothing > 0 && curve.values.length >= MIN_SMOOTHED;
}

// Exponential moving average without a bias to the first value. A value's weight grows with its distance
// from the previous one, relative to the `range` of steps of all curves shown. So down-sampled, sparse and
// zoomed curves look alike, over any axis, and runs of different lengths are smoothed alike.
function average({ steps, values }, range, smoothing) {
  const base = Math.sqrt(smoothing);
  let sum = 0;
  let weight = 0;
  return values.map((value, place) => {
    if (value === null) return null;
    const keep = base ** ((SMOOTHED_POINTS * (steps[place] - (steps[place - 1] ?? steps[0]))) / range || 1);
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}

function nearestValue(column, at) {
  for (let away = 0; away < column.length; away += 1) {
    for (const place of [at - away, at + away]) {
      if (column[place] !== null && column[place] !== undefined) return place;
    }
  }
  return at;
}

function yRange(low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === 0 && high === 0) return [-0.08, 1]; // most metrics are never negative
  const space = 0.08 * (high - low) || 0.1 * Math.abs(high);
  return [low - space, high + space];
}

function elapsed(seconds) {
  if (seconds < MINUTE) return `${Number(seconds.toPrecision(3))} s`;
  const total = Math.round(seconds);
  const [large, small, unit, part] = total < HOUR ? ["min", "s", MINUTE, 1] : total < 24 * HOUR ? ["h", "min", HOUR, MINUTE] : ["d", "h", 24 * HOUR, HOUR];
  const rest = Math.floor((total % unit) / part);
  return `${Math.floor(total / unit)} ${large}${rest ? ` ${rest} ${small}` : ""}`;
}

// Returns the label of a tick, such as 2.5, with enough digits to distinguish it from the next tick, which
// is `distance` away.
function short(value, distance) {
  const size = Math.abs(value);
  if (size >= 1e12 || (size && size < 1e-3)) {
    return value.toExponential(Math.min(20, Math.max(0, 1 + exponent(size) - exponent(distance)))).replace(/\.?0+e/, "e");
  }
  const [unit, suffix] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  return Number((value / unit).toFixed(Math.min(20, Math.max(0, 1 - exponent(distance / unit))))) + suffix;
}

// Returns the width of a vertical axis with these labels.
function widthOf(labels) {
  return Math.max(MIN_Y_AXIS, ...labels.map((label) => 8 + DIGIT * label.length));
}

function exponent(value) {
  return Math.floor(Math.log10(value) + 1e-9);
}

function text(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(3)).toExponential();
  return size >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

// `color` is a computed color without transparency, such as rgb(1, 2, 3).
function translucent(color, opacity) {
  return color.replace("rgb(", "rgba(").replace(")", `, ${opacity})`);
}
