"use strict";
// Three charts on one axis of time: all of the recording, the spans in view, and the speed of each link in view.

const LEFT_PX = 128, RIGHT_PX = 26, BINS = 400, LEAST_US = 0.5;
const STEPS = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map(step => step * 10 ** (power - 2))).flat();

let colours = {}, fontInk = "";

vb.view = [...vb.extent];

function timeAxis(show) {
  return {
    show, incrs: STEPS, space: 90, size: 26, gap: 2, stroke: () => fontInk, font: "12px system-ui, sans-serif",
    grid: { stroke: () => colours.grid, width: 1 }, ticks: { stroke: () => colours.line, width: 1, size: 4 },
    values: (u, values) => vb.ticks(values),
  };
}

function sideAxis(options) {
  return {
    size: LEFT_PX, gap: 6, stroke: () => fontInk, font: "12px system-ui, sans-serif",
    grid: { show: false }, ticks: { show: false }, ...options,
  };
}

function quietCursor(more) {
  return {
    y: false, points: { show: false }, drag: { x: false, y: false, setScale: false },
    bind: { dblclick: () => () => null }, ...more,
  };
}

const padding = [4, RIGHT_PX, 0, 0];
const timeScale = range => ({ time: false, auto: false, range: () => range() });

// Bytes (or time) of spans by bin of a stretch, spread over the bins that they touch.
function binned(lane, min, max, amount, bins) {
  const step = (max - min) / bins.length;
  for (let i = vb.above(lane.end, min), last = vb.above(lane.start, max, true); i < last; i++) {
    const start = Math.max(lane.start[i], min), end = Math.min(lane.end[i], max);
    const first = Math.min(bins.length - 1, Math.floor((start - min) / step));
    const until = Math.min(bins.length - 1, Math.floor((end - min) / step));
    const density = amount(i) / Math.max(lane.end[i] - lane.start[i], 1e-3);
    if (first === until) bins[first] += density * Math.max(end - start, 1e-3);
    else for (let bin = first; bin <= until; bin++) {
      bins[bin] += density * (Math.min(end, min + (bin + 1) * step) - Math.max(start, min + bin * step));
    }
  }
}

function overviewData() {
  const [min, max] = vb.extent, step = (max - min) / BINS;
  const bins = row => {
    const sums = new Float64Array(BINS);
    for (const lane of vb.lanes) if (lane.row === row) binned(lane, min, max, i => lane.end[i] - lane.start[i], sums);
    return Array.from(sums, us => Math.min(100, 100 * us / step));
  };
  const compute = bins("compute"), both = bins("wait").map((wait, i) => Math.min(100, wait + compute[i])); // stacked
  return [Array.from({ length: BINS }, (_, i) => min + i * step), both, compute];
}

vb.linkNames = Object.keys(vb.data.links);

function rateData() {
  const [min, max] = vb.view, step = (max - min) / BINS;
  const of = vb.linkNames.map(function (name) {
    const sums = new Float64Array(BINS);
    for (const lane of vb.lanes) if (lane.row === name) binned(lane, min, max, i => vb.nbytes(lane.items[i]), sums);
    return Array.from(sums, count => count / step / 1e3);
  });
  return [Array.from({ length: BINS }, (_, i) => min + i * step), ...of];
}

const stepped = uPlot.paths.stepped({ align: 1 });
const RATE_STROKES = ["copy", "wait-drive", "optimizer", "wait-host"];

vb.rateColour = i => RATE_STROKES[i % RATE_STROKES.length];

function newOverview(width) {
  const share = colour => ({ stroke: () => colours[colour], fill: () => colours[colour], paths: stepped, points: { show: false } });
  return new uPlot({
    width, height: 64, padding, legend: { show: false }, series: [{}, share("wait-link"), share("compute")],
    scales: { x: timeScale(() => vb.extent), y: { range: [0, 100] } },
    axes: [timeAxis(true), sideAxis({ splits: () => [50], values: () => ["compute, waits"] })],
    cursor: quietCursor({ x: false, drag: { x: true, y: false, setScale: false } }),
    hooks: { setSelect: [taken] },
  }, overviewData(), document.getElementById("overview"));
}

function taken(u) {
  if (u.selecting || u.select.width < 3) return;
  vb.setView(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
}

function newLanes(width) {
  const count = vb.lanes.length;
  return new uPlot({
    width, height: 30 + count * vb.LANE_PX, padding, legend: { show: false }, series: [{}, { show: false }],
    scales: { x: timeScale(() => vb.view), y: { auto: false, range: () => [0, count] } },
    axes: [timeAxis(true), sideAxis({
      splits: () => vb.lanes.map((_, i) => count - i - 0.5), values: () => vb.lanes.map(vb.laneTitle), space: 1,
    })],
    cursor: quietCursor({ sync: { key: "time" } }),
    hooks: { draw: [drawSpans] },
  }, [vb.extent, [0, 0]], document.getElementById("lanes"));
}

vb.laneTitle = function (lane) {
  const titles = { pass: "passes", round: "speculation", rest: "gaps" };
  return lane.name.replace(/^\w+/, name => titles[name] || name);
};

function drawSpans(u) {
  const begun = performance.now(), palette = vb.COLOURS.map(name => colours[name]);
  vb.drawn = vb.drawLanes(u, palette, vb.COLOURS.map(name => (name === "idle" ? fontInk : "#fff")));
  vb.drawMs = performance.now() - begun;
}

function newRates(width) {
  const series = vb.linkNames.map((name, i) => ({
    label: name, stroke: () => colours[vb.rateColour(i)], width: 1.5, paths: stepped, points: { show: false },
  }));
  return new uPlot({
    width, height: 110, padding: [10, RIGHT_PX, 0, 0], legend: { show: false }, series: [{}, ...series],
    scales: { x: timeScale(() => vb.view), y: { range: (u, min, max) => [0, Math.max(max || 0, 1e-3) * 1.1] } },
    axes: [timeAxis(true), sideAxis({ space: 30, values: (u, values) => values.map(value => value + " GB/s") })],
    cursor: quietCursor({ sync: { key: "time" } }),
  }, rateData(), document.getElementById("rates"));
}

// -- the view ---------------------------------------------------------------------------------------------------------

// Show a stretch of time; what lies outside of the recording is not shown.
vb.setView = function (min, max) {
  const [first, last] = vb.extent, width = Math.min(Math.max(max - min, LEAST_US), last - first);
  const from = Math.min(Math.max((min + max - width) / 2, first), last - width);
  vb.view = [from, from + width];
  vb.redraw();
};

vb.zoom = function (factor, at) {
  const [min, max] = vb.view, fixed = at === undefined ? (min + max) / 2 : at;
  vb.setView(fixed - (fixed - min) * factor, fixed + (max - fixed) * factor);
};

vb.pan = part => vb.setView(...vb.view.map(moment => moment + part * (vb.view[1] - vb.view[0])));

vb.lookAt = function (lane, i) {
  const length = Math.max(lane.end[i] - lane.start[i], LEAST_US);
  vb.setView(lane.start[i] - 2 * length, lane.end[i] + 2 * length);
};

let due = 0;

vb.redraw = function () {
  if (!due) due = requestAnimationFrame(() => { due = 0; redrawNow(); });
};

function redrawNow() {
  const [min, max] = vb.view, { overview, plot, rates } = vb.charts;
  plot.setScale("x", { min, max });
  if (rates) rates.setData(rateData());
  const whole = min === vb.extent[0] && max === vb.extent[1], left = whole ? -9 : overview.valToPos(min, "x");
  const width = whole ? 0 : overview.valToPos(max, "x") - left; // of all of it nothing is marked
  overview.selecting = true;
  overview.setSelect({ left, top: 0, width, height: overview.over.clientHeight }, false);
  overview.selecting = false;
  const app = document.getElementById("lanes").dataset;
  app.from = min, app.to = max, app.drawn = vb.drawn;
  document.getElementById("shown").textContent = vb.time(max - min) + " from " + vb.time(min) + " on";
  vb.viewChanged();
}

vb.charts = {};

vb.readColours = function () {
  const names = [...vb.COLOURS, "ink", "grid", "line"];
  vb.resolve(names).forEach((colour, i) => { colours[names[i]] = colour; });
  fontInk = colours.ink;
};

vb.recolour = function () {
  vb.readColours();
  for (const chart of Object.values(vb.charts)) if (chart) chart.redraw(false, true);
};

vb.makeCharts = function () {
  vb.readColours();
  const width = document.getElementById("lanes").clientWidth;
  vb.charts = { overview: newOverview(width), plot: newLanes(width), rates: vb.linkNames.length ? newRates(width) : null };
  new ResizeObserver(function ([entry]) {
    for (const chart of Object.values(vb.charts)) {
      if (chart && entry.contentRect.width) chart.setSize({ width: entry.contentRect.width, height: chart.height });
    }
    vb.redraw();
  }).observe(document.getElementById("lanes"));
};
