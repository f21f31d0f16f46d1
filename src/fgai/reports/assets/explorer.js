// Which node is chosen, and the ways to choose one: a list, arrows, a search, a click in a drawing.
const explorer = doc.explorer;
const position = new Map();
const labelOf = new Map();
const nameBy = new Map();
let chosen = null;
let group = [];

function readExplorer() {
  const { id, name, label } = explorer.nodes;
  id.forEach((node, at) => {
    position.set(node, at);
    if (label) labelOf.set(node, label[at]);
    if (name) nameBy.set(node, name[at]);
  });
  (dig(explorer, "around.id") || []).forEach((node, at) => {
    if (explorer.around.label) labelOf.set(node, explorer.around.label[at]);
    if (explorer.around.name) nameBy.set(node, explorer.around.name[at]);
  });
}

function nameOf(id) {
  const total = explorer ? explorer.total : Infinity;
  if (id >= total) return `fake ${id - total + 1}`;
  return nameBy.get(id) ?? `node ${id}`;
}
const shortName = (id) => nameOf(id).replace(/^node (?=\d+$)/, "");
const className = (number) => dig(explorer, "classes")?.[number] ?? `class ${number}`;
const changed = (model, at) => model.predicted && model.predicted_after && model.predicted[at] !== model.predicted_after[at];

function groups() {
  const all = explorer.nodes.id;
  const k = explorer.k;
  const out = [{ title: `all on this page (${all.length})`, nodes: all }];
  const add = (title, nodes) => { if (nodes.length) out.push({ title: `${title} (${nodes.length})`, nodes }); };
  if (explorer.nodes.joined) add("joined by the attack", all.filter((_, at) => explorer.nodes.joined[at]));
  explorer.models.forEach((model) => {
    add(`${model.name}: prediction changed`, all.filter((_, at) => changed(model, at)));
    const kept = all.map((_, at) => (model.before ? ranks(model, at).kept.size / Math.max(1, ranks(model, at).before.length) : (model.kept?.[at] ?? 100) / 100));
    const order = all.map((_, at) => at).filter((at) => kept[at] < 1 && explorer.nodes.degree[at] > k).sort((a, b) => kept[a] - kept[b]);
    add(`${model.name}: explanation changed most`, order.slice(0, 100).map((at) => all[at]));
  });
  return out;
}

function pick(id, announce) {
  if (!position.has(id)) {
    byId("status").textContent = `${nameOf(id)} is not carried by this page.`;
    return;
  }
  chosen = id;
  showNode(id);
  redrawNetwork();
  byId("status").textContent = announce ? `Showing ${nameOf(id)}.` : "";
  byId("picked").textContent = `Below: ${nameOf(id)}`;
  try { window.history.replaceState(null, "", `#node=${id}`); } catch { /* some browsers forbid it on files */ }
}

function step(by) {
  if (!group.length) return;
  const at = group.indexOf(chosen);
  pick(group[at < 0 ? 0 : (at + by + group.length) % group.length], true);
}

function startPicker() {
  const choices = groups();
  const select = byId("group");
  choices.forEach((choice, at) => select.append(el("option", { value: at }, choice.title)));
  group = choices[0].nodes;
  select.addEventListener("change", () => { group = choices[Number(select.value)].nodes; pick(group[0], true); });
  byId("previous").addEventListener("click", () => step(-1));
  byId("next").addEventListener("click", () => step(1));
  byId("picker").hidden = false;
  startSearch();
  const asked = /^#node=(\d+)$/.exec(window.location.hash);
  const first = asked && position.has(Number(asked[1])) ? Number(asked[1]) : explorer.nodes.id[0];
  chosen = first;
  showNode(first);
  byId("picked").textContent = `Below: ${nameOf(first)}`;
}

function startSearch() {
  const [input, list] = [byId("search"), byId("found")];
  let found = [];
  let active = -1;
  const close = () => { list.hidden = true; active = -1; input.setAttribute("aria-expanded", "false"); input.removeAttribute("aria-activedescendant"); };
  const mark = () => {
    const items = [...list.querySelectorAll("[role=option]")];
    items.forEach((item, at) => item.setAttribute("aria-selected", String(at === active)));
    if (active >= 0) { input.setAttribute("aria-activedescendant", `found-${active}`); items[active].scrollIntoView({ block: "nearest" }); }
  };
  const take = (id) => { close(); input.value = ""; pick(id, true); };
  const update = () => {
    const asked = input.value.trim().toLowerCase();
    if (!asked) { close(); return; }
    const digits = /^(?:node )?(\d+)$/.exec(asked);
    const number = digits ? Number(digits[1]) : null;
    const exact = (id) => id === number || nameOf(id).toLowerCase() === asked;
    const hits = (id) => exact(id) ? 0 : String(id).startsWith(asked) ? 1 : nameOf(id).toLowerCase().includes(asked) ? 2 : 3;
    found = explorer.nodes.id.map((id) => [hits(id), id]).filter(([rank]) => rank < 3).sort((a, b) => a[0] - b[0] || a[1] - b[1]).slice(0, 8).map(([, id]) => id);
    const items = found.map((id, at) => el("li", { role: "option", id: `found-${at}`, "aria-selected": "false", on: { mousedown: (event) => { event.preventDefault(); take(id); } } },
      nameOf(id), " ", el("small", {}, hint(id))));
    const lacking = found.some(exact) ? "" : number !== null ? absence(number) : items.length ? "" : "No such node on this page.";
    list.replaceChildren(...(lacking ? [el("li", { class: "empty" }, lacking)] : []), ...items);
    list.hidden = false;
    active = items.length && !lacking ? 0 : -1; // Enter must not take a node nobody asked for
    input.setAttribute("aria-expanded", "true");
    mark();
  };
  input.addEventListener("input", update);
  input.addEventListener("focus", update);
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      if (found.length && !list.hidden) active = (active + (event.key === "ArrowDown" ? 1 : -1) + found.length) % found.length;
      mark();
      event.preventDefault();
    } else if (event.key === "Enter" && active >= 0 && !list.hidden) take(found[active]);
    else if (event.key === "Escape") close();
  });
}

// Why a node that was asked for by its number is not among those found.
const absence = (id) => (id < explorer.total ? `Node ${id} is not on this page; use --node ${id}.` : `There is no node ${id}; the graph has ${explorer.total}.`);

function hint(id) {
  const at = position.get(id);
  const flips = explorer.models.filter((model) => changed(model, at)).map((model) => model.name);
  const parts = nameBy.has(id) ? [`node ${id}`] : [];
  if (labelOf.has(id) && labelOf.get(id) >= 0) parts.push(className(labelOf.get(id)));
  if (flips.length) parts.push(`${flips.join(", ")} changes its prediction`);
  return parts.join(" · ");
}
