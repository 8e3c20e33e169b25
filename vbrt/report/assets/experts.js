"use strict";
// Heat maps of routed experts: a row for each layer, a cell for each expert.

const SHADES = 8, WIDTH_PX = 960, TEXT_PX = 14;

// The least count of each shade, rising from 1. Each is a multiple of the one before: most experts are touched a few
// times, and some very often.
vb.shadeBounds = function (most) {
  const bounds = Array.from({ length: SHADES }, (_, shade) => Math.round(most ** (shade / SHADES)));
  return most ? [...new Set(bounds)].sort((a, b) => a - b) : [];
};

// What tells the names of layers apart: the parts between dots in which not all of them agree.
vb.shortNames = function (names) {
  const parts = names.map(name => name.split("."));
  if (names.length < 2 || parts.some(own => own.length !== parts[0].length)) return names;
  const differ = parts[0].map((_, i) => new Set(parts.map(own => own[i])).size > 1);
  return parts.map(own => own.filter((_, i) => differ[i]).join("."));
};

function shadeOf(bounds, count) {
  const shade = bounds.filter(bound => bound <= count).length;
  return Math.ceil(shade * SHADES / (bounds.length || 1)); // where shades are few, the last one is the strongest
}

const NUMBERS = /[\d.]+/g;

function shades(kind) {
  const [page, full] = vb.resolve(["page", kind]).map(text => text.match(NUMBERS).slice(0, 3).map(Number));
  return Array.from({ length: SHADES + 1 }, function (_, shade) {
    const part = shade ? 0.12 + 0.88 * shade / SHADES : 0.05;
    return "rgb(" + page.map((low, i) => Math.round(low + (full[i] - low) * part)).join(" ") + ")";
  });
}

function heatMap(kind, layers, counts) {
  const columns = Math.max(...counts.map(row => row.length)), most = Math.max(...counts.flat());
  const wide = Math.min(24, Math.max(3, Math.floor(WIDTH_PX / columns))), high = Math.max(6, Math.min(wide, TEXT_PX));
  const names = vb.shortNames(layers.map(one => one.layer)), bounds = vb.shadeBounds(most);
  const left = 7 * Math.max(...names.map(name => name.length)) + 12;
  const caption = vb.el("figcaption", {}, kind), canvas = vb.el("canvas", { role: "img", "aria-label": kind + " by layer and expert" });
  const figure = vb.el("figure", { class: kind }, caption, canvas);
  const width = left + columns * wide + 30, height = counts.length * high + TEXT_PX + 8;
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  canvas.dataset.left = left, canvas.dataset.wide = wide, canvas.dataset.high = high;

  function cellAt(event) {
    const box = canvas.getBoundingClientRect(), row = Math.floor((event.clientY - box.top) / high);
    return [row, Math.floor((event.clientX - box.left - left) / wide)];
  }

  canvas.addEventListener("mousemove", function (event) {
    const [row, expert] = cellAt(event), hits = layers[row] && layers[row].hits[expert];
    if (hits === undefined) return vb.hideTip();
    const touches = hits + layers[row].misses[expert], rate = touches ? ", " + vb.share(hits / touches) + " hits" : "";
    const numbers = touches + " touches, " + hits + " hits, " + layers[row].misses[expert] + " misses" + rate;
    vb.showTip(event, layers[row].layer + ", expert " + expert + "\n" + numbers);
  });
  canvas.addEventListener("mouseleave", vb.hideTip);

  function draw() {
    const ratio = devicePixelRatio || 1, colours = shades(kind), [text] = vb.resolve(["faint"]);
    canvas.width = width * ratio, canvas.height = height * ratio;
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    const gap = wide > 6 ? 1 : 0;
    counts.forEach((row, y) => row.forEach(function (count, x) {
      ctx.fillStyle = colours[shadeOf(bounds, count)];
      ctx.fillRect(left + x * wide, y * high, wide - gap, high - (high > 6 ? 1 : 0));
    }));
    labels(ctx, text);
    caption.replaceChildren(kind, ...legend(bounds, most, colours));
  }

  function labels(ctx, text) {
    ctx.fillStyle = text, ctx.font = "12px system-ui, sans-serif", ctx.textBaseline = "middle", ctx.textAlign = "right";
    const step = Math.ceil(TEXT_PX / high);
    for (let y = 0; y < names.length; y += step) ctx.fillText(names[y], left - 6, y * high + high / 2);
    ctx.textAlign = "center";
    const room = Math.ceil(7 * (String(columns).length + 1) / wide), every = 2 ** Math.ceil(Math.log2(room));
    for (let x = 0; x < columns; x += every) ctx.fillText(String(x), left + x * wide + wide / 2, counts.length * high + 10);
  }

  draw();
  return [figure, draw];
}

function legend(bounds, most, colours) {
  const keys = [["0", 0]];
  bounds.forEach(function (first, i) {
    const last = i + 1 < bounds.length ? bounds[i + 1] - 1 : most;
    keys.push([first === last ? String(first) : first + "–" + last, shadeOf(bounds, first)]);
  });
  return keys.map(([text, shade]) => vb.el("span", {}, vb.el("span", { class: "key", style: "background:" + colours[shade] }), text));
}

vb.makeExperts = function () {
  const layers = vb.data.experts, section = document.getElementById("experts");
  vb.redrawExperts = () => {};
  if (!layers.length) return;
  section.hidden = false;
  const touches = layers.map(one => one.hits.map((hits, i) => hits + one.misses[i]));
  const maps = [
    heatMap("touches", layers, touches), heatMap("hits", layers, layers.map(one => one.hits)),
    heatMap("misses", layers, layers.map(one => one.misses)),
  ];
  section.append(...maps.map(([figure]) => figure));
  vb.redrawExperts = () => maps.forEach(([, draw]) => draw());
};
