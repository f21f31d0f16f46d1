// One neighbourhood, before and after, for every model: same places, same colours, linked zoom.
const SHADES = 9;
const WHOLE = 1.42;
let networkRange = WHOLE;
let networkCentre = [0, 0];

function networkScale(network) {
  const all = network.models.flatMap((m) => [...m.before, ...m.after]).filter((w) => w !== null).sort((a, b) => a - b);
  return all.length ? Math.max(1, all[Math.floor(0.98 * (all.length - 1))]) : 1;
}

// Lines come in a few shades, each one trace: a trace per edge would be slow.
function edgeTraces(edges, x, y, weights, fresh, scale) {
  const groups = new Map();
  edges.forEach(([a, b], at) => {
    if (weights[at] === null || weights[at] === undefined) return;
    const shade = Math.min(SHADES - 1, Math.floor((SHADES * weights[at]) / scale));
    const key = `${shade} ${fresh(at)}`;
    if (!groups.has(key)) groups.set(key, { shade, fake: fresh(at), x: [], y: [] });
    const group = groups.get(key);
    group.x.push(x[a], x[b], null);
    group.y.push(y[a], y[b], null);
  });
  return [...groups.values()].sort((a, b) => a.shade - b.shade).map((group) => ({
    x: group.x, y: group.y, mode: "lines", hoverinfo: "skip",
    line: { width: 0.7 + (4.3 * group.shade) / (SHADES - 1), dash: group.fake ? "3px,2px" : "solid",
      color: group.fake ? css("--new") : attentionColour(group.shade / (SHADES - 1)) },
    opacity: group.fake ? 0.35 + (0.6 * group.shade) / (SHADES - 1) : 1,
  }));
}

function middles(edges, x, y, weights, describe) {
  const shown = edges.map((edge, at) => [edge, at]).filter(([, at]) => weights[at] !== null && weights[at] !== undefined);
  return {
    x: shown.map(([[a, b]]) => (x[a] + x[b]) / 2), y: shown.map(([[a, b]]) => (y[a] + y[b]) / 2), mode: "markers",
    marker: { size: 11, opacity: 0, color: css("--ink") }, text: shown.map(([edge, at]) => describe(edge, at)),
    hovertemplate: "%{text}<extra></extra>",
  };
}

function networkPanel(network, index, after) {
  const model = network.models[index];
  const weights = after ? model.after : model.before;
  const wrong = after ? model.wrong_after : model.wrong;
  const original = wrong.length;
  const scale = networkScale(network);
  const narrow = window.innerWidth < 560;
  const unit = dig(doc, "explorer.unit") || 1e-6;
  const { x, y, nodes, edges } = network;
  const fresh = (at) => after && model.before[at] === null;
  const members = nodes.map((id, at) => ({ id, at })).filter(({ at }) => after || at < original);
  const old = members.filter(({ at }) => at < original);
  const fakes = members.filter(({ at }) => at >= original);
  const describe = ([a, b], at) => `${safe(nameOf(nodes[a]))} – ${safe(nameOf(nodes[b]))}: attention ${safe(attention(weights[at] * unit))}`;
  const data = [
    ...edgeTraces(edges, x, y, weights, fresh, scale),
    middles(edges, x, y, weights, describe),
    {
      x: old.map((m) => x[m.at]), y: old.map((m) => y[m.at]), mode: "markers", customdata: old.map((m) => m.id),
      text: old.map((m) => `${safe(nameOf(m.id))}${wrong[m.at] ? ", predicted wrong" : ""}`), hovertemplate: "%{text}<extra></extra>",
      marker: {
        size: old.map((m) => (m.id === chosen ? 15 : 10) * (narrow ? 0.7 : 1)), opacity: 1,
        color: old.map((m) => (m.id === chosen ? css("--ink") : wrong[m.at] ? css("--wrong") : css("--card"))),
        line: { width: 1.5, color: old.map((m) => (wrong[m.at] ? css("--wrong") : css("--ink"))) },
      },
    },
    {
      x: fakes.map((m) => x[m.at]), y: fakes.map((m) => y[m.at]), mode: "markers", text: fakes.map((m) => safe(nameOf(m.id))),
      hovertemplate: "%{text}<extra></extra>", marker: { size: narrow ? 8 : 11, symbol: "diamond", color: css("--card"), line: { width: 2, color: css("--new") } },
    },
  ];
  const [cx, cy] = networkCentre;
  const axis = { visible: false, range: [cx - networkRange, cx + networkRange], fixedrange: coarse };
  return {
    data,
    layout: layout({
      height: narrow ? 200 : 330, margin: { l: 2, r: 2, t: 2, b: 2 }, hovermode: "closest",
      dragmode: coarse ? false : "pan", xaxis: { ...axis }, yaxis: { ...axis, range: [cy - networkRange, cy + networkRange] },
    }),
  };
}

function drawNetwork(place) {
  const network = doc.subgraph;
  if (!network || !network.models || !network.models.length) return false;
  const shown = (dig(doc, "explorer.models") || []).map((m) => m.name);
  network.models.forEach((model, index) => {
    const name = shown[index] ?? names[index];
    const pair = el("div", { class: "pairs" }, el("h3", {}, el("i", { class: `swatch m${names.indexOf(name) % 7}` }), name));
    place.append(pair);
    for (const after of [false, true]) {
      const id = `network-${index}-${after ? "after" : "before"}`;
      const wrong = (after ? model.wrong_after : model.wrong).reduce((sum, value) => sum + value, 0);
      const words = `${after ? "after" : "before"}: ${wrong} of ${model.wrong.length} wrong`;
      const holder = el("div", { class: "network-panel" });
      pair.append(holder);
      figure(holder, id, words, "", `${name}, attention on ${model.wrong.length} nodes ${words}`);
      draw(id, () => networkPanel(network, index, after), listen);
    }
  });
  byId("network-controls").hidden = false;
  byId("zoom-in").addEventListener("click", () => zoom(0.7));
  byId("zoom-out").addEventListener("click", () => zoom(1 / 0.7));
  byId("zoom-reset").addEventListener("click", () => { networkCentre = [0, 0]; zoom(0); });
  byId("network-legend").append(
    el("span", {}, "little", el("i", { class: "scale" }), "much attention"),
    el("span", {}, el("i", { class: "key" }), "predicted right"), el("span", {}, el("i", { class: "key wrong" }), "predicted wrong"),
    el("span", {}, el("i", { class: "key new" }), "fake node and its edges"), el("span", {}, el("i", { class: "key picked" }), "the node below"),
  );
  return true;
}

function listen(plot) {
  plot.on("plotly_click", (event) => {
    const id = event.points.map((point) => point.customdata).find((value) => value !== undefined);
    if (id !== undefined) pick(id, true);
  });
  plot.on("plotly_relayout", (change) => {
    const at = (axis) => [change[`${axis}.range[0]`], change[`${axis}.range[1]`]];
    const [x, y] = [at("xaxis"), at("yaxis")];
    if (x[0] === undefined || y[0] === undefined) return;
    networkCentre = [(x[0] + x[1]) / 2, (y[0] + y[1]) / 2];
    redrawNetwork();
  });
}

function zoom(factor) {
  networkRange = factor ? Math.min(3, Math.max(0.2, networkRange * factor)) : WHOLE;
  redrawNetwork();
}
const redrawNetwork = () => [...drawings.keys()].filter((id) => id.startsWith("network-")).forEach(redraw);
