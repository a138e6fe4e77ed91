// What Python computed: the drawing, which is in the page as it is, and what is unpacked later.
// Texts of a node, in the order of ``_nodes`` in drawing.py.
const NODE = ["index", "name", "source", "module", "op", "grid", "block", "kind", "part"];
const page = read(JSON.parse($("drawing").textContent));
const state = { graphs: [], found: [], shown: 300, sort: null, isDown: false, open: null,
  opener: null, kernel: null };

// Replaces numbers of texts and positions of nodes by the texts and the nodes.
function read({ texts, graphs }) {
  const branch = (graph, row) => Array.isArray(row)
    ? { name: texts[row[0]], time: texts[row[1]], share: row[2], isOpen: row[3],
        rows: row.slice(4).map((inside) => branch(graph, inside)) }
    : { node: graph.nodes[row] };
  for (const graph of graphs) {
    graph.nodes = graph.nodes.map((row) => {
      const [us, holder, frame] = row.slice(NODE.length);
      const said = Object.fromEntries(NODE.map((name, at) => [name, texts[row[at]]]));
      return { ...said, graph, us, holder, frame, words: "" };
    });
    for (const node of graph.nodes) node.holder = graph.nodes[node.holder];
    graph.edges = graph.edges.map(([source, target, kind]) =>
      ({ source: graph.nodes[source], target: graph.nodes[target], kind }));
    graph.tree = graph.tree.map((row) => branch(graph, row));
    graph.bars = graph.bars.map(([at, begin, gap, lane]) =>
      Object.assign(graph.nodes[at], { begin, gap, lane }));
    graph.frames = graph.frames.map(([name, text, parent, left, width, part]) =>
      ({ name, text, parent, left, width, part }));
    for (const row of graph.kernels.rows) {
      row.cells = row.cells.map((at) => texts[at]);
      row.modules = row.modules.map((at) => texts[at]);
      row.note = texts[row.note];
      row.nodes = new Set(row.nodes.map((at) => graph.nodes[at]));
    }
  }
  return graphs;
}

// The record as text, and the details of nodes.
const later = unpacked();

async function unpacked() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser has no DecompressionStream");
  }
  const packed = Uint8Array.from(atob($("later").textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const { record, facts, arguments: rows } = JSON.parse(await new Response(stream).text());
  page.forEach((graph, at) => graph.nodes.forEach((node, place) => {
    Object.assign(node, { facts: facts[at][place], arguments: rows[at][place] });
    const texts = [...node.facts.map(([, text]) => text), ...node.arguments.flat()];
    node.words = texts.join(" ").toLowerCase();
  }));
  return record;
}

async function save() {
  try {
    const address = URL.createObjectURL(new Blob([await later], { type: "application/json" }));
    make("a", { href: address, download: `graphkit-${$("save").dataset.kind}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  } catch (error) {
    fail(error);
  }
}

function fail(error) {
  $("failure").textContent = `The record and the details of nodes are not here: ${error.message}.`;
  $("failure").hidden = false;
}

// The time of nodes; one inside of another one that was measured is not counted again.
function totalTime(nodes) {
  const known = new Set(nodes);
  const isInside = ({ holder }) => holder &&
    ((known.has(holder) && holder.us !== null) || isInside(holder));
  const times = nodes.filter((node) => node.us !== null && !isInside(node));
  return times.length ? times.reduce((sum, node) => sum + node.us, 0) : null;
}
