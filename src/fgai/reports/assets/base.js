// Small helpers: the data, colours of the theme, one look for all plots.
const doc = JSON.parse(document.getElementById("data").textContent);
const records = doc.records || [];
const names = records.map((record) => String(record.name ?? "model"));
const coarse = window.matchMedia("(pointer: coarse)").matches;
const byId = (id) => document.getElementById(id);
const oneAttack = "oneAttack" in byId("distribution-plots").dataset; // it aims at nothing in particular

// Plotly reads a little markup in its texts; this makes it show them as they are.
const safe = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const clip = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`);
const percent = (share, digits = 0) => (share == null ? "–" : `${(100 * share).toFixed(digits)}\u00a0%`);
const attention = (value) => (value < 0.0005 ? "<0.001" : value.toFixed(3));
const signed = (value, digits = 2) => (typeof value === "number" ? value.toFixed(digits).replace("-", "−") : "–");
const dig = (value, path) => path.split(".").reduce((found, part) => (found == null ? undefined : found[part]), value);

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const modelColour = (index) => css(`--m${index % 7}`);
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const MARKERS = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x"];

function mix(first, second, share) {
  const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const [a, b] = [parts(first), parts(second)];
  return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * share)).join(",")})`;
}

// Attention from little to much; the same three stops as the legend.
function attentionColour(share) {
  const at = Math.min(1, Math.max(0, share));
  return at < 0.5 ? mix(css("--att0"), css("--att1"), 2 * at) : mix(css("--att1"), css("--att2"), 2 * at - 1);
}

function layout(extra) {
  const axis = {
    gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), tickcolor: css("--line"),
    zeroline: false, automargin: true, fixedrange: coarse, title: { standoff: 8 },
  };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, autosize: false, height: 280,
    margin: { l: 44, r: 14, t: 8, b: 40 }, dragmode: coarse ? false : "zoom",
    font: { family: css("--sans"), size: 12, color: css("--ink") },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), size: 12 } },
  };
  const out = { ...base, ...extra };
  for (const name of Object.keys(extra || {}).filter((key) => /^[xy]axis/.test(key))) out[name] = { ...axis, ...extra[name] };
  return out;
}

// Every drawing can be drawn again: for another theme, another size, or paper. While a part is being built its
// drawings wait, because only then it is known how wide they are.
const drawings = new Map();
let waiting = null;
function draw(id, make, started) {
  drawings.set(id, make);
  const start = () => { redraw(id); if (started) started(byId(id)); };
  if (waiting) waiting.push(start);
  else start();
}
function together(build) {
  const outer = waiting;
  waiting = outer || [];
  const result = build();
  if (!outer) {
    const starts = waiting;
    waiting = null;
    starts.forEach((start) => start());
  }
  return result;
}
function redraw(id) {
  const place = byId(id);
  if (!place) { drawings.delete(id); return; }
  const { data, layout: shape } = drawings.get(id)();
  shape.width = Math.max(100, place.clientWidth);
  Plotly.react(place, data, shape, { displayModeBar: false, doubleClick: "reset", scrollZoom: false });
}
const redrawAll = () => [...drawings.keys()].forEach(redraw);

function figure(parent, id, title, note, label) {
  const caption = el("figcaption", {}, title, note ? el("small", {}, note) : null);
  const plot = el("div", { class: "plot", id, role: "img", "aria-label": label || title });
  parent.append(el("figure", {}, title ? caption : null, plot));
  return plot;
}

function modelLegend(parent, ...more) {
  const keys = names.map((name, i) => el("span", {}, el("i", { class: `swatch m${i % 7}` }), name));
  parent.after(el("div", { class: "legend" }, ...keys, ...more));
}
const lineKey = (text, kind) => el("span", {}, el("i", { class: `key line ${kind}` }), text);

// A part that cannot be drawn says so; the others go on.
function part(id, build) {
  const place = byId(id);
  try {
    if (together(() => build(place)) === false) empty(place);
  } catch (error) {
    waiting = null;
    place.replaceChildren(el("p", { class: "empty" }, `This part could not be drawn (${error.message}).`));
  }
}
const empty = (place) => place.replaceChildren(el("p", { class: "empty" }, "Not in this record; see “What this page cannot show”."));
