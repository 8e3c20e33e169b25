"use strict";
// Tables that sort by any column: the longest waits, links, layers.

const FIRST_ROWS = 25;

// columns: {name, of(row): number or string, text(row)}; the first sort is by column `by`, the largest first.
vb.table = function (parent, columns, rows, options) {
  const head = vb.el("tr"), body = vb.el("tbody"), more = vb.el("button", { type: "button" });
  let by = options.by, falling = true, limit = FIRST_ROWS;
  const place = vb.el("div", { class: "scroll" });
  place.append(vb.el("table", { class: options.click ? "click" : "" }, vb.el("thead", {}, head), body));
  parent.append(place, more);
  columns.forEach(function (column, i) {
    const cell = vb.el("th", { class: column.words ? "words" : "", scope: "col" }, column.name);
    cell.addEventListener("click", function () {
      falling = by === i ? !falling : !column.words;
      by = i;
      show();
    });
    head.append(cell);
  });
  more.addEventListener("click", function () { limit *= 8; show(); });

  function compare(a, b) {
    const one = columns[by].of(a), other = columns[by].of(b);
    const order = typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other;
    return falling ? -order : order;
  }

  function line(row) {
    const cells = columns.map(column => vb.el("td", { class: column.words ? "words" : "" }, column.text(row)));
    const made = vb.el("tr", {}, ...cells);
    if (options.click) made.addEventListener("click", () => options.click(row));
    return made;
  }

  function show() {
    const shown = rows.filter(options.keep || (() => true)).sort(compare);
    head.querySelectorAll("th").forEach(function (cell, i) {
      if (i === by) cell.setAttribute("aria-sort", falling ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    body.replaceChildren(...shown.slice(0, limit).map(line));
    more.hidden = shown.length <= limit;
    more.textContent = limit + " of " + shown.length.toLocaleString("en") + ": show more";
  }

  show();
  return show;
};

const REASON_WORDS = ["the drive", "the link", "the host"];

vb.reasons = function (lane, i) {
  const parts = lane.why.map((column, reason) => [column[i], REASON_WORDS[reason]]).filter(([us]) => us > 0.05);
  return parts.sort((a, b) => b[0] - a[0]).map(([us, of]) => of + " " + vb.time(us)).join(", ") || "nothing";
};

function waitTable() {
  const rows = vb.lanes.filter(lane => lane.row === "wait").flatMap(lane => lane.items.map((_, i) => ({ lane, i })));
  const length = ({ lane, i }) => lane.end[i] - lane.start[i], page = ({ lane, i }) => vb.page(lane.items[i]);
  const columns = [
    { name: "wait", of: length, text: row => vb.time(length(row)) },
    { name: "for", of: ({ lane, i }) => vb.reasons(lane, i), text: ({ lane, i }) => vb.reasons(lane, i), words: true },
    { name: "at", of: ({ lane, i }) => lane.start[i], text: ({ lane, i }) => vb.time(lane.start[i]) },
    { name: "bytes", of: ({ lane, i }) => vb.nbytes(lane.items[i]), text: ({ lane, i }) => vb.bytes(vb.nbytes(lane.items[i])) },
    { name: "page", of: page, text: page, words: true },
  ];
  const keep = ({ lane, i }) => !vb.matching || vb.matching[lane.items[i]] === 1;
  return vb.table(document.getElementById("waits"), columns, rows, { by: 0, keep, click: showSpan });
}

function showSpan({ lane, i }) {
  vb.lookAt(lane, i);
  document.getElementById("tools").scrollIntoView({ block: "start" });
}

function linkTable() {
  const rows = Object.entries(vb.data.links), columns = [
    { name: "link", of: ([name]) => name, text: ([name]) => name, words: true },
    { name: "bytes", of: ([, one]) => one.nbytes, text: ([, one]) => vb.bytes(one.nbytes) },
    { name: "GB/s while busy", of: ([, one]) => one.gb_per_s, text: ([, one]) => one.gb_per_s.toFixed(2) },
    { name: "busy", of: ([, one]) => one.busy_us, text: ([, one]) => vb.time(one.busy_us) },
    { name: "idle", of: ([, one]) => 1 - one.busy_share, text: ([, one]) => vb.share(1 - one.busy_share) },
  ];
  return vb.table(document.getElementById("links"), columns, rows, { by: 1 });
}

function layerTable() {
  const columns = [
    { name: "layer", of: row => row[0], text: row => row[0], words: true },
    { name: "compute", of: row => row[1], text: row => vb.time(row[1]) },
    { name: "wait", of: row => row[2], text: row => vb.time(row[2]) },
  ];
  for (const link of vb.linkNames) {
    columns.push({ name: link, of: row => row[3][link] || 0, text: row => vb.bytes(row[3][link] || 0) });
  }
  const keep = row => !vb.words.length || vb.says(row[0]);
  return vb.table(document.getElementById("layers"), columns, vb.data.layers, { by: 2, keep, click: row => vb.find(row[0]) });
}

vb.makeTables = function () {
  const tables = [waitTable(), layerTable()];
  document.getElementById("links").hidden = !vb.linkNames.length;
  linkTable();
  vb.refilter = () => tables.forEach(show => show());
};
