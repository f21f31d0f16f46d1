// GAT and GATv2 at one node of a changed graph: only its receptive field is computed, in double precision.
const ARRAYS = { f4: Float32Array, u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };

// An array as fgai packs it: little-endian numbers in base64.
function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed.data), (letter) => letter.charCodeAt(0));
  return new ARRAYS[packed.type](bytes.buffer);
}

function unpackAll(value) {
  if (Array.isArray(value)) return value.map(unpackAll);
  if (value === null || typeof value !== "object") return value;
  if (typeof value.data === "string" && value.type in ARRAYS) return unpack(value);
  return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, unpackAll(part)]));
}

export function softmax(scores) {
  const top = Math.max(...scores);
  const parts = scores.map((score) => Math.exp(score - top));
  const total = parts.reduce((sum, part) => sum + part, 0);
  return parts.map((part) => part / total);
}

// The edges and features of a graph, without its self-loops: every node has one.
export class Graph {
  constructor(values) {
    const { nodes, rowptr, source, features, typical } = unpackAll(values);
    Object.assign(this, { nodes, rowptr, source, features, typical });
    this.outptr = new Uint32Array(nodes + 1);
    for (const from of source) this.outptr[from + 1] += 1;
    for (let node = 0; node < nodes; node += 1) this.outptr[node + 1] += this.outptr[node];
    this.target = new Uint32Array(source.length);
    const next = this.outptr.slice();
    for (let node = 0; node < nodes; node += 1) {
      for (let at = rowptr[node]; at < rowptr[node + 1]; at += 1) this.target[next[source[at]]++] = node;
    }
  }

  incoming(node) { return this.source.subarray(this.rowptr[node], this.rowptr[node + 1]); }

  outgoing(node) { return this.target.subarray(this.outptr[node], this.outptr[node + 1]); }

  joined(one, two) { return this.incoming(one).includes(two) || this.incoming(two).includes(one); }

  // Call `use(column, value)` for the features of a node that are not zero.
  eachFeature(node, use) {
    const { kind, columns, rowptr, indices, values, bits } = this.features;
    if (kind === "dense") for (let c = 0; c < columns; c += 1) { if (values[node * columns + c]) use(c, values[node * columns + c]); }
    if (kind === "sparse") for (let at = rowptr[node]; at < rowptr[node + 1]; at += 1) use(indices[at], values ? values[at] : 1);
    if (kind === "bits") {
      const width = Math.ceil(columns / 8);
      for (let c = 0; c < columns; c += 1) if ((bits[node * width + (c >> 3)] >> (c & 7)) & 1) use(c, 1);
    }
  }
}

// A graph after a change as `fgai.graph.ChangeRecord` defines it.
export class Changed {
  constructor(graph, change) {
    Object.assign(this, { graph, injected: change.injected || [], rows: new Map(), memo: new Map() });
    const row = (node) => {
      if (!this.rows.has(node)) this.rows.set(node, new Set(node < graph.nodes ? graph.incoming(node) : []));
      return this.rows.get(node);
    };
    for (const [one, two] of change.removed_edges || []) { row(one).delete(two); row(two).delete(one); }
    for (const [one, two] of change.added_edges || []) { row(one).add(two); row(two).add(one); }
    this.injected.forEach(({ edges }, at) => edges.forEach((end) => { row(end).add(graph.nodes + at); row(graph.nodes + at).add(end); }));
    this.touched = [new Set(this.injected.map((_, at) => graph.nodes + at))];
  }

  // The sources of a node's incoming edges, itself included, in order.
  neighbours(node) {
    const row = this.rows.get(node);
    return [...(row || this.graph.incoming(node)), node].sort((one, two) => one - two);
  }

  // The nodes whose input to a layer may differ from that in the unchanged graph.
  touchedAt(layer) {
    while (this.touched.length <= layer) {
      const last = this.touched.at(-1);
      const next = new Set([...last, ...this.rows.keys()]);
      for (const node of last) if (node < this.graph.nodes) for (const end of this.graph.outgoing(node)) next.add(end);
      this.touched.push(next);
    }
    return this.touched[layer];
  }

  eachFeature(node, use) {
    const fresh = this.injected[node - this.graph.nodes];
    if (!fresh) { this.graph.eachFeature(node, use); return; }
    const columns = this.graph.features.columns;
    const scaled = (column, value) => { if (value) use(column, value * fresh.strength); };
    if (fresh.copy !== undefined) this.graph.eachFeature(fresh.copy, scaled);
    else (fresh.features || this.graph.typical.slice(fresh.typical * columns, (fresh.typical + 1) * columns)).forEach((value, column) => scaled(column, value));
  }
}

// Move numbers into their range and the row into its radius, as `fgai.ops.clip`; in place.
function clip(row, limits) {
  if (!limits) return row;
  const { low, high, radius } = limits;
  const finite = (c) => Number.isFinite(high[c] - low[c]);
  let norm = 0;
  for (let c = 0; c < row.length; c += 1) {
    row[c] = row[c] >= low[c] ? Math.min(row[c], high[c]) : low[c];
    if (finite(c) && high[c] > low[c]) norm += ((row[c] - (low[c] + high[c]) / 2) / ((high[c] - low[c]) / 2)) ** 2;
  }
  const factor = radius[0] / Math.sqrt(norm);
  if (factor < 1) {
    for (let c = 0; c < row.length; c += 1) {
      const middle = finite(c) ? (low[c] + high[c]) / 2 : 0;
      row[c] = middle + factor * (row[c] - middle);
    }
  }
  return row;
}

// What a normalised input adds to a projection: ((x − mean) / std · scale + shift) @ W.
function fold(projection, { scale, shift }) {
  const width = projection.weight.length / scale.length;
  projection.sums = new Float64Array(width);
  projection.shifts = new Float64Array(width);
  projection.weight.forEach((weight, at) => {
    projection.sums[at % width] += scale[Math.floor(at / width)] * weight;
    projection.shifts[at % width] += shift[Math.floor(at / width)] * weight;
  });
}

// A trained model; numbers of the unchanged graph are computed once.
export class Model {
  constructor(values) {
    this.layers = unpackAll(values);
    this.clean = new Map();
    for (const { norm, value, right } of this.layers) if (norm) [value, right].filter(Boolean).forEach((one) => fold(one, norm));
  }

  // The logits of a node and its attention in every layer: heads[h][j] and the explanation vector [j].
  at(node, graph) {
    const logits = this.output(this.layers.length - 1, node, graph);
    return { logits: [...logits], layers: this.layers.map((_, layer) => this.attention(layer, node, graph)) };
  }

  once(name, layer, node, touched, graph, make) {
    if (touched && !graph.memo.has(this)) graph.memo.set(this, new Map());
    const memo = touched ? graph.memo.get(this) : this.clean;
    const key = `${name}${layer}:${node}`;
    if (!memo.has(key)) memo.set(key, make());
    return memo.get(key);
  }

  // The rows of a projection [width] of the input of a layer.
  project(layer, node, graph, { weight, bias, sums, shifts }, limits) {
    const { norm } = this.layers[layer];
    const width = weight.length / (layer ? this.layers[layer - 1].width : graph.graph.features.columns);
    const out = new Float64Array(width);
    let total = 0;
    let squares = 0;
    const add = (column, value) => {
      const scaled = norm ? value * norm.scale[column] : value;
      for (let c = 0, at = column * width; c < width; c += 1, at += 1) out[c] += scaled * weight[at];
      total += value;
      squares += value * value;
    };
    if (layer) this.output(layer - 1, node, graph).forEach((value, column) => add(column, value));
    else graph.eachFeature(node, add);
    if (norm) {
      const mean = total / norm.scale.length;
      const deviation = Math.sqrt(Math.max(0, squares / norm.scale.length - mean * mean) + 1e-5);
      out.forEach((value, c) => { out[c] = (value - mean * sums[c]) / deviation + shifts[c]; });
    }
    if (bias) bias.forEach((value, c) => { out[c] += value; });
    return clip(out, limits);
  }

  // The two sides of the score and the values of a node.
  sides(layer, node, graph) {
    return this.once("s", layer, node, graph.touchedAt(layer).has(node), graph, () => {
      const { score, heads, channels, value, right, source, destination, limits } = this.layers[layer];
      const values = this.project(layer, node, graph, value, limits?.value);
      if (score === "dynamic") return { values, far: values, near: this.project(layer, node, graph, right, limits?.right) };
      const side = (weight) => Float64Array.from({ length: heads }, (_, h) => {
        let sum = 0;
        for (let at = h * channels; at < (h + 1) * channels; at += 1) sum += weight[at] * values[at];
        return sum;
      });
      return { values, far: clip(side(source), limits?.source), near: clip(side(destination), limits?.destination) };
    });
  }

  attention(layer, node, graph) {
    return this.once("a", layer, node, graph.touchedAt(layer + 1).has(node), graph, () => {
      const { score, heads, channels, slope, weight } = this.layers[layer];
      const neighbours = graph.neighbours(node);
      const { near } = this.sides(layer, node, graph);
      const leaky = (x) => (x > 0 ? x : slope * x);
      const scoreOf = (far, h) => {
        if (score === "additive") return leaky(far[h] + near[h]);
        let sum = 0;
        for (let at = h * channels; at < (h + 1) * channels; at += 1) sum += weight[at] * leaky(far[at] + near[at]);
        return sum;
      };
      const scores = neighbours.map((from) => {
        const { far } = this.sides(layer, from, graph);
        return Array.from({ length: heads }, (_, h) => scoreOf(far, h));
      });
      const explanation = softmax(scores.map((row) => row.reduce((sum, one) => sum + one, 0) / heads));
      return { neighbours, heads: Array.from({ length: heads }, (_, h) => softmax(scores.map((row) => row[h]))), explanation };
    });
  }

  // The output of a layer at a node, after the activation that follows it.
  output(layer, node, graph) {
    return this.once("o", layer, node, graph.touchedAt(layer + 1).has(node), graph, () => {
      const { heads, channels, concat, bias, width } = this.layers[layer];
      const { neighbours, heads: weights } = this.attention(layer, node, graph);
      const out = new Float64Array(width);
      neighbours.forEach((from, j) => {
        const { values } = this.sides(layer, from, graph);
        for (let at = 0; at < heads * channels; at += 1) {
          const share = weights[Math.floor(at / channels)][j];
          out[concat ? at : at % channels] += (concat ? share : share / heads) * values[at];
        }
      });
      if (bias) bias.forEach((value, c) => { out[c] += value; });
      const last = layer === this.layers.length - 1;
      return last ? out : out.map((value) => (value > 0 ? value : Math.expm1(value)));
    });
  }
}
