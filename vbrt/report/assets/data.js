"use strict";
// The recording, and how times and bytes are written. `vb` is what the scripts of this page share.
const vb = { data: JSON.parse(document.getElementById("data").textContent) };

vb.lanes = vb.data.lanes.map(function (lane) {
  const count = lane.starts.length, perUs = vb.data.perUs;
  const start = new Float64Array(count), end = new Float64Array(count);
  let at = 0;
  for (let i = 0; i < count; i++) {
    at += lane.starts[i];
    start[i] = at / perUs;
    end[i] = (at + lane.lengths[i]) / perUs;
  }
  const why = lane.why && lane.why.map(column => Float64Array.from(column, us => us / perUs));
  return { name: lane.name, row: lane.row, items: lane.items, start, end, why };
});

vb.window = vb.data.window.map(moment => moment / vb.data.perUs);
vb.extent = (function () {
  let last = vb.window[1];
  for (const lane of vb.lanes) last = Math.max(last, lane.end[lane.end.length - 1] || 0);
  return [0, Math.max(last, 1)];
})();

vb.page = item => vb.data.items[item][0];
vb.nbytes = item => vb.data.items[item][1];
vb.layer = item => vb.page(item).split("#")[0];
vb.isLink = lane => lane.row.includes(">");

// -- text -------------------------------------------------------------------------------------------------------------

const UNITS = [[1e6, "s"], [1e3, "ms"], [1, "µs"]];

vb.time = function (us) {
  const [unit, name] = UNITS.find(([least]) => Math.abs(us) >= least) || UNITS[2];
  const value = us / unit, digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return Number(value.toFixed(digits)) + " " + name;
};

// Ticks of one axis share a unit, that of their step, and their digits: 0.5 ms, 1.0 ms, 1.5 ms.
vb.ticks = function (values) {
  const step = values.length > 1 ? values[1] - values[0] : Math.abs(values[0]) || 1;
  const [unit, name] = UNITS.find(([least]) => 10 * step >= least) || UNITS[2];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-6));
  return values.map(value => (value / unit).toFixed(digits) + " " + name);
};

vb.bytes = function (count) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024) return (unit === "B" ? count : count.toFixed(1)) + " " + unit;
    count /= 1024;
  }
  return count.toFixed(1) + " TiB";
};

vb.share = part => (100 * part).toFixed(part < 0.0995 ? 1 : 0) + " %";

// -- elements ---------------------------------------------------------------------------------------------------------

vb.el = function (tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

vb.key = colour => vb.el("span", { class: "key", style: "background: var(--" + colour + ")" });

// -- searching sorted times -------------------------------------------------------------------------------------------

// The first index whose value is above (or, with `orEqual`, not below) x.
vb.above = function (sorted, x, orEqual) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > x || (orEqual && sorted[middle] === x)) high = middle;
    else low = middle + 1;
  }
  return low;
};
