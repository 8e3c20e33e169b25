"use strict";
// Spans on a canvas: what is in view only, and spans narrower than a pixel together as one column.

vb.REASONS = ["wait-drive", "wait-link", "wait-host"];
vb.COLOURS = ["compute", ...vb.REASONS, "copy", "model", "idle", "optimizer", "round"];
vb.phases = [...new Set(vb.lanes.filter(lane => lane.row === "pass").flatMap(lane => lane.items.map(vb.page)))];
const PHASES = 5;
for (let i = 0; i < PHASES; i++) vb.COLOURS.push("phase" + i);

vb.phaseColour = phase => "phase" + vb.phases.indexOf(phase) % PHASES;

vb.mainReason = function (lane, i) {
  let best = 2;
  for (const reason of [1, 0]) if (lane.why[reason][i] > lane.why[best][i]) best = reason;
  return best;
};

function colourOf(lane, i) {
  if (lane.row === "wait") return vb.REASONS[vb.mainReason(lane, i)];
  if (lane.row === "pass") return vb.phaseColour(vb.page(lane.items[i]));
  if (lane.row === "rest") return vb.page(lane.items[i]);
  return vb.isLink(lane) ? "copy" : lane.row;
}

for (const lane of vb.lanes) {
  lane.code = Uint8Array.from(lane.items, (item, i) => vb.COLOURS.indexOf(colourOf(lane, i)));
}

// Colours as the browser resolves them, in this theme; a canvas knows no variables.
vb.resolve = function (names) {
  const probe = document.body.appendChild(vb.el("span", { hidden: "" }));
  const found = names.map(function (name) {
    probe.style.color = "var(--" + name + ")";
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return found;
};

vb.LANE_PX = 24;
const LABEL_FROM_PX = 40, LETTER_PX = 6.3, GAP_PX = 3;

function shortened(name, width) {
  const room = width / LETTER_PX - 1, parts = name.split("#")[0].split(".");
  for (let from = 0; from < parts.length; from++) {
    const text = parts.slice(from).join(".");
    if (text.length <= room) return text;
  }
  return "";
}

// Draw all lanes into uPlot's canvas; returns how many rectangles that took.
vb.drawLanes = function (u, colours, ink) {
  const { ctx, bbox } = u, ratio = devicePixelRatio || 1, min = u.scales.x.min, max = u.scales.x.max;
  const scale = bbox.width / (max - min), height = bbox.height / vb.lanes.length;
  let drawn = 0;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.font = 11 * ratio + "px system-ui, sans-serif";
  ctx.textBaseline = "middle", ctx.textAlign = "left";
  vb.lanes.forEach(function (lane, row) {
    const top = bbox.top + row * height + GAP_PX * ratio, tall = height - 2 * GAP_PX * ratio;
    const first = vb.above(lane.end, min), last = vb.above(lane.start, max, true);
    let column = -1, filled = 0, longest = -1, code = 0, lit = true;
    function flush() {
      if (column < 0) return;
      ctx.globalAlpha = (lit ? 1 : 0.18) * Math.min(1, 0.3 + 0.7 * filled);
      ctx.fillStyle = colours[code];
      ctx.fillRect(column, top, 1, tall);
      column = -1;
      drawn++;
    }
    for (let i = first; i < last; i++) {
      const left = bbox.left + (lane.start[i] - min) * scale, wide = (lane.end[i] - lane.start[i]) * scale;
      const isLit = !vb.matching || vb.matching[lane.items[i]] === 1;
      if (wide < 1.5) {
        const at = Math.floor(left);
        if (at !== column) {
          flush();
          column = at, filled = 0, longest = -1, lit = false;
        }
        filled += wide;
        if ((isLit && !lit) || (isLit === lit && wide > longest)) longest = wide, code = lane.code[i], lit = isLit;
        continue;
      }
      flush();
      const from = Math.max(left, bbox.left - 2), to = Math.min(left + wide, bbox.left + bbox.width + 2);
      ctx.globalAlpha = isLit ? 1 : 0.18;
      ctx.fillStyle = colours[lane.code[i]];
      ctx.fillRect(from, top, Math.max(1, to - from - (to - from > 4 * ratio ? ratio / 2 : 0)), tall);
      drawn++;
      if ((to - from) / ratio > LABEL_FROM_PX && isLit) {
        const text = shortened(vb.page(lane.items[i]), (to - from) / ratio);
        ctx.fillStyle = ink[lane.code[i]];
        if (text) ctx.fillText(text, from + 4 * ratio, top + tall / 2);
      }
    }
    flush();
  });
  ctx.restore();
  return drawn;
};

// The span under a point of the plot, in CSS pixels; null where there is none within three of them.
vb.spanAt = function (u, left, top) {
  const lane = vb.lanes[Math.floor(top / (u.over.clientHeight / vb.lanes.length))];
  if (!lane || !lane.start.length) return null;
  const x = u.posToVal(left, "x"), slack = u.posToVal(left + 3, "x") - x;
  const next = vb.above(lane.end, x);
  let best = null, distance = slack;
  for (const i of [next - 1, next]) {
    if (i < 0 || i >= lane.start.length) continue;
    const away = Math.max(lane.start[i] - x, x - lane.end[i], 0);
    if (away <= distance) best = { lane, i }, distance = away;
  }
  return best;
};
