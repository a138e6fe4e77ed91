// The record, its graphs, and what the views of the package say about them.
const page = { text: "", record: null, graphs: [] };

async function unpacked(id) {
  const packed = Uint8Array.from(atob($(id).textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function load() {
  page.text = await unpacked("record");
  page.record = JSON.parse(page.text);
  const views = JSON.parse(await unpacked("views"));
  const graphs = page.record.kind === "graph" ? [page.record] : page.record.graphs;
  const names = new Map();
  page.graphs = graphs.map((graph, place) => {
    const name = graph.name || "graph";
    names.set(name, (names.get(name) || 0) + 1);
    const title = names.get(name) === 1 ? name : `${name} #${names.get(name)}`;
    return linked(Object.assign(graph, views[place], { title }));
  });
}

// Gives each node its graph, the node around it, and its place in each view.
function linked(graph) {
  graph.known = new Map(graph.nodes.map((node) => [node.index, node]));
  graph.nodes.forEach((node, place) => {
    node.graph = graph;
    node.holder = node.parent < node.index ? graph.known.get(node.parent) : undefined;
    node.path = node.module || (node.holder ? node.holder.path : "");
    node.names = [graph.phases[place], ...node.path.split(".")].filter(Boolean);
    node.part = graph.parts[place];
    node.branch = graph.branches[place];
    node.frame = graph.places[place];
  });
  graph.us = timeOf(graph.nodes);
  return graph;
}

// A node inside another measured node is not counted again.
function timeOf(nodes) {
  const known = new Set(nodes);
  const isInside = ({ holder }) =>
    holder && known.has(holder) && (isNumber(holder.duration_us) || isInside(holder));
  const measured = nodes.filter((node) => isNumber(node.duration_us) && !isInside(node));
  return measured.length ? measured.reduce((sum, node) => sum + node.duration_us, 0) : undefined;
}

// The name of a part, and its colour: the same on every page.
const partName = (part) => part || "other";
const colourOf = (part) => `part-${partName(part)}`;

function save() {
  const address = URL.createObjectURL(new Blob([page.text], { type: "application/json" }));
  make("a", { href: address, download: `graphkit-${page.record.kind}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
