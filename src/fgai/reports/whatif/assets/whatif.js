// The controls and tables of the page. `mount` shows them; `default.render` is for notebooks (anywidget).
const SHOWN = 14; // neighbours in the table
const CLASSES = 5;
const UNDO = 100;

const percent = (share) => (share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`);
const injectedWords = (count) => `${count} injected neighbour${count === 1 ? "" : "s"}`;
const signed = (value) => value.toFixed(2).replace("-", "−");
const pairOf = (one, two) => [Math.min(one, two), Math.max(one, two)];
const same = (one) => (two) => pairOf(...one).join() === pairOf(...two).join();
const empty = (node) => ({ node, removed_edges: [], added_edges: [], injected: [] });

// Computes in this browser; what Python says about a change it also says.
function local(facts) {
  const graph = new Graph(facts.graph);
  const models = facts.models.map((model) => new Model(model.layers));
  const clean = new Changed(graph, {});
  const known = (node) => {
    if (!Number.isInteger(node) || node < 0 || node >= graph.nodes) throw new Error(`There is no node ${node}; the nodes are 0 to ${graph.nodes - 1}.`);
  };
  const check = (change) => {
    known(change.node);
    const pairs = [...change.removed_edges, ...change.added_edges];
    pairs.flat().forEach(known);
    change.injected.forEach((one) => {
      [...one.edges, ...("copy" in one ? [one.copy] : [])].forEach(known);
      if (!Number.isFinite(one.strength)) throw new Error("The strength of an injected node must be a number.");
      if ("typical" in one && !facts.typical.includes(one.typical)) throw new Error(`No class ${one.typical} among the training nodes.`);
    });
    if (pairs.some((pair, at) => pair.length !== 2 || pair[0] === pair[1] || pairs.findIndex(same(pair)) < at)) throw new Error("An edge must join two nodes, and change once.");
    if (change.removed_edges.some((pair) => !graph.joined(...pair))) throw new Error("This edge is not there.");
    if (change.added_edges.some((pair) => graph.joined(...pair))) throw new Error("This edge is there already.");
  };
  return {
    joined: (one, two) => graph.joined(one, two),
    view: async (change) => {
      check(change);
      const after = new Changed(graph, change);
      return models.map((model) => ({ before: model.at(change.node, clean), after: model.at(change.node, after) }));
    },
  };
}

// One row per neighbour: its share in every model, before and after.
function attentionRows(views, layer) {
  const weights = views.map(({ before, after }) => [before, after].map((view) => {
    const layers = layer < 0 ? view.layers : [view.layers[layer]];
    const out = new Map();
    layers.forEach(({ neighbours, explanation }) => neighbours.forEach((id, j) => out.set(id, (out.get(id) || 0) + explanation[j] / layers.length)));
    return out;
  }));
  const ids = new Set(weights.flatMap((pair) => pair.flatMap((map) => [...map.keys()])));
  const rows = [...ids].map((id) => ({ id, cells: weights.map(([before, after]) => ({ before: before.get(id), after: after.get(id) })) }));
  const most = (row) => Math.max(...row.cells.map((cell) => Math.max(cell.before || 0, cell.after || 0)));
  return rows.sort((one, two) => most(two) - most(one) || one.id - two.id);
}

// The top k of the old neighbours before, how many of them are in it after, and how many new ones rank in the top k of all.
function kept(rows, model, k) {
  const old = rows.filter((row) => row.cells[model].before !== undefined);
  const top = (from, when) => new Set(from.filter((row) => row.cells[model][when] !== undefined)
    .sort((one, two) => two.cells[model][when] - one.cells[model][when] || one.id - two.id).slice(0, k).map((row) => row.id));
  const [before, after] = [top(old, "before"), top(old, "after")];
  const ids = new Set(old.map((row) => row.id));
  const intruders = [...top(rows, "after")].filter((id) => !ids.has(id)).length;
  return { stay: [...before].filter((id) => after.has(id)).length, all: before.size, intruders };
}

// Probabilities, the class, and the margin of `label`: its logit less the largest other one.
function outcome({ logits }, label) {
  const order = logits.map((_, c) => c).sort((one, two) => logits[two] - logits[one]);
  const [first, second] = order;
  const own = label ?? first;
  return { shares: softmax(logits), order, first, margin: logits[own] - logits[own === first ? second : first] };
}

// `ask` puts questions to Python; `linked` pages keep the change in their address.
export function mount(place, facts, ask = null, linked = true) {
  const source = facts.graph ? local(facts) : { joined: null, view: (change) => ask("view", change) };
  const nameOf = (id) => (id >= facts.nodes ? `injected ${id - facts.nodes + 1}` : facts.names?.[id] ?? `node ${id}`);
  const className = (label) => facts.classes?.[label] ?? `class ${label}`;
  const numberOf = (text) => {
    const word = text.trim().toLowerCase();
    const named = facts.names ? facts.names.findIndex((name) => name.toLowerCase() === word) : -1;
    const number = named >= 0 ? named : /^(node )?\d+$/.test(word) ? Number(word.replace("node ", "")) : NaN;
    if (!(number < facts.nodes)) throw new Error(facts.names ? `There is no node called “${text}”.` : `There is no node ${text || "without a number"}; the nodes are 0 to ${facts.nodes - 1}.`);
    return number;
  };
  let state = empty(facts.start);
  let layer = -1;
  let asked = 0;
  let sliding = false;
  const past = [];
  const enough = facts.models.map(() => new Map()); // per model: the fewest injected neighbours seen to change a node's class

  const status = el("p", { class: "status", role: "status", "aria-live": "polite" });
  const result = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Attention and class before and after" });
  const list = el("ul", { class: "changes", "aria-label": "Changes" });
  const say = (text) => { status.textContent = text; };
  const attempt = (act) => async () => { try { await act(); } catch (error) { say(error.message); } };
  const button = (text, act, more) => el("button", { type: "button", ...more, on: { click: attempt(act) } }, text);
  const field = (label, more, act) => el("input", { type: "text", size: 9, "aria-label": label, autocomplete: "off", spellcheck: "false", ...more,
    on: act ? { keydown: (event) => { if (event.key === "Enter") { event.preventDefault(); attempt(act)(); } } } : {} });

  async function show() {
    const turn = (asked += 1);
    const views = await source.view(state);
    if (turn !== asked) return;
    draw(views);
    place.dataset.shown = String(turn);
  }

  // What cannot be shown is taken back; an edit can be undone.
  async function turnTo(next, undoable) {
    const before = structuredClone(state);
    const listed = list.contains(place.getRootNode().activeElement);
    state = next;
    sliding = false;
    try { await show(); } catch (error) { state = before; drawChanges(); throw error; }
    if (undoable) past.push(before);
    past.splice(0, past.length - UNDO);
    say("");
    drawChanges();
    if (listed) (undo.disabled ? picker : undo).focus();
    keep();
  }
  function act(edit) {
    const next = structuredClone(state);
    edit(next);
    return turnTo(next, true);
  }
  const address = () => `#whatif=${encodeURIComponent(JSON.stringify(state))}`;
  function keep() { try { if (linked) window.history.replaceState(null, "", address()); } catch { /* some browsers forbid it on files */ } }
  async function open() {
    const found = /#whatif=(.*)$/.exec(window.location.hash);
    if (!found || !linked) return false;
    const { node, removed_edges = [], added_edges = [], injected = [] } = JSON.parse(decodeURIComponent(found[1]));
    await turnTo({ node, removed_edges, added_edges, injected }, true);
    picker.value = facts.names?.[node] ?? String(node);
    return true;
  }

  // Edges: one that is there goes, one that is not comes; twice is as before.
  function flip(change, one, two) {
    for (const name of ["removed_edges", "added_edges"]) {
      const at = change[name].findIndex(same([one, two]));
      if (at >= 0) { change[name].splice(at, 1); return; }
    }
    const there = source.joined ? source.joined(one, two) : neighboursNow.has(two);
    change[there ? "removed_edges" : "added_edges"].push(pairOf(one, two));
  }
  let neighboursNow = new Set();
  function leave(id) {
    if (id < facts.nodes) return act((change) => flip(change, state.node, id));
    return act((change) => change.injected.splice(id - facts.nodes, 1));
  }

  const bar = (before, after, kind, largest = 1) => {
    const fill = el("span", { class: `fill ${kind}` });
    fill.style.width = `${(100 * (after || 0)) / largest}%`;
    const track = el("span", { class: "track", "aria-hidden": "true" }, fill);
    if (before !== undefined) {
      const tick = el("span", { class: "tick" });
      tick.style.left = `${(100 * before) / largest}%`;
      track.append(tick);
    }
    const words = after === undefined ? "gone" : percent(after);
    return el("td", {}, track, el("span", { class: "number" }, words), el("span", { class: "unseen" }, before === undefined ? ", new" : `, before ${percent(before)}`));
  };

  function draw(views) {
    const rows = attentionRows(views, layer);
    const ends = views.map(({ before, after }) => {
      const first = outcome(before);
      return [first, outcome(after, first.first)];
    });
    const own = state.injected.filter(({ edges }) => edges.length === 1 && edges[0] === state.node).length;
    if (own && own === state.injected.length && !state.removed_edges.length && !state.added_edges.length) {
      ends.forEach(([a, b], m) => { if (a.first !== b.first) enough[m].set(state.node, Math.min(own, enough[m].get(state.node) ?? own)); });
    }
    neighboursNow = new Set(views[0].before.layers.flatMap(({ neighbours }) => neighbours));
    const focused = place.getRootNode().activeElement?.dataset?.key;
    const head = (text, more) => el("tr", {}, el("th", { scope: "colgroup", colspan: 1 + views.length, class: "group" }, text, ...(more || [])));
    const line = (title, cells) => el("tr", {}, el("th", { scope: "row" }, title), ...cells.map((cell) => el("td", {}, ...[cell].flat())));
    const moved = (before, after, changed) => (before === after ? after : [`${before} → `, el("strong", { class: changed ? "flag" : "" }, after)]);
    const truth = facts.labels?.[state.node] ?? -1;
    const summary = [
      line("Class", ends.map(([a, b]) => moved(className(a.first), className(b.first), a.first !== b.first))),
      line("Margin of the class before", ends.map(([a, b]) => moved(signed(a.margin), signed(b.margin), b.margin < 0))),
      line(`Top ${facts.k} before`, views.map((_, m) => {
        const { stay, all, intruders } = kept(rows, m, facts.k);
        if (!all) return "–";
        return el("span", { class: stay < all || intruders ? "flag" : "" }, `${stay} of ${all} stay${intruders ? `; of all, ${intruders} of ${facts.k} are new` : ""}`);
      })),
      line("Class proven for", facts.models.map((model) => {
        if (!model.proven) return "not certified (no limits, a large graph, or a layer no proof covers)";
        const most = model.proven[state.node];
        return most > 0 ? el("span", { class: "badge" }, `≤ ${injectedWords(most)}`) : "nothing proven";
      })),
      line("Class changed by", enough.map((found) => (found.has(state.node) ? el("span", { class: "flag" }, `${injectedWords(found.get(state.node))} (found here)`) : "none found yet"))),
    ];
    const labels = [...new Set([...ends.flatMap(([a, b]) => [a.first, b.first]), ...(truth < 0 ? [] : [truth]), ...ends.flatMap(([, b]) => b.order.slice(0, 3))])].slice(0, Math.max(CLASSES, 2 * ends.length + 1));
    const classes = labels.map((label) => el("tr", {}, el("th", { scope: "row" }, className(label)),
      ...ends.map(([a, b], m) => bar(a.shares[label], b.shares[label], `m${m}`))));
    const shown = [...rows.slice(0, SHOWN), ...rows.slice(SHOWN).filter((row) => row.id >= facts.nodes)];
    const largest = Math.max(1e-9, ...rows.flatMap((row) => row.cells.flatMap((cell) => [cell.before || 0, cell.after || 0])));
    const neighbours = shown.map(({ id, cells }) => {
      const gone = cells.every((cell) => cell.after === undefined);
      const name = id === state.node ? "itself" : nameOf(id);
      const act = id === state.node ? null : button(gone ? "+" : "−", () => leave(id), { class: "small", "data-key": `edge-${id}`, "aria-label": `${gone ? "Restore" : "Remove"} the edge to ${name}`, title: gone ? "Restore the edge" : "Remove the edge" });
      const link = id === state.node || id >= facts.nodes ? el("span", { class: id >= facts.nodes ? "new" : "" }, name) : button(name, () => look(id), { class: "plain", "data-key": `node-${id}`, title: `Look at ${name}` });
      return el("tr", {}, el("th", { scope: "row" }, el("div", {}, act, link)), ...cells.map((cell, m) => bar(cell.before, cell.after, id >= facts.nodes ? "injected" : `m${m}`, largest)));
    });
    const count = views[0].before.layers.length;
    const choice = el("select", { "aria-label": "Layers whose attention is shown", "data-key": "layer", on: { change: attempt(() => { layer = Number(choice.value); return show(); }) } },
      ...["mean over layers", ...Array.from({ length: count }, (_, at) => `layer ${at + 1}`)].map((text, at) => el("option", { value: at - 1, selected: at - 1 === layer }, text)));
    const promise = facts.models.some((model) => model.proven) ? " Proven: so many injected neighbours of the unchanged node do not change its class, whatever their features." : "";
    const rest = rows.length - shown.length;
    result.replaceChildren(el("table", {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, nameOf(state.node), truth < 0 ? null : el("small", {}, `truth: ${className(truth)}`)), ...facts.models.map((model, m) => el("th", { scope: "col" }, el("i", { class: `swatch m${m}` }), model.name)))),
      el("tbody", {}, ...summary), el("tbody", {}, head("Probability"), ...classes),
      el("tbody", {}, head("Attention, ", [choice]), ...neighbours)),
    el("p", { class: "caption" }, `Bars: now. Ticks: before the change. Margin: the logit of that class less the largest other one. Strength: factor of the new node's features.${promise}${rest > 0 ? ` ${rest} weaker neighbours are not listed.` : ""}`));
    if (focused) result.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  const look = (node) => { picker.value = facts.names?.[node] ?? String(node); return turnTo({ ...state, node }); };
  function drawChanges() {
    const edges = [["removed_edges", "edge removed"], ["added_edges", "edge added"]].flatMap(([name, words]) => state[name].map((pair, at) =>
      el("li", {}, el("span", {}, `${words}: ${nameOf(pair[0])} – ${nameOf(pair[1])}`), button("×", () => act((change) => change[name].splice(at, 1)), { class: "small", "aria-label": `Take back: ${words}` }))));
    const injected = state.injected.map((one, at) => {
      const kind = "copy" in one ? `copy of ${nameOf(one.copy)}` : "typical" in one ? `typical of ${className(one.typical)}` : "worst found";
      const number = el("output", {}, one.strength.toFixed(2));
      const slide = attempt(async () => {
        if (!sliding) past.push(structuredClone(state)); // one step until the slider is left
        undo.disabled = false;
        sliding = true;
        state.injected[at].strength = Number(slider.value);
        number.textContent = state.injected[at].strength.toFixed(2);
        await show();
      });
      const slider = el("input", { type: "range", min: 0, max: 5, step: 0.05, value: one.strength, "aria-label": `Strength of injected ${at + 1}`, title: "Its features are multiplied by this", on: { input: slide, change: keep, blur: () => { sliding = false; } } });
      slider.value = one.strength;
      return el("li", {}, el("span", { class: "new" }, `injected ${at + 1}`), el("span", {}, `${kind}, joined to ${one.edges.map(nameOf).join(", ")}`),
        el("label", {}, "strength ", slider, number), button("×", () => act((change) => change.injected.splice(at, 1)), { class: "small", "aria-label": `Take back injected ${at + 1}` }));
    });
    list.replaceChildren(...edges, ...injected);
    undo.disabled = !past.length;
    reset.disabled = !edges.length && !injected.length;
  }

  const picker = field("Node, by number or name", { value: facts.names?.[facts.start] ?? String(facts.start), "data-key": "picker" }, () => look(numberOf(picker.value)));
  const kind = el("select", { "aria-label": "Features of the new node", on: { change: () => { copied.hidden = kind.value !== "copy"; } } },
    el("option", { value: "copy" }, "copy of node"), ...facts.typical.map((label) => el("option", { value: `typical ${label}` }, `typical of ${className(label)}`)),
    ...(ask ? facts.models.map((model, m) => el("option", { value: `worst ${m}` }, `worst for ${model.name}, by an attack`)) : []));
  const copied = field("Node whose features are copied", { value: facts.names?.[facts.copy] ?? String(facts.copy) }, () => inject());
  const other = field("Edge to node", { placeholder: facts.names ? "name" : "number" }, () => edge());
  async function inject() {
    const edges = [state.node];
    const [word, label] = kind.value.split(" ");
    let features = { copy: word === "copy" ? numberOf(copied.value) : undefined };
    if (word === "typical") features = { typical: Number(label) };
    if (word === "worst") { say("An attack is searching …"); features = { features: await ask(`worst-${label}`, state) }; }
    await act((change) => change.injected.push({ ...features, strength: 1, edges }));
  }
  async function edge() {
    const end = numberOf(other.value);
    if (end === state.node) throw new Error("An edge must join two nodes.");
    await act((change) => flip(change, state.node, end));
  }
  const undo = button("Undo", () => turnTo(past.pop()));
  const reset = button("Reset", () => act((change) => Object.assign(change, empty(change.node))));
  const copy = button("Copy link", async () => { keep(); await navigator.clipboard.writeText(window.location.href.split("#")[0] + address()); say("The link is on the clipboard."); });
  // The file that `fgai evaluate MODEL --change FILE` replays.
  const saves = facts.models.map((model) => button(facts.models.length > 1 ? `Save for ${model.name}` : "Save change", () => {
    const record = { kind: "change", schema: 1, model: model.hash, graph: facts.hash, ...state };
    const file = `change-${state.node}${facts.models.length > 1 ? `-${model.name.replace(/[^\w.-]+/g, "_")}` : ""}.json`;
    const link = el("a", { href: URL.createObjectURL(new Blob([JSON.stringify(record)], { type: "application/json" })), download: file });
    link.click();
    URL.revokeObjectURL(link.href);
    say(`Saved ${file}. To replay it: fgai evaluate MODEL --change ${file}, with the file of ${model.name} for MODEL.`);
  }, { title: "A file that fgai evaluate replays" }));

  place.classList.add("whatif");
  place.replaceChildren(
    el("div", { class: "controls" }, el("label", {}, "Node ", picker), button("Show", () => look(numberOf(picker.value))), button("Random", () => look(Math.floor(Math.random() * facts.nodes))),
      el("span", { class: "space" }), undo, reset, linked ? copy : null, ...saves),
    el("div", { class: "controls" }, el("label", {}, "Inject a node: ", kind), copied, button("Inject", inject),
      el("span", { class: "space" }), el("label", {}, "Edge to node ", other), button("Add or remove", edge)),
    list, status, result);
  window.addEventListener("hashchange", attempt(async () => { if (await open()) place.scrollIntoView({ block: "start" }); }));
  return attempt(async () => { drawChanges(); if (!(await open().catch((error) => { say(`The link holds no change of this graph: ${error.message}`); return false; }))) await show(); })();
}

// Notebooks: `facts` is synchronised, questions that need Python go as messages.
function render({ model, el: place }) {
  const waiting = new Map();
  let last = 0;
  model.on("msg:custom", ({ id, answer, error }) => {
    const { resolve, reject } = waiting.get(id) || {};
    waiting.delete(id);
    if (error) reject?.(new Error(error));
    else resolve?.(answer);
  });
  const ask = (question, change) => new Promise((resolve, reject) => {
    last += 1;
    waiting.set(last, { resolve, reject });
    model.send({ id: last, question, change });
  });
  if (document.body.dataset.jpThemeLight) place.style.colorScheme = document.body.dataset.jpThemeLight === "false" ? "dark" : "light";
  mount(place, model.get("facts"), ask, false);
}
export default { render };
