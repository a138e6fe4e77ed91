// The tree of modules.
function shareBar(share) {
  const bar = make("span");
  bar.style.width = `${isNumber(share) ? 100 * share : 0}%`;
  return make("span", { class: "share", "aria-hidden": "true" }, bar);
}

// Numbers and bars are in columns of their own; a name is indented by its depth.
function treeRow(tag, name, time, graph, depth, facts = {}) {
  const made = make(tag, { class: "row", title: name, ...facts },
    make("span", { class: "us" }, us(time)),
    shareBar(graph.us > 0 && isNumber(time) ? time / graph.us : 0),
    make("span", { class: "name" }, ...breakable(name)));
  made.style.setProperty("--depth", depth);
  return made;
}

function branch(name, nodes, depth, graph, isOpen) {
  const made = make("details", {}, treeRow("summary", name, timeOf(nodes), graph, depth));
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
    ? treeRow("button", key.short_name, key.duration_us, graph, depth + 1,
        { type: "button", onclick: () => showNode(key) })
    : branch(key, each, depth + 1, graph, groups.size === 1 || isMost(each, graph)));
}

// A module that takes nearly all time says little: its own modules do.
const isMost = (nodes, graph) => graph.us > 0 && timeOf(nodes) >= 0.9 * graph.us;

function showTree() {
  const isOpen = state.graphs.length === 1;
  $("tree").replaceChildren(...state.graphs.map((graph) =>
    branch(graph.title, graph.nodes, 0, graph, isOpen)));
  $("totals").replaceChildren(...(isOpen ? state.graphs[0].facts : []).map((fact) =>
    make("div", {}, ...list([fact]))));
}
