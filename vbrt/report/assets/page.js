"use strict";
// The page around the charts: what ran, where time went, search, pointer and keys.

const $ = id => document.getElementById(id);

// -- what ran ---------------------------------------------------------------------------------------------------------

function showRan() {
  const ran = vb.data.ran, count = vb.lanes.reduce((sum, lane) => sum + (lane.row === "rest" ? 0 : lane.start.length), 0);
  const facts = ran ? [
    ["model", ran.models.join("; ")], ["config", ran.config], ["machine", ran.machine],
    ["versions", Object.entries(ran.versions).map(pair => pair.join(" ")).join(", ")],
    ["commit", ran.commit || "none: vbrt was installed"], ["date", ran.date.replace("T", " ").replace("+00:00", " UTC")],
  ] : [];
  const passes = new Map();
  for (const lane of vb.lanes) {
    if (lane.row === "pass") for (const item of lane.items) passes.set(vb.page(item), (passes.get(vb.page(item)) || 0) + 1);
  }
  facts.push(["passes", [...passes].map(([phase, n]) => n + " × " + phase).join(", ") || "none"]);
  facts.push(["spans", count.toLocaleString("en")]);
  for (const [name, text] of facts) $("ran").append(vb.el("dt", {}, name), vb.el("dd", {}, text));
  $("settings").hidden = !ran;
  if (ran) $("settings").querySelector("pre").textContent = JSON.stringify(ran.settings, null, 2);
}

const KINDS = [
  ["compute", "compute", "computing", "a layer of the tiers computes"],
  ["link", "wait-link", "waiting for the link", "pages are copied to the computing device, or stand in the queue for it"],
  ["drive", "wait-drive", "waiting for the drive", "pages are read from files"],
  ["host", "wait-host", "waiting for the host", "nothing moves that the layer waits for: Python decides, or launches late"],
  ["optimizer", "optimizer", "optimizer", "steps of an optimizer"],
  ["model", "model", "rest of the model", "in a pass, but in no layer of the tiers: attention, norms, Python"],
  ["idle", "idle", "nothing to do", "between two passes: what the caller does"],
];

const WAITS = { link: 1, drive: 1, host: 1 };

function showShares() {
  const shares = vb.data.shares, whole = Math.max(KINDS.reduce((sum, [kind]) => sum + shares[kind], 0), 1);
  for (const [kind, colour, name, meaning] of KINDS) {
    const us = shares[kind] / vb.data.perUs;
    if (us <= 0) continue;
    const title = name + ": " + vb.time(us) + ", " + vb.share(shares[kind] / whole);
    $("bar").append(vb.el("div", { style: "flex:" + shares[kind] + ";background:var(--" + colour + ")", title }));
    const numbers = vb.el("b", {}, vb.share(shares[kind] / whole));
    $("shares").append(vb.el("li", {}, vb.key(colour), numbers, " " + name + ", " + vb.time(us), vb.el("small", {}, meaning)));
  }
}

function showLegend() {
  const has = row => vb.lanes.some(lane => lane.row === row && lane.start.length);
  const keys = vb.phases.map(phase => [vb.phaseColour(phase), "pass: " + phase]);
  if (has("round")) keys.push(["round", "round of speculation"]);
  if (has("optimizer")) keys.push(["optimizer", "optimizer"]);
  keys.push(["compute", "compute"]);
  for (const [kind, colour, name] of KINDS) if (kind in WAITS && vb.data.shares[kind] > 0) keys.push([colour, name]);
  if (vb.linkNames.length) keys.push(["copy", "copy over a link"]);
  if (has("rest")) keys.push(["model", "rest of the model"], ["idle", "nothing to do"]);
  $("legend").append(...keys.map(([colour, name]) => vb.el("li", {}, vb.key(colour), name)));
  vb.linkNames.forEach((name, i) => $("legend").append(vb.el("li", {}, vb.key(vb.rateColour(i)), "GB/s of " + name)));
}

// -- search -----------------------------------------------------------------------------------------------------------

vb.words = [];
vb.matching = null; // by item: 1 if its page has all words; null without a search
let matches = [], at = -1;

vb.says = name => vb.words.every(word => name.toLowerCase().includes(word));

vb.find = function (text) {
  $("find").value = text;
  search();
};

function search() {
  vb.words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  vb.matching = vb.words.length ? Uint8Array.from(vb.data.items, ([page]) => vb.says(page)) : null;
  matches = [], at = -1;
  let waited = 0;
  if (vb.matching) {
    for (const lane of vb.lanes) lane.items.forEach(function (item, i) {
      if (!vb.matching[item] || lane.row === "rest") return;
      matches.push({ lane, i });
      if (lane.row === "wait") waited += lane.end[i] - lane.start[i];
    });
    matches.sort((a, b) => a.lane.start[a.i] - b.lane.start[b.i]);
  }
  $("found").textContent = vb.matching ? matches.length.toLocaleString("en") + " spans, waits " + vb.time(waited) : "";
  vb.refilter();
  vb.redraw();
}

function goTo(step) {
  if (!matches.length) return;
  at = at < 0 ? (step > 0 ? 0 : matches.length - 1) : (at + step + matches.length) % matches.length;
  vb.lookAt(matches[at].lane, matches[at].i);
  $("found").textContent = (at + 1).toLocaleString("en") + " of " + matches.length.toLocaleString("en") + " spans";
}

// -- pointer and keys -------------------------------------------------------------------------------------------------

vb.showTip = function (event, text) {
  const tip = $("tip");
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  const below = event.clientY + 18, fits = below + tip.offsetHeight < innerHeight;
  tip.style.top = (fits ? below : Math.max(4, event.clientY - tip.offsetHeight - 12)) + "px";
};

vb.hideTip = () => { $("tip").hidden = true; };

const REST = { model: "in a pass, in no layer of the tiers", idle: "between passes: nothing to do" };

function told({ lane, i }) {
  const item = lane.items[i], us = lane.end[i] - lane.start[i], page = vb.page(item), lines = [];
  lines.push((lane.row === "rest" ? REST[page] : lane.row + " " + vb.layer(item)) + ": " + vb.time(us));
  if (page.includes("#")) lines.push("page " + page);
  if (vb.nbytes(item)) {
    const rate = vb.isLink(lane) ? " at " + (vb.nbytes(item) / Math.max(us, 1e-3) / 1e3).toFixed(2) + " GB/s" : "";
    lines.push(vb.bytes(vb.nbytes(item)) + rate);
  }
  if (lane.row === "wait") lines.push("waited for " + vb.reasons(lane, i));
  if (lane.row === "compute") lines.push("waited before: " + waitBefore(lane, i));
  lines.push("from " + vb.time(lane.start[i]) + " on");
  return lines.join("\n");
}

// The wait of the lease that computes: the one that ends where it begins.
function waitBefore(compute, i) {
  for (const lane of vb.lanes) {
    if (lane.row !== "wait") continue;
    for (const near of [vb.above(lane.end, compute.start[i] - 0.2), vb.above(lane.end, compute.start[i] - 0.2) + 1]) {
      const same = near < lane.end.length && Math.abs(lane.end[near] - compute.start[i]) < 0.2;
      if (same && vb.page(lane.items[near]) === vb.page(compute.items[i])) return vb.time(lane.end[near] - lane.start[near]);
    }
  }
  return "0 µs";
}

function watchPointer() {
  const u = vb.charts.plot, over = u.over;
  let held = null;
  const spanOf = function (event) {
    const box = over.getBoundingClientRect();
    return vb.spanAt(u, event.clientX - box.left, event.clientY - box.top);
  };
  over.addEventListener("pointerdown", function (event) {
    if (event.button) return;
    held = { x: event.clientX, view: vb.view };
    over.setPointerCapture(event.pointerId);
  });
  over.addEventListener("pointermove", function (event) {
    if (held && Math.abs(event.clientX - held.x) > 2) {
      over.classList.add("moving");
      vb.hideTip();
      const moved = (held.x - event.clientX) / over.clientWidth * (held.view[1] - held.view[0]);
      return vb.setView(held.view[0] + moved, held.view[1] + moved);
    }
    const span = spanOf(event);
    if (span) vb.showTip(event, told(span));
    else vb.hideTip();
  });
  for (const end of ["pointerup", "pointercancel"]) {
    over.addEventListener(end, () => { held = null; over.classList.remove("moving"); });
  }
  over.addEventListener("pointerleave", vb.hideTip);
  over.addEventListener("dblclick", function (event) {
    const span = spanOf(event);
    if (span) vb.setView(span.lane.start[span.i], span.lane.end[span.i]);
  });
  over.addEventListener("wheel", wheel, { passive: false });
}

function wheel(event) {
  const u = vb.charts.plot, whole = vb.view[1] - vb.view[0] >= vb.extent[1] - vb.extent[0];
  const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  if (whole && (sideways || event.deltaY > 0)) return; // nothing further out: the page scrolls
  event.preventDefault();
  const lines = event.deltaMode === 1 ? 16 : 1, delta = (sideways ? event.deltaX || event.deltaY : event.deltaY) * lines;
  if (sideways) vb.pan(delta / u.over.clientWidth);
  else vb.zoom(Math.exp(Math.max(-1, Math.min(1, delta / 300))), u.posToVal(event.clientX - u.over.getBoundingClientRect().left, "x"));
}

const KEYS = {
  w: () => vb.zoom(0.6), "+": () => vb.zoom(0.6), s: () => vb.zoom(1 / 0.6), "-": () => vb.zoom(1 / 0.6),
  a: () => vb.pan(-0.25), d: () => vb.pan(0.25), 0: () => vb.setView(...vb.extent),
};

function watchKeys() {
  document.addEventListener("keydown", function (event) {
    if (event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = KEYS[event.key.toLowerCase()];
    if (act) act();
  });
  $("find").addEventListener("input", search);
  $("find").addEventListener("keydown", function (event) {
    if (event.key === "Enter") goTo(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") vb.find("");
  });
  $("before").addEventListener("click", () => goTo(-1));
  $("after").addEventListener("click", () => goTo(1));
  $("closer").addEventListener("click", KEYS["+"]);
  $("wider").addEventListener("click", KEYS["-"]);
  $("whole").addEventListener("click", KEYS[0]);
}

// -- theme, address, start --------------------------------------------------------------------------------------------

function setTheme(theme) {
  document.documentElement.style.colorScheme = theme;
  vb.recolour();
  vb.redrawExperts();
}

function watchTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)"), own = document.documentElement.style;
  dark.addEventListener("change", () => setTheme(own.colorScheme));
  $("theme").addEventListener("click", function () {
    setTheme((own.colorScheme || (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark");
  });
}

// The view is kept in the address, behind the #: it can be copied, and reloaded.
let late = 0;

vb.viewChanged = function () {
  clearTimeout(late);
  late = setTimeout(function () {
    const [min, max] = vb.view, whole = min === vb.extent[0] && max === vb.extent[1];
    const parts = new URLSearchParams(whole ? {} : { from: min.toFixed(1), to: max.toFixed(1) });
    if (vb.words.length) parts.set("find", $("find").value);
    history.replaceState(null, "", "#" + parts);
  }, 400);
};

function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1)), from = Number(asked.get("from")), to = Number(asked.get("to"));
  if (asked.get("theme")) setTheme(asked.get("theme") === "dark" ? "dark" : "light");
  if (asked.get("find")) vb.find(asked.get("find"));
  if (to > from) vb.setView(from, to);
}

$("app").hidden = false;
showRan();
showShares();
vb.makeCharts();
showLegend();
vb.makeTables();
vb.makeExperts();
watchPointer();
watchKeys();
watchTheme();
fromAddress();
vb.redraw();
document.documentElement.dataset.ready = "yes";
