// Fetches data.json once a second and draws it: tiles, curves, tables. Nothing comes from anywhere else.
"use strict";

const token = new URLSearchParams(location.search).get("token") || "";
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8;
const [MANY_ROWS, MANY_NAMES] = [40, 8];
const byId = (id) => document.getElementById(id);
let tag = "";
let newest = null;
let failures = 0;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// ---- numbers for people

function digits(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("e+", "e");
  if (size >= 100) return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, " ");
  return Number(value.toPrecision(3)).toString();
}

function bytes(value) {
  if (!value) return "0 B";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log10(value) / 3)));
  return `${Number((value / 1000 ** power).toPrecision(3))} ${units[power]}`;
}

const rate = (value) => `${bytes(value)}/s`;
const percent = (value) => `${Math.round(100 * value)} %`;

function seconds(value) {
  if (!value) return "–";
  if (value < 1) return `${digits(1000 * value)} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// ---- charts

function ticks(low, high, most) {
  const raw = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const found = [];
  // Each from its number: a sum of steps may stay where it is.
  const last = Math.floor(high / step + 1e-9);
  for (let n = Math.ceil(low / step - 1e-9); n <= last && found.length <= 2 * most; n += 1) found.push(n * step);
  return found;
}

function path(points, x, y) {
  let text = "";
  let pen = "M";
  for (const [px, py] of points) {
    if (px === null || py === null) { pen = "M"; continue; }
    text += `${pen}${x(px).toFixed(1)} ${y(py).toFixed(1)}`;
    pen = "L";
  }
  return text;
}

// across: how an x is written; before: what stands before one that is read.
// lines: [{label, points: [[x, y]], kind: class}], the one to read from last.
function chart(place, title, lines, format, across, before = "") {
  let figure = place.querySelector(`[data-title="${CSS.escape(title)}"]`);
  if (!figure) {
    const svg = drawn("svg", { role: "img" });
    figure = element("figure", { class: "chart", "data-title": title },
      element("figcaption", {}, element("span", {}, title), element("output")), svg, element("ul", { class: "legend" }));
    place.append(figure);
    const point = (event) => { figure.at = event.clientX - svg.getBoundingClientRect().left; figure.redraw(); };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", () => { figure.at = null; figure.redraw(); });
    new ResizeObserver(() => figure.redraw()).observe(svg);
  }
  figure.redraw = () => plot(figure, title, lines, format, across, before);
  figure.redraw();
}

function plot(figure, title, lines, format, across, before) {
  const svg = figure.querySelector("svg");
  const width = Math.max(200, svg.clientWidth);
  const height = Math.max(120, svg.clientHeight);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const read = lines[lines.length - 1];
  const told = figure.querySelector("output");
  const all = lines.flatMap((line) => line.points).filter(([px, py]) => px !== null && py !== null);
  if (!all.length) {
    told.textContent = "";
    svg.append(drawn("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing yet"));
    return;
  }
  const xs = all.map((p) => p[0]);
  const ys = all.map((p) => p[1]);
  let [left, right] = [Math.min(...xs), Math.max(...xs)];
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  if (low >= 0 && low < 0.5 * high) low = 0;
  if (right === left) right = left + 1;
  const size = Math.max(Math.abs(low), Math.abs(high));
  // What is constant is so but for rounding: the mean of three times 0.1 is another number.
  if (high - low <= 1e-12 * size) { high += size / 10 || 1; low -= size / 10; }
  const marks = ticks(low, high, 4);
  const [x0, x1] = [12 + 6.3 * Math.max(...marks.map((at) => format(at).length)), width - 14];
  const [y0, y1] = [height - 22, 10];
  const x = (v) => x0 + ((v - left) / (right - left)) * (x1 - x0);
  const y = (v) => y0 + ((v - low) / (high - low)) * (y1 - y0);
  for (const at of marks) {
    svg.append(drawn("line", { class: "grid", x1: x0, x2: x1, y1: y(at), y2: y(at) }));
    svg.append(drawn("text", { x: x0 - 6, y: y(at) + 4, "text-anchor": "end" }, format(at)));
  }
  for (const at of ticks(left, right, Math.max(2, Math.floor(width / 80)))) {
    svg.append(drawn("text", { x: x(at), y: height - 5, "text-anchor": "middle" }, across(at)));
  }
  for (const line of lines) svg.append(drawn("path", { class: line.kind, d: path(line.points, x, y) }));
  const known = read.points.filter((p) => p[0] !== null && p[1] !== null);
  let shown = known[known.length - 1];
  if (figure.at != null && known.length) {
    const wanted = left + ((figure.at - x0) / (x1 - x0)) * (right - left);
    shown = known.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a));
    svg.append(drawn("line", { class: "cursor", x1: x(shown[0]), x2: x(shown[0]), y1: y0, y2: y1 }));
  }
  told.textContent = shown ? `${format(shown[1])} at ${before}${across(shown[0])}` : "";
  svg.setAttribute("aria-label", `${title}: ${told.textContent}; from ${format(low)} to ${format(high)}`);
  const legend = figure.querySelector(".legend");
  legend.replaceChildren(...(lines.length < 2 ? [] : lines.length > COLOURS + 1
    ? [keyOf(read), element("li", {}, `and ${lines.length - 1} workers`)] : [...lines].reverse().map(keyOf)));
}

function keyOf(line) {
  return element("li", {}, element("i", { class: line.kind.split(" ").pop() }), line.label);
}

// ---- tables

// columns: [title, text of a row, class of a row]
function table(place, caption, columns, rows) {
  const head = element("tr", {}, ...columns.map(([title]) => element("th", { scope: "col" }, title)));
  const body = rows.map((row) => element("tr", { "data-rank": row.rank }, ...columns.map(([title, text, kind], i) => {
    const cell = i ? element("td", { "data-label": title }) : element("th", { scope: "row" });
    cell.append(element("span", kind ? { class: kind(row) } : {}, String(text(row))));
    return cell;
  })));
  place.replaceChildren(element("table", { "aria-label": caption }, element("thead", {}, head), element("tbody", {}, ...body)));
}

// Of many rows those in trouble come first, so that nobody has to look for them.
function ordered(rows) {
  const trouble = (row) => (row.state === "silent" ? 2 : row.straggler ? 1 : 0);
  return rows.length > MANY_ROWS ? [...rows].sort((a, b) => trouble(b) - trouble(a) || a.rank - b.rank) : rows;
}

// The first of them, and how many there are besides.
function first(items, separator) {
  const more = items.length - MANY_NAMES;
  return items.slice(0, MANY_NAMES).join(separator) + (more > 0 ? ` and ${more} more` : "");
}

const state = ["state", (row) => (row.state === "silent" ? `silent ${seconds(row.silent_s)}` : row.straggler ? "slow" : row.state),
  (row) => (row.state === "running" && row.straggler ? "slow" : row.state)];

function workers(data) {
  const columns = [
    ["worker", (w) => `worker ${w.rank}`], ["client", (w) => w.client], ["host", (w) => w.host], state,
    ["steps", (w) => digits(w.steps)], ["steps/s", (w) => digits(w.steps_per_s)],
    ["own work", (w) => seconds(w.own_s_per_step)], ["in calls", (w) => percent(w.blocked_share)],
    ["moved", (w) => rate(w.bytes_per_s)], ["staleness", (w) => (w.staleness === null ? "–" : digits(w.staleness))],
    ["memory", (w) => bytes(w.resident_bytes)],
  ];
  const told = (y) => (y === null ? "not finite" : digits(y));
  for (const name of Object.keys(data.curves)) columns.push([name, (w) => told(w.newest[name])]);
  table(byId("workers"), "Workers", columns, ordered(data.workers));
}

function servers(data) {
  table(byId("servers"), "Servers", [
    ["server", (s) => `server ${s.rank}`], ["host", (s) => s.host], state, ["keys", (s) => digits(s.keys)],
    ["held", (s) => bytes(s.held_bytes)], ["requests/s", (s) => digits(s.requests_per_s)], ["moved", (s) => rate(s.bytes_per_s)],
    ["updates", (s) => digits(s.rounds)], ["queue", (s) => s.queue],
    ["waits for client", (s) => first(s.missing, ", ") || "–"], ["memory", (s) => bytes(s.resident_bytes)],
  ], ordered(data.servers));
}

// ---- the page

function show(data) {
  const { totals, shape } = data;
  byId("job").textContent = data.job.slice(0, 8);
  document.title = `kvmpi ${data.job.slice(0, 8)}`;
  const counted = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
  const parts = [`${counted(shape.workers, "worker")} in ${counted(shape.clients, "client")}`, counted(shape.servers, "server"), `up ${seconds(data.elapsed_s)}`];
  byId("state").textContent = parts.join(" · ");
  byId("lost").hidden = !data.lost.length;
  byId("lost").textContent = first(data.lost, "; ");
  const slowest = data.slowest === null ? "–" : `worker ${data.slowest}`;
  const straggles = data.workers.some((w) => w.rank === data.slowest && w.straggler);
  const tiles = [
    ["steps", digits(totals.steps)], ["steps/s", digits(totals.steps_per_s)], ["moved", rate(totals.bytes_per_s)],
    ["workers running", `${totals.running} of ${shape.workers}`], ["slowest", slowest, straggles ? "slow" : ""], ["keys", digits(totals.keys)],
    ...(shape.servers > 1 ? [["imbalance", totals.imbalance.toFixed(2)]] : []),
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, text, kind]) =>
    element("div", {}, element("dt", {}, name), element("dd", { "data-tile": name, class: kind || "" }, text))));
  byId("curves-section").hidden = !Object.keys(data.curves).length;
  for (const [name, curve] of Object.entries(data.curves)) {
    const ones = Object.entries(curve.workers);
    const lines = ones.map(([rank, points]) => ({ label: `worker ${rank}`, points, kind: `one k${rank % COLOURS}` }));
    const mean = { label: "mean", points: curve.mean, kind: lines.length > 1 ? "mean" : "only" };
    chart(byId("curves"), name, lines.length > 1 ? [...lines, mean] : [mean], digits, digits, "step ");
  }
  chart(byId("speed"), "bytes moved", [{ label: "all", points: data.history.bytes_per_s, kind: "only" }], rate, seconds);
  chart(byId("speed"), "steps per second", [{ label: "mean", points: data.history.steps_per_s, kind: "only" }], digits, seconds);
  byId("workers-section").hidden = !data.workers.length;
  byId("servers-section").hidden = !data.servers.length;
  workers(data);
  servers(data);
  document.body.dataset.ready = "yes";
}

async function look() {
  try {
    const answer = await fetch(`data.json?token=${encodeURIComponent(token)}`, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag") || "";
      newest = await answer.json();
      show(newest);
    } else if (answer.status !== 304) {
      throw new Error(`status ${answer.status}`);
    }
    failures = 0;
    byId("state").classList.remove("stale");
  } catch (error) {
    failures += 1;
    if (failures > 2) {
      byId("state").textContent = "The job has ended, or its scheduler cannot be reached; this is what it said last.";
      byId("state").classList.add("stale");
    }
  }
  setTimeout(look, document.hidden ? 5000 : 1000);
}

look();
