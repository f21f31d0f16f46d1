// One node: facts, its surroundings before and after, the ranked explanation, attention values.
const STAR = 12;

// Ranks are taken among the original neighbours; fake ones are listed in place, without a rank.
function ranks(model, at) {
  const ids = explorer.nodes.neighbours[at];
  const [before, after] = [model.before[at], model.after[at]];
  const known = (n) => before[n] !== null;
  const order = (weights) => ids.map((_, n) => n).filter((n) => weights[n] !== null).sort((a, b) => weights[b] - weights[a] || ids[a] - ids[b]);
  const first = order(before).slice(0, explorer.k);
  const second = [];
  let ranked = 0;
  for (const n of order(after)) {
    if (ranked >= explorer.k) break;
    if (known(n)) ranked += 1;
    second.push(n);
  }
  const kept = new Set(first.filter((n) => second.includes(n)));
  return { before: first, after: second, kept, known };
}

function showNode(id) {
  together(() => buildNode(id));
}

function buildNode(id) {
  const at = position.get(id);
  const place = byId("node");
  for (const name of [...drawings.keys()].filter((key) => key.startsWith("star-") || key.startsWith("values-"))) drawings.delete(name);
  const facts = [];
  if (nameBy.has(id)) facts.push(`node ${id}`);
  if (labelOf.has(id)) facts.push(labelOf.get(id) >= 0 ? `truth: ${className(labelOf.get(id))}` : "truth unknown");
  if (explorer.nodes.degree) facts.push(`${explorer.nodes.degree[at]} neighbours`);
  facts.push(attackOn(at));
  const sides = el("div", { class: "sides" });
  place.replaceChildren(el("div", { class: "who" }, el("h3", { id: "node-title" }, nameOf(id)), ...facts.map((fact) => el("span", {}, fact)),
    doc.whatif ? el("a", { class: "noprint", href: `#whatif=${encodeURIComponent(JSON.stringify({ node: id }))}` }, "What if its neighbours changed?") : null), sides);
  explorer.models.forEach((model, index) => sides.append(side(model, index, at, id)));
  if (!explorer.nodes.neighbours) place.append(el("p", { class: "empty" }, "The record carries no attention of single nodes; give the models to see neighbours."));
  explorer.models.forEach((model, index) => { if (model.before) { drawStars(model, index, at, id); drawValues(model, index, at, id); } });
}

// Fake nodes that the attack on a model joins to a node; attacks on different models may choose different places.
function fakesAt(model, at) {
  if (!model.after) return 0;
  return explorer.nodes.neighbours[at].filter((id, n) => id >= explorer.total && model.after[at][n] !== null).length;
}

function attackOn(at) {
  const nodes = explorer.nodes;
  const fakes = nodes.neighbours ? explorer.models.map((model) => fakesAt(model, at)) : [0];
  const counted = (count) => `${count || "no"} fake node${count === 1 ? "" : "s"}`;
  if (fakes.every((count) => count === fakes[0])) {
    if (fakes[0]) return `the attack joins ${counted(fakes[0])} to it`;
  } else return `the attack joins ${explorer.models.map((model, n) => `${counted(fakes[n])} to it in ${model.name}`).join(", ")}`;
  const model = explorer.models[0];
  const joined = model.before ? nodes.neighbours[at].filter((_, n) => model.before[at][n] === null && model.after[at][n] !== null).length : 0;
  if (joined) return `the attack joins ${joined} other node${joined > 1 ? "s" : ""} to it`;
  if (explorer.models.some((model) => model.changed?.[at])) return "the attack changes its features";
  const reach = explorer.models[0].reach?.[at];
  if (reach === undefined) return "not attacked directly";
  return reach ? "not attacked directly, but close enough to be moved" : "out of reach of the attack";
}

function side(model, index, at) {
  const rows = [];
  const row = (term, ...words) => rows.push(el("div", {}, el("dt", {}, term), el("dd", {}, ...words)));
  if (model.predicted) {
    const said = (suffix) => `${className(model[`predicted${suffix}`][at])}${model[`confidence${suffix}`] ? ` (${Math.round(model[`confidence${suffix}`][at] / 10)} %)` : ""}`;
    const flip = changed(model, at);
    const truth = explorer.nodes.label ? explorer.nodes.label[at] : -1;
    const judged = (suffix) => (truth < 0 ? "" : model[`predicted${suffix}`][at] === truth ? " ✓" : " ✗");
    row("Prediction", `${said("")}${judged("")} → `, el("span", { class: flip ? "flag" : "good" }, `${said("_after")}${judged("_after")}`));
  }
  if (model.before) {
    const { before, kept, known } = ranks(model, at);
    const lost = before.length - kept.size;
    row(`Top ${explorer.k}`, before.length ? el("span", { class: lost ? "flag" : "good" }, `${kept.size} of ${before.length} stay`) : "it attends to nobody", before.length ? byChance(model, at, before.length) : null);
    const taken = explorer.nodes.neighbours[at].reduce((sum, _, n) => sum + (known(n) ? 0 : model.after[at][n] || 0), 0) * explorer.unit;
    if (taken > 0) row("New neighbours", `take ${percent(taken)} of its attention`);
  } else if (model.kept && model.kept[at] !== null) row(`Top ${explorer.k}`, `${model.kept[at]} % stay`);
  if (!oneAttack && model.kept_explanation && model.kept_explanation[at] !== null) row("… if aimed at", `${model.kept_explanation[at]} % stay when the attack aims at the explanation (mean over layers)`);
  const proofs = model.radii || [];
  proofs.forEach((layer, n) => row(proofs.length > 1 ? `Proved, layer ${n + 1}` : "Proved", proved(model, layer, at)));
  if (model.injections?.length) row("Injected nodes", againstInjected(model.injections, at));
  if (at === 0) (model.changes || []).forEach((found) => row("Smallest change", found));
  const box = el("div", { class: "side" }, el("h4", {}, el("i", { class: `swatch m${names.indexOf(model.name) % 7}` }), model.name), el("dl", {}, ...rows));
  if (model.before) {
    const stars = el("div", { class: "stars" });
    figure(stars, `star-${index}-before`, "before", "", `Attention of the node in ${model.name} before the attack`);
    figure(stars, `star-${index}-after`, "after", "", `Attention of the node in ${model.name} after the attack`);
    box.append(stars, rankList(model, at));
    const values = el("div", {});
    figure(values, `values-${index}`, "Attention values: before ○, after ●", "", `Attention values of the node in ${model.name}`);
    box.append(values);
  }
  return box;
}

// What a random order would keep; without other neighbours, all of them.
function byChance(model, at, shown) {
  const neighbours = model.before[at].filter((weight) => weight !== null).length + explorer.nodes.rest[at];
  return neighbours > shown ? ` (chance: ${((shown * shown) / neighbours).toFixed(1)})` : " (it has no others)";
}

function proved(model, layer, at) {
  const value = (list) => (list ? list[at] : null);
  const radius = (found) => (found < 0.0001 ? "below 0.0001" : found.toPrecision(2));
  const top = value(layer.topk);
  const kind = value(layer.class);
  const k = dig(doc.certificates || {}, `${model.name}.k2`) ?? explorer.k;
  const words = [];
  if (top === -1) words.push(`top ${k}: no other neighbour can enter`);
  else if (top !== null && top !== undefined) words.push(`its own top ${k} stays while its explanation vector moves by less than ${radius(top)}`);
  if (kind === -1) words.push("class: does not depend on attention");
  else if (kind !== null && kind !== undefined) words.push(`class while each head moves by less than ${radius(kind)}${layer.class_status === "bound" ? " (a bound)" : ""}`);
  return words.join("; ") || "nothing known";
}

// What no injected node can do to it, whatever its features: order of the old neighbours, and class.
function againstInjected(threats, at) {
  const words = [];
  const [near] = threats;
  near.layers.forEach((layer, n) => {
    const name = near.layers.length > 1 ? ` of layer ${n + 1}` : "";
    const only = layer.reason?.startsWith("if ") ? `, ${layer.reason}` : "";
    if (layer.status === "invariant") words.push(`none of them can reorder the others${name}${only}`);
    else if (layer.certified?.[at]) words.push(`top ${near.k}${name} holds against ${near.neighbours}`);
  });
  const held = threats.filter((threat) => threat.class?.[at]);
  const who = { direct: "its own", any: "every node's" };
  if (held.length) words.push(`class holds against ${held[0].neighbours} (${held.map((threat) => who[threat.where]).join(" and ")})`);
  else words.push(near.class ? "class not proved" : "class: nothing known without limits");
  return words.join("; ");
}

function rankList(model, at) {
  const { before, after, kept, known } = ranks(model, at);
  const ids = explorer.nodes.neighbours[at];
  const truth = explorer.nodes.truth?.[at];
  const item = (n, weights) => {
    const id = ids[n];
    const kind = !known(n) ? "fake" : kept.has(n) ? "kept" : "lost";
    const told = { fake: id >= explorer.total ? "fake node" : "joined by the attack", kept: "in both lists", lost: "in one list only" }[kind];
    const text = (id === explorer.nodes.id[at] ? "itself" : shortName(id)) + (truth?.[n] ? " ★" : "");
    const label = position.has(id) && id !== explorer.nodes.id[at]
      ? el("button", { type: "button", title: `Show ${nameOf(id)} (${told})`, on: { click: () => pick(id, true) } }, text)
      : el("span", { title: told }, text);
    return el("li", { class: kind }, label, el("span", {}, attention(weights[n] * explorer.unit)));
  };
  const rows = Math.max(before.length, after.length);
  const lines = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  lines.setAttribute("viewBox", `0 0 34 ${30 * rows}`);
  lines.setAttribute("height", String(30 * rows));
  lines.setAttribute("aria-hidden", "true");
  kept.forEach((n) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const [y0, y1] = [15 + 30 * before.indexOf(n), 15 + 30 * after.indexOf(n)];
    path.setAttribute("d", `M0 ${y0} C17 ${y0} 17 ${y1} 34 ${y1}`);
    lines.append(path);
  });
  const list = el("div", { class: "ranks" },
    el("span", { class: "head" }, `top ${explorer.k} before`), el("span", {}), el("span", { class: "head" }, `top ${explorer.k} after${after.some((n) => !known(n)) ? ", and new ones" : ""}`),
    el("ol", { "aria-label": "before the attack" }, ...before.map((n) => item(n, model.before[at]))), lines,
    el("ol", { "aria-label": "after the attack" }, ...after.map((n) => item(n, model.after[at]))));
  if (truth) list.append(el("span", { class: "head", style: "grid-column: 1 / -1" }, "★ truly informative"));
  return list;
}

// The strongest neighbours in any view; the same ones, in the same places, for all models.
function starMembers(at, id) {
  const ids = explorer.nodes.neighbours[at];
  const most = (n) => Math.max(...explorer.models.flatMap((m) => (m.before ? [m.before[at][n] || 0, m.after[at][n] || 0] : [0])));
  const strongest = ids.map((_, n) => n).filter((n) => ids[n] !== id).sort((a, b) => most(b) - most(a)).slice(0, STAR);
  const scale = Math.max(1, ...ids.map((_, n) => most(n)));
  return { members: strongest.sort((a, b) => (ids[a] >= explorer.total) - (ids[b] >= explorer.total) || a - b), scale, own: ids.indexOf(id) };
}

function drawStars(model, index, at, id) {
  const { members, scale, own } = starMembers(at, id);
  const ids = explorer.nodes.neighbours[at];
  for (const after of [false, true]) {
    draw(`star-${index}-${after ? "after" : "before"}`, () => {
      const weights = (after ? model.after : model.before)[at];
      const spot = members.map((_, i) => Math.PI / 2 - (2 * Math.PI * i) / members.length);
      const [x, y] = [[0, ...spot.map(Math.cos)], [0, ...spot.map(Math.sin)]];
      const edges = members.map((_, i) => [0, i + 1]);
      const given = members.map((n) => weights[n]);
      const fresh = (i) => ids[members[i]] >= explorer.total || model.before[at][members[i]] === null;
      const shown = members.map((_, i) => i).filter((i) => given[i] !== null);
      const fake = shown.map((i) => ids[members[i]] >= explorer.total);
      const self = own >= 0 ? weights[own] : null;
      const narrow = window.innerWidth < 560;
      const words = (i) => `${safe(nameOf(ids[members[i]]))}: ${safe(attention(given[i] * explorer.unit))}`;
      return {
        data: [
          ...edgeTraces(edges, x, y, given, fresh, scale),
          {
            x: shown.map((i) => x[i + 1]), y: shown.map((i) => y[i + 1]), mode: narrow ? "markers" : "markers+text", customdata: shown.map((i) => ids[members[i]]),
            text: shown.map((i) => safe(clip(shortName(ids[members[i]]), 9))), hovertext: shown.map(words), hovertemplate: "%{hovertext}<extra></extra>",
            textposition: shown.map((i) => (Math.sin(spot[i]) >= -0.01 ? "top center" : "bottom center")), textfont: { size: 10, color: css("--soft") },
            marker: { size: 12, opacity: 1, symbol: fake.map((is) => (is ? "diamond" : "circle")), color: css("--card"), line: { width: fake.map((is) => (is ? 2 : 1.4)), color: fake.map((is) => css(is ? "--new" : "--ink")) } },
          },
          {
            x: [0], y: [0], mode: "markers", hovertext: [`${safe(nameOf(id))}${self === null ? "" : `, attention to itself: ${safe(attention(self * explorer.unit))}`}`], hovertemplate: "%{hovertext}<extra></extra>",
            marker: { size: 20, opacity: 1, color: self === null ? css("--card") : attentionColour(self / scale), line: { width: 2, color: css("--ink") } },
          },
        ],
        layout: layout({
          height: narrow ? 150 : 215, margin: { l: 2, r: 2, t: 2, b: 2 }, hovermode: "closest", dragmode: false,
          xaxis: { visible: false, range: [-1.4, 1.4], fixedrange: true }, yaxis: { visible: false, range: [-1.4, 1.4], fixedrange: true, scaleanchor: "x" },
        }),
      };
    }, (plot) => plot.on("plotly_click", (event) => {
      const hit = event.points.map((point) => point.customdata).find((value) => value !== undefined);
      if (hit !== undefined) pick(hit, true);
    }));
  }
}

function drawValues(model, index, at, id) {
  const { members, scale, own } = starMembers(at, id);
  const ids = explorer.nodes.neighbours[at];
  const chosenRows = own >= 0 ? [own, ...members] : members;
  const value = (list, n) => (list[at][n] === null ? null : list[at][n] * explorer.unit);
  const rows = [...chosenRows].sort((a, b) => (model.before[at][a] ?? -1) - (model.before[at][b] ?? -1));
  const label = (n) => safe(clip(ids[n] === id ? "itself" : shortName(ids[n]), 16));
  draw(`values-${index}`, () => {
    const joined = { x: [], y: [] };
    rows.forEach((n, row) => { if (value(model.before, n) !== null && value(model.after, n) !== null) { joined.x.push(value(model.before, n), value(model.after, n), null); joined.y.push(row, row, null); } });
    const dots = (list, open) => ({
      x: rows.map((n) => value(list, n)), y: rows.map((_, row) => row), mode: "markers", text: rows.map((n) => safe(nameOf(ids[n]))),
      marker: { size: 9, opacity: 1, symbol: rows.map((n) => (ids[n] >= explorer.total ? "diamond" : "circle") + (open ? "-open" : "")), line: { width: open ? 1.8 : 0 }, color: rows.map((n) => (ids[n] >= explorer.total ? css("--new") : modelColour(names.indexOf(model.name)))) },
      hovertemplate: `%{text}, ${open ? "before" : "after"}: %{x:.3f}<extra></extra>`,
    });
    return {
      data: [{ ...joined, mode: "lines", hoverinfo: "skip", line: { color: css("--soft"), width: 1.5 } }, dots(model.before, true), dots(model.after, false)],
      layout: layout({
        height: 60 + 21 * rows.length, margin: { l: 10, r: 12, t: 4, b: 34 }, dragmode: false,
        xaxis: { rangemode: "tozero", range: [-0.02 * scale * explorer.unit, 1.06 * scale * explorer.unit], fixedrange: true, nticks: 5 },
        yaxis: { tickvals: rows.map((_, row) => row), ticktext: rows.map(label), fixedrange: true, gridcolor: css("--faint") },
      }),
    };
  });
  const hidden = explorer.nodes.rest[at] + ids.length - chosenRows.length;
  if (hidden > 0) byId(`values-${index}`).parentElement.append(el("p", { class: "caption" }, `and ${hidden} weaker neighbour${hidden > 1 ? "s" : ""}`));
}
