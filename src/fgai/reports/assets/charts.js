// Curves over all nodes: distribution of overlaps, removal of edges, certificates, losses.
function drawDistribution(place) {
  const attacks = (dig(doc, "distribution.attacks") || []).slice(oneAttack ? -1 : 0);
  if (!attacks.length) return false;
  const titles = {
    explanation: ["The attack aims at the explanation", "its worst case"],
    prediction: ["The attack aims at the prediction", "explanations suffer on the way"],
  };
  const { k } = doc.distribution;
  const most = Math.max(...attacks.flatMap((attack) => attack.models.flatMap((m) => m.shares)));
  attacks.forEach((attack) => {
    const id = `distribution-${attack.key}`;
    const [title, note] = oneAttack ? ["Under attack", ""] : titles[attack.key] || [attack.key, ""];
    const chance = attack.models.map((m) => m.chance).find((value) => typeof value === "number");
    const means = attack.models.map((m) => `${m.name} ${(k * m.mean).toFixed(1)} of ${k}`).join(", ");
    const stay = `on average ${means} stay${chance === undefined ? "" : `, by chance ${(k * chance).toFixed(1)}`}`;
    figure(place, id, title, note ? `${note}; ${stay}` : stay, `${title}: ${stay}`);
    draw(id, () => ({
      data: attack.models.map((m) => ({
        type: "bar", name: safe(m.name), x: m.shares.map((_, count) => count), y: m.shares, marker: { color: modelColour(names.indexOf(m.name)) },
        hovertemplate: `${safe(m.name)}: %{y:.1%} of the nodes keep %{x} of ${k}<extra></extra>`,
      })),
      layout: layout({
        barmode: "group", bargap: 0.25, bargroupgap: 0.05,
        xaxis: { title: { text: `of a node’s ${k} strongest neighbours stay` }, dtick: Math.ceil(k / 10), range: [-0.6, k + 0.6], fixedrange: true },
        yaxis: { title: { text: "share of nodes" }, tickformat: ".0%", range: [0, 1.05 * most], fixedrange: true },
        ...chanceLine(chance, k),
      }),
    }));
  });
  modelLegend(place, lineKey("mean by chance", "dotted"));
  return true;
}

function chanceLine(known, k) {
  if (known === undefined) return {};
  const line = { color: css("--soft"), width: 1.5, dash: "dot" };
  return { shapes: [{ type: "line", x0: k * known, x1: k * known, y0: 0, y1: 1, yref: "paper", line }] };
}

function drawCurves(place) {
  const held = records.map((record, index) => ({ index, found: dig(record, "metrics.f_slope.node") })).filter((r) => r.found);
  if (!held.length) return false;
  const reference = records.find((record) => record.name === doc.reference) || records[0];
  const lowest = Math.min(...held.flatMap((r) => ["clean", "attacked"].flatMap((view) => [...(dig(r.found, `${view}.curve_plus`) || []), ...(dig(r.found, `${view}.curve_minus`) || [])])));
  for (const [view, title] of [["clean", "Clean graph"], ["attacked", "Attacked graph"]]) {
    const shown = held.filter((r) => dig(r.found, `${view}.curve_plus`));
    if (!shown.length) continue;
    const gaps = shown.map((r) => `${names[r.index]} ${signed(r.found[view].gap)}`).join(", ");
    figure(place, `curve-${view}`, title, `gap of the slopes: ${gaps}`, `${title}: gap of the slopes: ${gaps}`);
    draw(`curve-${view}`, () => {
      const x = shown[0].found[view].curve_plus.map((_, i) => 10 * i);
      const data = [];
      const random = dig(reference, `metrics.null.random.f_slope.node.${view}.curve_plus`);
      if (random) {
        data.push({ x, y: random, mode: "lines", line: { color: css("--soft"), width: 1.5, dash: "dot" }, hovertemplate: "random order: %{y:.1%}<extra></extra>" });
      }
      shown.forEach(({ index, found }) => {
        for (const [curve, dash, words] of [["curve_plus", "solid", "strongest first"], ["curve_minus", "dash", "weakest first"]]) {
          data.push({
            x, y: found[view][curve], mode: "lines+markers", line: { color: modelColour(index), width: 2, dash },
            marker: { symbol: MARKERS[index % 7] + (dash === "dash" ? "-open" : ""), size: 8 },
            hovertemplate: `${safe(names[index])}, ${words}: %{y:.1%} right, %{x} % removed<extra></extra>`,
          });
        }
      });
      return { data, layout: layout({
        xaxis: { title: { text: "edges removed" }, ticksuffix: " %", dtick: 10 },
        yaxis: { title: { text: "still right" }, tickformat: ".0%", range: [Math.max(0, lowest) - 0.04, 1.03] },
      }) };
    });
  }
  modelLegend(place, lineKey("strongest first", ""), lineKey("weakest first", "dashed"), lineKey("random order", "dotted"));
  return true;
}

function drawCertified(place) {
  const proofs = names.map((name, index) => ({ name, index, proof: (doc.certificates || {})[name] })).filter((p) => dig(p, "proof.layers.length"));
  if (!proofs.length) return false;
  const first = proofs[0].proof;
  const panels = [["topk", `The top ${first.k2 ?? "k"} cannot change`], ["class", "The predicted class cannot change"]];
  for (const [kind, title] of panels) {
    const last = ({ proof }) => proof.layers[proof.layers.length - 1];
    const known = proofs.filter((p) => (last(p)[kind] || []).some((share) => share !== null));
    const id = `certified-${kind}`;
    if (!known.length) {
      place.append(el("figure", {}, el("figcaption", {}, title), el("p", { class: "empty" }, `Unknown: ${last(proofs[0]).reason || "no certificate fits this model"}`)));
      continue;
    }
    figure(place, id, title, `share of the ${last(known[0]).counted ?? ""} nodes with more than ${first.k2 ?? "k"} neighbours`);
    draw(id, () => ({
      data: known.map((p) => ({
        x: p.proof.radii, y: last(p)[kind], mode: "lines+markers", name: safe(p.name),
        line: { color: modelColour(p.index), width: 2, dash: DASHES[p.index % 6] }, marker: { symbol: MARKERS[p.index % 7], size: 6 },
        hovertemplate: `${safe(p.name)}: %{y:.1%} certain up to %{x:.4f}<extra></extra>`,
      })),
      layout: layout({
        xaxis: { type: "log", title: { text: `radius (${safe(first.norm ?? "")}, log scale)` }, tickvals: [0.001, 0.003, 0.01, 0.03, 0.1] },
        yaxis: { range: [-0.03, 1.03], tickformat: ".0%" },
      }),
    }));
  }
  modelLegend(place);
  return true;
}

// The mean around each epoch: adversaries that take turns would make a line that jumps into a solid band.
function smoothed(values, reach) {
  const sums = [0];
  values.forEach((value, at) => sums.push(sums[at] + value));
  return values.map((_, at) => {
    const [from, to] = [Math.max(0, at - reach), Math.min(values.length, at + reach + 1)];
    return (sums[to] - sums[from]) / (to - from);
  });
}

function drawLosses(place) {
  const held = names.filter((name) => dig(doc.histories || {}, name)?.terms);
  if (!held.length) return false;
  held.forEach((name, at) => {
    const history = doc.histories[name];
    const all = Object.keys(history.terms).filter((term) => history.terms[term].some((value) => value > 0));
    const terms = all.filter((term) => term !== "total");
    const lines = terms.length > 1 ? ["total", ...terms] : terms;
    const kept = Number(history.best_epoch) + 1;
    const colour = (term, i) => (term === "total" ? css("--ink") : lines.length > 1 ? modelColour([2, 3, 4, 5, 1][(i - 1) % 5]) : modelColour(names.indexOf(name)));
    const reach = lines.length > 1 ? Math.round(history.terms[lines[0]].length / 40) : 0;
    const drawn = reach ? `, lines are means over ${(2 * reach + 1) * (history.step || 1)} epochs` : "";
    figure(place, `loss-${at}`, name, `${history.epochs} epochs; the weights of epoch ${kept} were kept${drawn}`);
    draw(`loss-${at}`, () => ({
      data: lines.filter((term) => history.terms[term]).map((term, i) => ({
        x: history.terms[term].map((_, epoch) => 1 + epoch * (history.step || 1)), y: smoothed(history.terms[term], reach), mode: "lines", name: safe(term.replace(/_/g, " ")),
        line: { width: term === "total" ? 2.4 : 1.6, dash: DASHES[i % 6], color: colour(term, i) },
        hovertemplate: `${safe(term.replace(/_/g, " "))}: %{y:.3g} in epoch %{x}<extra></extra>`,
      })),
      layout: layout({
        height: lines.length > 1 ? 350 : 280, showlegend: lines.length > 1, legend: { orientation: "h", y: -0.3, yanchor: "top", font: { size: 11 } },
        margin: { l: 52, r: 14, t: 8, b: 40 },
        xaxis: { title: { text: "epoch" } }, yaxis: { type: lines.length > 1 ? "log" : "linear", tickformat: "~g", dtick: lines.length > 1 ? 1 : undefined, rangemode: "tozero" },
        shapes: [{ type: "line", x0: kept, x1: kept, y0: 0, y1: 1, yref: "paper", line: { color: css("--soft"), width: 1, dash: "dot" } }],
      }),
    }));
  });
  return true;
}
