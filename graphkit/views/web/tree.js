// The tree of modules, and the sums of the graph above it.
function shareBar(share) {
  const bar = make("span");
  bar.style.width = `${isNumber(share) ? 100 * share : 0}%`;
  return make("span", { class: "share", "aria-hidden": "true" }, bar);
}

function treeRow(tag, name, time, graph, facts = {}) {
  return make(tag, { class: "row", title: name, ...facts }, make("span", {}, name),
    shareBar(graph.us > 0 && isNumber(time) ? time / graph.us : 0),
    make("span", { class: "us" }, us(time)));
}

function branch(name, nodes, depth, graph, isOpen) {
  const made = make("details", {}, treeRow("summary", name, timeOf(nodes), graph));
  const fill = () => made.childElementCount === 1 && made.append(...inside(nodes, depth, graph));
  made.addEventListener("toggle", fill);
  if (isOpen) {
    fill();
    made.open = true;
  }
  return made;
}

// In order of the first node, so that modules and the kernels between them are in the order of
// execution.
function inside(nodes, depth, graph) {
  const groups = new Map();
  for (const node of nodes) {
    const key = node.names.length > depth ? node.names[depth] : node;
    if (groups.has(key)) groups.get(key).push(node);
    else groups.set(key, [node]);
  }
  return [...groups].map(([key, each]) => key === each[0]
    ? treeRow("button", key.short_name, key.duration_us, graph,
        { type: "button", onclick: () => showNode(key) })
    : branch(key, each, depth + 1, graph, groups.size === 1 || isMost(each, graph)));
}

// A module that takes nearly all time says little: its own modules do.
const isMost = (nodes, graph) => graph.us > 0 && timeOf(nodes) >= 0.9 * graph.us;

function showTree() {
  const isOpen = state.graphs.length === 1;
  $("tree").replaceChildren(...state.graphs.map((graph) =>
    branch(graph.title, graph.nodes, 0, graph, isOpen)));
  $("totals").replaceChildren(...(isOpen ? totals(state.graphs[0]) : []));
}

function totals(graph) {
  const { timing, memory } = graph;
  const early = (graph.edges || []).filter((edge) => edge.kind === "programmatic").length;
  return list([
    ["nodes", `${graph.nodes.length}; ${(graph.edges || []).length} edges, ${early} programmatic`],
    ["replay", timing ? `p50 ${us(timing.p50_us)} us, p95 ${us(timing.p95_us)} us` : "not measured"],
    ["busy", timing && `${us(timing.busy_us)} us, gaps ${us(timing.gap_us)} us`],
    ["critical path", timing && `${us(timing.critical_us)} us, ${timing.critical_path.length} nodes`],
    ["memory", memory &&
      `${size(memory.graph_bytes)} in a pool of ${size(memory.pool_bytes)}`],
    ["captured at", graph.captured_at],
  ]);
}
